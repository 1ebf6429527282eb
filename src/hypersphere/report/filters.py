"""Filters of a first layer as small images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report.arrays import Array, as_numbers
from hypersphere.report.frame import chart_html, counted, shortened
from hypersphere.report.png import png_uri

MOST_FILTERS = 256  # number of filters shown
MOST_PIXELS = 64  # per side


@dataclass(frozen=True, eq=False)
class Filters:
    """Small images: mid-grey for a weight of 0, white and black for the largest weights.

    Args:
        title: heading.
        images: grey images (N, H, W) or (N, 1, H, W), or colour images (N, 3, H, W).
        names: text below each image, for example its learned k; optional.
        shared: use one scale for all images; otherwise each image has its own scale.
        caption: text below the images.

    Example:
        >>> Filters("First layer", np.ones((2, 3, 7, 7))).pixels.shape
        (2, 7, 7, 3)
    """

    title: str
    images: Array
    names: Sequence[str] = ()
    shared: bool = False
    caption: str = ""

    def __post_init__(self) -> None:
        images = as_numbers("images", self.images, 3, 4)
        accepted = "an array of shape (N, H, W), (N, 1, H, W) or (N, 3, H, W)"
        require(images.ndim == 3 or images.shape[1] in (1, 3), "images", accepted, images.shape)
        sides = images.shape[-2:]
        require(
            min(sides) >= 1 and max(sides) <= MOST_PIXELS,
            "images",
            f"images with 1 to {MOST_PIXELS} pixels per side",
            sides,
        )
        count = len(images)
        require(
            len(self.names) in (0, count),
            "names",
            f"empty, or one name for each of the {count} images",
            len(self.names),
        )

    @property
    def pixels(self) -> NDArray:
        """The images as bytes: grey (N, H, W) or colour (N, H, W, 3)."""
        images = as_numbers("images", self.images, 3, 4)[:MOST_FILTERS]
        if images.ndim == 4:
            images = images[:, 0] if images.shape[1] == 1 else np.moveaxis(images, 1, -1)
        images = np.nan_to_num(images)
        axes = None if self.shared else tuple(range(1, images.ndim))
        peak = np.abs(images).max(axis=axes, keepdims=True, initial=0)
        scaled = np.divide(images, peak, out=np.zeros_like(images), where=peak > 0)
        return np.round(127.5 + 127.5 * scaled).astype(np.uint8)


def filters_html(section: Filters) -> str:
    """Return a grid of images as HTML."""
    pixels, count = section.pixels, len(section.images)
    images = "".join(_image_html(section, index, picture) for index, picture in enumerate(pixels))
    notes = ["All on one scale." if section.shared else "Each on its own scale.", "Grey is 0."]
    if len(pixels) < count:
        notes.append(f"The first {len(pixels)} of {count:,}.")
    gaps = int((~np.isfinite(as_numbers("images", section.images, 3, 4))).sum())
    if gaps:
        notes.append(f"{counted(gaps, 'weight')} not finite, drawn as 0.")
    height, width = pixels.shape[1:3]
    kind = "colour" if pixels.ndim == 4 else "grey"
    alt = f"{section.title}: {counted(len(pixels), 'filter')} of {height} × {width} pixels in {kind}."
    named = " named" if section.names else ""
    picture = f"<div class='filters{named}' role='img' aria-label='{escape(alt)}'>{images}</div>"
    return chart_html(picture, notes=notes, caption=section.caption)


def _image_html(section: Filters, index: int, picture: NDArray) -> str:
    name = section.names[index] if section.names else ""
    words = f"<span>{escape(shortened(name, 12))}</span>" if name else ""
    title = escape(f"filter {index}{f': {name}' if name else ''}")
    return f"<div title='{title}'><img src='{png_uri(picture)}' alt=''>{words}</div>"
