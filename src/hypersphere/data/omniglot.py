"""Omniglot: 1,623 characters of 50 alphabets, each drawn once by 20 people."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hypersphere._validation import require
from hypersphere.data._files import (
    DamagedData,
    accept_root_first,
    data_root,
    find_file,
    read_arrays,
    require_choice,
)
from hypersphere.data.containers import LabelledImages

SPLITS = ("background", "evaluation")
SIDE = 105  # height and width of the drawings in the file
ADVICE = (
    "Put omniglot.npz in the folder omniglot: bits (rows of 105x105 packed bits, ink=1), char, drawer, "
    "evaluation (0 or 1) and char_names."
)
CONTENT_SHA256 = "be1ad6e1423713d2ac32ac6c41464af879b2753b16570fd0283892b3948436f2"


@accept_root_first(*SPLITS)
def omniglot(
    split: str = "background", root: str | Path | None = None, *, size: int = 28, verify: bool = True
) -> LabelledImages:
    """Drawn characters, grey: 964 classes of 20 drawings (background) and 659 other classes (evaluation).

    Ink is 255, paper 0. Smaller sizes average the ink. Names are "alphabet/character/drawer".

    Args:
        split: "background" or "evaluation"; they share no character.
        root: contains the folder omniglot with omniglot.npz.
        size: height and width, 1..105.
        verify: compare the arrays with the published drawings; False reads any arrays of the same format.
    """
    require_choice("split", split, SPLITS)
    require(1 <= size <= SIDE, "size", f"in 1..{SIDE}", size)
    path = find_file([data_root(root) / "omniglot"], ("omniglot.npz",), ADVICE)
    arrays = read_arrays(path, ("bits", "char", "drawer", "evaluation", "char_names"))
    _check_arrays(arrays, path)
    if verify and _content_sha256(arrays) != CONTENT_SHA256:
        raise DamagedData(f"{path} must contain the published drawings; pass verify=False to read it anyway")
    rows = np.flatnonzero(arrays["evaluation"] == (split == "evaluation"))
    chars, names = arrays["char"][rows].astype(np.int64), arrays["char_names"]
    # The file numbers all 1,623 characters; labels number those of the split.
    split_chars, labels = np.unique(chars, return_inverse=True)
    return LabelledImages(
        _unpack(arrays["bits"][rows], size),
        torch.from_numpy(labels.astype(np.int64)),
        tuple(str(names[char]) for char in split_chars),
        tuple(f"{names[char]}/{int(drawer):02d}" for char, drawer in zip(chars, arrays["drawer"][rows], strict=True)),
    )


def _check_arrays(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """Raise DamagedData unless all arrays have the documented types and shapes."""
    bits, row_bytes = arrays["bits"], (SIDE * SIDE + 7) // 8
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] != row_bytes:
        raise DamagedData(f"{path}: bits must be uint8 (N, {row_bytes}), not {bits.dtype} {bits.shape}")
    count = len(bits)
    for name in ("char", "drawer", "evaluation"):
        array = arrays[name]
        if array.shape != (count,) or array.dtype.kind not in "iub":
            raise DamagedData(f"{path}: {name} must be integers ({count},), not {array.dtype} {array.shape}")
    char, names = arrays["char"], arrays["char_names"]
    if names.ndim != 1:
        raise DamagedData(f"{path}: char_names must be a 1-d array of names, not of shape {names.shape}")
    if count and (char.min() < 0 or char.max() >= len(names)):
        raise DamagedData(f"{path}: char must be in 0..{len(names) - 1}, not {char.min()}..{char.max()}")


def _content_sha256(arrays: dict[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of drawings and labels, which does not depend on compression and integer types."""
    digest = hashlib.sha256(np.ascontiguousarray(arrays["bits"]).tobytes())
    for name in ("char", "drawer", "evaluation"):
        digest.update(arrays[name].astype("<i4").tobytes())
    return digest.hexdigest()


def _unpack(bits: NDArray[Any], size: int) -> Tensor:
    """Return the drawings as (N, 1, size, size), unpacked a thousand at a time to save memory."""
    parts = [torch.empty(0, 1, size, size, dtype=torch.uint8)]
    for start in range(0, len(bits), 1000):
        ink = np.unpackbits(bits[start : start + 1000], axis=1, count=SIDE * SIDE)
        images = torch.from_numpy(ink).reshape(-1, 1, SIDE, SIDE) * 255
        if size < SIDE:
            images = functional.adaptive_avg_pool2d(images.float(), size).round().to(torch.uint8)
        parts.append(images)
    return torch.cat(parts)
