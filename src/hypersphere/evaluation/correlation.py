"""Rank correlation of two measurements of the same samples."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere.evaluation._arrays import Array, as_scores

__all__ = ["rank_correlation"]


def rank_correlation(first: Array, second: Array) -> float:
    """Return Spearman's rank correlation: the correlation of the ranks, with the mean rank for equal values.

    It is NaN if all values of one side are equal.

    Args:
        first, second: (N,) measurements of the same N >= 2 samples.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 9.0, 100.0]), 6)
        1.0
    """
    a, b = as_scores("first", first), as_scores("second", second)
    if not len(a) == len(b) >= 2:
        raise ValueError(f"first and second must have the same length >= 2, not {len(a)} and {len(b)}")
    x, y = (ranks - ranks.mean() for ranks in (_mean_ranks(a), _mean_ranks(b)))
    scale = math.sqrt(float(x.square().sum() * y.square().sum()))
    return float(torch.dot(x, y)) / scale if scale > 0 else math.nan


def _mean_ranks(values: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Return ranks from 1; equal values share the mean of their ranks.

    >>> _mean_ranks(torch.tensor([3.0, 1.0, 3.0]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[index]
