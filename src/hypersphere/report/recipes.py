"""The page of a recipe: the table with the source's numbers, curves by epoch, and pictures from saved tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hypersphere._files import replacing
from hypersphere.report import charts
from hypersphere.report._words import joined_facts, measured, settings_table, words_of
from hypersphere.report.charts import Series, figure_svg
from hypersphere.report.page import Chart, Page, Section, SideBySide, Tabs, write_page
from hypersphere.report.runs import ABOUT_DIRECTIONS, LEARNED, landscape_charts, learned_chart
from hypersphere.report.spheres import Sphere, Spheres
from hypersphere.report.tables import Cell, Column, Table, markdown

__all__ = ["RecipeResults", "group_rows", "recipe_page", "summary_table", "write_recipe_page"]

CURVES = {  # columns for curves that are not columns of the table
    "loss": Column("training loss", False, ".3f"),
    "error": Column("test error %", False, ".2f"),
    "energy": Column("hidden energy", False, ".4f"),
}
FIRST = ("error", "accuracy", "loss", "energy")  # these curves come first, in this order
MOST_ROWS = 12  # curves that can be distinguished in one chart
FEWEST_ROWS = 3  # smaller groups are merged


@dataclass(frozen=True, eq=False)
class RecipeResults:
    """A recipe and its records, as plain data.

    Attributes:
        title, lead: heading and first paragraph.
        columns: columns of the table by the key of the metric in the records.
        rows: names of the rows, in order.
        records: mappings with `row`, `seed`, `metrics`, and optionally `curves`, `settings` or `config`, `seconds`,
            `versions`, `machine`, `threads`, `commit`, `overrides` and `scale`.
        printed: the numbers of the source, by row and key.
        figures: keys of the curves in figure.svg.
        tensors: function that returns the tensors saved with a record.
    """

    title: str
    lead: str
    columns: Mapping[str, Column]
    rows: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    figures: Sequence[str] = ()
    tensors: Callable[[Mapping[str, Any]], Mapping[str, Tensor]] = lambda record: {}

    def by_row(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the records of each row that has any, ordered by seed."""
        ordered = sorted(self.records, key=lambda record: record["seed"])
        by_row = {row: [record for record in ordered if record["row"] == row] for row in self.rows}
        return {row: of for row, of in by_row.items() if of}


def recipe_page(results: RecipeResults) -> Page:
    """Return the page: table, curves, learned parameters, landscapes, spheres, and the settings that all rows share."""
    saved = {row: [(record, results.tensors(record)) for record in of] for row, of in results.by_row().items()}
    figures = [*_curve_tabs(results), *_learned(saved), *_landscapes(saved), *_spheres(results, saved)]
    sections = [summary_table(results), *figures, _settings(results)]
    return Page(results.title, results.lead, sections, _facts(results.records))


def write_recipe_page(results: RecipeResults, folder: Path) -> Path:
    """Write report.html, table.md and, if the recipe has figures, figure.svg; return the path of the page."""
    blocks = [f"# {results.title}", results.lead, markdown(summary_table(results))]
    rows = []
    for title, names in group_rows(list(results.by_row())).items():
        made = {key: _chart(results, key, names) for key in results.figures}
        row = [(", ".join(filter(None, (_column(results, key).name, title))), made[key]) for key in made if made[key]]
        rows += [row] if row else []
    if rows:
        with replacing(folder / "figure.svg") as draft:
            draft.write_text(figure_svg(results.title, rows), encoding="utf-8")
        drawn = ", ".join(_column(results, key).name for key in results.figures)
        blocks.append(f"![{results.title}: {drawn} by epoch](figure.svg)")
    with replacing(folder / "table.md") as draft:
        draft.write_text("\n\n".join([*blocks, markdown(_settings(results))]) + "\n", encoding="utf-8")
    return write_page(folder / "report.html", recipe_page(results))


