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
from hypersphere.evaluation.comparison import PairedDifference, paired_difference, student_quantile
from hypersphere.evaluation.correlation import rank_correlation
from hypersphere.evaluation.features import Pca, concatenate, fit_pca, mirrored_features, patch_features
from hypersphere.evaluation.few_shot import Episodes, FewShot, draw_episodes, few_shot
from hypersphere.evaluation.generation import InceptionScore, inception_score
from hypersphere.evaluation.identification import Identification, OpenSet, first_of_each, identify
from hypersphere.evaluation.landscape import Landscape, landscape
from hypersphere.evaluation.mates import MateRanks, rank_mates
from hypersphere.evaluation.retrieval import Retrieval, retrieve
from hypersphere.evaluation.roc import FARS, OperatingPoint, Roc, roc
from hypersphere.evaluation.summary import summarize_identification, summarize_verification
from hypersphere.evaluation.verification import (
    Interval,
    Verification,
    bootstrap,
    cosine_scores,
    make_folds,
    verify,
    verify_scores,
)

__all__ = [
    "FARS",
    "M_MIN_BINARY",
    "M_MIN_MULTICLASS",
    "AngleDistribution",
    "AngleHistograms",
    "Episodes",
    "FewShot",
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
    "Verification",
    "angular_fisher_score",
    "angular_visual_hardness",
    "bootstrap",
    "class_angles",
    "concatenate",
    "cosine_scores",
    "draw_episodes",
    "few_shot",
    "first_of_each",
    "fit_pca",
    "identify",
    "inception_score",
    "inter_class_angle",
    "intra_class_angle",
    "landscape",
    "make_folds",
    "mirrored_features",
    "pair_angles",
    "paired_difference",
    "patch_features",
    "rank_correlation",
    "rank_mates",
    "retrieve",
    "roc",
    "smallest_angle",
    "smallest_margin",
    "student_quantile",
    "summarize_identification",
    "summarize_verification",
    "verify",
    "verify_scores",
]
