"""Every table of the sources as one command: rows as data, one JSON record a row and seed."""

from hypersphere.recipes import digits, lfw, omniglot
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

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (digits.RECIPE, omniglot.RECIPE, lfw.RECIPE)}
