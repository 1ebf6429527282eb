"""Charts: functions that take plain data and return an Altair chart.

The `description` of a chart is its alternative text. Its `usermeta` holds what a page shows around the picture: the
legend, the table of numbers, notes, and options for reading values with the pointer or the keys.
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
from hypersphere.report._text import pluralize, short_names
from hypersphere.report._vega import SOFT, altair, figure_svg, inline, make_chart, series_color
from hypersphere.report.images import png_uri
from hypersphere.report.palette import SCALE, class_colors, interpolated_colors, ordered_colors
from hypersphere.report.tables import ARROWS, Cell, Column, Table

__all__ = ["Series", "bars", "figure_svg", "heat_map", "histogram", "landscape", "lines", "scatter"]

MOST_POINTS = 400  # points drawn per curve
MOST_BANDED = 6  # with more curves, bands could not be distinguished
MOST_DOTTED = 16  # curves of at most this number of points show each point as a dot
MOST_LISTED = 240  # cells in the table of numbers
MOST_SCATTERED = 1500  # points of a scatter plot
MOST_SIDE = 64  # cells per side; of larger matrices, evenly spaced rows and columns are drawn
MOST_WRITTEN = 12  # columns of a heat map whose cells show their numbers
LONGEST_NAME = 18  # letters of a row or column name in a picture
PIXELS = 400  # per side of a landscape
LEVELS = 9  # equal parts of the range of a landscape, separated by contour lines
DARK, LIGHT = "#0b1220", "#ffffff"  # text and lines on light and on dark colours


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
        count, x = self.rows.shape[1], self.places
        require(len(x) == count, f"x of {self.name!r}", f"one position for each of the {count} values", len(x))
        wrong = x[~np.isfinite(x) | (np.diff(x, prepend=-np.inf) < 0)]
        require(not len(wrong), f"x of {self.name!r}", "finite and ascending", wrong[:1].tolist())

    def __repr__(self) -> str:
        seeds, count = self.rows.shape
        return f"Series({self.name!r}, {pluralize(count, 'value')}{f' of {seeds} seeds' * (seeds > 1)})"

    @property
    def rows(self) -> NDArray:
        """The values as (seeds, T), NaN for gaps."""
        return np.atleast_2d(as_numbers(f"values of {self.name!r}", self.values, 1, 2))

    @property
    def places(self) -> NDArray:
        """The positions of the values, (T,)."""
        x = range(1, self.rows.shape[1] + 1) if self.x is None else self.x
        return as_numbers(f"x of {self.name!r}", x, 1)

    @property
    def mean(self) -> NDArray:
        """The mean over seeds, (T,); NaN if no seed has a finite value."""
        return mean_and_spread(self.rows)[0]

    @property
    def deviation(self) -> NDArray:
        """The standard deviation over seeds, (T,); NaN if there are fewer than two."""
        return mean_and_spread(self.rows)[1]

    def cells(self) -> list[Cell]:
        """Return one table cell per position: the mean, with its standard deviation if it is known."""
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
    """Return a line chart. Bands show one standard deviation over seeds if there are few curves.

    Args:
        series: the curves, in the order of the legend.
        x_name, y_name: names of the axes.
        format: format of the values, as in a `Column`; with ".1%" the axis is in per cent too.
        log_x, log_y: make the axis logarithmic; values <= 0 are omitted. Use both for a DET curve.
        limits: the range of possible values, for example (0, 1) for a rate; bands end there.
        higher_is_better: adds an arrow to the name of the values.
        ordered: use a sequential colour scale, for series with an order such as the layers of a network.

    Example:
        >>> lines([Series("softmax", [2.3, 0.8]), Series("A-Softmax", [4.1, 1.9])], y_name="loss").description[:16]
        '2 curves of loss'
    """
    require(len(series) > 0, "series", "at least one Series", 0)
    require(limits is None or limits[0] < limits[1], "limits", "two numbers, low and high", limits)
    alt, column = altair(), Column(y_name or "value", higher_is_better, format)
    is_banded = len(series) <= MOST_BANDED
    points: list[dict[str, Any]] = []
    last_values = []
    for curve in series:
        x, mean, cells = curve.places, curve.mean, curve.cells()
        on_axis = (x > 0) | (not log_x)
        y = np.where(on_axis & ((mean > 0) | (not log_y)), mean, np.nan)
        low, high = (np.clip(y + sign * curve.deviation, *(limits or (None, None))) for sign in (-1, 1))
        low = np.where((low > 0) | (not log_y), low, y)  # a band cannot reach 0 on a log axis
        for k in _thinned(np.flatnonzero(on_axis), y):
            row = {"x": float(x[k]), "series": curve.name, "y": None if np.isnan(y[k]) else float(y[k])}
            row |= {"text": column.show(cells[k]), "dashed": curve.dashed}
            if is_banded and np.isfinite(high[k]):  # no deviation is known from one seed
                row |= {"low": float(low[k]), "high": float(high[k])}
            points.append(row)
        drawn = np.flatnonzero(np.isfinite(y))
        last_values.append(column.show(cells[drawn[-1]]) if len(drawn) else "no values")
    places = np.unique([row["x"] for row in points if row["y"] is not None])
    x_axis: dict[str, Any] = {"grid": False, "tickCount": 8}
    if log_x and len(places):
        first, last = np.log10(places[[0, -1]])
        x_axis |= {"values": (10.0 ** np.arange(math.ceil(first), last + 1e-6)).tolist(), "format": "~g"}
    elif (places == np.round(places)).all():  # epochs have integer ticks
        x_axis |= {"format": "d"} | ({"values": places.tolist()} if len(places) <= MOST_DOTTED else {})
    x_scale = {"type": "log", "nice": False} if log_x else {"zero": False, "nice": False}
    y_axis = {"format": "~%", "tickCount": 6} if format.endswith("%") else {"tickCount": 6}
    y_scale = {"type": "log"} if log_y else {"zero": False}
    palette = ordered_colors if ordered else class_colors
    colors = dict(zip((curve.name for curve in series), palette(len(series)), strict=True))
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=x_name, axis=x_axis, scale=x_scale),
        y=alt.Y("y:Q", title=None, axis=y_axis, scale=y_scale),
        color=series_color(colors),
    )
    dash = alt.StrokeDash("dashed:N", legend=None, scale={"domain": [False, True], "range": [[1, 0], [6, 5]]})
    dots = {"size": 34, "opacity": 1} if len(places) <= MOST_DOTTED else False
    layers = [base.mark_line(strokeWidth=2.25, point=dots).encode(strokeDash=dash)]
    if any("low" in row for row in points):
        layers.insert(0, base.mark_area(opacity=0.16).encode(y=alt.Y("low:Q", title=None), y2="high"))
    extent = f" from {places[0]:.4g} to {places[-1]:.4g}." if len(places) else ": no value is finite."
    return make_chart(
        points,
        layers,
        about=f"{pluralize(len(series), 'curve')} of {y_name or 'values'} over {x_name}{extent}",
        numbers=_values_table(series, x_name, format),
        title=y_name + ("" if higher_is_better is None else f" {ARROWS[higher_is_better]}"),
        colors=colors,
        # Show the final value of training. ROC and DET curves, which have log axes, all end at the same point.
        details=() if log_x else last_values,
        notes=_line_notes(series, is_banded, log_y),
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
    """Return histograms with shared bins; the height of a bin is its share of the values.

    Args:
        samples: values by name; with `counts`, numbers of values in the bins between `edges`.
        edges: ascending edges (bins + 1,); by default equal bins chosen from the values.
        counts: True if `samples` are counts per bin.
        x_name: name of the axis of values.
        format: format of the values, as in a `Column`.
        marks: names and positions of dashed lines, for example a threshold or an initial value.

    Example:
        >>> histogram({"positive": [0.2, 0.3], "negative": [1.4]}, x_name="angle").description[:25]
        'Histograms of 2 distribut'
    """
    require(len(samples) > 0, "samples", "at least one distribution", 0)
    require(not counts or edges is not None, "edges", "given with counts", None)
    alt, show = altair(), Column(x_name or "value", None, format).show
    arrays = {name: as_numbers(f"samples[{name!r}]", values, 1, 2, 3, 4).ravel() for name, values in samples.items()}
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    bins = bin_edges(*finite.values()) if edges is None else as_numbers("edges", edges, 1)
    require(len(bins) > 1 and bool((np.diff(bins) > 0).all()), "edges", "at least two ascending numbers", edges)
    middles = (bins[:-1] + bins[1:]) / 2
    points: list[dict[str, Any]] = []
    summary: list[list[Any]] = []
    outside = 0
    for name, values in finite.items():
        if counts:
            accepted = f"one count >= 0 for each of the {len(middles)} bins"
            require(len(values) == len(middles) and bool((values >= 0).all()), f"samples[{name!r}]", accepted, values)
        heights = values if counts else np.histogram(values, bins)[0].astype(np.float64)
        positions, weights = (middles, values) if counts else (values, np.ones(len(values)))
        total, moments = float(weights.sum()), [None] * 4
        if total:
            mean, occupied = np.average(positions, weights=weights), positions[weights > 0]
            deviation = np.sqrt(np.average((positions - mean) ** 2, weights=weights))
            moments = [mean, deviation, occupied.min(), occupied.max()]
        outside += 0 if counts else len(values) - int(heights.sum())
        summary.append([name, total, *moments])
        for left, middle, share in zip(
            bins.tolist(), middles.tolist(), (heights / (total or 1)).tolist(), strict=False
        ):
            points.append({"x": left, "at": middle, "series": name, "y": share, "text": f"{share:.1%}"})
        points.append({"x": float(bins[-1]), "series": name, "y": 0.0})  # ends the last step
    colors = dict(zip(samples, class_colors(len(samples)), strict=True))
    x_channel = alt.X("x:Q", title=x_name, axis={"grid": False, "tickCount": 9}, scale={"nice": False, "zero": False})
    base = alt.Chart().encode(
        x=x_channel,
        y=alt.Y("y:Q", title=None, axis={"format": "~%", "tickCount": 6}, stack=None),
        color=series_color(colors),
    )
    layers = [base.mark_area(interpolate="step-after", opacity=0.16)]
    layers.append(base.mark_line(interpolate="step-after", strokeWidth=1.6))
    for name, place in (marks or {}).items():
        row = inline([{"x": float(place), "label": f"{name} {show(place)}"}])
        mark = alt.Chart(row).encode(x=x_channel)
        side = {"align": "left", "dx": 6} if place < (bins[0] + bins[-1]) / 2 else {"align": "right", "dx": -6}
        label = mark.mark_text(baseline="top", fontSize=11, fill=SOFT, **side)
        layers.append(mark.mark_rule(strokeDash=[5, 4], stroke="#777f8c"))
        layers.append(label.encode(y=alt.value(0), text="label:N"))
    heads = [Column(word, None, format) for word in ("mean", "s.d.", "smallest", "largest")]
    what = f"Histograms of {len(samples)} distributions" if len(samples) > 1 else "Histogram"
    marked = "".join(f" A line at {show(place)}: {name}." for name, place in (marks or {}).items())
    gaps = sum(len(arrays[name]) - len(values) for name, values in finite.items())
    return make_chart(
        points,
        layers,
        about=f"{what} of {x_name or 'values'}.{marked}",
        numbers=Table("", [Column("distribution"), Column("count", None, ",.0f"), *heads], summary),
        title="share",
        colors=colors,
        details=[show((mean, deviation)) for _, _, mean, deviation, *_ in summary],
        notes=[
            f"{pluralize(gaps, 'value')} not finite, omitted." * bool(gaps),
            f"{pluralize(outside, 'value')} outside the bins, not drawn." * bool(outside),
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
        'Bars of energy for conv1, conv2.'
    """
    require(len(labels) > 0 and len(series) > 0, "labels", "at least one name, with a Series", list(labels))
    alt, columns = altair(), [Column(""), *(Column(curve.name, None, format) for curve in series)]
    colors = dict(zip((curve.name for curve in series), class_colors(len(series)), strict=True))
    points = []
    for curve, column in zip(series, columns[1:], strict=True):
        accepted = f"one value for each of the {len(labels)} labels"
        require(curve.rows.shape[1] == len(labels), f"values of {curve.name!r}", accepted, curve.rows.shape[1])
        spreads = np.nan_to_num(curve.deviation).tolist()
        for label, cell, value, spread in zip(labels, curve.cells(), curve.mean.tolist(), spreads, strict=True):
            if math.isfinite(value):
                row = {"label": label, "series": curve.name, "y": value, "start": start, "text": column.show(cell)}
                points.append(row | {"low": value - spread, "high": value + spread, "end": max(value + spread, start)})
    low, high = min([start, *(row["low"] for row in points)]), max([start, *(row["high"] for row in points)])
    room = 0.2 * ((high - low) or 1.0)  # for the numbers at the ends of the bars
    axis = {"format": "~%" if format.endswith("%") else "~g", "tickCount": 5}
    x = alt.X("start:Q", title=value_name, axis=axis, scale={"domain": [low, high + room], "nice": False})
    base = alt.Chart().encode(
        y=alt.Y("label:N", title=None, sort=None, axis={"labelLimit": 140}), yOffset=alt.YOffset("series:N", sort=None)
    )
    text = base.mark_text(align="left", dx=6, fontSize=11, fill=SOFT)
    return make_chart(
        points,
        [
            base.mark_bar().encode(x=x, x2="y", color=series_color(colors)),
            base.mark_rule(strokeWidth=1.5, stroke=SOFT).encode(x="low:Q", x2="high"),
            text.encode(x="end:Q", text="text:N"),
        ],
        about=f"Bars of {value_name or 'values'} for {', '.join(labels)}.",
        numbers=Table("", columns, [[*row] for row in zip(labels, *(curve.cells() for curve in series), strict=True)]),
        colors=colors,
        height=len(labels) * (8 + 17 * len(series)) + 40,
    )


