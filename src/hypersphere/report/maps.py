"""Charts of matrices: heat maps, and landscapes with contour lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report._arrays import Array, as_numbers, mean_and_spread
from hypersphere.report._vega import counted, decades, layer, make_chart, quantity, round_step
from hypersphere.report.palette import SCALE
from hypersphere.report.tables import Cell, Column, Table

__all__ = ["heat_map", "landscape"]

MOST_SIDE = 64  # cells per side; larger matrices are drawn as means of blocks
MOST_WRITTEN = 12  # columns of a map whose cells show their numbers
MOST_LISTED = 240  # cells in the table of numbers
SMOOTH_SIDE = 41  # cells per side of a landscape after interpolation
DARK, LIGHT = "#0b1220", "#ffffff"  # text and lines on light and on dark colours


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
    """Return a matrix as coloured cells, with their numbers if there are few; NaN is left blank.

    Example:
        >>> heat_map([[1.0, 2.0]], ["a"], ["b", "c"], value_name="angle").description
        'Heat map of angle, 1 × 2. lowest: angle 1, row a, column b. highest: angle 2, row a, column c.'
    """
    matrix, column = as_numbers("values", values, 2), Column(value_name, None, format)
    require(min(matrix.shape) > 0, "values", "a matrix with at least one row and one column", matrix.shape)
    for name, given, count in zip(("rows", "columns"), (rows, columns), matrix.shape, strict=True):
        require(len(given) in (0, count), name, f"empty, or {count} names", len(given))
    height, width = matrix.shape
    rows = tuple(map(str, rows or range(height)))
    columns = tuple(map(str, columns or (rows if height == width else range(width))))
    down, across = (math.ceil(side / MOST_SIDE) for side in matrix.shape)
    grid = _block_means(_block_means(matrix, down).T, across).T
    low, high = limits or _ends(grid)
    names = [_block_names(rows, down), _block_names(columns, across)]
    written = grid.shape[1] <= MOST_WRITTEN
    cells = [
        {"row": i, "column": j, "y": value}
        | ({"text": column.show(value), "shade": _shade(value, low, high)} if written else {})
        for i, line in enumerate(grid.tolist())
        for j, value in enumerate(line)
        if math.isfinite(value)
    ]
    gap = 0.02 if max(grid.shape) <= 40 else 0
    x, y = (
        {"field": field, "type": "ordinal", "title": title or None, "axis": _names_axis(of, turn)}
        | {"scale": {"domain": list(range(len(of))), "paddingInner": gap, "paddingOuter": 0}}
        for field, title, of, turn in (("column", column_name, names[1], -90), ("row", row_name, names[0], 0))
    )
    layers = [layer("rect", {"x": x, "y": y, "color": _color("y", value_name, low, high)})]
    if written:
        text = {"field": "text", "type": "nominal"}
        shade = {"field": "shade", "type": "nominal", "scale": None}
        layers.append(layer("text", {"x": x, "y": y, "text": text, "fill": shade}, fontSize=11))
    blank = ~np.isfinite(matrix)
    is_diagonal = np.array_equal(blank, np.eye(height, width))  # an empty diagonal needs no note
    notes = [
        f"Each cell is the mean of up to {down} × {across} of the {counted(matrix.size, 'value')}."
        * (down * across > 1),
        f"{counted(int(blank.sum()), 'cell')} without a finite value, left blank."
        * bool(blank.any() and not is_diagonal),
    ]
    extremes: list[list[Cell]] = [[word, float(matrix[i, j]), rows[i], columns[j]] for word, i, j in _extremes(matrix)]
    summary = Table("", [Column(""), column, Column("row"), Column("column")], extremes)
    if small := matrix.size <= MOST_LISTED:
        heads = [Column(row_name), *(Column(name, None, format) for name in columns)]
        body = [[name, *line] for name, line in zip(rows, matrix.tolist(), strict=True)]
    ratio = min(max(grid.shape[0] / grid.shape[1], 0.3), 1.3)
    return make_chart(
        cells,
        layers,
        about=f"Heat map of {value_name}, {height} × {width}.",
        summary=summary,
        numbers=Table("", heads, body) if small else None,
        notes=notes,
        height=560 * ratio,
        square=ratio,
        kind="cells",
        row_names=names[0],
        column_names=names[1],
        name=value_name,
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
    """
    matrix, column = as_numbers("values", values, 2), Column(value_name, None, format)
    require(min(matrix.shape) > 1, "values", "a matrix with at least two rows and two columns", matrix.shape)
    for name, ends in (("x", x), ("y", y), ("limits", limits or (1.0, 2.0))):
        require(len(ends) == 2 and ends[0] < ends[1], name, "two finite numbers, low and high", ends)
    matrix = np.where((matrix > 0) | (not log), matrix, np.nan)
    low, high = limits or _ends(matrix)
    surface = _interpolated(np.log10(matrix) if log else matrix)
    steps = [(end - start) / (count - 1) for (start, end), count in zip((x, y), surface.shape[::-1], strict=True)]
    cells = [
        {"i": i, "j": j, "value": 10**value if log else value}
        for i, line in enumerate(surface.tolist())
        for j, value in enumerate(line)
        if math.isfinite(value)
    ]
    places = {
        name: quantity(
            name, title=title, scale={"domain": list(ends), "nice": False}, axis={"grid": False, "tickCount": 5}
        )
        for name, title, ends in (("x", x_name, x), ("y", y_name, y))
    }
    between = {"x2": {"field": "x2"}, "y2": {"field": "y2"}}
    colored = layer("rect", {**places, **between, "color": _color("value", value_name, low, high, log)}, clip=True)
    # Each cell also covers the next ones, which are painted over it, so that no seams are visible.
    colored["transform"] = [
        {"as": name + end, "calculate": f"{start + (shift - 0.5) * step!r} + datum.{index} * {step!r}"}
        for name, (start, _), step, index in (("x", x, steps[0], "j"), ("y", y, steps[1], "i"))
        for end, shift in (("", 0), ("2", 2))
    ]
    layers, bounds = [colored], [math.log10(end) if log else end for end in (low, high)]
    segments: list[dict[str, Any]] = []
    for level in _levels(low, high, log):
        place = math.log10(level) if log else level
        for (r, c), (s, d) in contour(surface, place).tolist():
            ends_x, ends_y = (x[0] + c * steps[0], x[0] + d * steps[0]), (y[0] + r * steps[1], y[0] + s * steps[1])
            segment = dict(zip(("x", "x2", "y", "y2"), (*ends_x, *ends_y), strict=True))
            segments.append(segment | {"shade": _shade(place, *bounds)})
    shade = {"field": "shade", "type": "nominal", "scale": None}
    layers.append(layer("rule", {**places, **between, "stroke": shade}, segments, opacity=0.6))
    points = [{"x": float(a), "y": float(b), "label": name} for name, (a, b) in (marks or {}).items()]
    if points:
        named = {**places, "text": {"field": "label", "type": "nominal"}}
        dot = {"size": 90, "filled": True, "fill": LIGHT, "stroke": "#d1360b", "strokeWidth": 3, "opacity": 1}
        layers.append(layer("point", places, points, **dot))
        for paint in ({"stroke": LIGHT, "strokeWidth": 4}, {"fill": DARK}):  # an outline below the letters
            layers.append(layer("text", named, points, dy=17, fontWeight=600, **paint))
    spots = [np.linspace(*ends, count) for ends, count in zip((x, y), matrix.shape[::-1], strict=True)]
    found: list[list[Cell]] = [
        [word, float(matrix[i, j]), float(spots[0][j]), float(spots[1][i])] for word, i, j in _extremes(matrix)
    ]
    heads = [Column(""), column, Column(x_name, None, ".3g"), Column(y_name, None, ".3g")]
    gaps = int((~np.isfinite(matrix)).sum())
    marked = "".join(f" Marked: {name}." for name in marks or {})
    return make_chart(
        cells,
        layers,
        about=f"Landscape of {value_name} over {x_name} and {y_name}.{marked}",
        summary=Table("", heads, found),
        notes=[f"{counted(gaps, 'point')} without a {'positive ' * log}finite value, left blank." * bool(gaps)],
        height=500,
        square=1.0,
    )


