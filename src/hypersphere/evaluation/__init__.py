"""Measuring features: arrays or tensors in, numbers and small dataclasses out."""

from hypersphere.evaluation.angles import AngleDistribution, AngleHistograms, class_angles, pair_angles, smallest_angle
from hypersphere.evaluation.bootstrap import Interval, bootstrap
from hypersphere.evaluation.bounds import (
    M_MIN_BINARY,
    M_MIN_MULTICLASS,
    inter_class_angle,
    intra_class_angle,
    smallest_margin,
)
from hypersphere.evaluation.ensemble import concatenate, mirrored_features, patch_features
from hypersphere.evaluation.fisher import angular_fisher_score
from hypersphere.evaluation.gallery import first_of_each
from hypersphere.evaluation.hardness import angular_visual_hardness
from hypersphere.evaluation.identification import Identification, identify
from hypersphere.evaluation.landscape import Landscape, landscape
from hypersphere.evaluation.open_set import OpenSet
from hypersphere.evaluation.pca import Pca, fit_pca
from hypersphere.evaluation.roc import FARS, OperatingPoint, Roc, roc
from hypersphere.evaluation.scores import cosine_scores
from hypersphere.evaluation.verification import Verification, make_folds, verify, verify_scores

__all__ = [
    "FARS",
    "M_MIN_BINARY",
    "M_MIN_MULTICLASS",
    "AngleDistribution",
    "AngleHistograms",
    "Identification",
    "Interval",
    "Landscape",
    "OpenSet",
    "OperatingPoint",
    "Pca",
    "Roc",
    "Verification",
    "angular_fisher_score",
    "angular_visual_hardness",
    "bootstrap",
    "class_angles",
    "concatenate",
    "cosine_scores",
    "first_of_each",
    "fit_pca",
    "identify",
    "inter_class_angle",
    "intra_class_angle",
    "landscape",
    "make_folds",
    "mirrored_features",
    "pair_angles",
    "patch_features",
    "roc",
    "smallest_angle",
    "smallest_margin",
    "verify",
    "verify_scores",
]
