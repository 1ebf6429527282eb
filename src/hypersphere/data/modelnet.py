"""ModelNet10: furniture as point clouds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hypersphere.data._files import (
    DamagedData,
    accept_root_first,
    check_columns,
    data_root,
    find_file,
    read_arrays,
    require_choice,
)
from hypersphere.data.containers import PointClouds

COUNTS = {"train": 3991, "test": 908}
COORDINATE_SCALE = 32767  # coordinates in [-1, 1] are stored as int16, in half the size of float32
ADVICE = (
    "Put modelnet10_1024.npz in the folder modelnet10: points (N, 1024, 3) in the unit ball, times 32767, as int16; "
    "label, test (0 or 1) and classes."
)


@accept_root_first(*COUNTS)
def modelnet10(split: str = "train", root: str | Path | None = None, *, verify: bool = True) -> PointClouds:
    """Furniture as 1,024 points in the unit ball, 10 classes: 3,991 train and 908 test.

    Args:
        split: "train" or "test".
        root: contains the folder modelnet10 with modelnet10_1024.npz.
        verify: require the official number of shapes. The points are sampled, so there is no published checksum.
    """
    require_choice("split", split, COUNTS)
    path = find_file([data_root(root) / "modelnet10"], ("modelnet10_1024.npz",), ADVICE)
    arrays = read_arrays(path, ("points", "label", "test", "classes"))
    points, label = arrays["points"], arrays["label"]
    if points.dtype != np.int16 or points.ndim != 3 or points.shape[2] != 3:
        raise DamagedData(f"{path}: points must be int16 (N, P, 3), not {points.dtype} {points.shape}")
    check_columns(arrays, path, rows=len(points), integers=("label", "test"), label="label", names="classes")
    in_split = arrays["test"] == (split == "test")
    count = int(in_split.sum())
    if verify and count != COUNTS[split]:
        raise DamagedData(
            f"{path} must contain {COUNTS[split]} shapes for {split}, not {count}; pass verify=False to read it anyway"
        )
    classes = tuple(str(name) for name in arrays["classes"])  # str rather than np.str_
    clouds = torch.from_numpy(points[in_split].astype(np.float32) / COORDINATE_SCALE)
    return PointClouds(clouds, torch.from_numpy(label[in_split].astype(np.int64)), classes)