def contour(values: NDArray, level: float) -> NDArray:
    """Return line segments (K, 2, 2) from (row, column) to (row, column) where a grid crosses a level.

    Each square of four values is divided into two triangles. In a triangle that crosses the level, one corner is on
    the other side than the two others, and a segment connects the crossings of its two edges.

    >>> contour(np.array([[0.0, 0.0], [1.0, 1.0]]), 0.25).tolist()
    [[[0.25, 0.25], [0.25, 1.0]], [[0.25, 0.25], [0.25, 0.0]]]
    """
    grid = np.stack([values, *np.indices(values.shape)], axis=-1)
    segments = []
    for side in (grid[:-1, 1:], grid[1:, :-1]):
        corners = [part.reshape(-1, 3) for part in (grid[:-1, :-1], grid[1:, 1:], side)]
        above = [corner[:, 0] > level for corner in corners]
        finite = np.isfinite(sum(corner[:, 0] for corner in corners))
        for lone, second, third in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
            crossed = (above[lone] != above[second]) & (above[lone] != above[third]) & finite
            start, ends = corners[lone][crossed], []
            for other in (second, third):
                stop = corners[other][crossed]
                share = ((level - start[:, 0]) / (stop[:, 0] - start[:, 0]))[:, None]
                ends.append(start[:, 1:] + share * (stop - start)[:, 1:])
            segments.append(np.stack(ends, axis=1))
    return np.concatenate(segments)


