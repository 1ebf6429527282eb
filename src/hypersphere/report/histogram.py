"""Histograms of one or several distributions with shared bins: angles of pairs, learned k and ρ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report.arrays import Array, as_numbers
from hypersphere.report.axis import Axis, fit_axis, round_step
from hypersphere.report.frame import HEIGHT, WIDTH, Entry, chart_html, counted, path, plot_html, shortened
from hypersphere.report.palette import class_colors
from hypersphere.report.table import Column, Table

MOST_BINS = 200  # more bins are merged
FEWEST_BINS, MOST_CHOSEN = 8, 100  # limits of the automatic number of bins


@dataclass(frozen=True, eq=False)
class Distribution:
    """One distribution, given by its values or by its counts in the bins of the histogram."""

    name: str
    values: Array | None = None
    counts: Array | None = None

    def __post_init__(self) -> None:
        given = [key for key in ("values", "counts") if getattr(self, key) is not None]
        require(len(given) == 1, f"values of {self.name!r}", "given either as values or as counts", given or None)
        if self.counts is not None:
            counts = as_numbers(f"counts of {self.name!r}", self.counts, 1)
            is_valid = bool((counts >= 0).all())
            require(is_valid, f"counts of {self.name!r}", "finite numbers >= 0", counts[~(counts >= 0)][:1].tolist())

    @property
    def numbers(self) -> NDArray:
        """The finite values, flattened; empty if counts are given."""
        if self.values is None:
            return np.zeros(0)
        numbers = as_numbers(f"values of {self.name!r}", self.values, *range(5)).ravel()
        return numbers[np.isfinite(numbers)]


@dataclass(frozen=True, eq=False)
class Histogram:
    """Overlaid distributions with shared bins.

    Args:
        title: heading.
        distributions: the distributions, in the order of the legend.
        x_name: name of the axis of values.
        edges: ascending edges (bins + 1,); by default round numbers chosen from the values.
        format: format of the values, as in a `Column`.
        shares: show fractions of each distribution, so that small ones are visible next to large ones; else counts.
        marks: names and positions of dashed lines, for example a threshold or an initial value.
        caption: text below the chart.

    Example:
        >>> Histogram("Angles", [Distribution("positive", [0.2, 0.3]), Distribution("negative", [1.4])]).bins[:2]
        array([0.2, 0.3])
    """

    title: str
    distributions: Sequence[Distribution]
    x_name: str = ""
    edges: Array | None = None
    format: str = ".3g"
    shares: bool = True
    marks: Mapping[str, float] = field(default_factory=dict)
    caption: str = ""

    def __post_init__(self) -> None:
        for index, one in enumerate(self.distributions):
            require(isinstance(one, Distribution), f"distributions[{index}]", "a Distribution", type(one).__name__)
            _ = one.numbers
        require(len(self.distributions) > 0, "distributions", "at least one Distribution", 0)
        if self.edges is not None:
            edges = as_numbers("edges", self.edges, 1)
            is_valid = len(edges) > 1 and bool((np.diff(edges) > 0).all())
            require(is_valid, "edges", "at least two ascending numbers", self.edges)
        for one in self.distributions:
            if one.counts is not None:
                require(self.edges is not None, "edges", f"given with the counts of {one.name!r}", None)
                accepted = f"one count for each of the {len(self.bins) - 1} bins"
                require(len(one.counts) == len(self.bins) - 1, f"counts of {one.name!r}", accepted, len(one.counts))
        for name, place in self.marks.items():
            require(math.isfinite(place), f"marks[{name!r}]", "a finite number", place)
        _ = self.column

    @property
    def column(self) -> Column:
        """The format of the values."""
        return Column(self.x_name or "value", None, self.format)

    @property
    def bins(self) -> NDArray:
        """The edges of the bins."""
        if self.edges is not None:
            return as_numbers("edges", self.edges, 1)
        return round_bins(*(one.numbers for one in self.distributions))


@dataclass(frozen=True, eq=False)
class Counted:
    """Binned counts of a distribution, with its moments and extremes."""

    name: str
    color: str
    counts: NDArray
    total: float
    mean: float
    deviation: float
    least: float
    greatest: float
    outside: int


def round_bins(*samples: NDArray) -> NDArray:
    """Return edges at round numbers that include all values, as fine as the narrowest sample needs.

    >>> round_bins(np.array([0.0, 10.0]))
    array([ 0.,  2.,  4.,  6.,  8., 10.])
    """
    values = np.concatenate(samples)
    if not len(values):
        return np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    if high - low <= 100 * math.ulp(max(abs(low), abs(high))):
        half = abs(low) / 20 or 0.5
        return np.array([low - half, low + half])
    width = min(filter(None, map(_advised_width, samples)), default=(high - low) / FEWEST_BINS)
    count = (high - low) / width
    step = round_step(high - low, round(min(max(count, FEWEST_BINS), MOST_CHOSEN)))
    first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
    return np.arange(first, last + 1) * step


def _advised_width(values: NDArray) -> float:
    """Return the bin width of the Freedman–Diaconis rule; 0 if half of the values are equal."""
    if not len(values):
        return 0.0
    low, high = np.quantile(values, [0.25, 0.75]).tolist()
    return 2 * (high - low) / len(values) ** (1 / 3)


def histogram_html(section: Histogram) -> str:
    """Return the chart as HTML."""
    edges, drawn = _counted(section)
    heights = [one.counts / (one.total or 1) if section.shares else one.counts for one in drawn]
    shown = np.concatenate([[edges[0], edges[-1]], [float(place) for place in section.marks.values()]])
    x = fit_axis(shown, percent=section.format.endswith("%"), most=9)
    y = fit_axis(np.concatenate([[0.0], *heights]), percent=section.shares, rounded=True)
    marks = "".join(
        _marks(index, one, height, x.place(edges), y)
        for index, (one, height) in enumerate(zip(drawn, heights, strict=True))
    )
    legend = [Entry(one.name, one.color, _moments(section, one), "box") for one in drawn]
    names = (section.x_name, "share" if section.shares else "count")
    return chart_html(
        plot_html(marks, _alt(section, drawn), x, y, names=names, over=_lines_html(section, x)),
        legend=legend,
        notes=_notes(section, drawn),
        caption=section.caption,
        numbers=_numbers(section, drawn),
        data=_data(section, edges, drawn, heights, x, y),
    )


def _counted(section: Histogram) -> tuple[NDArray, list[Counted]]:
    edges = section.bins
    joined = math.ceil((len(edges) - 1) / MOST_BINS)
    cuts = np.arange(0, len(edges) - 1, joined)
    middles = (edges[:-1] + edges[1:]) / 2
    colors = class_colors(len(section.distributions))
    drawn = []
    for one, color in zip(section.distributions, colors, strict=True):
        if one.counts is not None:
            counts, numbers = as_numbers("counts", one.counts, 1), middles
            weights, outside = counts, 0
        else:
            numbers = one.numbers
            counts = np.histogram(numbers, edges)[0].astype(np.float64)
            weights, outside = np.ones(len(numbers)), len(numbers) - int(counts.sum())
        total = float(weights.sum())
        mean = float((numbers * weights).sum() / total) if total else math.nan
        deviation = math.sqrt(float((weights * (numbers - mean) ** 2).sum() / total)) if total else math.nan
        there = numbers[weights > 0]
        ends = (float(there.min()), float(there.max())) if len(there) else (math.nan, math.nan)
        drawn.append(Counted(one.name, color, np.add.reduceat(counts, cuts), total, mean, deviation, *ends, outside))
    return edges[[*cuts, len(edges) - 1]], drawn


def _marks(index: int, one: Counted, heights: NDArray, across: NDArray, y: Axis) -> str:
    top = np.r_[0.0, y.place(heights), 0.0]
    # The outline goes up and down at each edge between two bins, and along the top of the non-empty ones.
    x = np.stack([across, across, (across + np.r_[across[1:], 1.0]) / 2], axis=1).ravel()
    before, after = top[:-1], top[1:]
    empty = (before == 0) & (after == 0)
    rise = np.stack(
        [np.where(empty, np.nan, before), np.where(empty, np.nan, after), np.where(after > 0, after, np.nan)], 1
    )
    outline = path(x, rise.ravel())
    closed = path(np.repeat(across, 2), np.stack([before, after], axis=1).ravel())
    return (
        f"<g class='hue' data-series='{index}' style='--class:{one.color}'>"
        f"<path class='band' d='{closed}Z'/><path class='line thin' d='{outline}'/></g>"
    )


def _lines_html(section: Histogram, x: Axis) -> str:
    """Return dashed lines with their names at different heights, so that close names do not overlap."""
    return "".join(
        f"<div class='mark{' left' if at > 0.6 else ''}' style='left:{100 * at:.2f}%' aria-hidden='true'>"
        f"<span style='top:{18 * index}px'>{escape(shortened(name))} <b>{escape(section.column.show(place))}</b></span>"
        "</div>"
        for index, (name, place) in enumerate(section.marks.items())
        for at in [x.place(float(place))]
    )


def _moments(section: Histogram, one: Counted) -> str:
    return section.column.show((one.mean, one.deviation)) if one.total else "no values"


def _notes(section: Histogram, drawn: Sequence[Counted]) -> list[str]:
    notes = []
    gaps = 0
    for one in section.distributions:
        if one.values is not None:
            gaps += int((~np.isfinite(as_numbers("values", one.values, *range(5)))).sum())
    if gaps:
        notes.append(f"{counted(gaps, 'value')} not finite, omitted.")
    outside = sum(one.outside for one in drawn)
    if outside:
        notes.append(f"{counted(outside, 'value')} outside the bins, not drawn.")
    return notes


def _alt(section: Histogram, drawn: Sequence[Counted]) -> str:
    show = section.column.show
    descriptions = [
        f"{one.name}: {counted(round(one.total), 'value')}, mean {show(one.mean)}, standard deviation "
        f"{show(one.deviation)}, from {show(one.least)} to {show(one.greatest)}."
        if one.total
        else f"{one.name}: no values."
        for one in drawn
    ]
    marks = [f"A line at {show(place)}: {name}." for name, place in section.marks.items()]
    what = "Histogram" if len(drawn) == 1 else f"Histograms of {len(drawn)} distributions"
    return " ".join([f"{what} of {section.x_name or 'values'}.", *descriptions, *marks])


def _numbers(section: Histogram, drawn: Sequence[Counted]) -> Table:
    form = section.format
    columns = [
        Column("distribution"),
        Column("count", format=",.0f"),
        *(Column(name, format=form) for name in ("mean", "s.d.", "smallest", "largest")),
    ]
    return Table(
        "", columns, [[one.name, one.total, one.mean, one.deviation, one.least, one.greatest] for one in drawn]
    )


def _data(
    section: Histogram, edges: NDArray, drawn: Sequence[Counted], heights: Sequence[NDArray], x: Axis, y: Axis
) -> dict[str, object]:
    middles = WIDTH * x.place((edges[:-1] + edges[1:]) / 2)
    show = section.column.show
    name = f"{section.x_name} " if section.x_name else ""
    return {
        "kind": "points",
        "x": np.round(middles, 1).tolist(),
        "heads": [
            f"{name}{show(low)} to {show(high)}"
            for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ],
        "series": [
            {
                "name": one.name,
                "color": one.color,
                "at": list(range(len(middles))),
                "y": np.round(HEIGHT * (1 - y.place(height)), 1).tolist(),
                "text": [_share(count, one.total) for count in one.counts.tolist()],
            }
            for one, height in zip(drawn, heights, strict=True)
        ],
    }


def _share(count: float, total: float) -> str:
    return f"{count:,.6g} ({count / total:.1%})" if total else "0"
