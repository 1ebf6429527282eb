"""Hyperspherical energy: low if directions are spread evenly over the sphere."""

from collections.abc import Callable

from hypersphere.energy._regularizer import LayerPenalty, NeuronRegularizer, StepResult
from hypersphere.energy._steps import Step, Warmup
from hypersphere.energy.comhe import CoMHE
from hypersphere.energy.energy import (
    data_dependent_energy,
    hyperspherical_energy,
    layer_energies,
    mean_energy,
    random_batch_energy,
    random_energy,
)
from hypersphere.energy.features import FEATURE_ENERGIES, FeatureEnergy, Gaussian, alignment, koleo, uniformity
from hypersphere.energy.inspect import Inspection, LayerInspection, inspect
from hypersphere.energy.low_rank import LowRank, factors, low_rank_
from hypersphere.energy.mhe import MHE
from hypersphere.energy.minimum import Minimum, minimize
from hypersphere.energy.orthogonality import SRIP, Orthogonal, Orthonormal

__all__ = [
    "FEATURE_ENERGIES",
    "MHE",
    "REGULARIZERS",
    "SRIP",
    "CoMHE",
    "FeatureEnergy",
    "Gaussian",
    "Inspection",
    "LayerInspection",
    "LayerPenalty",
    "LowRank",
    "Minimum",
    "NeuronRegularizer",
    "Orthogonal",
    "Orthonormal",
    "Step",
    "StepResult",
    "Warmup",
    "alignment",
    "data_dependent_energy",
    "factors",
    "hyperspherical_energy",
    "inspect",
    "koleo",
    "layer_energies",
    "low_rank_",
    "mean_energy",
    "minimize",
    "random_batch_energy",
    "random_energy",
    "uniformity",
]

REGULARIZERS: dict[str, Callable[..., NeuronRegularizer]] = {
    "mhe": MHE,
    "comhe": CoMHE,
    "orthonormal": Orthonormal,
    "orthogonal": Orthogonal,
    "srip": SRIP,
}
"""The regularisers by name, as configurations and the command line refer to them."""
