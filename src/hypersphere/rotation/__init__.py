"""Training by rotation (OPT): neurons keep their mutual angles, and one rotation of each layer is learned.

Reading order: `rotate` attaches a rotation to every layer of a model, `parametrization` computes the rotated weight,
and `hypersphere.functions.orthogonal` holds the maps from parameters to rotations, such as the Cayley transform. The
other modules build on these: other ways to train (`periodic`, `input_rotation`), to store (`adapters`) and to measure
(`diagnostics`).
"""

from hypersphere._deprecation import deprecated_names
from hypersphere.rotation.adapters import combine, load_adapter, merge, save_adapter, unmerge
from hypersphere.rotation.diagnostics import (
    RotationPenalty,
    RotationState,
    degrees_of_freedom,
    orthogonality_error,
    rotation_states,
)
from hypersphere.rotation.input_rotation import InputRotation
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.periodic import Equivalence, Stochastic
from hypersphere.rotation.refine import CompressiveEnergy, refine_neurons
from hypersphere.rotation.rotate import (
    fold_,
    rotatable_layers,
    rotate_,
    rotated_layers,
    rotation_parameters,
    select,
    use,
    use_rotation_set,
)
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = [
    "BlockLayout",
    "CompressiveEnergy",
    "Equivalence",
    "InputRotation",
    "Rotation",
    "RotationPenalty",
    "RotationState",
    "Stochastic",
    "TwoSidedRotation",
    "combine",
    "degrees_of_freedom",
    "fold_",
    "load_adapter",
    "merge",
    "orthogonality_error",
    "refine_neurons",
    "rotatable_layers",
    "rotate_",
    "rotated_layers",
    "rotation_parameters",
    "rotation_states",
    "save_adapter",
    "select",
    "unmerge",
    "use",
    "use_rotation_set",
]

__getattr__ = deprecated_names(
    __name__,
    {
        "Layout": "hypersphere.rotation:BlockLayout",
        "measure": "hypersphere.rotation:rotation_states",
        "refined": "hypersphere.rotation:refine_neurons",
    },
)
