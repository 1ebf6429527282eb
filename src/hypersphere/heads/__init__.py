"""Classifier heads: modules whose forward pass is the loss."""

from hypersphere.heads.binary import BinaryHead
from hypersphere.heads.head import AngularHead
from hypersphere.heads.presets import (
    PRESETS,
    HeadOptions,
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
from hypersphere.heads.schedules import Annealing, Ramp
from hypersphere.heads.sharded import ShardedHead

__all__ = [
    "PRESETS",
    "AngularHead",
    "Annealing",
    "BinaryHead",
    "HeadOptions",
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
