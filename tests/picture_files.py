"""Small image files for the tests of sources."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def pixels(seed, height=8, width=8, channels=3):
    """Return random pixels (H, W, C), or (H, W) for one channel."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return values if channels == 3 else values[..., 0]


def encoded(values, kind="PNG", **options):
    """Return the bytes of an image file; PNG and BMP keep the pixels exactly."""
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, kind, **options)
    return buffer.getvalue()


def write_tree(root: Path, counts: dict, *, size=(8, 8), channels=3, kind="PNG") -> dict:
    """Write CLASS/NUMBER.png files; return their pixels by name."""
    written = {}
    for at, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            values = pixels(1000 * at + number, *size, channels)
            file = f"{number:03d}.{kind.lower()}"
            (root / name / file).write_bytes(encoded(values, kind))
            written[f"{name}/{file}"] = values
    return written
