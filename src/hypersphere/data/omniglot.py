"""Omniglot: 1,623 characters of 50 alphabets, each drawn once by 20 people."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hypersphere._validation import require
from hypersphere.data._files import (
    DamagedData,
    accept_root_first,
    check_columns,
    data_root,
    find_file,
    read_arrays,
    require_choice,
)
from hypersphere.data.containers import LabelledImages

SPLITS = ("background", "evaluation")
CONTENT_SHA256 = "be1ad6e1423713d2ac32ac6c41464af879b2753b16570fd0283892b3948436f2"  # see _content_sha256
SIDE = 105  # height and width of the drawings in the file
ADVICE = (
    "Put omniglot.npz in the folder omniglot: bits (rows of 105x105 packed bits, ink=1), char, drawer, "
    "evaluation (0 or 1) and char_names."
)


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
    bits, row_bytes = arrays["bits"], (SIDE * SIDE + 7) // 8
    if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] != row_bytes:
        raise DamagedData(f"{path}: bits must be uint8 (N, {row_bytes}), not {bits.dtype} {bits.shape}")
    columns = ("char", "drawer", "evaluation")
    check_columns(arrays, path, rows=len(bits), integers=columns, label="char", names="char_names")
    if verify and _content_sha256(arrays) != CONTENT_SHA256:
        raise DamagedData(f"{path} must contain the published drawings; pass verify=False to read it anyway")
    rows = np.flatnonzero(arrays["evaluation"] == (split == "evaluation"))
    chars, names = arrays["char"][rows].astype(np.int64), arrays["char_names"]
    # The file numbers all 1,623 characters; labels number those of the split.
    split_chars, labels = np.unique(chars, return_inverse=True)
    return LabelledImages(
        _unpack(bits[rows], size),
        torch.from_numpy(labels.astype(np.int64)),
        tuple(str(names[char]) for char in split_chars),
        tuple(f"{names[char]}/{int(drawer):02d}" for char, drawer in zip(chars, arrays["drawer"][rows], strict=True)),
    )


def _content_sha256(arrays: dict[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of drawings and labels.

    The file itself has no fixed checksum, because it depends on the compression and on the integer types.
    """
    digest = hashlib.sha256(np.ascontiguousarray(arrays["bits"]).tobytes())
    for name in ("char", "drawer", "evaluation"):
        digest.update(arrays[name].astype("<i4").tobytes())
    return digest.hexdigest()


def _unpack(bits: NDArray[Any], size: int) -> Tensor:
    """Return the drawings as (N, 1, size, size), unpacked in blocks of 1,000 to save memory."""
    parts = [torch.empty(0, 1, size, size, dtype=torch.uint8)]  # `cat` needs at least one tensor
    for start in range(0, len(bits), 1000):
        ink = np.unpackbits(bits[start : start + 1000], axis=1, count=SIDE * SIDE)
        images = torch.from_numpy(ink).reshape(-1, 1, SIDE, SIDE) * 255
        if size < SIDE:
            # The size need not divide 105, so windows overlap; each pixel is the mean ink of its window.
            images = F.adaptive_avg_pool2d(images.float(), size).round().to(torch.uint8)
        parts.append(images)
    return torch.cat(parts)
