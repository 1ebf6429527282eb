"""Every table of the sources as one command: rows and scales as data, one JSON record per row and seed."""

from hypersphere._validation import nearest_name
from hypersphere.recipes import (
    attacks,
    digits,
    energy_networks,
    graphs,
    imbalance,
    open_set,
    opt_networks,
    opt_studies,
    sphere_networks,
)
from hypersphere.recipes.execution import execute
from hypersphere.recipes.recipe import SCALES, Metric, Outcome, Recipe, Row
from hypersphere.recipes.record import Record, read_records, read_tensors, run_name

__all__ = [
    "RECIPES",
    "SCALES",
    "Metric",
    "Outcome",
    "Recipe",
    "Record",
    "Row",
    "execute",
    "find_recipe",
    "read_records",
    "read_tensors",
    "run_name",
]

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        digits.RECIPE,
        open_set.OMNIGLOT,
        open_set.LFW,
        sphere_networks.CONVERGENCE,
        sphere_networks.OPERATORS,
        sphere_networks.NORMS,
        sphere_networks.LEARNED,
        attacks.RECIPE,
        energy_networks.MLP,
        energy_networks.CNN,
        energy_networks.WIDTH,
        energy_networks.DEPTH,
        energy_networks.SPHERENET,
        imbalance.TOY,
        imbalance.MANY,
        graphs.ENERGIES,
        opt_networks.MLP,
        opt_networks.CNN,
        graphs.ROTATIONS,
        opt_networks.POINTNET,
        opt_studies.OMNIGLOT,
        opt_studies.INITIAL_ENERGY,
        opt_studies.LANDSCAPE,
    )
}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name, or by a table or figure that it covers, such as "T6.1".

    >>> find_recipe("T6.1").name
    'energy-cnn'
    """
    if name in RECIPES:
        return RECIPES[name]
    for recipe in RECIPES.values():
        if name.lower() in (one.lower() for one in recipe.covers):
            return recipe
    covered = sorted({one for recipe in RECIPES.values() for one in recipe.covers})
    near = nearest_name(name, [*RECIPES, *covered])
    raise ValueError(
        f"name must be one of {', '.join(RECIPES)}, or a table that one of them covers, not {name!r}{near}"
    )
