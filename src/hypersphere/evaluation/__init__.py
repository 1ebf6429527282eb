"""Evaluation of features: functions of arrays or tensors that return numbers or small dataclasses."""

from hypersphere.evaluation.angles import (
    M_MIN_BINARY,
    M_MIN_MULTICLASS,
    AngleDistribution,
    AngleHistograms,
    angular_fisher_score,
    angular_visual_hardness,
    class_angles,
    inter_class_angle,
    intra_class_angle,
    pair_angles,
    smallest_angle,
    smallest_margin,
)
from hypersphere.evaluation.calibration import Calibration
from hypersphere.evaluation.comparison import (
    PairedDifference,
    paired_difference,
    rank_correlation,
    student_quantile,
)
from hypersphere.evaluation.costs import actual_dcf, bayes_threshold, calibration_loss, cllr, min_cllr, min_dcf
from hypersphere.evaluation.discard import ErrorVersusDiscard, error_vs_discard
from hypersphere.evaluation.features import Pca, concatenate, fit_pca, mirrored_features, patch_features
from hypersphere.evaluation.few_shot import Episodes, FewShot, draw_episodes, few_shot
from hypersphere.evaluation.generation import InceptionScore, inception_score
from hypersphere.evaluation.groups import GroupRates, rates_by_group
from hypersphere.evaluation.identification import Identification, OpenSet, first_of_each, identify, identify_by_first
from hypersphere.evaluation.intervals import Interval, bootstrap
from hypersphere.evaluation.landscape import Landscape, landscape
from hypersphere.evaluation.mates import MateRanks, rank_mates
from hypersphere.evaluation.retrieval import Retrieval, retrieve
from hypersphere.evaluation.roc import FARS, DetCurve, OperatingPoint, Roc, det_curve, roc
from hypersphere.evaluation.score_norm import score_norm
from hypersphere.evaluation.streaming import AllPairs, RocPoints, verify_blocks
from hypersphere.evaluation.summary import summarize_all_pairs, summarize_identification, summarize_verification
from hypersphere.evaluation.templates import templates
from hypersphere.evaluation.verification import (
    Verification,
    cosine_scores,
    make_folds,
    pair_scores,
    verify,
    verify_scores,
)

__all__ = [
    "FARS",
    "M_MIN_BINARY",
    "M_MIN_MULTICLASS",
    "AllPairs",
    "AngleDistribution",
    "AngleHistograms",
    "Calibration",
    "DetCurve",
    "Episodes",
    "ErrorVersusDiscard",
    "FewShot",
    "GroupRates",
    "Identification",
    "InceptionScore",
    "Interval",
    "Landscape",
    "MateRanks",
    "OpenSet",
    "OperatingPoint",
    "PairedDifference",
    "Pca",
    "Retrieval",
    "Roc",
    "RocPoints",
    "Verification",
    "actual_dcf",
    "angular_fisher_score",
    "angular_visual_hardness",
    "bayes_threshold",
    "bootstrap",
    "calibration_loss",
    "class_angles",
    "cllr",
    "concatenate",
    "cosine_scores",
    "det_curve",
    "draw_episodes",
    "error_vs_discard",
    "few_shot",
    "first_of_each",
    "fit_pca",
    "identify",
    "identify_by_first",
    "inception_score",
    "inter_class_angle",
    "intra_class_angle",
    "landscape",
    "make_folds",
    "min_cllr",
    "min_dcf",
    "mirrored_features",
    "pair_angles",
    "pair_scores",
    "paired_difference",
    "patch_features",
    "rank_correlation",
    "rank_mates",
    "rates_by_group",
    "retrieve",
    "roc",
    "score_norm",
    "smallest_angle",
    "smallest_margin",
    "student_quantile",
    "summarize_all_pairs",
    "summarize_identification",
    "summarize_verification",
    "templates",
    "verify",
    "verify_blocks",
    "verify_scores",
]
