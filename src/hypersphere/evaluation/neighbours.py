"""The nearest entries of a gallery, found block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.evaluation.arrays import blocks

__all__ = ["nearest"]


def nearest(x: Tensor, entries: Sequence[Tensor], k: int, block: int, probes: int) -> Tensor:
    """The k entries with the highest cosine for each unit row of x, best first, numbered through all of `entries`.

    >>> nearest(torch.eye(2), [torch.tensor([[0.0, 2.0], [3.0, 1.0]]), torch.eye(2)], 2, block=2, probes=1)
    tensor([[2, 1],
            [0, 3]])
    """
    best = x.new_full((len(x), k), -math.inf)
    found = torch.zeros(len(x), k, dtype=torch.int64, device=x.device)
    number = 0
    for rows in entries:
        for _, piece in blocks(rows, block):
            w = sphere.row_directions(piece.to(x))
            for first, some in blocks(x, probes):
                here = slice(first, first + len(some))
                scores, place = (some @ w.mT).topk(min(k, len(w)), dim=1)
                scores, order = torch.cat([best[here], scores], 1).sort(dim=1, descending=True, stable=True)
                best[here] = scores[:, :k]
                found[here] = torch.cat([found[here], place + number], 1).gather(1, order[:, :k])
            number += len(w)
    return found
