"""Read the records of a recipe in the form that report pages take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.output import warn
from hypersphere.recipes import RECIPES, Recipe, Record, read_records, read_tensors, run_name
from hypersphere.training.run import CONFIG

__all__ = ["current_records", "results_of", "usable_results", "write_report"]


def write_report(recipe: Recipe, records: Sequence[Record], out: Path) -> Path:
    """Write the page of a recipe next to its records in `out`, with table.md and figure.svg; return its path.

    The page covers all records in the folder, including rows and seeds that are not among the given ones.
    """
    require(bool(records), "records", "at least one record", list(records))
    folder = out / run_name(recipe.name, records[0].overrides, records[0].scale)
    stored = current_records(recipe, read_records(out, folder.name))
    by_row_and_seed = {(record.row, record.seed): record for record in [*stored, *records]}
    shown = [by_row_and_seed[key] for key in sorted(by_row_and_seed)]
    return report.write_recipe_page(results_of(recipe, shown, out), folder)


def results_of(recipe: Recipe, records: Sequence[Record], out: Path) -> report.RecipeResults:
    """Return a recipe and its records in the form that report pages take."""
    return report.RecipeResults(
        recipe.title,
        f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)",
        {
            metric.key: report.Column(metric.heading, metric.higher_is_better, metric.format)
            for metric in recipe.metrics
        },
        [row.name for row in recipe.rows],
        [asdict(record) for record in records],
        recipe.printed,
        recipe.figures,
        lambda record: read_tensors(out, Record(**record)),
    )


def current_records(recipe: Recipe, records: Sequence[Record]) -> list[Record]:
    """Return the records that still match the recipe: it has their row, with the same settings."""
    return [record for record in records if record.is_current(recipe)]


def usable_results(folder: Path) -> report.RecipeResults:
    """Return the recipe and the records of a folder: those that match the current settings of the recipe, if any.

    A message names the records that are left out, or says that no record matches the current settings.
    """
    where = folder.resolve()
    records = read_records(where.parent, where.name)
    accepted = f"a run of `hypersphere train` (with a {CONFIG}) or a folder of records of `hypersphere reproduce`"
    require(bool(records), "folders", accepted, str(folder))
    name = records[0].recipe
    require(name in RECIPES, f"recipe of {folder}", f"one of {', '.join(RECIPES)}", name)
    recipe = RECIPES[name]
    rows = {row.name for row in recipe.rows}
    current = current_records(recipe, records)
    usable = current or [record for record in records if record.row in rows]
    require(bool(usable), f"rows of {folder}", f"rows of {name}: {', '.join(rows)}", sorted({r.row for r in records}))
    if not current:
        warn(f"{folder} was made with settings that differ from the current ones of {name}")
    elif others := sorted({record.row for record in records if record not in current}):
        warn(f"{folder}: ignoring records whose settings differ from the current ones of {name}: {', '.join(others)}")
    return results_of(recipe, usable, where.parent)
