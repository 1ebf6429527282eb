"""A batch is checked once, cheaply, before anything is computed from it."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import require

__all__ = ["check_features", "counted_rows"]


def check_features(x: Tensor, in_features: int) -> None:
    """Refuse what is not a matrix of features of the right length."""
    require(isinstance(x, Tensor), "x", "a tensor of features", type(x).__name__)
    if x.ndim != 2 or x.shape[1] != in_features or not x.is_floating_point() or x.layout != torch.strided:
        raise ValueError(
            f"x must be dense floating-point features of shape (B, {in_features}), not {x.dtype} {tuple(x.shape)}"
        )


def counted_rows(x: Tensor, y: Tensor, num_classes: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Return labels as int64, 0 where ignored, and which rows count (None: all); refuse labels that are no classes.

    While compiling or tracing the numbers cannot be looked at, and only the type and shape are checked.
    """
    require(isinstance(y, Tensor), "y", "a tensor of labels", type(y).__name__)
    if y.shape != x.shape[:1] or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be {len(x)} integer labels, one a row of x, not {y.dtype} {tuple(y.shape)}")
    y = y.long()
    if _numerics.values_readable(y):
        if not len(y):
            return y, None
        low, high = (int(v) for v in torch.aminmax(y))
        if low >= 0 and high < num_classes and not low <= ignore_index <= high:
            return y, None
    counted = y != ignore_index
    if _numerics.values_readable(y):
        bad = counted & ((y < 0) | (y >= num_classes))
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(f"y must lie in [0, {num_classes}), but row {row} is {int(y[row])}")
    return y.masked_fill(~counted, 0), counted