def _color(field: str, title: str, low: float, high: float, log: bool = False) -> dict[str, Any]:
    """Return the encoding of numbers as colours, with a colour bar above the map."""
    domain = [low, high] if low < high else [low - 0.5, low + 0.5]
    scale = {"type": "log" if log else "linear", "domain": domain, "range": list(SCALE), "clamp": True, "nice": False}
    bar = {"orient": "top", "direction": "horizontal", "gradientLength": 180, "gradientThickness": 10, "tickCount": 5}
    return quantity(field, title=title or None, scale=scale, legend={**bar, "titleAnchor": "start"})


def _shade(value: float, low: float, high: float) -> str:
    return DARK if value - low > 0.55 * (high - low) else LIGHT


def _names_axis(names: Sequence[str], turn: int) -> dict[str, Any]:
    """Return an axis whose labels are looked up by position, so that equal names stay separate cells."""
    shown = [name if len(name) <= 16 else f"{name[:9]}…{name[-6:]}" for name in names]
    crowded = max(map(len, shown)) * len(shown) > 60 and max(map(len, shown)) > 2
    literals = ", ".join(f"'{''.join(map(_escaped, name))}'" for name in shown)
    return {"labelExpr": f"[{literals}][datum.value]", "labelAngle": turn if crowded else 0, "labelOverlap": True}


def _escaped(letter: str) -> str:
    """Return a letter of a string in the expression language of Vega; all but ASCII letters and digits are escaped."""
    if letter.isascii() and letter.isalnum():
        return letter
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


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
        at = np.linspace(0, len(values) - 1, max(len(values), SMOOTH_SIDE))
        below = np.minimum(at.astype(int), len(values) - 2)
        share, low, high = (at - below)[:, None], values[below], values[below + 1]
        # Where the share is 0 or 1, a gap at the other end must not spread.
        values = np.where(share == 0, low, np.where(share == 1, high, (1 - share) * low + share * high)).T
    return values


def _levels(low: float, high: float, log: bool) -> list[float]:
    """Return at most about eight round numbers between two values."""
    if not low < high:
        return []
    step = round_step((high - low) / 8)
    levels = [k * step for k in range(math.floor(low / step), math.ceil(high / step) + 1)]
    if log and high / low > 10:
        levels = [level for ten in decades(low / 10, high) for level in (ten, 3 * ten)]
    return [level for level in levels if low < level < high]


def _ends(values: NDArray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def _extremes(values: NDArray) -> list[tuple[str, int, int]]:
    """Return the row and column of the lowest and the highest value; empty if no value is finite."""
    if not np.isfinite(values).any():
        return []
    places = (("lowest", np.nanargmin(values)), ("highest", np.nanargmax(values)))
    return [(word, *divmod(int(at), values.shape[1])) for word, at in places]
