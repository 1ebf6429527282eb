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
from hypersphere.data.content import read_arrays
from hypersphere.data.errors import DamagedData, check_choice
from hypersphere.data.labelled import LabelledImages
from hypersphere.data.root import data_root, find

SIDE = 105
ADVICE = (
    "Put omniglot.npz in the folder omniglot: bits (rows of 105x105 packed bits, ink=1), char, drawer, "
    "evaluation (0 or 1) and char_names."
)
CONTENT_SUM = "be1ad6e1423713d2ac32ac6c41464af879b2753b16570fd0283892b3948436f2"


def omniglot(
    root: str | Path | None = None, split: str = "background", *, size: int = 28, verify: bool = True
) -> LabelledImages:
    """Drawn characters, grey: 964 classes of 20 drawings (background) and 659 other classes (evaluation).

    Ink is 255, paper 0. Smaller sizes average the ink. Names are "alphabet/character/drawer".

    Args:
        root: holds the folder omniglot with omniglot.npz.
        split: "background" or "evaluation"; they share no character.
        size: height and width, 1..105.
        verify: compare the arrays with the published drawings; False reads any arrays of the same form.
    """
    check_choice("split", split, ("background", "evaluation"))
    require(1 <= size <= SIDE, "size", f"in 1..{SIDE}", size)
    path = find([data_root(root) / "omniglot"], ("omniglot.npz",), ADVICE)
    arrays = read_arrays(path, ("bits", "char", "drawer", "evaluation", "char_names"))
    _check(arrays, path, verify)
    rows = np.flatnonzero(arrays["evaluation"] == (split == "evaluation"))
    chars, names = arrays["char"][rows].astype(np.int64), arrays["char_names"]
    kinds, labels = np.unique(chars, return_inverse=True)
    return LabelledImages(
        _unpack(arrays["bits"][rows], size),
        torch.from_numpy(labels.astype(np.int64)),
        tuple(str(names[kind]) for kind in kinds),
        tuple(f"{names[char]}/{int(drawer):02d}" for char, drawer in zip(chars, arrays["drawer"][rows], strict=True)),
    )


def _check(arrays: dict[str, NDArray[Any]], path: Path, verify: bool) -> None:
    bits, width = arrays["bits"], (SIDE * SIDE + 7) // 8
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] != width:
        raise DamagedData(f"{path}: bits must be uint8 (N, {width}), not {bits.dtype} {bits.shape}")
    count = len(bits)
    for name in ("char", "drawer", "evaluation"):
        if arrays[name].shape != (count,) or arrays[name].dtype.kind not in "iub":
            raise DamagedData(
                f"{path}: {name} must be integers ({count},), not {arrays[name].dtype} {arrays[name].shape}"
            )
    if arrays["char_names"].ndim != 1:
        raise DamagedData(f"{path}: char_names must be one row of names, not shape {arrays['char_names'].shape}")
    char, known = arrays["char"], len(arrays["char_names"])
    if count and (char.min() < 0 or char.max() >= known):
        raise DamagedData(f"{path}: char must be in 0..{known - 1}, not {char.min()}..{char.max()}")
    if verify and content_sum(arrays) != CONTENT_SUM:
        raise DamagedData(f"{path} must hold the published drawings, not others; pass verify=False to read it anyway")


def content_sum(arrays: dict[str, NDArray[Any]]) -> str:
    """SHA-256 of the drawings and their labels, whatever the compression and the integer types of the file."""
    digest = hashlib.sha256(np.ascontiguousarray(arrays["bits"]).tobytes())
    for name in ("char", "drawer", "evaluation"):
        digest.update(arrays[name].astype("<i4").tobytes())
    return digest.hexdigest()


def _unpack(bits: NDArray[Any], size: int) -> Tensor:
    """Drawings (N, 1, size, size), a thousand at a time to stay small in memory."""
    parts = [torch.empty(0, 1, size, size, dtype=torch.uint8)]
    for start in range(0, len(bits), 1000):
        ink = np.unpackbits(bits[start : start + 1000], axis=1, count=SIDE * SIDE)
        images = torch.from_numpy(ink).reshape(-1, 1, SIDE, SIDE) * 255
        if size < SIDE:
            images = functional.adaptive_avg_pool2d(images.float(), size).round().to(torch.uint8)
        parts.append(images)
    return torch.cat(parts)
