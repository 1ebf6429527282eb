"""Hyperspherical energy as a regulariser (chapters 5 and 6, appendices D and E)."""

from hypersphere.recipes.energy import (
    dynamics,
    faces,
    flows,
    generation,
    graphs,
    imbalance,
    networks,
    points,
    projections,
    residual,
    times,
)
from hypersphere.recipes.recipe import Recipe

__all__ = ["RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    flows.FLOWS,
    networks.FORMS,
    networks.CNN,
    networks.LAYERS,
    networks.WEIGHTS,
    networks.WIDTH,
    networks.DEPTH,
    residual.RESNET,
    residual.IMAGENET,
    networks.SPHERENET,
    projections.PROJECTIONS,
    dynamics.DYNAMICS,
    times.TIMES,
    imbalance.TOY,
    imbalance.TEN,
    imbalance.HUNDRED,
    graphs.ENERGIES,
    points.POINTS,
    generation.GAN,
    faces.AM_SOFTMAX,
)
