"""Classifier heads: objectives as a module whose forward is the loss."""

from hypersphere.heads.angular_head import AngularHead
from hypersphere.heads.annealing import Annealing, Ramp
from hypersphere.heads.binary_head import BinaryHead
from hypersphere.heads.presets import (
    PRESETS,
    a_softmax,
    adaface,
    am_softmax,
    arcface,
    combined_margin,
    ga_softmax,
    l_softmax,
    modified_softmax,
    s_softmax,
    softmax,
    sphereface2,
    sphereface_plus,
    sphereface_r,
    w_softmax,
)
from hypersphere.heads.sharded import ShardedHead

__all__ = [
    "PRESETS",
    "AngularHead",
    "Annealing",
    "BinaryHead",
    "Ramp",
    "ShardedHead",
    "a_softmax",
    "adaface",
    "am_softmax",
    "arcface",
    "combined_margin",
    "ga_softmax",
    "l_softmax",
    "modified_softmax",
    "s_softmax",
    "softmax",
    "sphereface2",
    "sphereface_plus",
    "sphereface_r",
    "w_softmax",
]
