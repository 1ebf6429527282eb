"""Every table of the thesis and its papers as one command: rows and scales are data, and each row and seed a record."""

from dataclasses import replace

from hypersphere._validation import nearest_name
from hypersphere.recipes import architectures, energy, objectives, rotation
from hypersphere.recipes.execution import execute
from hypersphere.recipes.planning import plan
from hypersphere.recipes.recipe import SCALES, Axis, Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.recipes.record import Record, read_records, read_tensors, run_name
from hypersphere.recipes.sources import PARTS, SourceEntry, printed_number, source_entries

__all__ = [
    "PARTS",
    "RECIPES",
    "SCALES",
    "Axis",
    "Claim",
    "Metric",
    "Outcome",
    "Recipe",
    "Record",
    "Row",
    "SourceEntry",
    "Tuning",
    "execute",
    "find_recipe",
    "plan",
    "printed_number",
    "read_records",
    "read_tensors",
    "run_name",
    "source_entries",
]

# Each package is one part of the thesis, so a recipe does not repeat the name of its part.
_PACKAGES = {"objectives": objectives, "architectures": architectures, "energy": energy, "rotation": rotation}
RECIPES: dict[str, Recipe] = {
    recipe.name: replace(recipe, part=part) for part, package in _PACKAGES.items() for recipe in package.RECIPES
}

# Tables of chapter 7 that the paper on orthogonal training prints as well. The recipes cover those of the paper.
_PAPER_TABLES = {"T7.6": "O-T2", "T7.9": "O-T7", "T7.10": "O-T8", "T7.11": "O-T9", "T7.12": "O-T9"}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name, or by a table or figure that it covers, such as "T6.1".

    >>> find_recipe("T6.1").name
    'energy-cnn'
    """
    if name in RECIPES:
        return RECIPES[name]
    identifier = _PAPER_TABLES.get(name.upper(), name).lower()
    for recipe in RECIPES.values():
        if identifier in (entry.lower() for entry in recipe.covers):
            return recipe
    covered = sorted({entry for recipe in RECIPES.values() for entry in recipe.covers})
    near = nearest_name(name, [*RECIPES, *covered])
    accepted = "a recipe of `hypersphere list recipes`, or a table or figure that one of them covers"
    raise ValueError(f"name must be {accepted}, not {name!r}{near}")
