"""ModelNet10: furniture as point clouds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hypersphere.data.content import read_arrays
from hypersphere.data.errors import DamagedData, check_choice
from hypersphere.data.labelled import PointClouds
from hypersphere.data.root import data_root, find

COUNTS = {"train": 3991, "test": 908}
SCALE = 32767
ADVICE = (
    "Put modelnet10_1024.npz in the folder modelnet10: points (N, 1024, 3) as int16 times 32767 in the unit ball, "
    "label, test (0 or 1) and classes."
)


def modelnet10(root: str | Path | None = None, split: str = "train", *, verify: bool = True) -> PointClouds:
    """Furniture as 1,024 points in the unit ball, 10 classes: 3,991 train and 908 test.

    Args:
        root: holds the folder modelnet10 with modelnet10_1024.npz.
        split: "train" or "test".
        verify: the official number of shapes must be there (points are sampled, so they have no published sum).
    """
    check_choice("split", split, COUNTS)
    path = find([data_root(root) / "modelnet10"], ("modelnet10_1024.npz",), ADVICE)
    arrays = read_arrays(path, ("points", "label", "test", "classes"))
    points, label, test = arrays["points"], arrays["label"], arrays["test"]
    if points.dtype != np.int16 or points.ndim != 3 or points.shape[2] != 3:
        raise DamagedData(f"{path}: points must be int16 (N, P, 3), not {points.dtype} {points.shape}")
    for name, array in (("label", label), ("test", test)):
        if array.shape != (len(points),) or array.dtype.kind not in "iub":
            raise DamagedData(f"{path}: {name} must be integers ({len(points)},), not {array.dtype} {array.shape}")
    names = arrays["classes"]
    if names.ndim != 1:
        raise DamagedData(f"{path}: classes must be one row of names, not shape {names.shape}")
    chosen = test == (split == "test")
    if verify and int(chosen.sum()) != COUNTS[split]:
        found = f"{path} must hold {COUNTS[split]} shapes for {split}, not {int(chosen.sum())}"
        raise DamagedData(f"{found}; pass verify=False to read it anyway")
    classes = tuple(str(name) for name in names)
    if len(label) and not 0 <= label.min() <= label.max() < len(classes):
        raise DamagedData(f"{path}: label must be in 0..{len(classes) - 1}, not {label.min()}..{label.max()}")
    cloud = torch.from_numpy(points[chosen].astype(np.float32) / SCALE)
    return PointClouds(cloud, torch.from_numpy(label[chosen].astype(np.int64)), classes)
