"""Bar charts, for example the energy of each layer compared with random neurons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from hypersphere._validation import require
from hypersphere.report.axis import Axis, fit_axis
from hypersphere.report.frame import LONGEST, Entry, chart_html, counted
from hypersphere.report.palette import class_colors
from hypersphere.report.series import Series
from hypersphere.report.table import Cell, Column, Table

MOST_BARS = 200  # summed over series
MOST_DESCRIBED = 12


@dataclass(frozen=True, eq=False)
class Bars:
    """Horizontal bars that begin at `start`, one group per label; whiskers show one standard deviation.

    Args:
        title: heading.
        labels: names of the groups.
        series: series with one value per label; their `x` is not used.
        value_name: name of the values.
        format: format of the values, as in a `Column`.
        start: value at which bars begin: 0, or 1 for a factor.
        caption: text below the chart.

    Example:
        >>> Bars("Energy", ["conv1", "conv2"], [Series("trained", [0.9, 0.7]), Series("random", [1.0, 1.0])]).labels
        ['conv1', 'conv2']
    """

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    value_name: str = ""
    format: str = ".3g"
    start: float = 0.0
    caption: str = ""

    def __post_init__(self) -> None:
        require(len(self.labels) > 0, "labels", "at least one name", list(self.labels))
        require(len(self.series) > 0, "series", "at least one Series", 0)
        for index, series in enumerate(self.series):
            require(isinstance(series, Series), f"series[{index}]", "a Series", type(series).__name__)
            count, accepted = series.rows.shape[1], f"one value for each of the {len(self.labels)} labels"
            require(count == len(self.labels), f"values of {series.name!r}", accepted, count)
        bars = len(self.labels) * len(self.series)
        require(bars <= MOST_BARS, "labels", f"labels for at most {MOST_BARS} bars in total", bars)
        _ = self.column

    @property
    def column(self) -> Column:
        """The format of the values."""
        return Column(self.value_name or "value", None, self.format)

    def cell(self, series: int, label: int) -> Cell:
        """Return a value, with its spread if there is one; None if it is not finite."""
        value, spread = (float(part[label]) for part in (self.series[series].mean, self.series[series].deviation))
        if np.isnan(value):
            return None
        return value if np.isnan(spread) else (value, spread)


def bars_html(section: Bars) -> str:
    """Return the chart as HTML."""
    colors = class_colors(len(section.series))
    spread = [np.nan_to_num(series.deviation) for series in section.series]
    reach = [series.mean + sign * s for series, s in zip(section.series, spread, strict=True) for sign in (-1, 1)]
    axis = fit_axis(np.concatenate([[section.start], *reach]))
    groups = "".join(
        f"<div class='group'><span class='group-name'>{escape(name)}</span><div class='tracks'>"
        + "".join(_bar_html(section, axis, at, label, color) for at, color in enumerate(colors))
        + "</div></div>"
        for label, name in enumerate(section.labels)
    )
    rows: list[list[Cell]] = [
        [name, *(section.cell(at, label) for at in range(len(section.series)))]
        for label, name in enumerate(section.labels)
    ]
    columns = [Column(""), *(Column(series.name, None, section.format) for series in section.series)]
    notes = []
    if any(isinstance(cell, tuple) for row in rows for cell in row):
        notes.append("Whiskers: ± one standard deviation.")
    gaps = sum(series.gaps for series in section.series)
    if gaps:
        notes.append(f"{counted(gaps, 'value')} not finite, omitted.")
    name = f"<p class='axis-name'>{escape(section.value_name)}</p>" if section.value_name else ""
    value = max(len(section.column.show(cell)) for row in rows for cell in row[1:])
    label = min(max(map(len, section.labels)), LONGEST)
    sizes = f"--value:{value}ch;--label:{label}ch"
    return chart_html(
        f"{name}<div class='bars' role='img' style='{sizes}' aria-label='{escape(_alt(section))}'>{groups}</div>",
        legend=[Entry(series.name, color, swatch="box") for series, color in zip(section.series, colors, strict=True)],
        notes=notes,
        caption=section.caption,
        numbers=Table("", columns, rows),
    )


def _bar_html(section: Bars, axis: Axis, series: int, label: int, color: str) -> str:
    cell = section.cell(series, label)
    value, spread = cell if isinstance(cell, tuple) else (cell, 0.0)
    drawn = ""
    if isinstance(value, float):
        drawn = f"<span class='fill' style='{_from_to(axis, section.start, value)}'></span>"
        if spread:
            drawn += f"<span class='whisker' style='{_from_to(axis, value - spread, value + spread)}'></span>"
    return (
        f"<div class='track hue' data-series='{series}' style='--class:{color}'><div class='lane'>"
        f"<span class='zero' style='left:{100 * axis.place(section.start):.2f}%'></span>{drawn}</div>"
        f"<span class='value'>{escape(section.column.show(cell))}</span></div>"
    )


def _from_to(axis: Axis, start: float, stop: float) -> str:
    low, high = sorted((axis.place(start), axis.place(stop)))
    return f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"


def _alt(section: Bars) -> str:
    groups = [
        f"{name}: "
        + ", ".join(
            f"{series.name} {section.column.show(section.cell(at, label))}" for at, series in enumerate(section.series)
        )
        + "."
        for label, name in enumerate(section.labels[:MOST_DESCRIBED])
    ]
    more = f" And {len(section.labels) - MOST_DESCRIBED} more." if len(section.labels) > MOST_DESCRIBED else ""
    return f"Bars of {section.value_name or 'values'}. {' '.join(groups)}{more}"
