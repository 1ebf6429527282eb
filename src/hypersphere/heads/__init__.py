"""Classifier heads: objectives as a module whose forward is the loss."""

from hypersphere.heads.angular_head import AngularHead
from hypersphere.heads.annealing import Annealing
from hypersphere.heads.presets import PRESETS, a_softmax, modified_softmax, softmax

__all__ = ["PRESETS", "AngularHead", "Annealing", "a_softmax", "modified_softmax", "softmax"]
