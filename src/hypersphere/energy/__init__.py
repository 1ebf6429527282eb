"""Hyperspherical energy: how evenly neurons cover the sphere."""

from hypersphere.energy.comhe import CoMHE
from hypersphere.energy.energy import (
    data_dependent_energy,
    hyperspherical_energy,
    random_batch_energy,
    random_energy,
)
from hypersphere.energy.inspection import Inspection, LayerInspection, inspect
from hypersphere.energy.low_rank import LowRank, factors, low_rank_
from hypersphere.energy.mhe import MHE
from hypersphere.energy.minimum import Minimum, minimize
from hypersphere.energy.orthogonality import SRIP, Orthogonal, Orthonormal

__all__ = [
    "MHE",
    "SRIP",
    "CoMHE",
    "Inspection",
    "LayerInspection",
    "LowRank",
    "Minimum",
    "Orthogonal",
    "Orthonormal",
    "data_dependent_energy",
    "factors",
    "hyperspherical_energy",
    "inspect",
    "low_rank_",
    "minimize",
    "random_batch_energy",
    "random_energy",
]
