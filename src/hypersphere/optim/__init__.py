"""Optimisers on the orthogonal group, parameter groups for weight decay, and control of weight norms."""

from hypersphere.optim.groups import param_groups
from hypersphere.optim.ogd import OGD, OGDAdam
from hypersphere.optim.projection import WeightedGradients, project_weights_

__all__ = ["OGD", "OGDAdam", "WeightedGradients", "param_groups", "project_weights_"]
