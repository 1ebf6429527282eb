"""Encode pixels as PNG data URIs."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

GREY, COLOR, INDEXED = 0, 2, 3  # PNG colour types


def png_uri(pixels: NDArray, colors: NDArray | None = None) -> str:
    """Return a PNG as a data URI.

    Args:
        pixels: bytes (H, W) for grey or, with `colors`, indices where 0 is transparent; (H, W, 3) for colour.
        colors: bytes (K, 3) with K <= 255, the colours of the indices 1 to K.

    Example:
        >>> png_uri(np.zeros((1, 1), dtype=np.uint8))[:30]
        'data:image/png;base64,iVBORw0K'
    """
    height, width = pixels.shape[:2]
    kind = COLOR if pixels.ndim == 3 else GREY if colors is None else INDEXED
    rows = pixels.reshape(height, -1)
    unfiltered = np.concatenate([np.zeros((height, 1), dtype=np.uint8), rows], axis=1).tobytes()
    parts = [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))]
    if colors is not None:
        parts += [_chunk(b"PLTE", b"\0\0\0" + colors.tobytes()), _chunk(b"tRNS", b"\0")]
    parts += [_chunk(b"IDAT", zlib.compress(unfiltered, 9)), _chunk(b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
