"""Charts of matrices: heat maps, and landscapes with contour lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report._arrays import Array, as_numbers
from hypersphere.report._text import counted, short_names
from hypersphere.report._vega import altair, inline, make_chart
from hypersphere.report.images import png_uri
from hypersphere.report.palette import SCALE, interpolated_colors
from hypersphere.report.tables import Cell, Column, Table

__all__ = ["heat_map", "landscape"]

MOST_SIDE = 64  # cells per side; of larger matrices, evenly spaced rows and columns are drawn
MOST_WRITTEN = 12  # columns of a map whose cells show their numbers
MOST_LISTED = 240  # cells in the table of numbers
LONGEST_NAME = 18  # letters of a row or column name in a picture
PIXELS = 400  # per side of a landscape
LEVELS = 9  # a landscape has a contour line between two of these equal parts of its range
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
        'Heat map of angle, 1 × 2. Lowest: 1 (a, b). Highest: 2 (a, c).'
    """
    alt, matrix, column = altair(), as_numbers("values", values, 2), Column(value_name, None, format)
    require(min(matrix.shape) > 0, "values", "a matrix with at least one row and one column", matrix.shape)
    for name, given, count in zip(("rows", "columns"), (rows, columns), matrix.shape, strict=True):
        require(len(given) in (0, count), name, f"empty, or {count} names", len(given))
    height, width = matrix.shape
    rows = [str(name) for name in rows or range(height)]
    columns = [str(name) for name in columns or (rows if height == width else range(width))]
    drawn = [np.unique(np.linspace(0, side - 1, min(side, MOST_SIDE)).astype(int)) for side in matrix.shape]
    grid = matrix[np.ix_(*drawn)]
    row_names, column_names = (
        _distinct([names[i] for i in indices]) for names, indices in zip((rows, columns), drawn, strict=True)
    )
    low, high = limits or _ends(grid)
    cells = [
        {"row": row, "column": name, "y": value, "text": column.show(value)}
        for row, line in zip(row_names, grid.tolist(), strict=True)
        for name, value in zip(column_names, line, strict=True)
        if math.isfinite(value)
    ]
    gap = {"paddingInner": 0.02 if max(grid.shape) <= 40 else 0, "paddingOuter": 0}
    base = alt.Chart().encode(
        x=alt.X("column:O", title=column_name or None, axis=_axis(column_names), scale={"domain": column_names, **gap}),
        y=alt.Y("row:O", title=row_name or None, axis=_axis(), scale={"domain": row_names, **gap}),
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
            f"{counted(int(blank.sum()), 'cell')} without a finite value, left blank."
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
    """Return values on a regular grid over two directions as colours with contour lines.

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
    low, high = limits or _ends(matrix)
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
        notes=[f"{counted(gaps, 'point')} without a {'positive ' * log}finite value, left blank." * bool(gaps)],
        height=500,
        square=1.0,
    )


def _surface_png(matrix: NDArray, low: float, high: float, log: bool) -> str:
    """Return an image of interpolated values as colours, with a line where they cross a level; gaps are transparent."""
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
    """Return `PIXELS` rows by linear interpolation."""
    at = np.linspace(0, len(values) - 1, PIXELS)
    below = np.minimum(at.astype(int), len(values) - 2)
    share = (at - below)[:, None]
    return (1 - share) * values[below] + share * values[below + 1]


def _color(field: str, title: str, low: float, high: float, log: bool = False) -> Any:
    """Return the encoding of numbers as colours, with a colour bar above the map."""
    domain = [low, high] if low < high else [low - 0.5, low + 0.5]
    scale = {"type": "log" if log else "linear", "domain": domain, "range": list(SCALE), "clamp": True, "nice": False}
    bar = {"orient": "top", "direction": "horizontal", "gradientLength": 180, "gradientThickness": 10, "tickCount": 5}
    return altair().Color(f"{field}:Q", title=title or None, scale=scale, legend={**bar, "titleAnchor": "start"})


def _axis(names: Sequence[str] = ()) -> dict[str, Any]:
    """Return an axis whose labels are turned if they are long."""
    longest = max(map(len, names), default=0)
    is_crowded = longest * len(names) > 60 and longest > 2
    return {"labelAngle": -90 if is_crowded else 0, "labelOverlap": True, "labelLimit": 140}


def _distinct(names: Sequence[str]) -> list[str]:
    """Return short names; spaces at the end, which are invisible, make equal names distinct."""
    short = short_names(names, LONGEST_NAME)
    return [name + " " * short[:index].count(name) for index, name in enumerate(short)]


def _ends(values: NDArray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (1.0, 2.0)


def _extremes(values: NDArray) -> list[tuple[str, int, int]]:
    """Return the row and column of the lowest and the highest value; empty if no value is finite."""
    if not np.isfinite(values).any():
        return []
    places = (("lowest", np.nanargmin(values)), ("highest", np.nanargmax(values)))
    return [(word, *divmod(int(at), values.shape[1])) for word, at in places]
