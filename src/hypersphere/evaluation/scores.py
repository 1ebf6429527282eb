"""Cosines of corresponding rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.evaluation.arrays import Array, as_features, as_scores, blocks

__all__ = ["cosine_scores"]


def cosine_scores(first: Array, second: Array, *, center: Array | None = None) -> Tensor:
    """Cosines of corresponding rows in float64, computed in blocks, after `center` (d,) is subtracted if given.

    >>> cosine_scores([[1.0, 0.0]], [[1.0, 1.0]])
    tensor([0.7071], dtype=torch.float64)
    """
    one = as_features("first", first)
    two = as_features("second", second, like=one).to(one.device)
    require(len(one) == len(two), "second", f"{len(one)} rows, as many as first", len(two))
    middle = torch.zeros(1, 1) if center is None else as_scores("center", center)[None]
    require(center is None or middle.shape[1] == one.shape[1], "center", f"{one.shape[1]} numbers", middle.shape[1])
    middle = middle.to(one.device)
    scores = [
        sphere.cosine(a.double() - middle, b.double() - middle)
        for (_, a), (_, b) in zip(blocks(one, 8192), blocks(two, 8192), strict=True)
    ]
    return torch.cat(scores)
