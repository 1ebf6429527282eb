"""Hyperspherical energy as a regulariser (chapters 5 and 6, appendices D and E)."""

from hypersphere.recipes.energy import (
    classes,
    dynamics,
    flows,
    generation,
    graphs,
    networks,
    projections,
    residual,
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
    dynamics.TIMES,
    classes.TOY,
    classes.TEN,
    classes.HUNDRED,
    graphs.ENERGIES,
    graphs.POINTS,
    generation.GAN,
    classes.AM_SOFTMAX,
)