def summary_table(results: RecipeResults) -> Table:
    """Return the table: mean ± s.d. over seeds, next to the numbers of the source where it prints any.

    If rows have different numbers of seeds, a column shows them.
    """
    by_row = results.by_row()
    printed = {key for numbers in results.printed.values() for key in numbers}
    counts = sorted({len(of) for of in by_row.values()})
    columns = [Column("method"), *[Column("seeds", None, ".0f")] * (len(counts) > 1)]
    for key, column in results.columns.items():
        columns += [column, *[Column(f"{column.name}, source", None, column.format)] * (key in printed)]
    body: list[list[Cell]] = []
    for row, of in by_row.items():
        body.append([row, *[len(of)] * (len(counts) > 1)])
        for key in results.columns:
            body[-1].append(measured(record["metrics"].get(key) for record in of))
            body[-1] += [results.printed.get(row, {}).get(key)] * (key in printed)
    caption = f"{counts[0]} seeds, mean ± s.d." if len(counts) == 1 else "Mean ± s.d. over the seeds of each row."
    lost = {row: sum(bool(record["metrics"].get("diverged")) for record in of) for row, of in by_row.items()}
    diverged = [f"{row} ({count} of {len(by_row[row])})" for row, count in lost.items() if count]
    caption = "One seed, so the noise is not known and no best value is marked." if counts == [1] else caption
    return Table("Results", columns, body, caption + f" Diverged: {', '.join(diverged)}." * bool(diverged))


def group_rows(names: Sequence[str], most: int = MOST_ROWS) -> dict[str, dict[str, str]]:
    """Return groups by title; each maps names to shorter names without the words of the title.

    If there are few rows, there is one group without a title. Otherwise rows are grouped by the part of the name after
    the last comma, after the first comma, or before the first comma; if no such grouping fits, by their order.

    >>> group_rows(["a, cold", "b, cold", "a, hot", "b, hot", "c, cold", "c, hot"], most=4)
    {'cold': {'a, cold': 'a', 'b, cold': 'b', 'c, cold': 'c'}, 'hot': {'a, hot': 'a', 'b, hot': 'b', 'c, hot': 'c'}}
    >>> group_rows(["one", "two", "three"], most=2)
    {'one … two': {'one': 'one', 'two': 'two'}, 'three': {'three': 'three'}}
    """
    if len(names) <= most:
        return {"": {name: name for name in names}}
    cuts = ((lambda p: (p[-1:], p[:-1])), (lambda p: (p[1:], p[:1])), (lambda p: (p[:1], p[1:])))
    candidates = []
    for cut in cuts:
        parts = {name: [", ".join(part) for part in cut(name.split(", "))] for name in names}
        sizes = [common for common, _ in parts.values()]
        groups: dict[str, dict[str, str]] = {}
        for name, (common, rest) in parts.items():
            merged = not rest or sizes.count(common) < FEWEST_ROWS
            groups.setdefault("" if merged else common, {})[name] = name if merged else rest
        if len(groups) > 1 and max(map(len, groups.values())) <= most:
            candidates.append({title or _ends(group): group for title, group in groups.items()})
    size = math.ceil(len(names) / math.ceil(len(names) / most))
    runs = [{name: name for name in names[start : start + size]} for start in range(0, len(names), size)]
    return min(candidates, key=len) if candidates else {_ends(run): run for run in runs}


def _ends(group: Mapping[str, str]) -> str:
    first, *others = group
    return f"{first} … {others[-1]}" if others else first


def _curve_tabs(results: RecipeResults) -> list[Section]:
    keys = {key for record in results.records for key in record.get("curves", ())}
    groups, kinds = group_rows(list(results.by_row())), []
    for key in sorted(keys, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key)):
        name = _column(results, key).name
        made = [(title or name, _chart(results, key, names)) for title, names in groups.items()]
        drawn: list[Section] = [Chart(title, chart) for title, chart in made if chart is not None]
        if drawn:
            kinds.append(drawn[0] if len(groups) == 1 else Tabs(name, drawn))
    return [Tabs("By epoch", kinds)] if kinds else []


def _chart(results: RecipeResults, key: str, names: Mapping[str, str]) -> Any:
    """Return a chart with one curve per row, mean and deviation over seeds; None if no row has the curve."""
    column, series = _column(results, key), []
    for row, of in results.by_row().items():
        curves = [record["curves"][key] for record in of if record.get("curves", {}).get(key)]
        if row in names and curves:
            padded = [list(values) for values in zip(*zip_longest(*curves), strict=True)]  # diverged ones are shorter
            series.append(Series(names[row], padded, x=_epochs(of, len(padded[0]))))
    if not series:
        return None
    means = np.concatenate([one.mean[np.isfinite(one.mean)] for one in series])
    steep = key in ("error", "loss") and len(means) > 0 and 0 < 10 * means.min() < means.max()
    limits = (0.0, 100.0) if column.name.endswith("%") else None
    options: dict[str, Any] = {"format": column.format, "limits": limits, "higher_is_better": column.higher_is_better}
    return charts.lines(series, y_name=column.name, log_y=bool(steep), **options)


