"""Every table of the sources as one command: rows as data, one JSON record a row and seed."""

from hypersphere.recipes import digits
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.recipes.record import Record, execute, read_records, read_tensors

__all__ = ["RECIPES", "Metric", "Outcome", "Recipe", "Record", "Row", "execute", "read_records", "read_tensors"]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (digits.RECIPE,)}
