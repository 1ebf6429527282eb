"""Checks of the features and labels that a head receives, and of the scores that it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import require

__all__ = [
    "NonFiniteScoresError",
    "check_features",
    "check_labels",
    "require_finite_scores",
    "require_labels",
    "without_ignored",
]


class NonFiniteScoresError(ValueError):
    """Finite features have scores that are not finite: class vectors diverged, or a score overflows."""


def check_features(x: Tensor, in_features: int) -> None:
    """Raise a `ValueError` unless `x` is a dense floating-point matrix with `in_features` columns."""
    require(isinstance(x, Tensor), "x", "a tensor of features", type(x).__name__)
    if x.ndim != 2 or x.shape[1] != in_features or not x.is_floating_point() or x.layout != torch.strided:
        raise ValueError(
            f"x must be dense floating-point features of shape (B, {in_features}), not {x.dtype} {tuple(x.shape)}"
        )


def check_labels(y: Tensor, batch: int) -> Tensor:
    """Return the labels in int64, or raise a `ValueError` unless `y` is a vector of `batch` integers.

    Values are not read. In a narrow dtype a label could equal an ignored one: -100 is 156 in uint8.
    """
    require(isinstance(y, Tensor), "y", "a tensor of labels", type(y).__name__)
    if y.shape != (batch,) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be {batch} integer labels, one per row of x, not {y.dtype} {tuple(y.shape)}")
    return y.long()


def require_labels(y: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise a `ValueError` that names the first label that is neither a class nor ignored."""
    if not _numerics.values_readable(y):
        return
    is_bad = (y != ignore_index) & ((y < 0) | (y >= num_classes))
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(f"y must be in [0, {num_classes}), but row {row} is {int(y[row])}")


def without_ignored(x: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    """Return the features with ignored rows set to zero, so that NaN in an ignored row has no effect."""
    return x.masked_fill((y == ignore_index).unsqueeze(1), 0)


def require_finite_scores(result: Tensor, x: Tensor, weight: Tensor) -> None:
    """Raise an error that names a row of the features or of the weight if a loss or score is not finite."""
    if not _numerics.values_readable(result) or bool(torch.isfinite(result.detach()).all()):
        return
    # Features first: if they are not finite, the input is wrong. Everything else means that training diverged.
    _numerics.require_finite_rows("x", x)
    try:
        _numerics.require_finite_rows("weight", weight)
    except ValueError as error:
        raise NonFiniteScoresError(str(error)) from None
    # All inputs are finite, so a product has overflowed, most likely in the row with the largest norm.
    norms = sphere.norm(_numerics.to_float64(x.detach()))
    row = int(norms.argmax())
    largest = float(sphere.norm(_numerics.to_float64(weight.detach())).max())
    raise NonFiniteScoresError(
        f"x must give scores that {result.dtype} can represent, but row {row} overflows: ‖x‖ = {norms[row]:.3g}, "
        f"and class vectors have norms up to {largest:.3g}"
    )
