"""Optimisers on the orthogonal group, parameter groups, control of weight norms, schedules and averages."""

from hypersphere.optim.averaging import MovingAverage
from hypersphere.optim.groups import param_groups
from hypersphere.optim.ogd import OGD, OGDAdam
from hypersphere.optim.optimizers import OPTIMIZERS, Optimizers
from hypersphere.optim.projection import WeightedGradients, project_weights_
from hypersphere.optim.schedules import SCHEDULES, Scheduler

__all__ = [
    "OGD",
    "OPTIMIZERS",
    "SCHEDULES",
    "MovingAverage",
    "OGDAdam",
    "Optimizers",
    "Scheduler",
    "WeightedGradients",
    "param_groups",
    "project_weights_",
]