def scatter(points: Array, labels: Array, *, vectors: Array | None = None, classes: Sequence[str] = ()) -> Any:
    """Return 2-d features with their norms, one colour per class, and class vectors as lines from the origin.

    Both axes have the same scale. A dashed circle shows the median norm. Class vectors are scaled to the picture.

    Example:
        >>> scatter([[3.0, 4.0], [0.0, 2.0]], [0, 1]).description[:71]
        'Scatter plot of 2 features of 2 classes. Norms from 2 to 5, median 3.5.'
    """
    x, class_of = as_numbers("points", points, 2), as_array("labels", labels)
    require(x.shape[1] == 2, "points", "an array of shape (N, 2)", x.shape)
    require(len(class_of) == len(x) > 0, "labels", f"one value for each of the {len(x)} points", len(class_of))
    alt, show, norms = altair(), Column("norm", None, ".3g").show, np.hypot(*x.T)
    names = {k: str(classes[k]) if len(classes) else str(k) for k in np.unique(class_of).tolist()}
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(np.isfinite(norms)))[:MOST_SCATTERED]
    rows = [{"x": float(x[i, 0]), "y": float(x[i, 1]), "series": names[int(class_of[i])]} for i in np.sort(chosen)]
    median, reach = float(np.nanmedian(norms)), 1.05 * float(np.abs(x[chosen]).max(initial=0.0)) or 1.0
    angles = np.linspace(0, 2 * math.pi, 73).tolist()
    circle = [{"x": median * math.cos(angle), "y": median * math.sin(angle), "order": angle} for angle in angles]
    options = {"title": None, "axis": {"tickCount": 6}, "scale": {"domain": [-reach, reach], "nice": False}}
    colors = dict(zip(names.values(), class_colors(len(names)), strict=True))
    position, color = {"x": alt.X("x:Q", **options), "y": alt.Y("y:Q", **options)}, series_color(colors)
    ring = alt.Chart(inline(circle)).mark_line(stroke="#98a1ad", strokeDash=[4, 4], strokeWidth=1.2)
    layers = [
        ring.encode(**position, order="order:Q"),
        alt.Chart().mark_circle(size=22, opacity=0.7).encode(**position, color=color),
    ]
    if vectors is not None:
        w = as_numbers("vectors", vectors, 2)
        w = 0.95 * reach * w / (np.hypot(*w.T).max(initial=0.0) or 1.0)
        spokes = [
            {"x": float(w[k, 0]), "y": float(w[k, 1]), "origin": 0.0, "series": name}
            for k, name in names.items()
            if k < len(w)
        ]
        rules = alt.Chart(inline(spokes)).mark_rule(strokeWidth=2)
        layers.append(rules.encode(**position, x2="origin", y2="origin", color=color))
    summary: list[list[Any]] = []
    for k, name in names.items():
        class_norms = norms[(class_of == k) & np.isfinite(norms)]
        has_norms = len(class_norms) > 0
        statistics = (class_norms.mean(), class_norms.min(), class_norms.max()) if has_norms else (None, None, None)
        summary.append([name, len(class_norms), *statistics])
    heads = [Column(f"{word} norm", None, ".3g") for word in ("mean", "smallest", "largest")]
    drawn = f" {len(chosen):,} of {len(x):,} are drawn." if len(chosen) < len(x) else ""
    least, most = (show(float(end)) for end in (np.nanmin(norms), np.nanmax(norms)))
    return make_chart(
        rows,
        layers,
        about=f"Scatter plot of {pluralize(len(x), 'feature')} of {len(names)} classes. Norms from {least} to {most}, "
        f"median {show(median)}.",
        numbers=Table("", [Column("class"), Column("features", None, ",.0f"), *heads], summary),
        colors=colors,
        notes=[f"Both axes have one scale; the dashed circle has the median norm {show(median)}.{drawn}"],
        height=520,
        square=1.0,
    )


