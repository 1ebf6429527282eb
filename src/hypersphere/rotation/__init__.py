"""Training by rotation: neurons stay as they are to each other, and the frame they live in is learned (OPT)."""

from hypersphere.rotation.convert import fold_, rotate_, rotated_layers, rotation_parameters, use
from hypersphere.rotation.inputs import InputRotation
from hypersphere.rotation.layout import Layout
from hypersphere.rotation.measure import (
    RotationState,
    degrees_of_freedom,
    measure,
    orthogonality_error,
)
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.penalty import RotationPenalty
from hypersphere.rotation.refine import refined
from hypersphere.rotation.selection import select
from hypersphere.rotation.stochastic import Stochastic

__all__ = [
    "InputRotation",
    "Layout",
    "Rotation",
    "RotationPenalty",
    "RotationState",
    "Stochastic",
    "degrees_of_freedom",
    "fold_",
    "measure",
    "orthogonality_error",
    "refined",
    "rotate_",
    "rotated_layers",
    "rotation_parameters",
    "select",
    "use",
]
