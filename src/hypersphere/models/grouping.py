"""Neighbourhoods in a cloud of points: which points stand for the rest, and what lies around them."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere._validation import require

__all__ = ["ball_query", "farthest_points", "gather"]


@torch.no_grad()
def farthest_points(points: Tensor, count: int) -> Tensor:
    """Indices (B, count) of points that are far apart: from the first on, each is the farthest from those before.

    >>> farthest_points(torch.tensor([[[0.0], [1.0], [5.0], [2.0]]]), 3)
    tensor([[0, 2, 3]])
    """
    require(1 <= count <= points.shape[1], "count", f"a number from 1 to the {points.shape[1]} points", count)
    batch = torch.arange(len(points), device=points.device)
    chosen = torch.zeros(len(points), count, dtype=torch.int64, device=points.device)
    nearest = torch.full(points.shape[:2], torch.inf, dtype=points.dtype, device=points.device)
    for place in range(1, count):
        last = points[batch, chosen[:, place - 1]].unsqueeze(1)
        nearest = torch.minimum(nearest, (points - last).square().sum(2))
        chosen[:, place] = nearest.argmax(1)
    return chosen


@torch.no_grad()
def ball_query(points: Tensor, centres: Tensor, radius: float, count: int) -> Tensor:
    """Indices (B, M, count) of the first points within a radius of each centre; the first one again where fewer are.

    Every centre must be a point, so there is always one.

    >>> ball_query(torch.tensor([[[0.0], [1.0], [5.0]]]), torch.tensor([[[0.5], [5.0]]]), 1.0, 2)
    tensor([[[0, 1],
             [2, 2]]])
    """
    far = torch.cdist(centres, points, compute_mode="donot_use_mm_for_euclid_dist") >= radius
    beyond = points.shape[1]
    index = torch.arange(beyond, device=points.device).expand(far.shape).masked_fill(far, beyond)
    index = index.topk(min(count, beyond), largest=False, sorted=True).values
    return torch.where(index == beyond, index[..., :1], index)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """The rows (B, …, C) of values (B, N, C) at indices (B, …).

    >>> gather(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[2, 0]]))
    tensor([[[3.],
             [1.]]])
    """
    batch = torch.arange(len(values), device=values.device).reshape(-1, *[1] * (index.ndim - 1))
    return values[batch, index]