def heat_map(
    values: Array,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    *,
    row_name: str = "",
    column_name: str = "",
    value_name: str = "value",
    format: str = ".3g",
    limits: tuple[float, float] | None = None,
) -> Any:
    """Return a matrix as coloured cells, with their numbers if there are few columns; NaN is left blank.

    Rows and columns without names are numbered. A square matrix uses the names of its rows for its columns too.

    Example:
        >>> heat_map([[1.0, 2.0]], ["a"], ["b", "c"], value_name="angle").description
        'Heat map of angle, 1 × 2. Lowest: 1 (a, b). Highest: 2 (a, c).'
    """
    alt, matrix, column = altair(), as_numbers("values", values, 2), Column(value_name, None, format)
    require(min(matrix.shape) > 0, "values", "a matrix with at least one row and one column", matrix.shape)
    for name, names, count in zip(("rows", "columns"), (rows, columns), matrix.shape, strict=True):
        require(len(names) in (0, count), name, f"empty or {count} names", len(names))
    height, width = matrix.shape
    rows = [str(name) for name in rows or range(height)]
    columns = [str(name) for name in columns or (rows if height == width else range(width))]
    drawn = [np.unique(np.linspace(0, side - 1, min(side, MOST_SIDE)).astype(int)) for side in matrix.shape]
    grid = matrix[np.ix_(*drawn)]
    row_names, column_names = (
        _distinct([names[i] for i in indices]) for names, indices in zip((rows, columns), drawn, strict=True)
    )
    low, high = limits or _finite_range(grid)
    cells = [
        {"row": row, "column": name, "y": value, "text": column.show(value)}
        for row, line in zip(row_names, grid.tolist(), strict=True)
        for name, value in zip(column_names, line, strict=True)
        if math.isfinite(value)
    ]
    padding = {"paddingInner": 0.02 if max(grid.shape) <= 40 else 0, "paddingOuter": 0}
    base = alt.Chart().encode(
        x=alt.X(
            "column:O", title=column_name or None, axis=_axis(column_names), scale={"domain": column_names, **padding}
        ),
        y=alt.Y("row:O", title=row_name or None, axis=_axis(), scale={"domain": row_names, **padding}),
    )
    layers = [base.mark_rect().encode(color=_color("y", value_name, low, high))]
    if grid.shape[1] <= MOST_WRITTEN:
        is_light = f"datum.y > {low + 0.55 * (high - low)!r}"
        shade = alt.condition(is_light, alt.value(DARK), alt.value(LIGHT))
        layers.append(base.mark_text(fontSize=11).encode(text="text:N", fill=shade))
    blank = ~np.isfinite(matrix)
    is_diagonal = np.array_equal(blank, np.eye(height, width))  # an empty diagonal needs no note
    extremes = [
        f" {word.capitalize()}: {column.show(matrix[i, j])} ({rows[i]}, {columns[j]})."
        for word, i, j in _extremes(matrix)
    ]
    numbers = None
    if matrix.size <= MOST_LISTED:
        heads = [Column(row_name), *(Column(name, None, format) for name in columns)]
        numbers = Table("", heads, [[name, *line] for name, line in zip(rows, matrix.tolist(), strict=True)])
    ratio = min(max(grid.shape[0] / grid.shape[1], 0.3), 1.3)
    return make_chart(
        cells,
        layers,
        about=f"Heat map of {value_name}, {height} × {width}.{''.join(extremes)}",
        numbers=numbers,
        notes=[
            f"{len(grid)} of {height} rows and {grid.shape[1]} of {width} columns, evenly spaced."
            * (grid.size < matrix.size),
            f"{pluralize(int(blank.sum()), 'cell')} without a finite value, left blank."
            * bool(blank.any() and not is_diagonal),
        ],
        height=560 * ratio,
        square=ratio,
        kind="cells",
        name=value_name,
    )


