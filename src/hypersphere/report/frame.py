"""The frame of all charts: axes, legend with toggles, notes and the table of numbers.

Heights are fixed in pixels and widths are fluid. The picture stretches without changing its strokes, and all text is
HTML, so that it keeps its size on a phone. assets/chart.js adds the read-out and the toggles; without it the chart is
complete but static.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from hypersphere.report.axis import Axis
from hypersphere.report.embed import json_script
from hypersphere.report.table import Table, table_html

WIDTH, HEIGHT = 1000, 280  # size in picture coordinates; the height equals that on the screen (chart.css)
NARROW = 236  # width of a picture on the narrowest phone, in pixels
LETTER = 7.2  # approximate width of a letter of an axis, in pixels
LINE = 18  # height of a label at the end of a curve, in pixels
LONGEST = 24  # longest such label, in letters


@dataclass(frozen=True)
class Entry:
    """One entry of the legend: name, colour, additional text, and style of the swatch."""

    name: str
    color: str
    detail: str = ""
    swatch: str = "line"


@dataclass(frozen=True)
class End:
    """A label to the right of a picture, at the height where a curve ends (0 at the bottom, 1 at the top)."""

    words: str
    detail: str
    color: str
    place: float
    series: int


def chart_html(
    picture: str,
    *,
    legend: Sequence[Entry] = (),
    notes: Sequence[str] = (),
    caption: str = "",
    numbers: Table | None = None,
    data: object = None,
) -> str:
    """Return a chart: legend, picture, texts, and a collapsed table of its numbers."""
    words = f"<p class='note'>{escape(' '.join(notes))}</p>" if notes else ""
    words = (f"<p class='caption'>{escape(caption)}</p>" if caption else "") + words
    table = f"<details><summary>Numbers</summary>{table_html(numbers)}</details>" if numbers else ""
    return (
        f"<div class='chart'>{legend_html(legend)}{picture}{words}{table}"
        f"{'' if data is None else json_script(data)}</div>"
    )


def legend_html(entries: Sequence[Entry]) -> str:
    """Return the legend, whose entries show and hide elements with the same `data-series`; empty for one entry."""
    if len(entries) < 2:
        return ""
    items = "".join(
        f"<li><button type='button' class='hue' style='--class:{entry.color}' data-toggle='{index}' "
        f"aria-pressed='true'><span class='swatch {entry.swatch}'></span>{escape(entry.name)}"
        f"{f'<span class=detail>{escape(entry.detail)}</span>' if entry.detail else ''}</button></li>"
        for index, entry in enumerate(entries)
    )
    return f"<ul class='toggles' aria-label='Press a name to show or hide it'>{items}</ul>"


def plot_html(
    marks: str,
    alt: str,
    x: Axis,
    y: Axis,
    *,
    names: tuple[str, str],
    ends: Sequence[End] = (),
    over: str = "",
) -> str:
    """Return the picture with its axes.

    Args:
        marks: SVG in coordinates of WIDTH by HEIGHT.
        alt: alternative text.
        x, y: the axes.
        names: names of the axes.
        ends: labels on the right, moved apart; omitted if they do not fit or all curves end at one place.
        over: HTML drawn over the picture.
    """
    lines = "".join(f"<path class='rule' d='M0 {_down(place)}H{WIDTH}'/>" for place in map(y.place, y.ticks))
    columns = "".join(
        f"<span style='left:{100 * x.place(tick):.2f}%'{'' if narrow else ' class=wide'}>{escape(label)}</span>"
        for tick, label, narrow in zip(x.ticks, x.labels, fitting(x), strict=True)
    )
    rows = "".join(
        f"<span style='top:{100 * (1 - y.place(tick)):.2f}%'>{escape(label)}</span>"
        for tick, label in zip(y.ticks, y.labels, strict=True)
    )
    gutter = max(map(len, y.labels), default=0)
    labels, room = _ends_html(ends)
    return (
        f"<div class='plot' style='--gutter:{gutter}ch;--room:{room}ch'>"
        f"<p class='axis-name y' aria-hidden='true'>{escape(names[1])}</p><div class='area'>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio='none' role='img' aria-label='{escape(alt)}'>"
        f"{lines}{marks}</svg><div class='ticks y' aria-hidden='true'>{rows}</div>"
        f"<div class='ticks x' aria-hidden='true'>{columns}</div>"
        f"<p class='axis-name x' aria-hidden='true'>{escape(names[0])}</p>{labels}{over}</div></div>"
    )


def fitting(x: Axis) -> list[bool]:
    """Return which ticks keep their labels on the narrowest phone without overlaps."""
    places = [x.place(tick) * NARROW for tick in x.ticks]
    widths = [len(label) * LETTER + 10 for label in x.labels]
    shown, free = [], -math.inf
    for place, width in zip(places, widths, strict=True):
        shown.append(place - width / 2 >= free)
        free = place + width / 2 if shown[-1] else free
    return shown


def path(x: NDArray, y: NDArray, size: tuple[float, float] = (WIDTH, HEIGHT)) -> str:
    """Return a polyline through points in [0, 1]², broken at NaN, in a picture of this width and height.

    >>> path(np.array([0, 0.5, 1]), np.array([0, 1, np.nan]))
    'M0 280L500 0'
    """
    return "".join("M" + "L".join(_points(x[run], y[run], size)) for run in runs(y) if len(run) > 1)


def dots(x: NDArray, y: NDArray, size: tuple[float, float] = (WIDTH, HEIGHT)) -> str:
    """Return a path that draws every point as a dot (a line of length 0 with round ends)."""
    there = np.isfinite(y)
    return "".join(f"M{point}h0" for point in _points(x[there], y[there], size))


def ribbon(x: NDArray, low: NDArray, high: NDArray, size: tuple[float, float] = (WIDTH, HEIGHT)) -> str:
    """Return the outline of the area between two lines, broken at NaN."""
    pieces = [(_points(x[run], high[run], size), _points(x[run], low[run], size)) for run in runs(low + high)]
    return "".join("M" + "L".join([*upper, *reversed(lower)]) + "Z" for upper, lower in pieces if len(upper) > 1)


def runs(values: NDArray) -> list[NDArray]:
    """Return the indices of each run without NaN."""
    there = np.flatnonzero(np.isfinite(values))
    return [run for run in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1) if len(run)]


def shortened(words: str, most: int = LONGEST) -> str:
    """Return the text, truncated with an ellipsis if it is long.

    >>> shortened("convolution", 7)
    'convol…'
    """
    return words if len(words) <= most else words[: most - 1] + "…"


def counted(count: int, what: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "value"), counted(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _points(x: NDArray, y: NDArray, size: tuple[float, float]) -> list[str]:
    return [f"{_short(size[0] * a)} {_short(size[1] * (1 - b))}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def _down(place: float) -> str:
    return _short(HEIGHT * (1 - place))


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _ends_html(ends: Sequence[End]) -> tuple[str, int]:
    """Return the labels and the width they need, in letters."""
    ordered = sorted(ends, key=lambda end: -end.place)
    heights = [HEIGHT * (1 - end.place) for end in ordered]
    moved = apart(heights)
    if not moved or (len(moved) > 1 and heights[-1] - heights[0] < LINE / 2):
        return "", 0
    leaders = "".join(
        f"<path data-series='{end.series}' d='M0 {_short(a)}L1 {_short(b)}'/>"
        for end, a, b in zip(ordered, heights, moved, strict=True)
    )
    words = [shortened(end.words) for end in ordered]
    labels = "".join(
        f"<span class='hue' data-series='{end.series}' style='--class:{end.color};top:{100 * at / HEIGHT:.2f}%'>"
        f"{escape(word)} <b>{escape(end.detail)}</b></span>"
        for end, word, at in zip(ordered, words, moved, strict=True)
    )
    room = max(len(word) + len(end.detail) for end, word in zip(ordered, words, strict=True)) + 3
    picture = f"<svg viewBox='0 0 1 {HEIGHT}' preserveAspectRatio='none'>{leaders}</svg>"
    return f"<div class='ends' aria-hidden='true'>{picture}{labels}</div>", room


def apart(heights: Sequence[float]) -> list[float]:
    """Move ascending heights apart so that lines of text do not overlap; return an empty list if they do not fit.

    >>> apart([100.0, 101.0, 200.0])
    [91.5, 109.5, 200.0]
    """
    if len(heights) * LINE > HEIGHT:
        return []
    groups: list[list[float]] = []  # groups of touching lines: their number, and the mean of their original heights
    for height in heights:
        groups.append([1, height])
        while len(groups) > 1 and _top(groups[-1]) < _top(groups[-2]) + groups[-2][0] * LINE:
            count, middle = groups.pop()
            total = groups[-1][0] + count
            groups[-1] = [total, (groups[-1][0] * groups[-1][1] + count * middle) / total]
    return [_top(group) + LINE * (index + 0.5) for group in groups for index in range(int(group[0]))]


def _top(group: Sequence[float]) -> float:
    count, middle = group
    return min(max(middle - count * LINE / 2, 0), HEIGHT - count * LINE)
