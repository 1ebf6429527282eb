"""Colours: ten for classes, which colour-blind readers can distinguish, generated ones, and sequential scales."""

from __future__ import annotations

import colorsys

import numpy as np
from numpy.typing import NDArray

# Chosen to maximise the smallest OKLab distance between two colours, for normal, protan, deutan and tritan vision,
# among colours with enough contrast to both a white and a near-black background.
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

# Sequential scale from indigo to mint in equal OKLab steps; the lightness, which everyone perceives, is monotone.
SCALE = ("#1f1a38", "#2b2e64", "#27498e", "#116aa9", "#198cb6", "#21aec4", "#4ececb", "#9ce6d0", "#defae6")
# From blue to amber with slowly increasing lightness; all contrast with both backgrounds.
ORDER = ("#2055be", "#7851c6", "#b450b0", "#e05785", "#f8704b", "#f09c18")

GOLDEN_TURN = 0.6180339887498949  # each new hue falls into the largest remaining gap


def class_colors(count: int) -> tuple[str, ...]:
    """Return one hexadecimal colour per class; the first ten do not depend on `count`.

    >>> class_colors(2)
    ('#0f5bd8', '#e16513')
    >>> len(set(class_colors(100)))
    100
    """
    generated = []
    for index in range(count - len(TEN_COLORS)):
        hue, lightness = (0.07 + index * GOLDEN_TURN) % 1.0, (0.42, 0.58, 0.50)[index % 3]
        generated.append(_hexadecimal(255 * np.array(colorsys.hls_to_rgb(hue, lightness, 0.62))))
    return (*TEN_COLORS[:count], *generated)


def ordered_colors(count: int) -> tuple[str, ...]:
    """Return colours from blue to amber, for ordered series.

    >>> ordered_colors(3)
    ('#2055be', '#ca549a', '#f09c18')
    """
    return tuple(map(_hexadecimal, interpolated_colors(ORDER, np.linspace(0, 1, count))))


def interpolated_colors(scale: tuple[str, ...], shares: NDArray) -> NDArray:
    """Return the colours (…, 3) of a scale at shares (…) of its length, with channels from 0 to 255.

    >>> interpolated_colors(SCALE, np.array([0.0, 1.0]))
    array([[ 31.,  26.,  56.],
           [222., 250., 230.]])
    """
    anchors = np.array([list(bytes.fromhex(color[1:])) for color in scale], dtype=np.float64)
    positions = np.linspace(0, 1, len(scale))
    return np.stack([np.interp(shares, positions, channel) for channel in anchors.T], axis=-1)


def _hexadecimal(channels: NDArray) -> str:
    return "#" + bytes(np.round(channels).astype(np.uint8).tolist()).hex()
