"""Training by rotation (chapter 7, appendix F, and the paper on orthogonal over-parameterised training)."""

from hypersphere.recipes.recipe import Recipe
from hypersphere.recipes.rotation import (
    classes,
    economy,
    few_shot,
    fine_tuning,
    graphs,
    landscape,
    language,
    mlp,
    networks,
    start,
)

__all__ = ["RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    mlp.MLP,
    networks.CNN,
    networks.BARE,
    networks.UNIT_NEURONS,
    networks.RESNET,
    start.INITIAL_ENERGY,
    economy.STOCHASTIC,
    economy.BLOCKS,
    networks.IMAGENET,
    few_shot.FEW_SHOT,
    graphs.GRAPHS_AND_POINTS,
    classes.MANY_CLASSES,
    classes.FACES,
    classes.DIGITS,
    landscape.LANDSCAPE,
    language.LANGUAGE,
    fine_tuning.FINE_TUNING,
)
