"""Classifier heads: modules whose forward pass is the loss.

Numbers of equations and sections refer to Weiyang Liu's thesis, *Deep Representation Learning on Hypersphere*.
"""

from typing import TYPE_CHECKING, NoReturn

from hypersphere._validation import nearest_name
from hypersphere.heads._centers import LabelAngles, class_vectors
from hypersphere.heads._checks import NonFiniteScoresError
from hypersphere.heads.baselines import BASELINES, CenterHead, HingeHead, MetricLearningHead
from hypersphere.heads.binary import BinaryHead
from hypersphere.heads.head import AngularHead
from hypersphere.heads.presets import (
    PRESET_ALIASES,
    PRESETS,
    HeadOptions,
    a_softmax,
    aam_softmax,
    adacos,
    adaface,
    am_softmax,
    arcface,
    combined_margin,
    cosface,
    curricularface,
    elasticface,
    ga_softmax,
    l_softmax,
    magface,
    modified_softmax,
    s_softmax,
    softmax,
    sphereface,
    sphereface2,
    sphereface_plus,
    sphereface_r,
    w_softmax,
)
from hypersphere.heads.prototypes import FixedHead, fixed
from hypersphere.heads.schedules import Annealing, Ramp
from hypersphere.heads.sharded import ShardedHead

__all__ = [
    "BASELINES",
    "PRESETS",
    "AngularHead",
    "Annealing",
    "BinaryHead",
    "CenterHead",
    "FixedHead",
    "HeadOptions",
    "HingeHead",
    "LabelAngles",
    "MetricLearningHead",
    "NonFiniteScoresError",
    "Ramp",
    "ShardedHead",
    "a_softmax",
    "aam_softmax",
    "adacos",
    "adaface",
    "am_softmax",
    "arcface",
    "class_vectors",
    "combined_margin",
    "cosface",
    "curricularface",
    "elasticface",
    "fixed",
    "ga_softmax",
    "l_softmax",
    "magface",
    "modified_softmax",
    "s_softmax",
    "softmax",
    "sphereface",
    "sphereface2",
    "sphereface_plus",
    "sphereface_r",
    "w_softmax",
]

# Type checkers would accept any name of a module with `__getattr__`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Suggest the nearest name, such as `arcface` for `ArcFace`."""
        near = nearest_name(name, __all__, PRESET_ALIASES)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")
