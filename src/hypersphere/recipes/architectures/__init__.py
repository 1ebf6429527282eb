"""Sphere and decoupled networks, and their robustness (chapters 3 and 4, appendices B and C)."""

from hypersphere.recipes.architectures import attacks, decoupled, functions, imagenet, residual, spherenet
from hypersphere.recipes.recipe import Recipe

__all__ = ["RECIPES"]

RECIPES: tuple[Recipe, ...] = (
    functions.SPHERE_FUNCTIONS,
    spherenet.LOSSES,
    spherenet.DEPTH,
    spherenet.NO_RELU,
    residual.CONVERGENCE,
    spherenet.CONVERGENCE,
    spherenet.WIDTH,
    spherenet.LEARNED,
    spherenet.SMALL_BATCHES,
    residual.SPHERE,
    imagenet.SPHERE,
    functions.MAGNITUDE_FUNCTIONS,
    decoupled.NORMS,
    decoupled.NO_BATCH_NORM,
    decoupled.OPERATORS,
    residual.OPERATORS,
    residual.DEEP,
    imagenet.DECOUPLED,
    attacks.ATTACKS,
    attacks.FEATURES,
    imagenet.FILTERS,
)
