"""Charts: functions that take plain data and return an Altair chart.

Each chart carries its alternative text as `description`. Its `usermeta` holds what a page shows around the picture: the
legend, the table of numbers, notes, and how values are read with the pointer or the keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require, require_package
from hypersphere.report._arrays import Array, as_array, as_numbers, mean_and_spread
from hypersphere.report.palette import SCALE, class_colors, ordered_colors
from hypersphere.report.tables import ARROWS, Cell, Column, Table

__all__ = ["Series", "bars", "figure_svg", "heat_map", "histogram", "landscape", "lines", "scatter"]

MOST_POINTS = 400  # points drawn per curve
MOST_BANDED = 6  # curves whose bands can be distinguished
MOST_DOTTED = 16  # curves with at most this number of points show each point as a dot
MOST_DESCRIBED = 8  # curves or bars that the alternative text describes
MOST_CELLS = 240  # cells in the table of numbers; larger data are summarised
MOST_SIDE = 64  # cells per side of a map; larger ones are drawn as means of blocks
MOST_WRITTEN = 12  # columns of a map whose cells show their numbers
MOST_SCATTERED = 1500  # points of a scatter plot
SMOOTH_SIDE = 41  # cells per side of a landscape after interpolation


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
        higher_is_better: whether the best value is the highest or the lowest; None names no best value.
        ordered: use a sequential colour scale, for series with an order such as the layers of a network.

    Example:
        >>> lines([Series("softmax", [2.3, 0.8]), Series("A-Softmax", [4.1, 1.9])], y_name="loss").description[:16]
        '2 curves of loss'
    """
    require(len(series) > 0, "series", "at least one Series", 0)
    require(limits is None or limits[0] < limits[1], "limits", "two numbers, low and high", limits)
    alt, column = _altair(), Column(y_name or "value", higher_is_better, format)
    banded = len(series) <= MOST_BANDED
    points: list[dict[str, Any]] = []
    drawn: list[tuple[Series, NDArray, NDArray]] = []
    for one in series:
        x, mean = one.places, one.mean
        visible = np.isfinite(mean) & ((mean > 0) | (not log_y)) & ((x > 0) | (not log_x))
        drawn.append((one, x[visible], mean[visible]))
        low, high = (np.clip(mean + sign * one.deviation, *(limits or (None, None))) for sign in (-1, 1))
        low = np.where((low > 0) | (not log_y), low, mean)  # a band cannot reach below the end of a log axis
        cells, places = one.cells(), np.log10(np.where(x > 0, x, np.nan)) if log_x else x
        for at in _thinned(places, np.where(visible, mean, np.nan)):
            if log_x and x[at] <= 0:
                continue
            row = {"x": float(x[at]), "series": one.name, "y": float(mean[at]) if visible[at] else None}
            row["text"] = column.show(cells[at])
            if banded and visible[at] and np.isfinite(one.deviation[at]):
                row |= {"low": float(low[at]), "high": float(high[at])}
            points.append(row | ({"dashed": True} if one.dashed else {}))
    names = [one.name for one in series]
    colors = (ordered_colors if ordered else class_colors)(len(names))
    places = np.unique(np.concatenate([np.zeros(0), *(x for _, x, _ in drawn)]))
    x_axis = alt.Axis(grid=False, tickCount=8)
    if log_x and len(places):
        x_axis = alt.Axis(grid=False, values=_decades(float(places[0]), float(places[-1])), format="~g")
    elif (places == np.round(places)).all():
        x_axis = alt.Axis(
            grid=False, format="d", **({"values": places.tolist()} if len(places) <= 12 else {"tickCount": 8})
        )
    x_encoding = alt.X("x:Q", title=x_name, axis=x_axis, scale=_scale(log_x, nice=False))
    y_axis = alt.Axis(format="~%") if format.endswith("%") else alt.Axis(tickCount=6)
    y_encoding = alt.Y("y:Q", title=None, axis=y_axis, scale=_scale(log_y, zero=False))
    base = alt.Chart(_rows(points)).encode(x=x_encoding, color=_colors(names, colors))
    layers = []
    if any("low" in row for row in points):
        layers.append(base.mark_area(opacity=0.16).encode(y=alt.Y("low:Q", title=None), y2="high:Q"))
    dash = alt.StrokeDash("dashed:N", legend=None, scale=alt.Scale(domain=[None, True], range=[[1, 0], [6, 5]]))
    layers.append(base.mark_line(strokeWidth=2.25).encode(y=y_encoding, strokeDash=dash))
    dotted = [len(y) <= MOST_DOTTED and not one.dashed for one, _, y in drawn]
    if any(dotted):
        few = [row for row in points if dotted[names.index(row["series"])] and row["y"] is not None]
        layers.append(base.properties(data=_rows(few)).mark_circle(size=34, opacity=1).encode(y=y_encoding))
    last = [column.show(float(y[-1])) if len(y) else "no values" for _, _, y in drawn]
    title = y_name + ("" if higher_is_better is None else f" {ARROWS[higher_is_better]}")
    return _finished(
        alt.layer(*layers),
        title,
        _describe_lines(drawn, column, x_name, y_name),
        _line_numbers(series, x_name, column),
        legend=[
            (one.name, color, value, "line dashed" if one.dashed else "line")
            for one, color, value in zip(series, colors, last, strict=True)
        ],
        notes=_line_notes(series, drawn, banded, log_y),
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
    alt, column, marks = _altair(), Column(x_name or "value", None, format), marks or {}
    arrays = {name: as_numbers(f"samples[{name!r}]", values, *range(1, 5)).ravel() for name, values in samples.items()}
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    bins = round_bins(*finite.values()) if edges is None else as_numbers("edges", edges, 1)
    require(len(bins) > 1 and bool((np.diff(bins) > 0).all()), "edges", "at least two ascending numbers", edges)
    middles, points, numbers, outside = (bins[:-1] + bins[1:]) / 2, [], [], 0
    for name, values in finite.items():
        if counts:
            accepted = f"one count >= 0 for each of the {len(middles)} bins"
            require(len(values) == len(middles) and bool((values >= 0).all()), f"samples[{name!r}]", accepted, values)
        heights = values if counts else np.histogram(values, bins)[0].astype(np.float64)
        at, weights = (middles, values) if counts else (values, np.ones(len(values)))
        total = float(weights.sum())
        outside += 0 if counts else len(values) - int(heights.sum())
        mean = float((at * weights).sum() / total) if total else math.nan
        deviation = math.sqrt(float((weights * (at - mean) ** 2).sum() / total)) if total else math.nan
        inside = at[weights > 0]
        ends = (float(inside.min()), float(inside.max())) if len(inside) else (None, None)
        numbers.append([name, total, mean, deviation, *ends])
        shares = heights / (total or 1)
        for edge, stop, share in zip(bins, [*bins[1:], None], [*shares.tolist(), 0.0], strict=True):
            row = {"x": float(edge), "series": name, "y": share}
            if stop is not None:
                row |= {"at": float((edge + stop) / 2), "text": f"{share:.1%}"}
            points.append(row)
    colors, show = class_colors(len(samples)), column.show
    base = alt.Chart(_rows(points)).encode(
        x=alt.X("x:Q", title=x_name, axis=alt.Axis(grid=False, tickCount=9), scale=alt.Scale(nice=False, zero=False)),
        color=_colors(list(samples), colors),
    )
    # Layers of one shared step function: a light area and its outline.
    y = alt.Y("y:Q", title=None, axis=alt.Axis(format="~%", tickCount=6), stack=None)
    layers = [
        base.mark_area(interpolate="step-after", opacity=0.16).encode(y=y),
        base.mark_line(interpolate="step-after", strokeWidth=1.6).encode(y=y),
    ]
    for name, place in marks.items():
        rule = alt.Chart(_rows([{"x": float(place), "label": f"{name} {show(place)}"}])).encode(x="x:Q")
        aside = "right" if place > (bins[0] + bins[-1]) / 2 else "left"
        text = {"align": aside, "dx": 6 if aside == "left" else -6, "baseline": "top", "fontSize": 11}
        layers.append(rule.mark_rule(strokeDash=[5, 4], stroke="#777f8c"))
        layers.append(rule.mark_text(**text, fill="#59616e").encode(y=alt.value(0), text="label:N"))
    described = [
        f"{name}: {total:,.0f} values, mean {show(mean)}, standard deviation {show(deviation)}."
        if total
        else f"{name}: no values."
        for name, total, mean, deviation, *_ in numbers
    ]
    described += [f"A line at {show(place)}: {name}." for name, place in marks.items()]
    what = f"Histograms of {len(samples)} distributions" if len(samples) > 1 else "Histogram"
    gaps = sum(len(arrays[name]) - len(finite[name]) for name in arrays)
    columns = [Column("distribution"), Column("count", None, ",.0f")]
    columns += [Column(word, None, format) for word in ("mean", "s.d.", "smallest", "largest")]
    return _finished(
        alt.layer(*layers),
        "share",
        " ".join([f"{what} of {x_name or 'values'}.", *described]),
        Table("", columns, numbers),
        legend=[(row[0], c, show((row[2], row[3])), "box") for row, c in zip(numbers, colors, strict=True)],
        notes=[f"{counted(gaps, 'value')} not finite, omitted."] * bool(gaps)
        + [f"{counted(outside, 'value')} outside the bins, not drawn."] * bool(outside),
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
    for one in series:
        accepted = f"one value for each of the {len(labels)} labels"
        require(one.rows.shape[1] == len(labels), f"values of {one.name!r}", accepted, one.rows.shape[1])
    alt, column = _altair(), Column(value_name or "value", None, format)
    points: list[dict[str, Any]] = []
    table: list[list[Cell]] = [[label] for label in labels]
    for one in series:
        for at, (cell, value, spread) in enumerate(
            zip(one.cells(), one.mean, np.nan_to_num(one.deviation), strict=True)
        ):
            table[at].append(cell)
            if np.isfinite(value):
                row = {"label": labels[at], "series": one.name, "y": value, "start": start, "text": column.show(cell)}
                points.append(row | {"low": value - spread, "high": value + spread, "end": max(value + spread, start)})
    names, colors = [one.name for one in series], class_colors(len(series))
    axis = alt.Axis(format="~%" if format.endswith("%") else "~g", tickCount=5)
    low, high = min([start, *(row["low"] for row in points)]), max([start, *(row["high"] for row in points)])
    room = 0.2 * ((high - low) or 1.0)  # for the numbers at the ends of the bars
    base = alt.Chart(_rows(points)).encode(
        y=alt.Y("label:N", title=None, sort=None, axis=alt.Axis(labelLimit=140, ticks=False)),
        yOffset=alt.YOffset("series:N", sort=None),
        x=alt.X("start:Q", title=value_name, axis=axis, scale=alt.Scale(domain=[low, high + room], nice=False)),
    )
    layers = [base.mark_bar().encode(x2="y:Q", color=_colors(names, colors))]
    layers.append(base.mark_rule(strokeWidth=1.5, stroke="#59616e").encode(x="low:Q", x2="high:Q"))
    layers.append(base.mark_text(align="left", dx=6, fontSize=11, fill="#59616e").encode(x="end:Q", text="text:N"))
    described = [
        f"{row[0]}: {', '.join(f'{name} {column.show(cell)}' for name, cell in zip(names, row[1:], strict=True))}."
        for row in table[:MOST_DESCRIBED]
    ]
    more = [f"And {len(labels) - MOST_DESCRIBED} more."] * (len(labels) > MOST_DESCRIBED)
    return _finished(
        alt.layer(*layers).properties(height=len(labels) * (8 + 17 * len(series)) + 40),
        "",
        " ".join([f"Bars of {value_name or 'values'}.", *described, *more]),
        Table("", [Column(""), *(Column(name, None, format) for name in names)], table),
        legend=[(name, color, "", "box") for name, color in zip(names, colors, strict=True)],
    )


def heat_map(
    values: Array,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    *,
    row_name: str = "",
    column_name: str = "",
    value_name: str = "",
    format: str = ".3g",
    limits: tuple[float, float] | None = None,
) -> Any:
    """Return a matrix as coloured cells, with their numbers if there are few; NaN is left blank.

    Example:
        >>> heat_map([[1.0, 2.0]], ["a"], ["b", "c"], value_name="angle").description
        'Heat map of angle, 1 rows by 2 columns: lowest 1 at a, b; highest 2 at a, c; mean 1.5.'
    """
    full, column = as_numbers("values", values, 2), Column(value_name or "value", None, format)
    require(min(full.shape) > 0, "values", "a matrix with at least one row and one column", full.shape)
    for name, given, count in zip(("rows", "columns"), (rows, columns), full.shape, strict=True):
        require(len(given) in (0, count), name, f"empty, or {count} names", len(given))
    alt = _altair()
    rows = tuple(map(str, rows or range(full.shape[0])))
    columns = tuple(map(str, columns or (rows if full.shape[0] == full.shape[1] else range(full.shape[1]))))
    blocks = [max(1, math.ceil(side / MOST_SIDE)) for side in full.shape]
    grid = _block_means(_block_means(full, blocks[0]).T, blocks[1]).T
    low, high = limits or (_finite_min(grid), _finite_max(grid))
    row_names, column_names = (_block_names(names, size) for names, size in zip((rows, columns), blocks, strict=True))
    written = grid.shape[1] <= MOST_WRITTEN
    points = [
        {"row": i, "column": j, "y": value}
        | ({"text": column.show(value), "light": (value - low) > 0.55 * (high - low)} if written else {})
        for i, line in enumerate(grid.tolist())
        for j, value in enumerate(line)
        if math.isfinite(value)
    ]
    color = alt.Color("y:Q", title=value_name or None, legend=_color_bar(alt), scale=_color_scale(alt, low, high))
    base = alt.Chart(_rows(points)).encode(
        x=alt.X(
            "column:O", title=column_name or None, axis=_names_axis(alt, column_names, -90), scale=_cells(alt, grid, 1)
        ),
        y=alt.Y("row:O", title=row_name or None, axis=_names_axis(alt, row_names, 0), scale=_cells(alt, grid, 0)),
    )
    layers = [base.mark_rect().encode(color=color)]
    if written:
        fill = alt.condition("datum.light", alt.value("#0b1220"), alt.value("#ffffff"))
        layers.append(base.mark_text(fontSize=11).encode(text="text:N", color=fill))
    gaps, notes = ~np.isfinite(full), []
    if blocks != [1, 1]:
        notes.append(f"Each cell is the mean of up to {blocks[0]} × {blocks[1]} of the {counted(full.size, 'value')}.")
    if gaps.any() and not np.array_equal(gaps, np.eye(*gaps.shape)):  # an empty diagonal needs no note
        notes.append(f"{counted(int(gaps.sum()), 'cell')} without a finite value, left blank.")
    described = f"Heat map of {value_name or 'values'}, {full.shape[0]} rows by {full.shape[1]} columns"
    if not gaps.all():
        ends = [(word, divmod(int(at), full.shape[1])) for word, at in _extremes(full)]
        described += ": " + "; ".join(
            f"{word} {column.show(float(full[i, j]))} at {rows[i]}, {columns[j]}" for word, (i, j) in ends
        )
        described += f"; mean {column.show(float(np.nanmean(full)))}"
    return _finished(
        alt.layer(*layers).properties(height=560 * min(max(grid.shape[0] / grid.shape[1], 0.3), 1.3)),
        "",
        f"{described}.",
        _matrix_numbers(full, rows, columns, row_name, format),
        notes=notes,
        kind="cells",
        rows=list(row_names),
        columns=list(column_names),
        name=value_name,
        square=min(max(grid.shape[0] / grid.shape[1], 0.3), 1.3),
    )


def landscape(
    values: Array,
    *,
    x: tuple[float, float] = (-1.0, 1.0),
    y: tuple[float, float] = (-1.0, 1.0),
    x_name: str = "first direction",
    y_name: str = "second direction",
    value_name: str = "loss",
    format: str = ".3g",
    log: bool = False,
    limits: tuple[float, float] | None = None,
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> Any:
    """Return values on a regular grid over two directions as colours with contour lines.

    Args:
        values: matrix (R, C); the first row is at the low end of y, at the bottom.
        x, y: coordinates of the first and last column, and of the first and last row.
        x_name, y_name, value_name: names of the axes and of the values.
        format: format of the values, as in a `Column`.
        log: use a logarithmic colour scale.
        limits: ends of the colour scale, by default the extremes; set them to compare several landscapes.
        marks: names and positions (x, y) of points, for example of the trained weights.

    Example:
        >>> bowl = np.linspace(-1, 1, 5)[:, None] ** 2 + np.linspace(-1, 1, 5) ** 2
        >>> landscape(bowl).description
        'Landscape of loss over first direction and second direction: from 0 at (0, 0) to 2.'
    """
    full, column = as_numbers("values", values, 2), Column(value_name, None, format)
    require(min(full.shape) > 1, "values", "a matrix with at least two rows and two columns", full.shape)
    for name, ends in (("x", x), ("y", y), ("limits", limits or (1.0, 2.0))):
        require(len(ends) == 2 and ends[0] < ends[1], name, "two finite numbers, low and high", ends)
    alt = _altair()
    full = np.where((full > 0) | (not log), full, np.nan)
    low, high = limits or (_finite_min(full), _finite_max(full))
    smooth = 10 ** _interpolated(np.log10(full)) if log else _interpolated(full)
    across, up = (np.linspace(*ends, count) for ends, count in zip((x, y), smooth.shape[::-1], strict=True))
    half_x, half_y = float(across[1] - across[0]) / 2, float(up[1] - up[0]) / 2
    cells = [
        {"i": i, "j": j, "value": value}
        for i, line in enumerate(smooth.tolist())
        for j, value in enumerate(line)
        if math.isfinite(value)
    ]
    scale = _color_scale(alt, low, high, log)
    color = alt.Color("value:Q", title=value_name, scale=scale, legend=_color_bar(alt))
    axes = [alt.Scale(domain=[ends[0], ends[1]], nice=False, zero=False) for ends in (x, y)]
    plain = alt.Axis(grid=False, tickCount=5)
    places = {
        "x": alt.X("x:Q", title=x_name, scale=axes[0], axis=plain),
        "y": alt.Y("y:Q", title=y_name, scale=axes[1], axis=plain),
    }
    layers = [
        alt.Chart(_rows(cells))
        # Each cell also covers the next ones, which are painted over it, so that no seams are visible.
        .transform_calculate(x=f"{x[0] - half_x!r} + datum.j * {2 * half_x!r}", x2=f"datum.x + {4 * half_x!r}")
        .transform_calculate(y=f"{y[0] - half_y!r} + datum.i * {2 * half_y!r}", y2=f"datum.y + {4 * half_y!r}")
        .mark_rect(clip=True)
        .encode(**places, x2="x2:Q", y2="y2:Q", color=color)
    ]
    segments, surface = [], np.log10(smooth) if log else smooth
    bottom, top = (math.log10(end) if log else end for end in (low, high))
    for level in _levels(low, high, log):
        height = math.log10(level) if log else level
        shade = "#0b1220" if height - bottom > 0.55 * (top - bottom) else "#ffffff"
        for (r, c), (s, d) in contour(surface, height).tolist():
            left_right = {"x": across[0] + c * 2 * half_x, "x2": across[0] + d * 2 * half_x, "shade": shade}
            segments.append(left_right | {"y": up[0] + r * 2 * half_y, "y2": up[0] + s * 2 * half_y})
    if segments:
        drawn = alt.Chart(_rows(segments)).mark_rule(opacity=0.6, strokeWidth=1)
        shades = alt.Stroke("shade:N", scale=None, legend=None)
        layers.append(drawn.encode(**places, x2="x2:Q", y2="y2:Q", stroke=shades))
    if points := [{"x": float(a), "y": float(b), "label": name} for name, (a, b) in (marks or {}).items()]:
        mark = alt.Chart(_rows(points)).encode(**places)
        layers.append(mark.mark_point(size=90, filled=True, fill="#ffffff", stroke="#d1360b", strokeWidth=3, opacity=1))
        halo = mark.mark_text(dy=17, fontWeight=600, stroke="#ffffff", strokeWidth=4).encode(text="label:N")
        layers += [halo, mark.mark_text(dy=17, fontWeight=600, fill="#0b1220").encode(text="label:N")]
    gaps = int((~np.isfinite(full)).sum())
    what, numbers = f"Landscape of {value_name} over {x_name} and {y_name}", list[list[Any]]()
    for word, at in _extremes(full) if gaps < full.size else ():
        i, j = divmod(at, full.shape[1])
        spot = np.linspace(*x, full.shape[1])[j], np.linspace(*y, full.shape[0])[i]
        numbers.append([word, float(full[i, j]), *map(float, spot)])
    if numbers:
        (_, least, a, b), (_, most, *_) = numbers
        what += f": from {column.show(least)} at ({a:.3g}, {b:.3g}) to {column.show(most)}"
    return _finished(
        alt.layer(*layers).properties(height=500),
        "",
        " ".join([f"{what}.", *(f"Marked: {name}." for name in marks or {})]),
        Table(
            "",
            [Column(""), Column(value_name, None, format), Column(x_name, None, ".3g"), Column(y_name, None, ".3g")],
            numbers,
        ),
        notes=[f"{counted(gaps, 'point')} without a {'positive ' * log}finite value, left blank."] * bool(gaps),
        square=1.0,
    )


def scatter(
    points: Array,
    labels: Array,
    *,
    vectors: Array | None = None,
    classes: Sequence[str] = (),
    format: str = ".3g",
) -> Any:
    """Return 2-d features with their norms, one colour per class, and class vectors as lines from the origin.

    Both axes have the same scale. A dashed circle shows the median norm.

    Example:
        >>> scatter([[3.0, 4.0], [0.0, 2.0]], [0, 1]).description
        'Scatter plot of 2 features of 2 classes in two dimensions. Norms from 2 to 5, median 3.5.'
    """
    x, numbers = as_numbers("points", points, 2), as_array("labels", labels)
    require(x.shape[1] == 2, "points", "an array of shape (N, 2)", x.shape)
    require(len(numbers) == len(x) > 0, "labels", f"one value for each of the {len(x)} points", len(numbers))
    alt, column = _altair(), Column("norm", None, format)
    present = np.unique(numbers)
    names = [str(classes[k]) if len(classes) else str(k) for k in present.tolist()]
    colors = dict(zip(names, class_colors(len(names)), strict=True))
    finite = np.flatnonzero(np.isfinite(x).all(axis=1))
    chosen = (
        finite
        if len(finite) <= MOST_SCATTERED
        else np.sort(np.random.default_rng(0).choice(finite, MOST_SCATTERED, replace=False))
    )
    norms = np.hypot(*x[finite].T) if len(finite) else np.zeros(1)
    of_name = dict(zip(present.tolist(), names, strict=True))
    rows = [{"x": float(x[i, 0]), "y": float(x[i, 1]), "series": of_name[int(numbers[i])]} for i in chosen]
    reach = 1.05 * float(np.abs(x[chosen]).max(initial=0.0)) or 1.0
    scale = alt.Scale(domain=[-reach, reach], nice=False)
    x_axis, y_axis = (
        kind(name, title=None, scale=scale, axis=alt.Axis(tickCount=6))
        for kind, name in ((alt.X, "x:Q"), (alt.Y, "y:Q"))
    )
    base = alt.Chart(_rows(rows)).encode(x=x_axis, y=y_axis, color=_colors(names, tuple(colors.values())))
    median = float(np.median(norms))
    turn = np.linspace(0, 2 * math.pi, 73)
    circle = [{"x": median * math.cos(t), "y": median * math.sin(t), "order": k} for k, t in enumerate(turn.tolist())]
    ring = alt.Chart(_rows(circle)).mark_line(stroke="#98a1ad", strokeDash=[4, 4], strokeWidth=1.2)
    layers = [ring.encode(x=x_axis, y=y_axis, order="order:Q"), base.mark_circle(size=22, opacity=0.7)]
    if vectors is not None:
        w = as_numbers("vectors", vectors, 2)
        ends = [
            {"x": float(w[k, 0]), "y": float(w[k, 1]), "x0": 0.0, "y0": 0.0, "series": of_name[k]}
            for k in present.tolist()
            if k < len(w)
        ]
        longest = max((math.hypot(end["x"], end["y"]) for end in ends), default=0.0) or 1.0
        for end in ends:  # class vectors are scaled to the picture: only their directions matter
            end["x"], end["y"] = (0.95 * reach * end[axis] / longest for axis in ("x", "y"))
        layers.append(base.properties(data=_rows(ends)).mark_rule(strokeWidth=2).encode(x2="x0:Q", y2="y0:Q"))
    table = []
    for k, name in of_name.items():
        of = np.hypot(*x[finite][numbers[finite] == k].T)
        table.append([name, len(of), *((of.mean(), of.min(), of.max()) if len(of) else (None,) * 3)])
    columns = [
        Column("class"),
        Column("features", None, ",.0f"),
        *(Column(f"{w} norm", None, format) for w in ("mean", "smallest", "largest")),
    ]
    drawn = f" {len(chosen):,} of {len(x):,} are drawn." if len(chosen) < len(x) else ""
    return _finished(
        alt.layer(*layers).properties(height=520),
        "",
        f"Scatter plot of {counted(len(x), 'feature')} of {len(names)} classes in two dimensions. Norms from "
        f"{column.show(float(norms.min()))} to {column.show(float(norms.max()))}, median {column.show(median)}.",
        Table("", columns, table),
        legend=[(name, color, "", "") for name, color in colors.items()],
        notes=[f"Both axes have one scale; the dashed circle has the median norm {column.show(median)}.{drawn}"],
        square=1.0,
    )


def figure_svg(title: str, rows: Sequence[Sequence[tuple[str, Any]]]) -> str:
    """Return rows of titled charts as one SVG image with a white background, for a README or a slide.

    Example:
        >>> figure_svg("A loss", [[("Loss", lines([Series("softmax", [2.3, 0.8])]))]])[:4]
        '<svg'
    """
    require(len(rows) > 0 and all(map(len, rows)), "rows", "at least one row of at least one chart", list(rows))
    converter = require_package("vl_convert", "vl-convert-python", "report")
    stacked, described = [], [title]
    for row in rows:
        charts = []
        for name, chart in row:
            spec = chart_spec(chart)
            notes = spec.pop("usermeta")["notes"][:1]  # about seeds
            described.append(f"{name}: {spec.pop('description')}")
            heading = {"text": name, "fontSize": 14, "fontWeight": 600, "color": "#16191f", "subtitle": notes}
            charts.append(spec | {"title": heading, "width": 860 // len(row) - 70, "height": 240})
        stacked.append({"hconcat": charts, "spacing": 34, "resolve": {"scale": {"color": "shared"}}})
    # The charts of a row show the same names, so they share a legend below them.
    legend = {**THEME["legend"], "orient": "bottom", "columns": 6, "symbolType": "stroke", "symbolStrokeWidth": 3}
    config = {**THEME, "background": "#ffffff", "padding": 14, "legend": legend}
    whole = {"vconcat": stacked, "resolve": {"scale": {"color": "independent"}}, "config": config}
    svg = converter.vegalite_to_svg({"$schema": "https://vega.github.io/schema/vega-lite/v6.json", **whole})
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(" ".join(described))}" ', 1)


def chart_spec(chart: Any) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart, with its data as lists of rows."""
    with _altair().data_transformers.enable(consolidate_datasets=False):
        spec = chart.to_dict()
    _expand_data(spec)
    layers = spec.get("layer", [])
    if layers and "data" not in spec:
        spec["data"] = layers[0].get("data", {"values": []})
        for layer in layers:  # layers inherit the data of the chart
            if layer.get("data") == spec["data"]:
                del layer["data"]
    return {key: value for key, value in spec.items() if key != "$schema"}


def _expand_data(spec: Any) -> None:
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        _expand_data(value)
    data = spec.get("data") if isinstance(spec, dict) else None
    if isinstance(data, dict) and isinstance(data.get("values"), str) and data.get("format") == {"type": "json"}:
        spec["data"] = {"values": json.loads(data["values"])}


FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
QUIET = {"labelColor": "#59616e", "titleColor": "#59616e", "titleFontWeight": "normal", "labelFontSize": 12}
THEME: dict[str, Any] = {  # colours of text and rules are replaced by those of the page (chart.css)
    "font": FONT,
    "background": None,
    "view": {"stroke": "transparent"},
    "axis": {
        **QUIET,
        "titleFontSize": 12.5,
        "domain": False,
        "ticks": False,
        "gridColor": "#e1e5ea",
        "labelPadding": 8,
        "labelOverlap": "greedy",
        "titlePadding": 10,
    },
    "axisX": {"titleAnchor": "end"},
    "legend": {**QUIET, "titleFontSize": 12.5, "symbolOpacity": 1},
    "title": {
        "color": "#59616e",
        "fontSize": 12.5,
        "fontWeight": "normal",
        "anchor": "start",
        "frame": "bounds",
        "offset": 12,
        "subtitleColor": "#59616e",
        "subtitleFontSize": 12.5,
    },
}


def counted(count: int, what: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "value"), counted(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


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
    step = _round_step((high - low) / min(max((high - low) / width, 8), 100))
    first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
    return np.arange(first, last + 1) * step


def contour(values: NDArray, level: float) -> NDArray:
    """Return line segments (K, 2, 2) from (row, column) to (row, column) where a grid crosses a level.

    Each square of four values is divided into two triangles. In a triangle that crosses the level, one corner is on
    the other side than the two others, and a segment connects the crossings of its two edges.

    >>> contour(np.array([[0.0, 0.0], [1.0, 1.0]]), 0.25).tolist()
    [[[0.25, 0.25], [0.25, 1.0]], [[0.25, 0.25], [0.25, 0.0]]]
    """
    rows, columns = (axis.astype(np.float64) for axis in np.indices(values.shape))
    grid = np.stack([values, rows, columns], axis=-1)
    segments = []
    for side in (grid[:-1, 1:], grid[1:, :-1]):
        corners = [grid[:-1, :-1].reshape(-1, 3), grid[1:, 1:].reshape(-1, 3), side.reshape(-1, 3)]
        above = [corner[:, 0] > level for corner in corners]
        finite = np.isfinite(sum(corner[:, 0] for corner in corners))
        for lone, second, third in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
            crossed = (above[lone] != above[second]) & (above[lone] != above[third]) & finite
            ends = []
            for other in (second, third):
                a, b = corners[lone][crossed], corners[other][crossed]
                share = ((level - a[:, 0]) / (b[:, 0] - a[:, 0]))[:, None]
                ends.append(a[:, 1:] + share * (b - a)[:, 1:])
            segments.append(np.stack(ends, axis=1))
    return np.concatenate(segments)


def _altair() -> Any:
    return require_package("altair", "altair", "report")


def _rows(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return inline data as one JSON text, because Altair checks lists value by value."""
    rounded = [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    return _altair().Data(values=json.dumps(rounded), format={"type": "json"})


def _finished(
    chart: Any,
    title: str,
    description: str,
    numbers: Table,
    *,
    legend: Sequence[tuple[str, str, str, str]] = (),
    notes: Sequence[str] = (),
    **readout: Any,
) -> Any:
    """Add the title, the alternative text, and what a page shows around the chart."""
    rows = [[_plain(cell) for cell in row] for row in numbers.rows]
    columns = [[column.name, column.higher_is_better, column.format] for column in numbers.columns]
    keys = [dict(zip(("name", "color", "detail", "kind"), entry, strict=True)) for entry in legend]
    about = {"legend": keys, "notes": list(notes), "numbers": {"columns": columns, "rows": rows}, **readout}
    size = {} if "height" in chart.to_dict(validate=False) else {"height": 320}
    return chart.properties(title=title, description=description, usermeta=about, width=560, **size)


def _plain(cell: Any) -> Any:
    if isinstance(cell, tuple):
        return [_plain(part) for part in cell]
    if cell is None or isinstance(cell, str):
        return cell
    return float(cell) if math.isfinite(cell) else None


def _colors(names: Sequence[str], colors: Sequence[str]) -> Any:
    alt = _altair()
    legend = alt.Legend(title=None) if len(names) > 1 else None
    return alt.Color("series:N", legend=legend, scale=alt.Scale(domain=list(names), range=list(colors)), sort=None)


def _scale(log: bool, **options: Any) -> Any:
    alt = _altair()
    return alt.Scale(type="log", nice=options.get("nice", True)) if log else alt.Scale(**{"zero": False, **options})


def _color_scale(alt: Any, low: float, high: float, log: bool = False) -> Any:
    domain = [low, high] if low < high else [low - 0.5, low + 0.5]
    return alt.Scale(type="log" if log else "linear", domain=domain, range=list(SCALE), clamp=True, nice=False)


def _color_bar(alt: Any) -> Any:
    return alt.Legend(
        orient="top", direction="horizontal", gradientLength=180, gradientThickness=10, titleAnchor="start", tickCount=5
    )


def _cells(alt: Any, grid: NDArray, axis: int) -> Any:
    few = max(grid.shape) <= 40  # thin lines between the cells of a small map
    return alt.Scale(domain=list(range(grid.shape[axis])), paddingInner=0.02 if few else 0, paddingOuter=0)


def _names_axis(alt: Any, names: Sequence[str], turn: int) -> Any:
    """Return an axis whose labels are looked up by position, so that equal names stay separate cells."""
    shown = [name if len(name) <= 16 else f"{name[:9]}…{name[-6:]}" for name in names]
    crowded = max(map(len, shown)) * len(shown) > 60 and max(map(len, shown)) > 2
    return alt.Axis(labelExpr=f"{_literal(shown)}[datum.value]", labelAngle=turn if crowded else 0, labelOverlap=True)


def _literal(names: Sequence[str]) -> str:
    """Return names as a list of string literals of the Vega expression language; other characters are escaped."""
    quoted = ("".join(c if c.isalnum() and c.isascii() else _escaped(c) for c in name) for name in names)
    return "[" + ", ".join(f"'{name}'" for name in quoted) + "]"


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _thinned(x: NDArray, y: NDArray) -> NDArray:
    """Return the indices of at most `MOST_POINTS` values with which the curve looks the same.

    The axis is divided into equal parts; each part keeps its smallest and largest value, and one gap if it has any.
    """
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    placed = np.where(np.isfinite(x), x, np.nanmin(x)) - np.nanmin(x)
    parts = (MOST_POINTS - 2) // 3
    part = np.minimum(placed / (placed.max() or 1.0) * parts, parts - 1).astype(int)
    indices = {0, len(y) - 1}
    for inside in np.split(np.arange(len(y)), np.flatnonzero(np.diff(part)) + 1):
        finite, gaps = inside[np.isfinite(y[inside])], inside[~np.isfinite(y[inside])]
        if len(finite):
            indices |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
        indices |= set(gaps[:1].tolist())
    return np.array(sorted(indices))


def _describe_lines(drawn: Sequence[tuple[Series, NDArray, NDArray]], column: Column, x_name: str, y_name: str) -> str:
    """Return the alternative text: the range of x, and the ends and extremes of each curve."""
    places = np.concatenate([x for _, x, _ in drawn])
    if not len(places):
        return "An empty chart: no value is finite."
    parts = []
    for one, x, y in drawn[:MOST_DESCRIBED]:
        if len(y):
            first, last, least, most = (column.show(float(value)) for value in (y[0], y[-1], y.min(), y.max()))
            best = f"lowest {least}, highest {most}"
            if column.higher_is_better is not None:
                at = int(y.argmax() if column.higher_is_better else y.argmin())
                best = f"best {column.show(float(y[at]))} at {x_name} {x[at]:.4g}"
            parts.append(f"{one.name}: {first} to {last}, {best}.")
    more = f" And {len(drawn) - MOST_DESCRIBED} more." if len(drawn) > MOST_DESCRIBED else ""
    what = f"{counted(len(drawn), 'curve')} of {y_name or 'values'}"
    return f"{what} over {x_name} from {places.min():.4g} to {places.max():.4g}. {' '.join(parts)}{more}"


def _line_notes(
    series: Sequence[Series], drawn: Sequence[tuple[Series, NDArray, NDArray]], banded: bool, log_y: bool
) -> list[str]:
    notes = []
    if seeds := sorted({len(one.rows) for one in series if len(one.rows) > 1}):
        over = f"over {'–'.join(map(str, seeds))} seeds."
        notes.append(f"Bands: mean ± one standard deviation {over}" if banded else f"Means {over}")
    if gaps := sum(int((~np.isfinite(one.rows)).sum()) for one in series):
        notes.append(f"{counted(gaps, 'value')} not finite, omitted.")
    if log_y and (lost := sum(int((one.mean <= 0).sum()) for one in series)):
        notes.append(f"{counted(lost, 'point')} at 0 or below omitted from the log axis.")
    if (longest := max(one.rows.shape[1] for one in series)) > MOST_POINTS:
        notes.append(f"Drawn with at most {MOST_POINTS} of {longest:,} points per curve, extremes included.")
    return notes


def _line_numbers(series: Sequence[Series], x_name: str, column: Column) -> Table:
    """Return a table of all values if there are few, else of the ends and extremes of each curve."""
    places = np.unique(np.concatenate([one.places for one in series]))
    if len(places) * len(series) <= MOST_CELLS:
        at = [dict(zip(one.places.tolist(), one.cells(), strict=True)) for one in series]
        columns = [Column(x_name), *(Column(one.name, None, column.format) for one in series)]
        return Table("", columns, [[f"{place:.6g}", *(cells.get(place) for cells in at)] for place in places.tolist()])
    rows: list[list[Cell]] = []
    for one in series:
        finite = np.flatnonzero(np.isfinite(one.mean))
        cells, values = one.cells(), one.mean[finite]
        ends = (
            [cells[finite[0]], cells[finite[-1]], float(values.min()), float(values.max())]
            if len(finite)
            else [None] * 4
        )
        rows.append([one.name, len(finite), *ends])
    formats = [Column(word, None, column.format) for word in ("first", "last", "lowest", "highest")]
    return Table("", [Column("curve"), Column("points", None, ",.0f"), *formats], rows)


def _matrix_numbers(values: NDArray, rows: Sequence[str], columns: Sequence[str], row_name: str, format: str) -> Table:
    """Return the matrix as a table if it is small, else the mean and extremes of its rows."""
    if values.size <= MOST_CELLS:
        heads = [Column(row_name), *(Column(name, None, format) for name in columns)]
        return Table("", heads, [[name, *line] for name, line in zip(rows, values.tolist(), strict=True)])
    heads = [Column(row_name or "row"), *(Column(word, None, format) for word in ("mean", "lowest", "highest"))]
    body = [
        [name, mean_and_spread(line[:, None])[0][0], _finite_min(line), _finite_max(line)]
        for name, line in zip(rows[:MOST_CELLS], values, strict=False)
    ]
    return Table("", heads, body)


def _block_means(values: NDArray, size: int) -> NDArray:
    """Return the means of each `size` rows."""
    padded = np.concatenate([values, np.full((-len(values) % size, values.shape[1]), np.nan)])
    return mean_and_spread(padded.reshape(-1, size, values.shape[1]).swapaxes(0, 1))[0]


def _block_names(names: Sequence[str], size: int) -> list[str]:
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    return [group[0] if len(group) == 1 else f"{group[0]} – {group[-1]}" for group in groups]


def _interpolated(values: NDArray) -> NDArray:
    """Return a finer grid by linear interpolation, so that cells of a coarse grid are not visible."""
    for _ in range(2):
        count = max(len(values), SMOOTH_SIDE)
        at = np.linspace(0, len(values) - 1, count)
        below = np.minimum(at.astype(int), len(values) - 2)
        share = (at - below)[:, None]
        # Where the share is 0 or 1, a gap at the other end must not spread.
        low, high = values[below], values[below + 1]
        values = np.where(share == 0, low, np.where(share == 1, high, (1 - share) * low + share * high)).T
    return values


def _levels(low: float, high: float, log: bool) -> list[float]:
    """Return round numbers between two values, at most about eight."""
    if not low < high:
        return []
    if log and high / low > 10:
        return [level for ten in _decades(low / 10, high) for level in (ten, 3 * ten) if low < level < high]
    step = _round_step((high - low) / 8)
    return [k * step for k in range(math.floor(low / step), math.ceil(high / step) + 1) if low < k * step < high]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(round(math.log10(low), 6)), math.floor(round(math.log10(high), 6))
    return [10.0**ten for ten in range(first, last + 1)]


def _round_step(width: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below a width.

    >>> _round_step(0.03), _round_step(7.0)
    (0.05, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if round(factor * power / width, 6) >= 1)


def _finite_min(values: NDArray) -> float:
    return float(np.min(values[np.isfinite(values)], initial=math.inf)) if np.isfinite(values).any() else 0.0


def _finite_max(values: NDArray) -> float:
    return float(np.max(values[np.isfinite(values)], initial=-math.inf)) if np.isfinite(values).any() else 1.0


def _extremes(values: NDArray) -> list[tuple[str, int]]:
    return [("lowest", int(np.nanargmin(values))), ("highest", int(np.nanargmax(values)))]
