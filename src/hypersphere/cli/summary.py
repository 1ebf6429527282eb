"""Summarise a recipe: table, figures and page, computed from the recipe and its records alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypersphere import report
from hypersphere._files import replacing
from hypersphere._validation import require
from hypersphere.cli.figures import settings_table
from hypersphere.cli.record_figures import figure_rows, record_sections
from hypersphere.cli.words import joined_facts, mean_and_spread, words_of
from hypersphere.recipes import Metric, Recipe, Record, read_records, run_name

__all__ = ["current_records", "record_page", "summary_table", "write_page_of", "write_report"]


def write_report(recipe: Recipe, records: Sequence[Record], out: Path) -> Path:
    """Write the page of a recipe next to its records in `out`, with table.md and figure.svg; return its path.

    The page covers all records in the folder, including rows and seeds that are not among the given ones.
    """
    require(bool(records), "records", "at least one record", list(records))
    folder = out / run_name(recipe.name, records[0].overrides)
    by_row_and_seed = {
        (record.row, record.seed): record for record in current_records(recipe, read_records(out, folder.name))
    }
    by_row_and_seed |= {(record.row, record.seed): record for record in records}
    return write_page_of(recipe, [by_row_and_seed[key] for key in sorted(by_row_and_seed)], folder)


def write_page_of(recipe: Recipe, records: Sequence[Record], folder: Path) -> Path:
    """Write the page, table.md and figure.svg of these records into their folder; return the path of the page."""
    page = record_page(recipe, records, folder.parent)
    charts = figure_rows(recipe, records)
    blocks = [f"# {recipe.title}", page.lead, report.markdown(summary_table(recipe, records))]
    if charts:
        with replacing(folder / "figure.svg") as draft:
            draft.write_text(report.figure_svg(recipe.title, charts), encoding="utf-8")
        blocks.append(f"![{recipe.title}: {', '.join(chart.y_name for chart in charts[0])} by epoch](figure.svg)")
    with replacing(folder / "table.md") as draft:
        draft.write_text("\n\n".join([*blocks, report.markdown(_settings(recipe, records))]) + "\n", encoding="utf-8")
    return report.write_page(
        folder / "report.html", title=page.title, lead=page.lead, sections=page.sections, meta=page.meta
    )


def record_page(recipe: Recipe, records: Sequence[Record], out: Path) -> report.Page:
    """Return the page: table, figures, settings."""
    return report.Page(
        recipe.title,
        f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)",
        [summary_table(recipe, records), *record_sections(recipe, records, out), _settings(recipe, records)],
        _meta(records),
    )


def current_records(recipe: Recipe, records: Sequence[Record]) -> list[Record]:
    """Return the records that still match the recipe: it has their row, with the same settings."""
    rows = {row.name: row for row in recipe.rows}

    def is_current(record: Record) -> bool:
        try:
            settings = recipe.settings_of(rows[record.row], record.overrides)
        except (KeyError, ValueError):
            return False
        return _text(settings) == _text(record.settings)

    return [record for record in records if is_current(record)]


def summary_table(recipe: Recipe, records: Sequence[Record]) -> report.Table:
    """Return the table of the recipe: mean ± s.d. over seeds, next to the numbers of the source where it reports any.

    If rows have different numbers of seeds, a column shows them.
    """
    printed = {key for row in recipe.rows for key in row.paper}
    of_rows = {row.name: [record for record in records if record.row == row.name] for row in recipe.rows}
    counts = sorted({len(of_row) for of_row in of_rows.values() if of_row})
    columns = [report.Column("method")]
    if len(counts) > 1:
        columns.append(report.Column("seeds", None, ".0f"))
    for metric in recipe.metrics:
        columns.append(report.Column(metric.heading, metric.higher_is_better, metric.format))
        if metric.key in printed:
            columns.append(report.Column(f"{metric.heading}, source", None, metric.format))
    body: list[list[Any]] = []
    for row in recipe.rows:
        of_row = of_rows[row.name]
        if not of_row:
            continue
        cells: list[Any] = [row.name] if len(counts) == 1 else [row.name, len(of_row)]
        for metric in recipe.metrics:
            cells.append(mean_and_spread(_finite_values(of_row, metric)))
            if metric.key in printed:
                cells.append(row.paper.get(metric.key))
        body.append(cells)
    return report.Table("Results", columns, body, caption=_caption(counts, of_rows))


def _caption(counts: Sequence[int], of_rows: Mapping[str, Sequence[Record]]) -> str:
    """Return the number of seeds, and the rows with diverged seeds, which are not part of the mean."""
    many = f"{counts[0]} seeds, mean ± s.d." if len(counts) == 1 else "Mean ± s.d. over the seeds of each row."
    lost = {row: sum(bool(record.metrics.get("diverged")) for record in of_row) for row, of_row in of_rows.items()}
    diverged = [f"{row} ({count} of {len(of_rows[row])})" for row, count in lost.items() if count]
    return ("One seed." if list(counts) == [1] else many) + (f" Diverged: {', '.join(diverged)}." if diverged else "")


def _settings(recipe: Recipe, records: Sequence[Record]) -> report.Table:
    """Return the settings that all rows share."""
    varied = {key for row in recipe.rows for key in row.settings}
    common = {key: value for key, value in records[0].settings.items() if key not in varied}
    changed = f"Changed from the recipe: {', '.join(records[0].overrides)}." if records[0].overrides else ""
    return settings_table(common, changed)


def _finite_values(records: Sequence[Record], metric: Metric) -> list[float]:
    values = (record.metrics.get(metric.key) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]


def _meta(records: Sequence[Record]) -> dict[str, str]:
    facts = [
        {**record.versions, "machine": record.machine, "threads": record.threads, "commit": record.commit or "none"}
        for record in records
    ]
    return {
        **joined_facts(facts),
        "total seconds": f"{sum(record.seconds for record in records):.0f}",
        **{key: words_of(value) for key, value in records[-1].overrides.items()},
    }


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
