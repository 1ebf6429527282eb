"""The page of a recipe: the table with the source's numbers, curves, and pictures from saved tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hypersphere._files import replacing
from hypersphere.report import _sections, charts
from hypersphere.report._text import format_setting, joined_facts, pluralize
from hypersphere.report.charts import figure_svg
from hypersphere.report.page import Chart, Page, Section, Stack, Tabs, write_page
from hypersphere.report.spheres import Sphere
from hypersphere.report.tables import Column, Table, markdown

__all__ = ["RecipeResults", "group_rows", "recipe_page", "summary_table", "write_recipe_page"]

CURVES = {  # names and formats of curves that are not columns of the table
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
        records: mappings with `row`, `seed`, `metrics`, and optionally `curves`, `config`, `seconds`, `versions`,
            `machine`, `threads`, `commit`, `overrides` and `scale`.
        printed: the numbers of the source, by row and key.
        figures: keys of the curves in figure.svg.
        comparisons: tables that compare the rows, shown below the results.
        axes: name, first and last value of the horizontal axis, by key of each curve that is not drawn by epoch.
        tensors: function that returns the tensors saved with a record.
    """

    title: str
    lead: str
    columns: Mapping[str, Column]
    rows: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    figures: Sequence[str] = ()
    comparisons: Sequence[Table] = ()
    axes: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)
    tensors: Callable[[Mapping[str, Any]], Mapping[str, Tensor]] = lambda record: {}

    def _repr_html_(self) -> str:
        return recipe_page(self)._repr_html_()

    def __repr__(self) -> str:
        return f"RecipeResults({self.title!r}, {pluralize(len(self.records), 'record')} of {len(self.by_row())} rows)"

    def by_row(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the records of each row that has any, ordered by seed."""
        ordered = sorted(self.records, key=lambda record: record["seed"])
        by_row = {row: [record for record in ordered if record["row"] == row] for row in self.rows}
        return {row: records for row, records in by_row.items() if records}

    def column(self, key: str) -> Column:
        """Return the name and format of a metric or of a curve."""
        return self.columns.get(key) or CURVES.get(key) or Column(key.replace("_", " "), None, ".4g")


def recipe_page(results: RecipeResults) -> Page:
    """Return a page of tables, curves, learned parameters, landscapes, spheres, and the settings that rows share."""
    tables = [summary_table(results), *results.comparisons]
    sections = [*tables, *_curve_tabs(results), *_pictures(results), *_settings(results)]
    return Page(results.title, results.lead, sections, _facts(results.records))


def write_recipe_page(results: RecipeResults, folder: Path) -> Path:
    """Write report.html, table.md and, if the recipe has figures, figure.svg; return the path of the page."""
    blocks = [f"# {results.title}", results.lead, markdown(summary_table(results))]
    for table in results.comparisons:
        blocks += [f"## {table.title}", markdown(table)]
    rows = []
    for title, names in group_rows(list(results.by_row())).items():
        panels = {results.column(key).name: _chart(results, key, names) for key in results.figures}
        rows.append([(f"{name}, {title}" if title else name, chart) for name, chart in panels.items() if chart])
    if any(rows):
        with replacing(folder / "figure.svg") as draft:
            draft.write_text(figure_svg(results.title, list(filter(None, rows))), encoding="utf-8")
        drawn = ", ".join(results.column(key).name for key in results.figures)
        axes = ", ".join(dict.fromkeys(_axis_name(results, key) for key in results.figures))
        blocks.append(f"![{results.title}: {drawn} over {axes}](figure.svg)")
    with replacing(folder / "table.md") as draft:
        draft.write_text("\n\n".join([*blocks, *map(markdown, _settings(results))]) + "\n", encoding="utf-8")
    return write_page(folder / "report.html", recipe_page(results))


def summary_table(results: RecipeResults) -> Table:
    """Return a table of mean ± s.d. over seeds, next to the numbers of the source where it prints any."""
    metrics = {row: [record["metrics"] for record in records] for row, records in results.by_row().items()}
    counts = {len(seeds) for seeds in metrics.values()}
    caption = "Mean ± s.d. over the seeds of each row."
    if counts == {1}:
        caption = "One seed, so the noise is not known and no best value is marked."
    elif len(counts) == 1:
        caption = f"{min(counts)} seeds, mean ± s.d."
    diverged_seeds = {row: sum(bool(numbers.get("diverged")) for numbers in seeds) for row, seeds in metrics.items()}
    diverged = ", ".join(f"{row} ({count} of {len(metrics[row])})" for row, count in diverged_seeds.items() if count)
    caption += f" Diverged: {diverged}." if diverged else ""
    return _sections.seed_table("Results", "method", results.columns, metrics, caption, results.printed)


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
    # Each cut splits the parts of a name into those of the title and those of the short name.
    cuts = ((lambda p: (p[-1:], p[:-1])), (lambda p: (p[1:], p[:1])), (lambda p: (p[:1], p[1:])))
    candidates = []
    for cut in cuts:
        parts = {name: [", ".join(part) for part in cut(name.split(", "))] for name in names}
        titles = [title for title, _ in parts.values()]
        groups: dict[str, dict[str, str]] = {}
        for name, (title, short) in parts.items():
            is_merged = not short or titles.count(title) < FEWEST_ROWS
            groups.setdefault("" if is_merged else title, {})[name] = name if is_merged else short
        if len(groups) > 1 and max(map(len, groups.values())) <= most:
            candidates.append({title or _first_and_last(group): group for title, group in groups.items()})
    size = math.ceil(len(names) / math.ceil(len(names) / most))
    slices = [{name: name for name in names[start : start + size]} for start in range(0, len(names), size)]
    return min(candidates, key=len) if candidates else {_first_and_last(part): part for part in slices}


def _first_and_last(group: Mapping[str, str]) -> str:
    first, *others = group
    return f"{first} … {others[-1]}" if others else first


def _curve_tabs(results: RecipeResults) -> list[Section]:
    """Return tabs of the curves that have an axis in `results.axes`, and of those over epochs or steps."""
    keys = {key for record in results.records for key in record.get("curves", ())}
    groups = group_rows(list(results.by_row()))
    with_axis: list[Section] = []
    over_training: list[Section] = []
    for key in sorted(keys, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key)):
        name = results.column(key).name
        panels = [(title or name, _chart(results, key, names)) for title, names in groups.items()]
        drawn: list[Section] = [Chart(title, chart) for title, chart in panels if chart is not None]
        if drawn:
            sections = with_axis if key in results.axes else over_training
            sections.append(drawn[0] if len(groups) == 1 else Tabs(name, drawn))
    by_title = {"Curves": with_axis, f"By {_unit(results)}": over_training}
    return [Tabs(title, sections) for title, sections in by_title.items() if sections]


def _chart(results: RecipeResults, key: str, names: Mapping[str, str]) -> Any:
    """Return a chart with one curve per row, mean and deviation over seeds; None if no row has the curve."""
    column, by_row = results.column(key), results.by_row()
    values_by_place = _on_axis if key in results.axes else _over_training
    series = _sections.seed_curves({short: values_by_place(results, by_row[row], key) for row, short in names.items()})
    if not series:
        return None
    means = np.concatenate([curve.mean[np.isfinite(curve.mean)] for curve in series])
    is_steep = key in ("error", "loss") and len(means) > 0 and 0 < 10 * means.min() < means.max()
    return charts.lines(
        series,
        x_name=_axis_name(results, key),
        y_name=column.name,
        format=column.format,
        log_y=bool(is_steep),
        limits=(0.0, 100.0) if column.name.endswith("%") else None,
        higher_is_better=column.higher_is_better,
    )


def _axis_name(results: RecipeResults, key: str) -> str:
    return results.axes[key][0] if key in results.axes else _unit(results)


def _on_axis(results: RecipeResults, records: Sequence[Mapping[str, Any]], key: str) -> list[dict[float, Any]]:
    """Return, for each record that has the curve, its values by evenly spaced position on its axis."""
    curves = [curve for record in records if (curve := record.get("curves", {}).get(key))]
    _, low, high = results.axes[key]
    return [dict(zip(np.linspace(low, high, len(curve)).tolist(), curve, strict=True)) for curve in curves]


def _over_training(results: RecipeResults, records: Sequence[Mapping[str, Any]], key: str) -> list[dict[float, Any]]:
    """Return, for each record that has the curve, its values by epoch or step.

    All curves of a record end at its last validation. A curve with one more value starts before training.
    """
    by_place, unit = [], _unit(results)
    for record in records:
        curves = {name: curve for name, curve in record.get("curves", {}).items() if name not in results.axes}
        # The loss has no value before training, and fewer values than other curves if validations are within epochs.
        losses, longest = len(curves.get("loss", ())), max(map(len, curves.values()), default=0)
        count = max(losses, longest - 1) if "loss" in curves else longest
        name, every, end = _schedule(record)
        if name != unit:
            every, end = 1, math.inf
        if curve := curves.get(key):
            numbers = range(count + 1 - len(curve), count + 1)
            # The end of training is validated even if it is not a multiple of `every`.
            by_place.append({min(every * number, end): value for number, value in zip(numbers, curve, strict=True)})
    return by_place


def _unit(results: RecipeResults) -> str:
    """Return the unit of training on the horizontal axis: "epoch", "step", or "validation" if neither is known."""
    units = {_schedule(record)[0] for record in results.records}
    return units.pop() if len(units) == 1 else "validation"


def _schedule(record: Mapping[str, Any]) -> tuple[str, int, float]:
    """Return the unit of validation, the distance between two validations, and the end of training."""
    config = record.get("config") or {}
    if "validation" not in config:  # a record of a recipe function, or of version 0.1: validated after each epoch
        return "epoch", 1, math.inf
    unit = config["validation"].get("every_unit", "epochs")
    if config.get(unit) is None:  # the length of training is given in the other unit
        return "validation", 1, math.inf
    return unit.removesuffix("s"), config["validation"]["every"], config[unit]


def _pictures(results: RecipeResults) -> list[Section]:
    """Return learned parameters of all seeds, and landscapes and features of the first seed of each row."""
    by_row = results.by_row()
    tensors = {row: [results.tensors(record) for record in records] for row, records in by_row.items()}
    first = {row: seeds[0] for row, seeds in tensors.items()}
    learned = {row: list(zip(seeds, map(_starts, by_row[row]), strict=True)) for row, seeds in tensors.items()}
    sections: list[Section] = [*_sections.learned_charts(learned)]
    grids = {
        key: {row: saved[f"landscape_{key}"] for row, saved in first.items() if f"landscape_{key}" in saved}
        for key in _sections.LANDSCAPES
    }
    places = {row: saved["coordinates"] for row, saved in first.items() if "coordinates" in saved}
    if maps := _sections.landscape_charts(grids, places):
        sections.append(Stack("Around the trained weights", _sections.lay_out(maps), _sections.ABOUT_DIRECTIONS))
    spheres = []
    for row, saved in first.items():
        if "features" in saved and saved["features"].shape[1] in (2, 3):
            metrics = by_row[row][0]["metrics"]
            shown = [(column, metrics.get(key)) for key, column in list(results.columns.items())[:2]]
            caption = ", ".join(f"{column.name} {column.show(value)}" for column, value in shown if value is not None)
            vectors = saved.get("class_vectors")
            spheres.append(Sphere(row, saved["features"], saved["labels"], vectors, caption=caption))
    return [*sections, *(_sections.feature_sections(spheres) if spheres else ())]


def _starts(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the initial values of learned parameters: 1 for a factor of ρ, and for k that of the operator."""
    operator = (record.get("config") or {}).get("operator")
    angular = operator.get("angular") if isinstance(operator, Mapping) else None
    return {"radius_factor": 1.0, "k": angular.get("k") if isinstance(angular, Mapping) else None}


def _settings(results: RecipeResults) -> list[Table]:
    """Return a table of the settings that all rows share and of the overrides; empty for records without settings."""
    overrides = results.records[0].get("overrides") or {}
    changed = f"Changed from the recipe: {', '.join(overrides)}." if overrides else ""
    table = _sections.settings_table([record.get("config") or {} for record in results.records], changed)
    return [table] if table.rows else []


def _facts(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    facts = []
    for record in records:
        named = {key: record[key] for key in ("scale", "machine", "threads") if record.get(key)}
        facts.append({**record.get("versions", {}), **named, "commit": record.get("commit") or "none"})
    total = {"total seconds": f"{sum(record.get('seconds', 0.0) for record in records):.0f}"}
    overrides = records[-1].get("overrides") or {}
    return {**joined_facts(facts), **total, **{key: format_setting(value) for key, value in overrides.items()}}
