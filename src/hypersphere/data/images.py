"""Read and decode one image file. Oversized, damaged and unexpected files are refused."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from hypersphere._validation import is_integer, printable, require, require_package
from hypersphere.data._files import DamagedData

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
# Formats that Pillow may decode, whatever the suffix. Some other decoders, such as PostScript, run external programs.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
MAX_IMAGE_BYTES = 64 * 2**20  # a compressed photo has a few MiB
MAX_IMAGE_PIXELS = 2**26  # 8,192 x 8,192; a small file can announce many more and fill the memory
FITS = ("stretch", "crop")
BILINEAR = 2  # PIL.Image.Resampling.BILINEAR

Size = int | tuple[int, int] | None


class BrokenSample(DamagedData):
    """One sample cannot be read or decoded; loading may skip it.

    Attributes:
        name: name of the sample, such as its path.
        reason: what is wrong with it.
        kind: what it should be, such as "image".
    """

    def __init__(self, name: str, reason: str, kind: str = "image") -> None:
        super().__init__(f"{printable(name)} is not a readable {kind}: {reason}")
        self.name, self.reason, self.kind = name, reason, kind

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes send the error to the main process.
        return BrokenSample, (self.name, self.reason, self.kind)


def as_floats(inputs: Tensor) -> Tensor:
    """Scale uint8 images to [0, 1]; return other inputs unchanged."""
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs


def is_image(path: PurePath) -> bool:
    """Return True if the name has the suffix of an image and does not begin with a dot."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def height_and_width(size: Size) -> tuple[int, int] | None:
    """Return `size` as (height, width), where an int means a square, or None."""
    pair = (size, size) if isinstance(size, int) else size
    fits = pair is None or (isinstance(pair, Sequence) and len(pair) == 2 and all(is_integer(s, 1) for s in pair))
    require(fits, "size", "a positive int, (height, width) or None", size)
    return None if pair is None else (int(pair[0]), int(pair[1]))


def read_image_file(path: Path, name: str | None = None) -> bytes:
    """Return the bytes of a file of at most MAX_IMAGE_BYTES; raise BrokenSample if it is larger or unreadable."""
    name = str(path) if name is None else name
    try:
        size = path.stat().st_size
        if size <= MAX_IMAGE_BYTES:
            with path.open("rb") as file:
                content = file.read(size)  # not the limit: `read(n)` allocates n bytes
    except OSError as error:
        raise BrokenSample(name, error.strerror or type(error).__name__) from error
    if size > MAX_IMAGE_BYTES:
        raise BrokenSample(name, f"it must have at most {MAX_IMAGE_BYTES} bytes, not {size}")
    return content


def decode_image(
    content: bytes,
    name: str,
    *,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
    fit: str = "stretch",
    fast: bool = False,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> UInt8[Tensor, "channels height width"]:
    """Decode an image to one or three channels.

    Args:
        content: the bytes of the file.
        name: name of the image, for error messages.
        size: (height, width) to resize to, or None.
        grey: True for one channel, False for three, None for one if the image is grey.
        fit: "stretch" changes the aspect ratio; "crop" keeps it and cuts off what is outside the centre.
        fast: let the JPEG decoder shrink by a power of two first, to no less than twice `size`.
        max_pixels: largest number of pixels. The header is checked before anything is decoded.

    Raises:
        BrokenSample: if the content is not an image, or has more than `max_pixels` pixels.
    """
    with _opened(content, name) as image:
        _check_header(image, max_pixels)
        if fast and size is not None:
            image.draft(None, (2 * size[1], 2 * size[0]))
        one_channel = is_grey(image) if grey is None else grey
        picture = image.convert("L" if one_channel else "RGB")
        if size is not None and picture.size != size[::-1]:  # Pillow's sizes are (width, height)
            box = _centre_box(picture.size, size) if fit == "crop" else None
            picture = picture.resize(size[::-1], BILINEAR, box=box)
        pixels = np.array(picture, dtype=np.uint8)
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def grey_in_header(content: bytes, name: str) -> bool:
    """Return True if the header announces a grey image; nothing is decoded."""
    with _opened(content, name) as image:
        return is_grey(image)


@contextmanager
def _opened(content: bytes, name: str) -> Iterator[Any]:
    """Open an image with Pillow; any error until it is closed becomes a BrokenSample."""
    pillow = require_package("PIL", "Pillow", "eval")
    image_module = require_package("PIL.Image", "Pillow", "eval")
    try:
        with image_module.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            yield image
    except pillow.UnidentifiedImageError as error:
        raise BrokenSample(name, f"it must be one of {', '.join(IMAGE_FORMATS)}") from error
    except Exception as error:  # a damaged image can raise almost any exception
        raise BrokenSample(name, str(error)) from error


def is_grey(image: Any) -> bool:
    """Return True if an open Pillow image is greyscale."""
    return image.mode in ("1", "L", "LA")


def _check_header(image: Any, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(f"it must have at most {max_pixels} pixels, not {width}x{height}")
    # Pillow would clip integers and floats to 0..255 without a warning.
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it must have 8 bits per channel, not mode {image.mode}")


def _centre_box(picture: tuple[int, int], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the largest centred box (left, top, right, bottom) of a picture with the aspect ratio of `size`."""
    width, height = picture
    scale = min(width / size[1], height / size[0])
    box_width, box_height = scale * size[1], scale * size[0]
    # Rounding can make the box larger than the picture, which Pillow rejects.
    left, top = max((width - box_width) / 2, 0.0), max((height - box_height) / 2, 0.0)
    return left, top, min(left + box_width, float(width)), min(top + box_height, float(height))
