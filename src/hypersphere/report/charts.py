"""Charts: functions that take plain data and return an Altair chart.

Each chart carries its alternative text as `description`. Its `usermeta` holds what a page shows around the picture: the
legend, the table of numbers, notes, and how values are read with the pointer or the keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report._arrays import Array, as_array, as_numbers, mean_and_spread
from hypersphere.report._vega import (
    category,
    counted,
    decades,
    figure_svg,
    layer,
    make_chart,
    named_colors,
    quantity,
    round_step,
)
from hypersphere.report.maps import heat_map, landscape
from hypersphere.report.palette import class_colors, ordered_colors
from hypersphere.report.tables import ARROWS, Cell, Column, Table

__all__ = ["Series", "bars", "figure_svg", "heat_map", "histogram", "landscape", "lines", "scatter"]

MOST_POINTS = 400  # points drawn per curve
MOST_BANDED = 6  # curves whose bands can be distinguished
MOST_DOTTED = 16  # curves with at most this number of points show each point as a dot
MOST_LISTED = 240  # cells in the table of numbers; larger data are summarised
MOST_SCATTERED = 1500  # points of a scatter plot


@dataclass(frozen=True, eq=False)
class Series:
    """A named series of values (T,), or (seeds, T) of which mean and standard deviation are drawn.

    Args:
        name: name in the legend.
        values: numbers; None and non-finite values are gaps.
        x: ascending positions (T,); 1, 2, … T by default.
        dashed: draw a dashed line, for references such as theory or chance level.

    Example:
        >>> Series("loss", [[3.0, 1.0], [1.0, 1.0]]).mean
        array([2., 1.])
    """

    name: str
    values: Array
    x: Array | None = None
    dashed: bool = False

    def __post_init__(self) -> None:
        count = self.rows.shape[1]
        if self.x is not None:
            x = as_numbers(f"x of {self.name!r}", self.x, 1)
            require(len(x) == count, f"x of {self.name!r}", f"one position for each of the {count} values", len(x))
            wrong = x[~np.isfinite(x) | (np.diff(x, prepend=-np.inf) < 0)]
            require(not len(wrong), f"x of {self.name!r}", "finite and ascending", wrong[:1].tolist())

    @property
    def rows(self) -> NDArray:
        """The values as (seeds, T), NaN for gaps."""
        return np.atleast_2d(as_numbers(f"values of {self.name!r}", self.values, 1, 2))

    @property
    def places(self) -> NDArray:
        """The positions of the values, (T,)."""
        return np.arange(1.0, self.rows.shape[1] + 1) if self.x is None else as_numbers("x", self.x, 1)

    @property
    def mean(self) -> NDArray:
        """The mean over seeds, (T,); NaN if no seed has a finite value."""
        return mean_and_spread(self.rows)[0]

    @property
    def deviation(self) -> NDArray:
        """The standard deviation over seeds, (T,); NaN if there are fewer than two."""
        return mean_and_spread(self.rows)[1]

    def cells(self) -> list[Cell]:
        """Return a table cell per position: the mean, with its standard deviation if there is one."""
        pairs = zip(self.mean.tolist(), self.deviation.tolist(), strict=True)
        return [mean if math.isnan(deviation) else (mean, deviation) for mean, deviation in pairs]


def lines(
    series: Sequence[Series],
    *,
    x_name: str = "epoch",
    y_name: str = "",
    format: str = ".4g",
    log_x: bool = False,
    log_y: bool = False,
    limits: tuple[float, float] | None = None,
    higher_is_better: bool | None = None,
    ordered: bool = False,
) -> Any:
    """Return curves over one axis; bands show one standard deviation over seeds if there are few curves.

    Args:
        series: the curves, in the order of the legend.
        x_name, y_name: names of the axes.
        format: format of the values, as in a `Column`; with ".1%" the axis is in per cent too.
        log_x, log_y: make the axis logarithmic; values <= 0 are omitted. Both give a DET curve of error rates.
        limits: the range of possible values, for example (0, 1) for a rate; bands end there.
        higher_is_better: adds an arrow to the name of the values.
        ordered: use a sequential colour scale, for series with an order such as the layers of a network.

    Example:
        >>> lines([Series("softmax", [2.3, 0.8]), Series("A-Softmax", [4.1, 1.9])], y_name="loss").description[:16]
        '2 curves of loss'
    """
    require(len(series) > 0, "series", "at least one Series", 0)
    require(limits is None or limits[0] < limits[1], "limits", "two numbers, low and high", limits)
    column, banded = Column(y_name or "value", higher_is_better, format), len(series) <= MOST_BANDED
    points: list[dict[str, Any]] = []
    summary: list[list[Cell]] = []
    for one in series:
        x, mean, deviation, cells = one.places, one.mean, one.deviation, one.cells()
        is_drawn = np.isfinite(mean) & ((mean > 0) | (not log_y)) & ((x > 0) | (not log_x))
        drawn = np.flatnonzero(is_drawn)
        values = mean[drawn]
        ends = (
            [cells[drawn[0]], cells[drawn[-1]], float(values.min()), float(values.max())] if len(drawn) else [None] * 4
        )
        summary.append([one.name, len(drawn), *ends])
        low, high = (np.clip(mean + sign * deviation, *(limits or (None, None))) for sign in (-1, 1))
        low = np.where((low > 0) | (not log_y), low, mean)  # a band cannot reach below the end of a log axis
        few = len(drawn) <= MOST_DOTTED and not one.dashed
        on_axis = x > 0 if log_x else np.full(len(x), True)
        for at in _thinned(np.log10(x[on_axis]) if log_x else x, np.where(is_drawn, mean, np.nan)[on_axis]):
            k = int(np.flatnonzero(on_axis)[at])
            row = {"x": float(x[k]), "series": one.name, "y": float(mean[k]) if is_drawn[k] else None}
            row |= (
                {"text": column.show(cells[k])}
                | ({"dot": True} if few else {})
                | ({"dashed": True} if one.dashed else {})
            )
            if banded and is_drawn[k] and np.isfinite(deviation[k]):
                row |= {"low": float(low[k]), "high": float(high[k])}
            points.append(row)
    colors = (ordered_colors if ordered else class_colors)(len(series))
    places = np.unique([row["x"] for row in points if row["y"] is not None])
    x_channel = quantity("x", title=x_name, axis={"grid": False, "tickCount": 8}, scale={"zero": False, "nice": False})
    if log_x and len(places):
        x_channel["axis"] |= {"values": decades(places[0], places[-1]), "format": "~g"}
        x_channel["scale"] = {"type": "log", "nice": False}
    elif (places == np.round(places)).all():  # epochs have integer ticks
        x_channel["axis"] |= {"format": "d"} | ({"values": places.tolist()} if len(places) <= MOST_DOTTED else {})
    y_axis = {"format": "~%", "tickCount": 6} if format.endswith("%") else {"tickCount": 6}
    y_channel = quantity("y", axis=y_axis, scale={"type": "log"} if log_y else {"zero": False})
    shared = {"x": x_channel, "color": named_colors([one.name for one in series], colors)}
    dash = category("dashed", legend=None, scale={"domain": [None, True], "range": [[1, 0], [6, 5]]})
    band = layer("area", {**shared, "y": {**y_channel, "field": "low"}, "y2": {"field": "high"}}, opacity=0.16)
    dots = layer("circle", {**shared, "y": y_channel}, size=34, opacity=1)
    dots["transform"] = [{"filter": "datum.dot && datum.y !== null"}]
    layers = [band] * any("low" in row for row in points)
    layers.append(layer("line", {**shared, "y": y_channel, "strokeDash": dash}, strokeWidth=2.25))
    span = f" from {places[0]:.4g} to {places[-1]:.4g}." if len(places) else ": no value is finite."
    heads = [Column(word, None, format) for word in ("first", "last", "lowest", "highest")]
    table = Table("", [Column("curve"), Column("points", None, ",.0f"), *heads], summary)
    # The last value says what training reached; a ROC or DET curve ends at the same place for all.
    last = ["" if log_x else column.show(row[3]) if row[1] else "no values" for row in summary]
    return make_chart(
        points,
        [*layers, *[dots] * any("dot" in row for row in points)],
        about=f"{counted(len(series), 'curve')} of {y_name or 'values'} over {x_name}{span}",
        summary=table,
        numbers=_all_values(series, x_name, format),
        title=y_name + ("" if higher_is_better is None else f" {ARROWS[higher_is_better]}"),
        legend=[
            (one.name, color, value, "line dashed" if one.dashed else "line")
            for one, color, value in zip(series, colors, last, strict=True)
        ],
        notes=_line_notes(series, banded, log_y),
        kind="points",
        axis=x_name,
    )


def histogram(
    samples: Mapping[str, Array],
    *,
    edges: Array | None = None,
    counts: bool = False,
    x_name: str = "",
    format: str = ".3g",
    marks: Mapping[str, float] | None = None,
) -> Any:
    """Return distributions with shared bins, each as a share of its total.

    Args:
        samples: values by name; with `counts`, numbers of values in the bins between `edges`.
        edges: ascending edges (bins + 1,); by default round numbers chosen from the values.
        counts: whether `samples` are counts.
        x_name: name of the axis of values.
        format: format of the values, as in a `Column`.
        marks: names and positions of dashed lines, for example a threshold or an initial value.

    Example:
        >>> histogram({"positive": [0.2, 0.3], "negative": [1.4]}, x_name="angle").description[:25]
        'Histograms of 2 distribut'
    """
    require(len(samples) > 0, "samples", "at least one distribution", 0)
    require(not counts or edges is not None, "edges", "given with counts", None)
    column, points, table, gaps, outside = Column(x_name or "value", None, format), list[Any](), list[list[Any]](), 0, 0
    arrays = {name: as_numbers(f"samples[{name!r}]", values, 1, 2, 3, 4).ravel() for name, values in samples.items()}
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    bins = round_bins(*finite.values()) if edges is None else as_numbers("edges", edges, 1)
    require(len(bins) > 1 and bool((np.diff(bins) > 0).all()), "edges", "at least two ascending numbers", edges)
    middles = (bins[:-1] + bins[1:]) / 2
    for name, values in finite.items():
        if counts:
            accepted = f"one count >= 0 for each of the {len(middles)} bins"
            require(len(values) == len(middles) and bool((values >= 0).all()), f"samples[{name!r}]", accepted, values)
        heights = values if counts else np.histogram(values, bins)[0].astype(np.float64)
        at, weights = (middles, values) if counts else (values, np.ones(len(values)))
        total, inside = float(weights.sum()), at[weights > 0]
        gaps += len(arrays[name]) - len(values)
        outside += 0 if counts else len(values) - int(heights.sum())
        mean = float(np.average(at, weights=weights)) if total else math.nan
        deviation = math.sqrt(float(np.average((at - mean) ** 2, weights=weights))) if total else math.nan
        table.append([name, total, mean, deviation, *((inside.min(), inside.max()) if total else (None, None))])
        for place, middle, height in zip(bins.tolist(), [*middles.tolist(), None], [*heights, 0.0], strict=True):
            share = float(height) / (total or 1.0)
            of_bin = {} if middle is None else {"at": middle, "text": f"{share:.1%}"}
            points.append({"x": place, "series": name, "y": share} | of_bin)
    colors, show = class_colors(len(samples)), column.show
    axis = {"grid": False, "tickCount": 9}
    encoding = {
        "x": quantity("x", title=x_name, axis=axis, scale={"nice": False, "zero": False}),
        "y": quantity("y", axis={"format": "~%", "tickCount": 6}, stack=None),
        "color": named_colors(list(samples), colors),
    }
    layers = [layer("area", encoding, interpolate="step-after", opacity=0.16)]
    layers.append(layer("line", encoding, interpolate="step-after", strokeWidth=1.6))
    marked = ""
    for name, place in (marks or {}).items():
        marked += f" A line at {show(place)}: {name}."
        row, at_left = [{"x": float(place), "label": f"{name} {show(place)}"}], place < (bins[0] + bins[-1]) / 2
        text = {"x": encoding["x"], "y": {"value": 0}, "text": {"field": "label", "type": "nominal"}}
        side = {"align": "left", "dx": 6} if at_left else {"align": "right", "dx": -6}
        layers.append(layer("rule", {"x": encoding["x"]}, row, strokeDash=[5, 4], stroke="#777f8c"))
        layers.append(layer("text", text, row, baseline="top", fontSize=11, fill="#59616e", **side))
    heads = [Column(word, None, format) for word in ("mean", "s.d.", "smallest", "largest")]
    what = f"Histograms of {len(samples)} distributions" if len(samples) > 1 else "Histogram"
    return make_chart(
        points,
        layers,
        about=f"{what} of {x_name or 'values'}.{marked}",
        summary=Table("", [Column("distribution"), Column("count", None, ",.0f"), *heads], table),
        title="share",
        legend=[(row[0], color, show((row[2], row[3])), "box") for row, color in zip(table, colors, strict=True)],
        notes=[
            f"{counted(gaps, 'value')} not finite, omitted." * bool(gaps),
            f"{counted(outside, 'value')} outside the bins, not drawn." * bool(outside),
        ],
        kind="points",
        axis=x_name,
    )


def bars(
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    value_name: str = "",
    format: str = ".3g",
    start: float = 0.0,
) -> Any:
    """Return horizontal bars that begin at `start`, one group per label; whiskers show one standard deviation.

    Example:
        >>> bars(["conv1", "conv2"], [Series("trained", [0.9, 0.7])], value_name="energy").description
        'Bars of energy. conv1: trained 0.9. conv2: trained 0.7.'
    """
    require(len(labels) > 0 and len(series) > 0, "labels", "at least one name, with a Series", list(labels))
    column, table, points = Column(value_name or "value", None, format), [[label] for label in labels], list[Any]()
    for one in series:
        accepted = f"one value for each of the {len(labels)} labels"
        require(one.rows.shape[1] == len(labels), f"values of {one.name!r}", accepted, one.rows.shape[1])
        values = zip(one.cells(), one.mean.tolist(), np.nan_to_num(one.deviation).tolist(), strict=True)
        for at, (cell, value, spread) in enumerate(values):
            table[at].append(cell)  # type: ignore[arg-type]
            if math.isfinite(value):
                row = {"label": labels[at], "series": one.name, "y": value, "start": start, "text": column.show(cell)}
                points.append(row | {"low": value - spread, "high": value + spread, "end": max(value + spread, start)})
    names, colors = [one.name for one in series], class_colors(len(series))
    low, high = min([start, *(row["low"] for row in points)]), max([start, *(row["high"] for row in points)])
    room = 0.2 * ((high - low) or 1.0)  # for the numbers at the ends of the bars
    axis = {"format": "~%" if format.endswith("%") else "~g", "tickCount": 5}
    x = quantity("start", title=value_name, axis=axis, scale={"domain": [low, high + room], "nice": False})
    y = {"y": category("label", axis={"labelLimit": 140}), "yOffset": category("series")}
    ends = {**y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    text = {**y, "x": {**x, "field": "end"}, "text": {"field": "text", "type": "nominal"}}
    return make_chart(
        points,
        [
            layer("bar", {**y, "x": x, "x2": {"field": "y"}, "color": named_colors(names, colors)}),
            layer("rule", ends, strokeWidth=1.5, stroke="#59616e"),
            layer("text", text, align="left", dx=6, fontSize=11, fill="#59616e"),
        ],
        about=f"Bars of {value_name or 'values'}.",
        summary=Table("", [Column(""), *(Column(name, None, format) for name in names)], table),
        legend=[(name, color, "", "box") for name, color in zip(names, colors, strict=True)],
        height=len(labels) * (8 + 17 * len(series)) + 40,
    )


def scatter(
    points: Array, labels: Array, *, vectors: Array | None = None, classes: Sequence[str] = (), format: str = ".3g"
) -> Any:
    """Return 2-d features with their norms, one colour per class, and class vectors as lines from the origin.

    Both axes have the same scale. A dashed circle shows the median norm. Class vectors are scaled to the picture.

    Example:
        >>> scatter([[3.0, 4.0], [0.0, 2.0]], [0, 1]).description[:71]
        'Scatter plot of 2 features of 2 classes. Norms from 2 to 5, median 3.5.'
    """
    x, numbers = as_numbers("points", points, 2), as_array("labels", labels)
    require(x.shape[1] == 2, "points", "an array of shape (N, 2)", x.shape)
    require(len(numbers) == len(x) > 0, "labels", f"one value for each of the {len(x)} points", len(numbers))
    show, finite = Column("norm", None, format).show, np.flatnonzero(np.isfinite(x).all(axis=1))
    names = {k: str(classes[k]) if len(classes) else str(k) for k in np.unique(numbers).tolist()}
    chosen = np.random.default_rng(0).permutation(finite)[:MOST_SCATTERED]
    rows = [{"x": float(x[i, 0]), "y": float(x[i, 1]), "series": names[int(numbers[i])]} for i in np.sort(chosen)]
    norms = np.hypot(*x.T)
    median, reach = float(np.nanmedian(norms)), 1.05 * float(np.abs(x[chosen]).max(initial=0.0)) or 1.0
    circle = [
        {"x": median * math.cos(turn), "y": median * math.sin(turn), "order": turn}
        for turn in np.linspace(0, 2 * math.pi, 73).tolist()
    ]
    scale, colors = {"domain": [-reach, reach], "nice": False}, class_colors(len(names))
    places = {axis: quantity(axis, scale=scale, axis={"tickCount": 6}) for axis in ("x", "y")}
    colored = {**places, "color": named_colors(list(names.values()), colors)}
    ring = {"stroke": "#98a1ad", "strokeDash": [4, 4], "strokeWidth": 1.2}
    layers = [
        layer("line", {**places, "order": quantity("order")}, circle, **ring),
        layer("circle", colored, size=22, opacity=0.7),
    ]
    if vectors is not None:
        w = as_numbers("vectors", vectors, 2)
        w = 0.95 * reach * w / (np.hypot(*w.T).max(initial=0.0) or 1.0)
        spokes = [
            {"x": float(w[k, 0]), "y": float(w[k, 1]), "x0": 0.0, "y0": 0.0, "series": name}
            for k, name in names.items()
            if k < len(w)
        ]
        ends = {"x2": {"field": "x0"}, "y2": {"field": "y0"}}
        layers.append(layer("rule", {**colored, **ends}, spokes, strokeWidth=2))
    table: list[list[Any]] = []
    for k, name in names.items():
        of = norms[finite][numbers[finite] == k]
        table.append([name, len(of), *((of.mean(), of.min(), of.max()) if len(of) else (None, None, None))])
    heads = [Column(f"{word} norm", None, format) for word in ("mean", "smallest", "largest")]
    drawn = f" {len(chosen):,} of {len(x):,} are drawn." if len(chosen) < len(x) else ""
    least, most = (show(float(end)) for end in (np.nanmin(norms), np.nanmax(norms)))
    return make_chart(
        rows,
        layers,
        about=f"Scatter plot of {counted(len(x), 'feature')} of {len(names)} classes. Norms from {least} to {most}, "
        f"median {show(median)}.",
        summary=Table("", [Column("class"), Column("features", None, ",.0f"), *heads], table),
        legend=[(name, color, "", "") for name, color in zip(names.values(), colors, strict=True)],
        notes=[f"Both axes have one scale; the dashed circle has the median norm {show(median)}.{drawn}"],
        height=520,
        square=1.0,
    )


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
    # The Freedman–Diaconis rule gives the width of a bin, limited to 8 to 100 bins.
    spreads = [(np.subtract(*np.quantile(one, [0.75, 0.25])), len(one)) for one in samples if len(one)]
    width = min((2 * spread / count ** (1 / 3) for spread, count in spreads if spread > 0), default=(high - low) / 8)
    step = round_step((high - low) / min(max((high - low) / width, 8), 100))
    first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
    return np.arange(first, last + 1) * step


def _thinned(x: NDArray, y: NDArray) -> NDArray:
    """Return the indices of at most `MOST_POINTS` values with which the curve looks the same.

    The axis is divided into equal parts; each part keeps its smallest and largest value, and one gap if it has any.
    """
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    parts = (MOST_POINTS - 2) // 3
    part = np.minimum((x - x[0]) / ((x[-1] - x[0]) or 1.0) * parts, parts - 1).astype(int)
    indices = {0, len(y) - 1}
    for inside in np.split(np.arange(len(y)), np.flatnonzero(np.diff(part)) + 1):
        finite, gaps = inside[np.isfinite(y[inside])], inside[~np.isfinite(y[inside])]
        if len(finite):
            indices |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
        indices |= set(gaps[:1].tolist())
    return np.array(sorted(indices))


def _line_notes(series: Sequence[Series], banded: bool, log_y: bool) -> list[str]:
    seeds = sorted({len(one.rows) for one in series if len(one.rows) > 1})
    over = f"over {'–'.join(map(str, seeds))} seeds." if seeds else ""
    gaps = sum(int((~np.isfinite(one.rows)).sum()) for one in series)
    lost = sum(int((one.mean <= 0).sum()) for one in series) if log_y else 0
    longest = max(one.rows.shape[1] for one in series)
    return [
        over and (f"Bands: mean ± one standard deviation {over}" if banded else f"Means {over}"),
        f"{counted(gaps, 'value')} not finite, omitted." * bool(gaps),
        f"{counted(lost, 'point')} at 0 or below omitted from the log axis." * bool(lost),
        f"Drawn with at most {MOST_POINTS} of {longest:,} points per curve, extremes included."
        * (longest > MOST_POINTS),
    ]


def _all_values(series: Sequence[Series], x_name: str, format: str) -> Table | None:
    """Return a table of all values, or None if they are many."""
    places = np.unique(np.concatenate([one.places for one in series])).tolist()
    if len(places) * len(series) > MOST_LISTED:
        return None
    at = [dict(zip(one.places.tolist(), one.cells(), strict=True)) for one in series]
    columns = [Column(x_name), *(Column(one.name, None, format) for one in series)]
    return Table("", columns, [[f"{place:.6g}", *(cells.get(place) for cells in at)] for place in places])