def landscape(
    values: Array,
    *,
    x: tuple[float, float] = (-1.0, 1.0),
    y: tuple[float, float] = (-1.0, 1.0),
    value_name: str = "loss",
    format: str = ".3g",
    log: bool = False,
    limits: tuple[float, float] | None = None,
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> Any:
    """Return values on a regular grid over two directions as colours, with contour lines.

    Args:
        values: matrix (R, C); the first row is at the low end of y, at the bottom.
        x, y: coordinates of the first and last column, and of the first and last row.
        value_name: name of the values.
        format: format of the values, as in a `Column`.
        log: use a logarithmic colour scale.
        limits: ends of the colour scale, by default the extremes; set them to compare several landscapes.
        marks: names and positions (x, y) of points, for example of the trained weights.
    """
    alt, matrix, column = altair(), as_numbers("values", values, 2), Column(value_name, None, format)
    require(min(matrix.shape) > 1, "values", "a matrix with at least two rows and two columns", matrix.shape)
    for name, ends in (("x", x), ("y", y), ("limits", limits or (1.0, 2.0))):
        require(len(ends) == 2 and ends[0] < ends[1], name, "two finite numbers, low and high", ends)
    matrix = np.where((matrix > 0) | (not log), matrix, np.nan)
    low, high = limits or _finite_range(matrix)
    across, upwards = (
        np.linspace(*ends, count).tolist() for ends, count in zip((x, y), matrix.shape[::-1], strict=True)
    )
    cells = [
        {"x": across[j], "y": upwards[i], "value": float(matrix[i, j])} for i, j in np.argwhere(np.isfinite(matrix))
    ]
    x_channel, y_channel = (
        channel(field, title=title, axis={"grid": False, "tickCount": 5}, scale={"domain": list(ends), "nice": False})
        for channel, field, title, ends in (
            (alt.X, "x:Q", "first direction", x),
            (alt.Y, "y:Q", "second direction", y),
        )
    )
    base = alt.Chart().encode(x=x_channel, y=y_channel)
    corners = [{"x": x[0], "x2": x[1], "y": y[0], "y2": y[1]}]
    surface = alt.Chart(inline(corners)).mark_image(url=_surface_png(matrix, low, high, log), aspect=False)
    layers = [
        surface.encode(x=x_channel, x2="x2", y=y_channel, y2="y2"),
        base.mark_point(opacity=0).encode(color=_color("value", value_name, low, high, log)),  # for the colour bar
    ]
    if marks:
        points = inline([{"x": float(a), "y": float(b), "label": name} for name, (a, b) in marks.items()])
        marked = base.properties(data=points)
        layers.append(marked.mark_point(size=90, filled=True, fill=LIGHT, stroke="#d1360b", strokeWidth=3, opacity=1))
        for paint in ({"stroke": LIGHT, "strokeWidth": 4}, {"fill": DARK}):  # an outline below the letters
            layers.append(marked.mark_text(dy=17, fontWeight=600, **paint).encode(text="label:N"))
    extremes: list[list[Cell]] = [
        [word, float(matrix[i, j]), across[j], upwards[i]] for word, i, j in _extremes(matrix)
    ]
    gaps = int((~np.isfinite(matrix)).sum())
    described = "".join(f" Marked: {name}." for name in marks or {})
    heads = [Column(""), column, *(Column(f"{word} direction", None, ".3g") for word in ("first", "second"))]
    return make_chart(
        cells,
        layers,
        about=f"Landscape of {value_name} over first direction and second direction.{described}",
        numbers=Table("", heads, extremes),
        notes=[f"{pluralize(gaps, 'point')} without a {'positive ' * log}finite value, left blank." * bool(gaps)],
        height=500,
        square=1.0,
    )


def bin_edges(*samples: NDArray) -> NDArray:
    """Return the edges of 8 to 100 equal bins that include all values, with a width that suits the narrowest sample.

    >>> bin_edges(np.array([0.0, 8.0]))
    array([0., 1., 2., 3., 4., 5., 6., 7., 8.])
    """
    values = np.concatenate(samples)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if high - low <= 100 * math.ulp(max(abs(low), abs(high))):
        half = abs(low) / 20 or 0.5
        return np.array([low - half, low + half])
    # Freedman–Diaconis rule: bins have the width 2·IQR/n^⅓.
    widths = [
        2 * np.subtract(*np.quantile(sample, [0.75, 0.25])) / len(sample) ** (1 / 3)
        for sample in samples
        if len(sample)
    ]
    narrowest = min((width for width in widths if width > 0), default=high - low)
    return np.linspace(low, high, 1 + round(min(max((high - low) / narrowest, 8), 100)))


def _thinned(indices: NDArray, y: NDArray) -> NDArray:
    """Return at most `MOST_POINTS` of the indices, chosen so that the curve of y keeps its shape.

    Each of many short segments keeps its smallest and its largest value, and one gap if it has any.
    """
    if len(indices) <= MOST_POINTS:
        return indices
    chosen = {indices[0], indices[-1]}
    for stretch in np.array_split(indices, (MOST_POINTS - 2) // 3):
        finite, gaps = stretch[np.isfinite(y[stretch])], stretch[np.isnan(y[stretch])]
        chosen.update(gaps[:1])
        if len(finite):
            chosen |= {finite[y[finite].argmin()], finite[y[finite].argmax()]}
    return np.sort(list(chosen))


def _line_notes(series: Sequence[Series], is_banded: bool, log_y: bool) -> list[str]:
    """Return notes on bands, omitted values and thinned curves; those that do not apply are empty."""
    seeds = sorted({len(curve.rows) for curve in series if len(curve.rows) > 1})
    over_seeds = f"over {'–'.join(map(str, seeds))} seeds." if seeds else ""
    gaps = sum(int((~np.isfinite(curve.rows)).sum()) for curve in series)
    nonpositive = sum(int((curve.mean <= 0).sum()) for curve in series) if log_y else 0
    longest = max(curve.rows.shape[1] for curve in series)
    return [
        over_seeds and (f"Bands: mean ± one standard deviation {over_seeds}" if is_banded else f"Means {over_seeds}"),
        f"{pluralize(gaps, 'value')} not finite, omitted." * bool(gaps),
        f"{pluralize(nonpositive, 'point')} at 0 or below omitted from the log axis." * bool(nonpositive),
        f"Drawn with at most {MOST_POINTS} of {longest:,} points per curve, extremes included."
        * (longest > MOST_POINTS),
    ]


def _values_table(series: Sequence[Series], x_name: str, format: str) -> Table:
    """Return a table of all values, or of those at evenly spaced positions if there are many."""
    places = np.unique(np.concatenate([curve.places for curve in series])).tolist()
    if len(places) * len(series) > MOST_LISTED:
        places = places[:: math.ceil(len(places) * len(series) / MOST_LISTED)]
    cells_by_place = [dict(zip(curve.places.tolist(), curve.cells(), strict=True)) for curve in series]
    columns = [Column(x_name), *(Column(curve.name, None, format) for curve in series)]
    return Table("", columns, [[f"{place:.6g}", *(cells.get(place) for cells in cells_by_place)] for place in places])


def _surface_png(matrix: NDArray, low: float, high: float, log: bool) -> str:
    """Return a PNG of interpolated values as colours, with contour lines and transparent gaps, as a data URI."""
    if log:
        matrix, low, high = np.log10(matrix), math.log10(low), math.log10(high)
    surface = _interpolated(_interpolated(matrix).T).T[::-1]  # the first row of an image is at the top
    shares = np.clip((surface - low) / ((high - low) or 1.0), 0, 1)
    pixels = np.concatenate([interpolated_colors(SCALE, shares), np.full((*shares.shape, 1), 255.0)], axis=-1)
    # A contour line passes between two neighbours on different sides of a level.
    band = np.minimum(np.floor(shares * LEVELS), LEVELS - 1)
    crossed = np.zeros(band.shape, dtype=bool)
    crossed[:-1] |= np.abs(np.diff(band, axis=0)) > 0
    crossed[:, :-1] |= np.abs(np.diff(band, axis=1)) > 0
    shade = np.where(shares[crossed] > 0.55, 20.0, 255.0)[:, None]
    pixels[crossed, :3] = 0.45 * pixels[crossed, :3] + 0.55 * shade
    pixels[~np.isfinite(surface)] = 0
    return png_uri(np.round(pixels).astype(np.uint8))


def _interpolated(values: NDArray) -> NDArray:
    """Interpolate linearly between rows, to `PIXELS` rows."""
    positions = np.linspace(0, len(values) - 1, PIXELS)
    below = np.minimum(positions.astype(int), len(values) - 2)
    share = (positions - below)[:, None]
    return (1 - share) * values[below] + share * values[below + 1]


def _color(field: str, title: str, low: float, high: float, log: bool = False) -> Any:
    """Return the colour encoding of a numeric field, with a colour bar above the chart."""
    domain = [low, high] if low < high else [low - 0.5, low + 0.5]
    scale = {"type": "log" if log else "linear", "domain": domain, "range": list(SCALE), "clamp": True, "nice": False}
    bar = {"orient": "top", "direction": "horizontal", "gradientLength": 180, "gradientThickness": 10, "tickCount": 5}
    return altair().Color(f"{field}:Q", title=title or None, scale=scale, legend={**bar, "titleAnchor": "start"})


def _axis(names: Sequence[str] = ()) -> dict[str, Any]:
    """Return axis options, with vertical labels if they would overlap."""
    longest = max(map(len, names), default=0)
    is_crowded = longest * len(names) > 60 and longest > 2
    return {"labelAngle": -90 if is_crowded else 0, "labelOverlap": True, "labelLimit": 140}


def _distinct(names: Sequence[str]) -> list[str]:
    """Shorten names, and append spaces, which are invisible, to make equal names distinct."""
    short = short_names(names, LONGEST_NAME)
    return [name + " " * short[:index].count(name) for index, name in enumerate(short)]


def _finite_range(values: NDArray) -> tuple[float, float]:
    """Return the smallest and the largest finite value; (1, 2) if there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (1.0, 2.0)


def _extremes(values: NDArray) -> list[tuple[str, int, int]]:
    """Return ("lowest", row, column) and ("highest", row, column), or an empty list if no value is finite."""
    if not np.isfinite(values).any():
        return []
    indices = (("lowest", np.nanargmin(values)), ("highest", np.nanargmax(values)))
    return [(word, *divmod(int(index), values.shape[1])) for word, index in indices]
