"""Heat maps, for example of angles between class vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report.arrays import Array, as_numbers
from hypersphere.report.axis import Axis, fit_axis
from hypersphere.report.field import Label, bar_html, limited_shape, map_html, picture_uri, shrunk
from hypersphere.report.frame import LETTER, NARROW, chart_html, counted
from hypersphere.report.names import short_names
from hypersphere.report.table import Column, Table

WIDE = 470  # smallest width of a large picture on a screen, in pixels
CELL = 64  # largest size of a cell in pixels, unless its label needs more
TALLEST = 640  # largest height in pixels
UPRIGHT = 16  # pixels between two rotated labels or two lines of text
MOST_RULED = 40  # cells per side up to which thin lines separate them
MOST_WRITTEN = 15  # cells per side up to which numbers are shown
LONGEST = 14  # longest label, in letters


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A matrix as colours, dark for low and light for high values; the first row is at the top.

    Args:
        title: heading.
        values: matrix (R, C); None and non-finite values are left blank.
        rows, columns: names of rows and columns; indices if empty. A square matrix with only `rows` uses them for both.
        row_name, column_name: names of the axes.
        value_name: name of the values, shown above the colour bar.
        format: format of the values, as in a `Column`.
        limits: ends of the colour scale, by default the extremes; values beyond them get the colour of the end.
        caption: text below the chart.

    Example:
        >>> HeatMap("Angles", [[0, 81.2], [81.2, 0]], rows=["cat", "dog"]).names
        (('cat', 'dog'), ('cat', 'dog'))
    """

    title: str
    values: Array
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    row_name: str = ""
    column_name: str = ""
    value_name: str = ""
    format: str = ".3g"
    limits: tuple[float, float] | None = None
    caption: str = ""

    def __post_init__(self) -> None:
        values = self.numbers
        require(min(values.shape) > 0, "values", "a matrix with at least one row and one column", values.shape)
        for name, given, count in zip(("rows", "columns"), (self.rows, self.columns), values.shape, strict=True):
            require(len(given) in (0, count), name, f"empty, or {count} names", len(given))
        if self.limits is not None:
            low, high = as_numbers("limits", self.limits, 1).tolist() if len(self.limits) == 2 else (1.0, 0.0)
            require(low < high, "limits", "two finite numbers, low and high", self.limits)
        _ = self.column

    @property
    def numbers(self) -> NDArray:
        """The matrix, NaN where it is left blank."""
        return as_numbers("values", self.values, 2)

    @property
    def column(self) -> Column:
        """The format of the values."""
        return Column(self.value_name or "value", None, self.format)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of rows and columns."""
        height, width = self.numbers.shape
        rows = tuple(map(str, self.rows or range(height)))
        columns = self.columns or (rows if height == width else range(width))
        return rows, tuple(map(str, columns))


def heatmap_html(section: HeatMap) -> str:
    """Return the chart as HTML."""
    values, blocks = shrunk(section.numbers)
    axis = _axis(section, values)
    rows, columns = (joined_names(names, size) for names, size in zip(section.names, blocks, strict=True))
    shape = limited_shape(*values.shape)
    short_rows, short = (short_names(names, LONGEST)[::size] for names, size in zip(section.names, blocks, strict=True))
    label = max(map(len, short)) * LETTER + 10
    most = min(max(CELL, label) * len(short), TALLEST * shape)
    wide, narrow = min(WIDE, most), min(NARROW, most)
    upright = label > wide / len(short)
    picture = map_html(
        picture_uri(values, axis),
        _alt(section),
        shape=shape,
        most=min(most, 560),
        rows=spaced(short_rows, wide / shape, narrow / shape, UPRIGHT),
        columns=spaced(short, wide, narrow, UPRIGHT if upright else label),
        names=(section.column_name, section.row_name),
        upright=upright,
        over=_rules(values) + _written(section, values, axis, wide, narrow),
    )
    text = [section.column.show(value) for value in values.ravel().tolist()]
    return chart_html(
        bar_html(axis, section.value_name) + picture,
        notes=_notes(section, values, blocks, axis),
        caption=section.caption,
        numbers=_numbers(section),
        data={"kind": "cells", "name": section.value_name, "rows": rows, "columns": columns, "text": text},
    )


def joined_names(names: Sequence[str], size: int) -> list[str]:
    """Return one name per group of `size` names.

    >>> joined_names(["a", "b", "c"], 2)
    ['a – b', 'c']
    """
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    return [group[0] if len(group) == 1 else f"{group[0]} – {group[-1]}" for group in groups]


def spaced(names: Sequence[str], wide: float, narrow: float, need: float) -> list[Label]:
    """Return as many labels as fit; those that also fit on a narrow screen are marked."""
    every = max(1, math.ceil(need * len(names) / wide))
    sparse = every * max(1, math.ceil(need * len(names) / narrow / every))
    return [
        Label((index + 0.5) / len(names), names[index], index % sparse == 0) for index in range(0, len(names), every)
    ]


def _axis(section: HeatMap, values: NDArray) -> Axis:
    shown = values if section.limits is None else np.array(section.limits, dtype=np.float64)
    return fit_axis(shown.ravel(), percent=section.format.endswith("%"), most=6)


def _rules(values: NDArray) -> str:
    """Return thin lines between cells, if there are few."""
    rows, columns = values.shape
    if max(rows, columns) > MOST_RULED:
        return ""
    lines = "".join(f"M0 {100 * row / rows:.2f}H100" for row in range(1, rows))
    lines += "".join(f"M{100 * column / columns:.2f} 0V100" for column in range(1, columns))
    inner = f"<path class='gap' d='{lines}'/>"
    return f"<svg viewBox='0 0 100 100' preserveAspectRatio='none' aria-hidden='true'>{inner}</svg>"


def _written(section: HeatMap, values: NDArray, axis: Axis, wide: float, narrow: float) -> str:
    """Return the numbers in the cells, if they fit."""
    rows, columns = values.shape
    words = [[section.column.show(value) if math.isfinite(value) else "" for value in row] for row in values.tolist()]
    longest = max(len(word) for row in words for word in row) * (LETTER - 0.6) + 4
    if max(rows, columns) > MOST_WRITTEN or longest > wide / columns:
        return ""
    kind = "" if longest <= narrow / columns else " wide"
    spans = "".join(
        f"<span style='left:{100 * (column + 0.5) / columns:.2f}%;top:{100 * (row + 0.5) / rows:.2f}%'"
        f"{' class=on-light' if axis.place(values[row, column]) > 0.55 else ''}>{escape(words[row][column])}</span>"
        for row in range(rows)
        for column in range(columns)
        if words[row][column]
    )
    return f"<div class='written{kind}' aria-hidden='true'>{spans}</div>"


def _notes(section: HeatMap, values: NDArray, blocks: tuple[int, int], axis: Axis) -> list[str]:
    notes = []
    if blocks != (1, 1):
        notes.append(
            f"Each cell is the mean of up to {blocks[0]} × {blocks[1]} of the {counted(section.numbers.size, 'value')}."
        )
    blank = ~np.isfinite(section.numbers)
    gaps = int(blank.sum())
    if gaps and not np.array_equal(blank, np.eye(*blank.shape)):  # an empty diagonal needs no note
        notes.append(f"{counted(gaps, 'cell')} without a finite value, left blank.")
    beyond = int(((values < axis.low) | (values > axis.high)).sum())
    if beyond:
        notes.append(f"{counted(beyond, 'cell')} beyond the ends of the colour bar.")
    return notes


def _alt(section: HeatMap) -> str:
    values, (rows, columns) = section.numbers, section.names
    what = f"Heat map of {section.value_name or 'values'}, {values.shape[0]} rows by {values.shape[1]} columns"
    if not np.isfinite(values).any():
        return f"{what}; no value is finite."
    extremes = []
    for word, find in (("lowest", np.nanargmin), ("highest", np.nanargmax)):
        row, column = divmod(int(find(values)), values.shape[1])
        extremes.append(f"{word} {section.column.show(float(values[row, column]))} at {rows[row]}, {columns[column]}")
    return f"{what}: {'; '.join(extremes)}; mean {section.column.show(float(np.nanmean(values)))}."


def _numbers(section: HeatMap) -> Table | None:
    values, (rows, columns) = section.numbers, section.names
    if max(values.shape) > MOST_WRITTEN:
        return None
    heads = [Column(section.row_name), *(Column(name, format=section.format) for name in columns)]
    return Table("", heads, [[name, *row] for name, row in zip(rows, values.tolist(), strict=True)])
