"""Optimisers on the orthogonal group, what weight decay may touch, and training by direction alone."""

from hypersphere.optim.groups import param_groups
from hypersphere.optim.ogd import OGD, OGDAdam
from hypersphere.optim.projection import WeightedGradients, project_weights_

__all__ = ["OGD", "OGDAdam", "WeightedGradients", "param_groups", "project_weights_"]
