"""Sections that the pages of runs and of recipes share: numbers and curves over seeds, features, and landscapes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hypersphere.evaluation import Identification, Roc
from hypersphere.report import charts
from hypersphere.report._arrays import as_array
from hypersphere.report._text import format_setting
from hypersphere.report.charts import Series
from hypersphere.report.page import Chart, Section, SideBySide
from hypersphere.report.spheres import Sphere, Spheres
from hypersphere.report.tables import Cell, Column, Table

ROC_POINTS = 300
RATE_AXIS: dict[str, Any] = {"format": ".1%", "limits": (0.0, 1.0)}
# Title and axis name of the histogram of each learned parameter.
LEARNED = {"k": ("Learned k", "k"), "radius_factor": ("Learned factor of ρ", "factor of ρ")}
LANDSCAPES = {
    "loss": ("Loss", Column("loss", None, ".3f")),
    "error": ("Test error", Column("test error %", None, ".1f")),
}
ABOUT_DIRECTIONS = (
    "Along two random directions, scaled so that each filter of a direction has the norm of the filter it is added to."
)


def seed_cell(values: Iterable[float | None]) -> Cell:
    """Return the table cell for the values of all seeds: mean, standard deviation and number of the finite ones.

    >>> seed_cell([1.0, 3.0, None]), seed_cell([2.0]), seed_cell([])
    ((2.0, 1.4142135623730951, 2), (2.0, nan, 1), None)
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    deviation = statistics.stdev(finite) if len(finite) > 1 else math.nan
    return (statistics.fmean(finite), deviation, len(finite)) if finite else None


def seed_table(
    title: str,
    first: str,
    columns: Mapping[str, Column],
    rows: Mapping[str, Sequence[Mapping[str, float | None]]],
    caption: str,
    printed: Mapping[str, Mapping[str, float]] | None = None,
) -> Table:
    """Return a table of mean ± s.d. over seeds, with the number of seeds if it differs between rows.

    Args:
        title, caption: title and caption of the table.
        first: heading of the first column, which has the names of the rows.
        columns: the other columns, by key of the metric.
        rows: for each name, one mapping from keys to numbers per seed.
        printed: for each name, the numbers of the source by key. They get columns next to the measured ones.
    """
    printed = printed or {}
    printed_keys = {key for numbers in printed.values() for key in numbers}
    counts_differ = len({len(seeds) for seeds in rows.values()}) > 1
    heads = [Column(first), *[Column("seeds", None, ".0f")] * counts_differ]
    for key, column in columns.items():
        heads += [column, *[Column(f"{column.name}, source", None, column.format)] * (key in printed_keys)]
    body: list[list[Cell]] = []
    for name, seeds in rows.items():
        body.append([name, *[len(seeds)] * counts_differ])
        for key in columns:
            body[-1].append(seed_cell(numbers.get(key) for numbers in seeds))
            body[-1] += [printed.get(name, {}).get(key)] * (key in printed_keys)
    return Table(title, heads, body, caption)


def seed_curves(values: Mapping[str, Sequence[Mapping[float, Any]]]) -> list[Series]:
    """Return one curve per name. Each seed maps steps or epochs to values; names without values are omitted."""
    curves = []
    for name, seeds in values.items():
        places = sorted({place for seed in seeds for place in seed})
        if places:
            curves.append(Series(name, [[seed.get(place) for place in places] for seed in seeds], x=places))
    return curves


