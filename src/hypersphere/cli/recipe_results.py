"""Convert the records of a recipe for report pages, and write its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.options import check_run
from hypersphere.cli.output import warn
from hypersphere.evaluation import PairedDifference
from hypersphere.recipes import RECIPES, Metric, Recipe, Record, read_records, read_tensors, run_name
from hypersphere.recipes.evidence import decide_claims, differences_to_baseline, format_difference

__all__ = ["recipe_results", "stored_results", "write_report"]


def recipe_results(recipe: Recipe, records: Sequence[Record], out: Path) -> report.RecipeResults:
    """Return a recipe and its records, which are stored below `out`, for report pages."""
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
        [*_difference_tables(recipe, records), *_claim_tables(recipe, records)],
        {key: (axis.name, axis.low, axis.high) for key, axis in recipe.axes.items()},
        lambda record: read_tensors(out, Record(**record)),
    )


def _difference_tables(recipe: Recipe, records: Sequence[Record]) -> list[report.Table]:
    """Return a table of the differences of rows to their baselines, with intervals; empty if there are none."""
    metrics = [metric for metric in recipe.metrics if metric.higher_is_better is not None]
    differences = {metric.key: differences_to_baseline(recipe, records, metric.key) for metric in metrics}
    baselines = {row.name: base.name for row in recipe.rows if (base := recipe.baseline_of(row)) is not None}
    names = [name for name in baselines if any(name in by_row for by_row in differences.values())]
    shown = [metric for metric in metrics if differences[metric.key]]
    if not names:
        return []
    columns = [report.Column("method"), report.Column("compared with")]
    columns += [report.Column(metric.heading, metric.higher_is_better) for metric in shown]
    cells = [
        [name, baselines[name], *(_formatted(differences[metric.key].get(name), metric) for metric in shown)]
        for name in names
    ]
    caption = "Mean difference, paired by seed, with its 95 % interval (Student's t)."
    return [report.Table("Differences to the baseline", columns, cells, caption)]


def _formatted(difference: PairedDifference | None, metric: Metric) -> str | None:
    return None if difference is None else format_difference(difference, metric)


def _claim_tables(recipe: Recipe, records: Sequence[Record]) -> list[report.Table]:
    """Return a table of the claims of a recipe and what the records say; empty if no claim can be decided."""
    cells = [
        [
            f"{decision.claim.text} ({decision.metric.heading})",
            None if decision.source is None else f"{decision.source:+{decision.metric.format}}",
            format_difference(decision.difference, decision.metric),
            str(decision.difference.pairs),
            decision.verdict,
        ]
        for decision in decide_claims(recipe, records)
        if decision.difference is not None
    ]
    names = ("claim", "difference in the source", "difference here", "seeds", "verdict")
    caption = "Yes or no if the 95 % interval does not contain zero."
    title = "Claims of the source" if recipe.covers else "Claims"
    return [report.Table(title, [report.Column(name) for name in names], cells, caption)] * bool(cells)


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
    """Return the recipe and the records of a folder, for report pages.

    Records that do not match the current settings of the recipe are left out with a warning, unless none matches.
    """
    path = folder.resolve()
    records = read_records(path.parent, path.name)
    if not records:
        check_run(folder, also=" or a folder of records of `hypersphere reproduce`")
    name = records[0].recipe
    require(name in RECIPES, f"recipe of {folder}", f"one of {', '.join(RECIPES)}", name)
    recipe = RECIPES[name]
    rows = {row.name for row in recipe.rows}
    current = [record for record in records if record.is_current(recipe)]
    usable = current or [record for record in records if record.row in rows]
    require(bool(usable), f"rows of {folder}", f"rows of {name}: {', '.join(rows)}", sorted({r.row for r in records}))
    if not current:
        warn(f"{folder} was made with settings that differ from the current ones of {name}")
    elif ignored := sorted({record.row for record in records if record not in current}):
        warn(f"{folder}: ignoring records whose settings differ from the current ones of {name}: {', '.join(ignored)}")
    return recipe_results(recipe, usable, path.parent)
