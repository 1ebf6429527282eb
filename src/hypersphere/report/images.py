"""Small images, for example the filters of a first layer."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require
from hypersphere.report._arrays import Array, as_numbers
from hypersphere.report._html import Displayable, element, escape

__all__ = ["Images"]

MOST_IMAGES = 256


@dataclass(frozen=True, eq=False, repr=False)
class Images(Displayable):
    """Weights as small images: mid-grey for 0, white and black for the largest magnitude of the image.

    Args:
        title: heading.
        images: grey images (N, H, W) or (N, 1, H, W), or colour images (N, 3, H, W).
        caption: text below the images.

    Example:
        >>> Images("First layer", np.ones((2, 3, 7, 7))).pixels.shape
        (2, 7, 7, 3)
    """

    title: str
    images: Array
    caption: str = ""

    def __post_init__(self) -> None:
        images = as_numbers("images", self.images, 3, 4)
        is_image = images.ndim == 3 or images.shape[1] in (1, 3)
        require(is_image, "images", "an array (N, H, W), (N, 1, H, W) or (N, 3, H, W)", images.shape)

    @property
    def pixels(self) -> NDArray:
        """The images as bytes: grey (N, H, W) or colour (N, H, W, 3)."""
        images = np.nan_to_num(as_numbers("images", self.images, 3, 4)[:MOST_IMAGES])
        if images.ndim == 4:
            images = images[:, 0] if images.shape[1] == 1 else np.moveaxis(images, 1, -1)
        peak = np.abs(images).max(axis=tuple(range(1, images.ndim)), keepdims=True, initial=0)
        scaled = np.divide(images, peak, out=np.zeros_like(images), where=peak > 0)
        return np.round(127.5 + 127.5 * scaled).astype(np.uint8)


def images_html(section: Images) -> str:
    """Return a grid of images as HTML."""
    pixels, count = section.pixels, len(section.images)
    size = f"{pixels.shape[1]} × {pixels.shape[2]} pixels in {'colour' if pixels.ndim == 4 else 'grey'}"
    images = "".join(f"<img src='{png_uri(picture)}' alt='' title='{index}'>" for index, picture in enumerate(pixels))
    truncated = f" The first {len(pixels)} of {count:,}." if len(pixels) < count else ""
    return (
        f"<div class='chart'><div class='filters' role='img' aria-label='{escape(section.title)}: {len(pixels)} images "
        f"of {size}.'>{images}</div>{element('p', 'caption', section.caption)}"
        f"<p class='note'>Each on its own scale; grey is 0.{truncated}</p></div>"
    )


def png_uri(pixels: NDArray) -> str:
    """Encode uint8 pixels, grey (H, W), RGB (H, W, 3) or RGBA (H, W, 4), as the data URI of a PNG.

    >>> png_uri(np.zeros((1, 1), dtype=np.uint8))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    height, width = pixels.shape[:2]
    # In a PNG, each row begins with the number of its filter; 0 means no filter.
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), pixels.reshape(height, -1)], axis=1)
    # Colour types of PNG: 0 is grey, 2 is RGB, 6 is RGBA.
    color_type = {1: 0, 3: 2, 4: 6}[pixels.size // (height * width)]
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()
