"""Colours of classes: ten that most colour-blind readers can tell apart, then as many as are asked for."""

from __future__ import annotations

import colorsys

# Found by maximising the smallest OKLab distance between any two, as seen with normal, protan, deutan and tritan eyes,
# over colours that stand out from white and from near-black paper alike.
TEN_COLORS = (
    "#0f5bd8",
    "#e16513",
    "#0ca171",
    "#b20100",
    "#957aff",
    "#cbb508",
    "#fb81bf",
    "#3cbeff",
    "#a2249a",
    "#00624e",
)

GOLDEN_TURN = 0.6180339887498949  # successive hues fall into the largest gap left


def class_colors(count: int) -> tuple[str, ...]:
    """Return one hexadecimal colour a class; the first ten never change with `count`.

    >>> class_colors(2)
    ('#0f5bd8', '#e16513')
    >>> len(set(class_colors(100)))
    100
    """
    return TEN_COLORS[:count] + tuple(_generated(index) for index in range(count - len(TEN_COLORS)))


def _generated(index: int) -> str:
    hue = (0.07 + index * GOLDEN_TURN) % 1.0
    lightness = (0.42, 0.58, 0.50)[index % 3]
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