def shared_limits(tensors: Iterable[Tensor]) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value of all tensors; None if they are equal or missing."""
    finite = torch.cat([torch.zeros(0), *(values[values.isfinite()] for values in tensors)])
    return (float(finite.min()), float(finite.max())) if len(finite) and finite.min() < finite.max() else None


def settings_table(settings: Sequence[Mapping[str, Any]], caption: str = "") -> Table:
    """Return a table of the settings that all runs share, one row per setting."""
    first, *others = settings
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    rows = [[key, format_setting(value)] for key, value in shared.items()]
    return Table("Settings", [Column("setting"), Column("value")], rows, caption)


def roc_chart(curves: Mapping[str, Sequence[Roc]], higher_is_better: bool | None = None) -> Chart:
    """Return one ROC curve per name, from the smallest false accept rate that the negative pairs resolve."""
    negatives = min(roc.negatives for seeds in curves.values() for roc in seeds)
    rates = torch.logspace(-math.log10(max(negatives, 10)), 0, ROC_POINTS, dtype=torch.float64)
    series = []
    for name, seeds in curves.items():
        tars = [roc.tar.cpu()[torch.searchsorted(roc.far.cpu(), rates, right=True) - 1] for roc in seeds]
        series.append(Series(name, torch.stack(tars), x=rates))
    options = {"x_name": "false accept rate", "y_name": "true accept rate", "log_x": True, **RATE_AXIS}
    return Chart("ROC", charts.lines(series, higher_is_better=higher_is_better, **options))


def cmc_chart(
    identified: Mapping[str, Sequence[Identification]], depth: int, higher_is_better: bool | None = None
) -> Chart:
    """Return one curve of identification rates per name, up to rank `depth` or the size of the smallest gallery."""
    depth = min(depth, *(result.entries for seeds in identified.values() for result in seeds))
    series = [Series(name, torch.stack([result.cmc(depth) for result in seeds])) for name, seeds in identified.items()]
    options = {"x_name": "rank", "y_name": "identification rate", **RATE_AXIS}
    return Chart("CMC", charts.lines(series, higher_is_better=higher_is_better, **options))


def lay_out(by_title: Mapping[str, Mapping[str, Any]], caption: str = "") -> list[Section]:
    """Arrange charts, given by title and name of the run: one row per title, or a single row if there is one run."""
    if all(len(by_name) == 1 for by_name in by_title.values()):
        return [SideBySide("", [Chart(title, *by_name.values()) for title, by_name in by_title.items()], caption)]
    return [
        SideBySide(title, [Chart(name, chart) for name, chart in by_name.items()], caption)
        for title, by_name in by_title.items()
    ]


def feature_sections(spheres: Sequence[Sphere]) -> list[Section]:
    """Return features on rotatable spheres, one section per set of classes, and scatter plots of 2-d features."""
    by_classes: dict[tuple[str, ...], list[Sphere]] = {}
    for sphere in spheres:
        by_classes.setdefault(tuple(sphere.classes), []).append(sphere)
    flat = [sphere for sphere in spheres if as_array("points", sphere.points).shape[1] == 2]
    title = f"Features on the unit {'circle' if len(flat) == len(spheres) else 'sphere'}"
    caption = "Directions of the features, one colour per class; the spikes are the class vectors."
    sections: list[Section] = [Spheres(title, group, caption) for group in by_classes.values()]
    if flat:
        scatters = [
            Chart(
                sphere.title,
                charts.scatter(sphere.points, sphere.labels, vectors=sphere.vectors, classes=sphere.classes),
            )
            for sphere in flat
        ]
        caption = "The features themselves, with their norms; lines are the directions of the class vectors."
        sections.append(SideBySide("Features with norms", scatters, caption))
    return sections


def learned_charts(seeds: Mapping[str, Sequence[tuple[Mapping[str, Tensor], Mapping[str, Any]]]]) -> list[Chart]:
    """Return histograms of learned k and factors of ρ by name, pooled over seeds.

    Each seed has two mappings by key: its parameters and their initial values. A line marks the initial value if all
    seeds share it.
    """
    histograms = []
    for key, (title, x_name) in LEARNED.items():
        with_key = {name: [seed for seed in runs if key in seed[0]] for name, runs in seeds.items()}
        values = {name: torch.cat([tensors[key] for tensors, _ in runs]) for name, runs in with_key.items() if runs}
        starts = {initial.get(key) for runs in with_key.values() for _, initial in runs}
        start = starts.pop() if len(starts) == 1 else None
        marks = {} if start is None else {"start": start}
        if values:
            histograms.append(Chart(title, charts.histogram(values, x_name=x_name, marks=marks)))
    return histograms


def landscape_charts(
    grids: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return landscape charts by title and name; those of one title share a colour scale.

    Args:
        grids: (P, P) values by "loss" or "error" and by name; i of entry [i, j] counts along the first direction.
        places: coordinates (P,) by name, the same for both directions.
    """
    by_title: dict[str, dict[str, Any]] = {}
    for key, (title, column) in LANDSCAPES.items():
        limits = shared_limits(grids[key].values())
        for name, grid in grids[key].items():
            ends = float(places[name][0]), float(places[name][-1])
            by_title.setdefault(title, {})[name] = charts.landscape(
                grid.T,  # the first direction is the horizontal axis
                x=ends,
                y=ends,
                value_name=column.name,
                format=column.format,
                log=key == "loss" and limits is not None and 0 < 10 * limits[0] < limits[1],
                limits=limits,
                marks={"trained": (0.0, 0.0)},
            )
    return by_title
