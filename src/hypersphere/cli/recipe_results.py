"""Read the records of a recipe in the form that report pages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.options import check_run
from hypersphere.cli.output import warn
from hypersphere.recipes import RECIPES, Recipe, Record, read_records, read_tensors, run_name

__all__ = ["recipe_results", "stored_results", "write_report"]


def recipe_results(recipe: Recipe, records: Sequence[Record], out: Path) -> report.RecipeResults:
    """Return a recipe and its records, which are stored below `out`, in the form that report pages take."""
    columns = {
        metric.key: report.Column(metric.heading, metric.higher_is_better, metric.format) for metric in recipe.metrics
    }
    return report.RecipeResults(
        recipe.title,
        f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)",
        columns,
        [row.name for row in recipe.rows],
        [asdict(record) for record in records],
        recipe.printed,
        recipe.figures,
        {key: (axis.name, axis.low, axis.high) for key, axis in recipe.axes.items()},
        lambda record: read_tensors(out, Record(**record)),
    )


def write_report(recipe: Recipe, records: Sequence[Record], out: Path) -> Path:
    """Write the page of a recipe next to its records in `out`, with table.md and figure.svg; return its path.

    The page also covers other rows and seeds whose records are in the folder and match the settings of the recipe.
    """
    require(bool(records), "records", "at least one record", list(records))
    folder = out / run_name(recipe.name, records[0].overrides, records[0].scale)
    stored = [record for record in read_records(out, folder.name) if record.is_current(recipe)]
    by_row_and_seed = {(record.row, record.seed): record for record in [*stored, *records]}
    shown = [by_row_and_seed[key] for key in sorted(by_row_and_seed)]
    return report.write_recipe_page(recipe_results(recipe, shown, out), folder)


def stored_results(folder: Path) -> report.RecipeResults:
    """Return the recipe and the records of a folder.

    Records that do not match the current settings of the recipe are left out, unless none matches. A message says so.
    """
    where = folder.resolve()
    records = read_records(where.parent, where.name)
    check_run(folder, also=" or a folder of records of `hypersphere reproduce`", valid=bool(records))
    name = records[0].recipe
    require(name in RECIPES, f"recipe of {folder}", f"one of {', '.join(RECIPES)}", name)
    recipe = RECIPES[name]
    rows = {row.name for row in recipe.rows}
    current = [record for record in records if record.is_current(recipe)]
    usable = current or [record for record in records if record.row in rows]
    require(bool(usable), f"rows of {folder}", f"rows of {name}: {', '.join(rows)}", sorted({r.row for r in records}))
    if not current:
        warn(f"{folder} was made with settings that differ from the current ones of {name}")
    elif others := sorted({record.row for record in records if record not in current}):
        warn(f"{folder}: ignoring records whose settings differ from the current ones of {name}: {', '.join(others)}")
    return recipe_results(recipe, usable, where.parent)
