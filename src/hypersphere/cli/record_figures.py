"""Figures for the records of a recipe: curves by epoch, learned parameters, landscapes, features on the sphere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hypersphere import report
from hypersphere.cli.figures import ABOUT_DIRECTIONS, LEARNED, landscape_maps, learned_histogram
from hypersphere.cli.row_groups import group_rows
from hypersphere.recipes import Metric, Recipe, Record, read_tensors

__all__ = ["figure_rows", "record_sections"]

CURVES = {  # headings of curves that are not columns of the table
    "loss": Metric("loss", "training loss", ".3f", False),
    "error": Metric("error", "test error %", ".2f", False),
    "energy": Metric("energy", "hidden energy", ".4f", False),
}
STEEP = {
    "error": 10.0,
    "loss": 10.0,
}  # the axis is logarithmic if the largest value is more than this times the smallest
FIRST = ("error", "accuracy", "loss", "energy")  # these curves come first, in this order

Kept = Mapping[str, Sequence[tuple[Record, Mapping[str, Tensor]]]]  # by row: record and tensors of each seed


def record_sections(recipe: Recipe, records: Sequence[Record], out: Path) -> list[report.Section]:
    """Return all figures that can be drawn from the records and the tensors saved with them in `out`."""
    saved = {
        row: [(record, read_tensors(out, record)) for record in of] for row, of in _by_row(recipe, records).items()
    }
    return [*_curves(recipe, records), *_learned(saved), *_landscapes(saved), *_spheres(recipe, saved)]


def figure_rows(recipe: Recipe, records: Sequence[Record]) -> list[list[report.Curves]]:
    """Return the charts of the curves named in `recipe.figures`, one row of charts per group of table rows."""
    groups = group_rows(list(_by_row(recipe, records)))
    charts = [
        [
            replace(chart, title=", ".join(filter(None, (chart.y_name, title))))
            for key in recipe.figures
            for chart in _chart(recipe, records, key, title, names)
        ]
        for title, names in groups.items()
    ]
    return [row for row in charts if row]


def _by_row(recipe: Recipe, records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each row of the table that has any, ordered by seed."""
    ordered = sorted(records, key=lambda record: record.seed)
    by_row = {row.name: [record for record in ordered if record.row == row.name] for row in recipe.rows}
    return {name: of_row for name, of_row in by_row.items() if of_row}


def _curves(recipe: Recipe, records: Sequence[Record]) -> list[report.Section]:
    keys = {key for record in records for key in record.curves}
    groups = group_rows(list(_by_row(recipe, records)))
    kinds: list[report.Section] = []
    for key in sorted(keys, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key)):
        charts = [chart for title, names in groups.items() for chart in _chart(recipe, records, key, title, names)]
        if len(groups) == 1:
            kinds += charts
        elif charts:
            kinds.append(report.Tabs(_metric(recipe, key).heading, charts))
    return [report.Tabs("By epoch", kinds)] if kinds else []


def _chart(
    recipe: Recipe, records: Sequence[Record], key: str, title: str, names: Mapping[str, str]
) -> list[report.Curves]:
    """Return a chart with one curve per row, mean and deviation over seeds; an empty list if no row has the curve."""
    metric = _metric(recipe, key)
    series = []
    for row, of_row in _by_row(recipe, records).items():
        curves = [record.curves[key] for record in of_row if record.curves.get(key)]
        if row in names and curves:
            padded = [
                list(values) for values in zip(*zip_longest(*curves), strict=True)
            ]  # diverged runs have shorter curves
            series.append(report.Series(names[row], padded, x=_epochs(of_row, key, len(padded[0]))))
    if not series:
        return []
    means = np.concatenate([one.mean[np.isfinite(one.mean)] for one in series])
    steep = key in STEEP and len(means) > 0 and means.min() > 0 and means.max() > STEEP[key] * means.min()
    return [
        report.Curves(
            title or metric.heading,
            series,
            y_name=metric.heading,
            format=metric.format,
            log_y=bool(steep),
            limits=(0.0, 100.0) if metric.heading.endswith("%") else None,
            higher_is_better=metric.higher_is_better,
        )
    ]


def _metric(recipe: Recipe, key: str) -> Metric:
    named = {metric.key: metric for metric in recipe.metrics}
    return named.get(key) or CURVES.get(key) or Metric(key, key.replace("_", " "), ".4g")


def _epochs(records: Sequence[Record], key: str, count: int) -> list[float]:
    """Return the epochs of the values, evenly spaced; a curve with one more value than the loss starts at epoch 0."""
    losses = max(len(record.curves.get("loss", ())) for record in records)
    before = int(count == losses + 1)
    total = records[0].settings.get("epochs")
    diverged = all(record.metrics.get("diverged") for record in records)
    step = total / (count - before) if isinstance(total, int) and count > before and not diverged else 1.0
    return [step * (index + 1 - before) for index in range(count)]


def _learned(saved: Kept) -> list[report.Section]:
    """Return histograms of the learned parameters, pooled over seeds."""
    sections: list[report.Section] = []
    for key in LEARNED:
        able = {row: of_row for row, of_row in saved.items() if any(key in tensors for _, tensors in of_row)}
        values = {
            row: torch.cat([tensors[key] for _, tensors in of_row if key in tensors]) for row, of_row in able.items()
        }
        starts = {_start(key, record) for of_row in able.values() for record, _ in of_row}
        if values:
            sections.append(learned_histogram(key, values, starts.pop() if len(starts) == 1 else None))
    return sections


def _start(key: str, record: Record) -> float | None:
    """Return the initial value: 1 for a factor of ρ, and for k that of the operator in the record."""
    angular = record.settings.get("operator", {}).get("angular")
    return 1.0 if key == "radius_factor" else angular.get("k") if isinstance(angular, Mapping) else None


def _landscapes(saved: Kept) -> list[report.Section]:
    """Return landscapes side by side, for the first seed of each row."""
    sections: list[report.Section] = []
    for key, title in (("loss", "Loss"), ("error", "Test error")):
        first = {row: of_row[0][1] for row, of_row in saved.items() if f"landscape_{key}" in of_row[0][1]}
        grids = {row: tensors[f"landscape_{key}"] for row, tensors in first.items()}
        if grids:
            maps = landscape_maps(key, grids, {row: tensors["coordinates"] for row, tensors in first.items()})
            sections.append(report.SideBySide(f"{title} around the trained weights", maps, caption=ABOUT_DIRECTIONS))
    return sections


def _spheres(recipe: Recipe, saved: Kept) -> list[report.Section]:
    """Return one sphere per row, for its first seed, if features of two or three dimensions were saved."""
    pictures = []
    for row, of_row in saved.items():
        record, tensors = of_row[0]
        if "features" not in tensors or tensors["features"].shape[1] not in (2, 3):
            continue
        values = [(metric, record.metrics.get(metric.key)) for metric in recipe.metrics[:2]]
        numbers = ", ".join(
            f"{metric.heading} {value:{metric.format}}"
            for metric, value in values
            if value is not None and math.isfinite(value)
        )
        vectors = tensors.get("class_vectors")
        pictures.append(report.Sphere(row, tensors["features"], tensors["labels"], vectors, caption=numbers))
    if not pictures:
        return []
    flat = all(len(picture.points[0]) == 2 for picture in pictures)
    caption = "Directions of the test features, one colour per class; the spikes are the class vectors."
    return [report.Spheres(f"Features on the unit {'circle' if flat else 'sphere'}", pictures, caption=caption)]