def _column(results: RecipeResults, key: str) -> Column:
    return results.columns.get(key) or CURVES.get(key) or Column(key.replace("_", " "), None, ".4g")


def _config(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record.get("config") or record.get("settings") or {}


def _epochs(records: Sequence[Mapping[str, Any]], count: int) -> list[float]:
    """Return the epochs of the values, evenly spaced; a curve with one more value than the loss starts at epoch 0."""
    before = int(count == max(len(record["curves"].get("loss", ())) for record in records) + 1)
    total = _config(records[0]).get("epochs")
    diverged = all(record["metrics"].get("diverged") for record in records)
    step = total / (count - before) if isinstance(total, int) and count > before and not diverged else 1.0
    return [step * (index + 1 - before) for index in range(count)]


Saved = Mapping[str, Sequence[tuple[Mapping[str, Any], Mapping[str, Tensor]]]]  # by row: record and tensors per seed


def _learned(saved: Saved) -> list[Section]:
    """Return histograms of the learned parameters, pooled over seeds."""
    sections: list[Section] = []
    for key in LEARNED:
        able = {row: [(record, t[key]) for record, t in of if key in t] for row, of in saved.items()}
        values = {row: torch.cat([tensor for _, tensor in of]) for row, of in able.items() if of}
        if values:
            sections.append(
                learned_chart(key, values, {_start(key, record) for of in able.values() for record, _ in of})
            )
    return sections


def _start(key: str, record: Mapping[str, Any]) -> float | None:
    """Return the initial value: 1 for a factor of ρ, and for k that of the operator in the record."""
    operator = _config(record).get("operator")
    angular = operator.get("angular") if isinstance(operator, Mapping) else None
    return 1.0 if key == "radius_factor" else angular.get("k") if isinstance(angular, Mapping) else None


def _landscapes(saved: Saved) -> list[Section]:
    """Return landscapes side by side, for the first seed of each row."""
    sections: list[Section] = []
    for key, title in (("loss", "Loss"), ("error", "Test error")):
        first = {row: of[0][1] for row, of in saved.items() if f"landscape_{key}" in of[0][1]}
        grids = {row: tensors[f"landscape_{key}"] for row, tensors in first.items()}
        if grids:
            maps = landscape_charts(key, grids, {row: tensors["coordinates"] for row, tensors in first.items()})
            sections.append(SideBySide(f"{title} around the trained weights", maps, ABOUT_DIRECTIONS))
    return sections


def _spheres(results: RecipeResults, saved: Saved) -> list[Section]:
    """Return spheres, and scatter plots of 2-d features with their norms, for the first seed of each row."""
    pictures, flat = [], []
    for row, of in saved.items():
        record, tensors = of[0]
        if "features" not in tensors or tensors["features"].shape[1] not in (2, 3):
            continue
        values = [(column, record["metrics"].get(key)) for key, column in list(results.columns.items())[:2]]
        numbers = ", ".join(f"{column.name} {column.show(value)}" for column, value in values if value is not None)
        vectors = tensors.get("class_vectors")
        pictures.append(Sphere(row, tensors["features"], tensors["labels"], vectors, caption=numbers))
        if tensors["features"].shape[1] == 2:
            flat.append(Chart(row, charts.scatter(tensors["features"], tensors["labels"], vectors=vectors)))
    if not pictures:
        return []
    caption = "Directions of the test features, one colour per class; the spikes are the class vectors."
    title = f"Features on the unit {'circle' if len(flat) == len(pictures) else 'sphere'}"
    sections: list[Section] = [Spheres(title, pictures, caption)]
    caption = "The features themselves, with their norms; lines are the directions of the class vectors."
    return sections + ([SideBySide("Features with norms", flat, caption)] if flat else [])


def _settings(results: RecipeResults) -> Table:
    """Return the settings that all rows share, and the changes from the recipe."""
    overrides = results.records[0].get("overrides") or {}
    changed = f"Changed from the recipe: {', '.join(overrides)}." if overrides else ""
    return settings_table([_config(record) for record in results.records], changed)


def _facts(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    facts = []
    for record in records:
        named = {key: record[key] for key in ("scale", "machine", "threads") if record.get(key)}
        facts.append({**record.get("versions", {}), **named, "commit": record.get("commit") or "none"})
    total = {"total seconds": f"{sum(record.get('seconds', 0.0) for record in records):.0f}"}
    overrides = records[-1].get("overrides") or {}
    return {**joined_facts(facts), **total, **{key: words_of(value) for key, value in overrides.items()}}
