"""What is told of a run: its table, its pictures and its page, from the recipe and the records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypersphere import report
from hypersphere.functions.menu import require
from hypersphere.recipes import Metric, Recipe, Record, read_tensors, run_name

__all__ = ["summary_table", "write_report"]


def write_report(recipe: Recipe, records: Sequence[Record], out: Path) -> Path:
    """Write the page of a run, and its table as Markdown, beside its records in `out`; return the page's path."""
    require(bool(records), "records", "at least one record", list(records))
    folder = out / run_name(recipe.name, records[0].overrides)
    table = summary_table(recipe, records)
    lead = f"{recipe.note} ({recipe.reference[:1].upper()}{recipe.reference[1:]}.)"
    with report.replacing(folder / "table.md") as draft:
        words = [f"# {recipe.title}", lead, report.markdown(table), _settings(recipe, records).body]
        draft.write_text("\n\n".join(words) + "\n", encoding="utf-8")
    return report.write_page(
        folder / "report.html",
        title=recipe.title,
        lead=lead,
        sections=[table, *_spheres(recipe, records, out), _settings(recipe, records)],
        meta=_meta(records),
    )


def _settings(recipe: Recipe, records: Sequence[Record]) -> report.Text:
    """What all rows have in common, as it was run."""
    own = {key for row in recipe.rows for key in row.settings}
    common = {key: value for key, value in records[0].settings.items() if key not in own}
    changed = f" Changed from the recipe: {', '.join(records[0].overrides)}." if records[0].overrides else ""
    return report.Text("Settings", ", ".join(f"{key} {value}" for key, value in common.items()) + "." + changed)


def summary_table(recipe: Recipe, records: Sequence[Record]) -> report.Table:
    """The recipe's table: mean ± s.d. over seeds, the source's own numbers in a column beside ours where it has any."""
    printed = {key for row in recipe.rows for key in row.paper}
    columns = [report.Column("method")]
    for metric in recipe.metrics:
        columns.append(report.Column(metric.heading, metric.higher_is_better, metric.format))
        if metric.key in printed:
            columns.append(report.Column(f"{metric.heading}, source", None, metric.format))
    body: list[list[Any]] = []
    counts = set()
    for row in recipe.rows:
        of_row = [record for record in records if record.row == row.name]
        if not of_row:
            continue
        counts.add(len(of_row))
        cells: list[Any] = [row.name]
        for metric in recipe.metrics:
            cells.append(_mean_and_spread(_finite_values(of_row, metric)))
            if metric.key in printed:
                cells.append(row.paper.get(metric.key))
        body.append(cells)
    seeds = "One seed." if counts == {1} else f"{'–'.join(map(str, sorted(counts)))} seeds, mean ± s.d."
    return report.Table("Results", columns, body, caption=seeds)


def _finite_values(records: Sequence[Record], metric: Metric) -> list[float]:
    values = (record.metrics.get(metric.key) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean_and_spread(values: Sequence[float]) -> float | tuple[float, float] | None:
    if len(values) > 1:
        return statistics.fmean(values), statistics.stdev(values)
    return values[0] if values else None


def _spheres(recipe: Recipe, records: Sequence[Record], out: Path) -> list[report.Section]:
    """One sphere a row, of its first seed, where the run kept features of two or three dimensions."""
    pictures = []
    for row in recipe.rows:
        first = min((r for r in records if r.row == row.name), key=lambda r: r.seed, default=None)
        tensors = {} if first is None else read_tensors(out, first)
        if first is None or "features" not in tensors or tensors["features"].shape[1] not in (2, 3):
            continue
        numbers = ", ".join(
            f"{metric.heading} {value:{metric.format}}"
            for metric in recipe.metrics[:2]
            for value in _finite_values([first], metric)
        )
        vectors = tensors.get("class_vectors")
        pictures.append(report.Sphere(row.name, tensors["features"], tensors["labels"], vectors, caption=numbers))
    if not pictures:
        return []
    caption = "Test features by direction, one colour a class; the spikes are the class vectors."
    return [report.Spheres("Features on the unit sphere", pictures, caption=caption)]


def _meta(records: Sequence[Record]) -> dict[str, str]:
    last = records[-1]
    return {
        **last.versions,
        "commit": last.commit or "none",
        "machine": f"{last.machine}, {last.threads} threads",
        "seconds in all": f"{sum(record.seconds for record in records):.0f}",
        **{key: str(value) for key, value in last.overrides.items()},
    }
