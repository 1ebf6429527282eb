"""Training by rotation (OPT): neurons keep their mutual angles, and one rotation of each layer is learned."""

from hypersphere._deprecation import deprecated_names
from hypersphere.rotation.activations import InputRotation
from hypersphere.rotation.diagnostics import (
    RotationPenalty,
    RotationState,
    degrees_of_freedom,
    measure,
    orthogonality_error,
)
from hypersphere.rotation.parametrization import Layout, Rotation
from hypersphere.rotation.refine import refine_neurons
from hypersphere.rotation.rotate import (
    fold_,
    rotatable_layers,
    rotate_,
    rotated_layers,
    rotation_parameters,
    select,
    use,
)
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
    "refine_neurons",
    "rotatable_layers",
    "rotate_",
    "rotated_layers",
    "rotation_parameters",
    "select",
    "use",
]

__getattr__ = deprecated_names(__name__, {"refined": "hypersphere.rotation:refine_neurons"})
