"""Numbers on a grid as an image: shared by heat maps and landscapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from hypersphere.report.arrays import mean_and_spread
from hypersphere.report.axis import Axis
from hypersphere.report.frame import fitting
from hypersphere.report.palette import scale_colors
from hypersphere.report.png import png_uri

MOST_SIDE = 200  # cells per side; larger grids are drawn as means of blocks
SHADES = 255
SHAPES = (0.4, 2.5)  # limits of the aspect ratio; cells are square between them


@dataclass(frozen=True)
class Label:
    """A label next to the picture at a position in [0, 1]; `narrow` ones are also shown on narrow screens."""

    place: float
    words: str
    narrow: bool = True


def shrunk(values: NDArray) -> tuple[NDArray, tuple[int, int]]:
    """Return at most 200 × 200 means of blocks, ignoring gaps, and the size of the blocks.

    >>> shrunk(np.arange(404.0)[None])[0][0, :2], shrunk(np.zeros((404, 7)))[1]
    (array([1., 4.]), (3, 1))
    """
    rows, columns = (max(1, math.ceil(side / MOST_SIDE)) for side in values.shape)
    values = _joined(_joined(values, rows).T, columns).T
    return values, (rows, columns)


def picture_uri(values: NDArray, axis: Axis) -> str:
    """Return an image with one pixel per cell; NaN is transparent, values beyond the axis get the colour of its end."""
    there = np.isfinite(values)
    if axis.log:
        there &= values > 0
    at = axis.place(np.where(there, values, axis.low)).clip(0, 1)
    return png_uri(np.where(there, 1 + np.round(at * (SHADES - 1)), 0).astype(np.uint8), scale_colors(SHADES))


def map_html(
    picture: str,
    alt: str,
    *,
    shape: float,
    most: float = 560,
    rows: Sequence[Label],
    columns: Sequence[Label],
    names: tuple[str, str] = ("", ""),
    upright: bool = False,
    smooth: bool = False,
    over: str = "",
) -> str:
    """Return the image with labels along its left and lower sides.

    Args:
        picture: URI of the image.
        alt: alternative text.
        shape: width divided by height.
        most: largest width in pixels.
        rows, columns: labels.
        names: names of the axes of the columns and of the rows.
        upright: rotate the labels of the columns by 90 degrees.
        smooth: interpolate colours.
        over: HTML drawn over the image.
    """
    gutter = max((len(label.words) for label in rows), default=0)
    foot = max((len(label.words) for label in columns), default=0) if upright else 0
    across = "".join(
        f"<span style='left:{100 * one.place:.2f}%'{_kind(one)}>{escape(one.words)}</span>" for one in columns
    )
    down = "".join(f"<span style='top:{100 * one.place:.2f}%'{_kind(one)}>{escape(one.words)}</span>" for one in rows)
    return (
        f"<div class='plot map' style='--gutter:{gutter}ch;--foot:{foot}ch;--shape:{shape:.4g};--most:{most:.0f}px'>"
        f"<p class='axis-name y' aria-hidden='true'>{escape(names[1])}</p><div class='area'>"
        f"<img src='{picture}' alt='{escape(alt)}'{' class=smooth' if smooth else ''}>{over}"
        f"<div class='ticks y' aria-hidden='true'>{down}</div>"
        f"<div class='ticks x{' upright' if upright else ''}' aria-hidden='true'>{across}</div>"
        f"<p class='axis-name x' aria-hidden='true'>{escape(names[0])}</p></div></div>"
    )


def bar_html(axis: Axis, name: str) -> str:
    """Return the colour bar with the ticks of the axis."""
    picture = png_uri(np.arange(1, SHADES + 1, dtype=np.uint8)[None], scale_colors(SHADES))
    ticks = "".join(
        f"<span style='left:{100 * axis.place(tick):.2f}%'{'' if narrow else ' class=wide'}>{escape(label)}</span>"
        for tick, label, narrow in zip(axis.ticks, axis.labels, fitting(axis), strict=True)
    )
    return (
        f"<div class='scale' aria-hidden='true'><span class='scale-name'>{escape(name)}</span>"
        f"<div class='scale-bar'><img src='{picture}' alt=''><div class='ticks x'>{ticks}</div></div></div>"
    )


def limited_shape(rows: int, columns: int) -> float:
    """Return width divided by height of an image of square cells, limited so that it is not a stripe."""
    return min(max(columns / rows, SHAPES[0]), SHAPES[1])


def _joined(values: NDArray, size: int) -> NDArray:
    """Return the means of each `size` rows."""
    if size == 1:
        return values
    short = -len(values) % size
    padded = np.concatenate([values, np.full((short, values.shape[1]), np.nan)])
    return mean_and_spread(padded.reshape(-1, size, values.shape[1]).swapaxes(0, 1))[0]


def _kind(label: Label) -> str:
    return "" if label.narrow else " class=wide"
