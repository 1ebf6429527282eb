"""Loss landscapes: values along two directions as a heat map with contour lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report.arrays import Array, as_numbers
from hypersphere.report.axis import Axis, fit_axis, write_tick
from hypersphere.report.contour import contour
from hypersphere.report.field import Label, bar_html, map_html, picture_uri, shrunk
from hypersphere.report.frame import chart_html, counted, fitting, shortened
from hypersphere.report.table import Column

MIDDLE = 0.55  # contour lines are light on darker colours and dark on lighter ones


@dataclass(frozen=True, eq=False)
class Landscape:
    """Values along two directions, with contour lines at the ticks of the colour bar.

    Args:
        title: heading.
        values: matrix (R, C) on a regular grid; the first row is at the low end of y, at the bottom.
        x, y: coordinates of the first and last column, and of the first and last row.
        x_name, y_name, value_name: names of the axes and of the values.
        format: format of the values, as in a `Column`.
        log: use a logarithmic colour scale.
        limits: ends of the colour scale, by default the extremes; set them to compare several landscapes.
        marks: names and positions (x, y) of points, for example of the trained weights.
        caption: text below the chart.

    Example:
        >>> bowl = np.linspace(-1, 1, 5)[:, None] ** 2 + np.linspace(-1, 1, 5) ** 2
        >>> Landscape("Loss", bowl, marks={"trained": (0, 0)}).value_name
        'loss'
    """

    title: str
    values: Array
    x: tuple[float, float] = (-1.0, 1.0)
    y: tuple[float, float] = (-1.0, 1.0)
    x_name: str = "first direction"
    y_name: str = "second direction"
    value_name: str = "loss"
    format: str = ".3g"
    log: bool = False
    limits: tuple[float, float] | None = None
    marks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    caption: str = ""

    def __post_init__(self) -> None:
        values = self.numbers
        require(min(values.shape) > 1, "values", "a matrix with at least two rows and two columns", values.shape)
        for name, ends in (("x", self.x), ("y", self.y), ("limits", self.limits or (1.0, 2.0))):
            low, high = as_numbers(name, ends, 1).tolist() if len(ends) == 2 else (1.0, 0.0)
            require(low < high, name, "two finite numbers, low and high", ends)
        for name, place in self.marks.items():
            is_point = len(place) == 2 and all(map(math.isfinite, place))
            require(is_point, f"marks[{name!r}]", "a point (x, y)", place)
        _ = self.column

    @property
    def numbers(self) -> NDArray:
        """The grid, NaN where it is left blank."""
        return as_numbers("values", self.values, 2)

    @property
    def column(self) -> Column:
        """The format of the values."""
        return Column(self.value_name, None, self.format)


def landscape_html(section: Landscape) -> str:
    """Return the chart as HTML."""
    values, blocks = shrunk(section.numbers)
    if section.log:
        values = np.where(values > 0, values, np.nan)
    shown = values.ravel() if section.limits is None else np.array(section.limits, dtype=np.float64)
    axis = fit_axis(shown, log=section.log, percent=section.format.endswith("%"), most=8)
    x, y = (_spread(ends, count) for ends, count in zip((section.x, section.y), values.shape[::-1], strict=True))
    labels = [
        Label(x.place(tick), words, narrow) for tick, words, narrow in zip(x.ticks, x.labels, fitting(x), strict=True)
    ]
    picture = map_html(
        picture_uri(values[::-1], axis),
        _alt(section, values),
        shape=1.0,
        rows=[Label(1 - y.place(tick), words) for tick, words in zip(y.ticks, y.labels, strict=True)],
        columns=labels,
        names=(section.x_name, section.y_name),
        smooth=True,
        over=_contours(values[::-1], axis) + _marks(section, x, y),
    )
    text = [section.column.show(value) for value in values[::-1].ravel().tolist()]
    rows, columns = (
        [f"{name} {words}" for words in _places(ends, count)]
        for name, ends, count in (
            (section.y_name, section.y, len(values)),
            (section.x_name, section.x, values.shape[1]),
        )
    )
    return chart_html(
        bar_html(axis, section.value_name) + picture,
        notes=_notes(section, values, blocks),
        caption=section.caption,
        data={"kind": "cells", "name": section.value_name, "rows": rows[::-1], "columns": columns, "text": text},
    )


def _spread(ends: tuple[float, float], count: int) -> Axis:
    """Return the axis of a picture whose cells are centred at evenly spaced points between the ends."""
    half = (ends[1] - ends[0]) / (count - 1) / 2
    fitted = fit_axis(np.array(ends, dtype=np.float64), most=6)
    return Axis(ends[0] - half, ends[1] + half, False, fitted.ticks, fitted.labels)


def _places(ends: tuple[float, float], count: int) -> list[str]:
    step = (ends[1] - ends[0]) / (count - 1)
    return [
        write_tick(ends[0] + index * step, 10.0 ** math.floor(round(math.log10(step), 6))) for index in range(count)
    ]


def _contours(values: NDArray, axis: Axis) -> str:
    """Return one contour line per tick of the colour bar, light on dark colours and dark on light ones."""
    paths = []
    grid = np.log10(np.where(np.isfinite(values), values, 1.0)) if axis.log else values
    grid = np.where(np.isfinite(values), grid, np.nan)
    scale = 1000 / np.array(values.shape)
    for tick in axis.ticks:
        lines = (contour(grid, math.log10(tick) if axis.log else tick) + 0.5) * scale
        drawn = "".join(f"M{b:.0f} {a:.0f}L{d:.0f} {c:.0f}" for (a, b), (c, d) in lines.tolist())
        if drawn:
            paths.append(f"<path class='contour{' dark' if axis.place(tick) > MIDDLE else ''}' d='{drawn}'/>")
    inner = "".join(paths)
    return f"<svg viewBox='0 0 1000 1000' preserveAspectRatio='none' aria-hidden='true'>{inner}</svg>"


def _marks(section: Landscape, x: Axis, y: Axis) -> str:
    """Return points with their names, aligned such that the names stay inside the picture."""
    spans = []
    for name, (a, b) in section.marks.items():
        across, up = x.place(float(a)), y.place(float(b))
        if 0 <= across <= 1 and 0 <= up <= 1:
            side = " right" if across < 0.35 else " left" if across > 0.65 else ""
            spans.append(
                f"<span class='point{side}{' above' if up < 0.2 else ''}' aria-hidden='true' "
                f"style='left:{100 * across:.2f}%;top:{100 * (1 - up):.2f}%'><b>{escape(shortened(name))}</b></span>"
            )
    return "".join(spans)


def _notes(section: Landscape, values: NDArray, blocks: tuple[int, int]) -> list[str]:
    notes = ["Contour lines at the ticks of the colour bar."]
    if blocks != (1, 1):
        notes.append(f"Each cell is the mean of up to {blocks[0]} × {blocks[1]} values.")
    gaps = int((~np.isfinite(values)).sum())
    if gaps:
        notes.append(f"{counted(gaps, 'cell')} without a {'positive ' if section.log else ''}finite value, left blank.")
    return notes


def _alt(section: Landscape, values: NDArray) -> str:
    what = f"Landscape of {section.value_name} over {section.x_name} and {section.y_name}"
    if not np.isfinite(values).any():
        return f"{what}; no value is finite."
    row, column = divmod(int(np.nanargmin(values)), values.shape[1])
    across, up = (
        _places(ends, count)[at]
        for ends, count, at in ((section.x, values.shape[1], column), (section.y, values.shape[0], row))
    )
    show = section.column.show
    marks = [f" Marked: {name}." for name in section.marks]
    return (
        f"{what}: from {show(float(np.nanmin(values)))} at ({across}, {up}) to {show(float(np.nanmax(values)))}."
        + "".join(marks)
    )
