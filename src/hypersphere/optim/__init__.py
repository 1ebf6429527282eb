"""Optimisers for spheres, rotations and sampled rows, parameter groups, weight norms, schedules and averages."""

from hypersphere.optim.averaging import MovingAverage
from hypersphere.optim.groups import param_groups
from hypersphere.optim.hyperball import Hyperball
from hypersphere.optim.muon import Muon
from hypersphere.optim.ogd import OGD, OGDAdam
from hypersphere.optim.projection import WeightedGradients, project_weights_
from hypersphere.optim.rows import RowAdamW, RowSGD
from hypersphere.optim.schedules import SCHEDULES, Scheduler
from hypersphere.optim.torch_optimizers import OPTIMIZERS, Optimizers

__all__ = [
    "OGD",
    "OPTIMIZERS",
    "SCHEDULES",
    "Hyperball",
    "MovingAverage",
    "Muon",
    "OGDAdam",
    "Optimizers",
    "RowAdamW",
    "RowSGD",
    "Scheduler",
    "WeightedGradients",
    "param_groups",
    "project_weights_",
]
