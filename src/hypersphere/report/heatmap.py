"""Heat maps: the angles between class vectors, confusions."""

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

WIDE = 470  # pixels that a large picture has on a screen, at least
CELL = 64  # pixels that a cell may have, or as many as its label needs
TALLEST = 640  # pixels
UPRIGHT = 16  # pixels from one label on end, or one line, to the next
MOST_RULED = 40  # cells a side that are parted by thin lines
MOST_WRITTEN = 15  # cells a side that show their numbers
LONGEST = 14  # letters of a label


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A matrix in colours, dark for low and light for high; the first row is on top.

    Args:
        title: the heading.
        values: (R, C); None and what is not finite stays blank.
        rows, columns: their names; numbers from 0 if empty. A square matrix with only `rows` has them on both sides.
        row_name, column_name: what rows and columns are.
        value_name: what the colours are, over their bar.
        format: of the values, as that of a `Column`.
        limits: the ends of the colours; beyond, values have those of the ends. The extremes if None.
        caption: a sentence under the chart.

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
        require(min(values.shape) > 0, "values", "of at least one row and column", values.shape)
        for name, given, count in zip(("rows", "columns"), (self.rows, self.columns), values.shape, strict=True):
            require(len(given) in (0, count), name, f"{count} names, or none", len(given))
        if self.limits is not None:
            low, high = as_numbers("limits", self.limits, 1).tolist() if len(self.limits) == 2 else (1.0, 0.0)
            require(low < high, "limits", "two finite numbers, low and high", self.limits)
        _ = self.column

    @property
    def numbers(self) -> NDArray:
        """The matrix, NaN where it is blank."""
        return as_numbers("values", self.values, 2)

    @property
    def column(self) -> Column:
        """How values are written."""
        return Column(self.value_name or "value", None, self.format)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of rows and columns."""
        height, width = self.numbers.shape
        rows = tuple(map(str, self.rows or range(height)))
        columns = self.columns or (rows if height == width else range(width))
        return rows, tuple(map(str, columns))


def heatmap_html(section: HeatMap) -> str:
    """Return the chart."""
    whole = section.numbers
    values, blocks = shrunk(whole)
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
    """Return one name for every `size`.

    >>> joined_names(["a", "b", "c"], 2)
    ['a – b', 'c']
    """
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    return [group[0] if len(group) == 1 else f"{group[0]} – {group[-1]}" for group in groups]


def spaced(names: Sequence[str], wide: float, narrow: float, need: float) -> list[Label]:
    """Return as many labels as have room: those of a narrow picture, and more of a wide one."""
    every = max(1, math.ceil(need * len(names) / wide))
    sparse = every * max(1, math.ceil(need * len(names) / narrow / every))
    return [
        Label((index + 0.5) / len(names), names[index], index % sparse == 0) for index in range(0, len(names), every)
    ]


def _axis(section: HeatMap, values: NDArray) -> Axis:
    known = values if section.limits is None else np.array(section.limits, dtype=np.float64)
    return fit_axis(known.ravel(), percent=section.format.endswith("%"), most=6)


def _rules(values: NDArray) -> str:
    """Thin lines of paper between few cells."""
    rows, columns = values.shape
    if max(rows, columns) > MOST_RULED:
        return ""
    lines = "".join(f"M0 {100 * row / rows:.2f}H100" for row in range(1, rows))
    lines += "".join(f"M{100 * column / columns:.2f} 0V100" for column in range(1, columns))
    inner = f"<path class='gap' d='{lines}'/>"
    return f"<svg viewBox='0 0 100 100' preserveAspectRatio='none' aria-hidden='true'>{inner}</svg>"


def _written(section: HeatMap, values: NDArray, axis: Axis, wide: float, narrow: float) -> str:
    """The numbers in the cells, where they have room."""
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
    if gaps and not np.array_equal(blank, np.eye(*blank.shape)):  # of a thing with itself there may be nothing to say
        notes.append(f"{counted(gaps, 'cell')} without a finite value left blank.")
    beyond = int(((values < axis.low) | (values > axis.high)).sum())
    if beyond:
        notes.append(f"{counted(beyond, 'cell')} beyond the ends of the colour bar.")
    return notes


def _alt(section: HeatMap) -> str:
    values, (rows, columns) = section.numbers, section.names
    what = f"Heat map of {section.value_name or 'values'}, {values.shape[0]} rows by {values.shape[1]} columns"
    if not np.isfinite(values).any():
        return f"{what}; no value is finite."
    told = []
    for word, find in (("lowest", np.nanargmin), ("highest", np.nanargmax)):
        row, column = divmod(int(find(values)), values.shape[1])
        told.append(f"{word} {section.column.show(float(values[row, column]))} at {rows[row]}, {columns[column]}")
    return f"{what}: {'; '.join(told)}; mean {section.column.show(float(np.nanmean(values)))}."


def _numbers(section: HeatMap) -> Table | None:
    values, (rows, columns) = section.numbers, section.names
    if max(values.shape) > MOST_WRITTEN:
        return None
    heads = [Column(section.row_name), *(Column(name, format=section.format) for name in columns)]
    return Table("", heads, [[name, *row] for name, row in zip(rows, values.tolist(), strict=True)])
