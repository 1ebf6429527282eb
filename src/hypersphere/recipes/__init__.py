"""Every table of the sources as one command: rows as data, one JSON record per row and seed."""

from hypersphere.recipes import (
    attacks,
    digits,
    energy_networks,
    graphs,
    imbalance,
    lfw,
    omniglot,
    opt_networks,
    opt_studies,
    sphere_networks,
)
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row, Trial
from hypersphere.recipes.record import Record, execute, read_records, read_tensors, run_name

__all__ = [
    "RECIPES",
    "Metric",
    "Outcome",
    "Recipe",
    "Record",
    "Row",
    "Trial",
    "execute",
    "read_records",
    "read_tensors",
    "run_name",
]

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        digits.RECIPE,
        omniglot.RECIPE,
        lfw.RECIPE,
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
