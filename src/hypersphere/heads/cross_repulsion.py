r"""Repulsion of some rows by a block of class vectors, for energies whose class vectors lie in several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypersphere import sphere
from hypersphere.functions.potential import PairPotential

__all__ = ["cross_repulsion"]

_PAIRS_AT_ONCE = 2**20


def cross_repulsion(rows: Tensor, w: Tensor, own: Tensor, potential: PairPotential) -> Tensor:
    r"""Σ_i Σ_j φ(cos(rᵢ, wⱼ)) without the pairs in which wⱼ is rᵢ itself, in memory that does not grow with pairs.

    Args:
        rows: (B, d), in float32 or wider.
        w: (N, d), of the same type.
        own: (B,) which wⱼ each row is; −1 for none.
        potential: φ.

    Example:
        >>> cross_repulsion(torch.eye(3)[:1], torch.eye(3), torch.tensor([0]), PairPotential())
        tensor(1.)
    """
    with sphere.full_precision(rows):
        return _Cross.apply(sphere.polar(rows)[1], w, own, potential)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, units: Tensor, w: Tensor, own: Tensor, potential: PairPotential) -> Tensor:
        total, d_units, d_w = units.new_zeros(()), torch.zeros_like(units), torch.empty_like(w)
        size = max(256, _PAIRS_AT_ONCE // max(len(units), 1))
        for start in range(0, len(w), size):
            block = slice(start, min(start + size, len(w)))
            length, unit = sphere.polar(w[block])
            c = units @ unit.mT
            itself = own[:, None] == torch.arange(block.start, block.stop, device=w.device)
            value, slope = (part.masked_fill(itself, 0.0) for part in potential.with_slope(c))
            total += value.sum()
            d_units.addmm_(slope, unit)
            across = slope.mT @ units - (slope * c).sum(0).unsqueeze(1) * unit
            d_w[block] = torch.where(length > 0, across / length.masked_fill(length == 0, 1), 0)
        ctx.save_for_backward(d_units, d_w)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_units, d_w = ctx.saved_tensors
        return outer * d_units, outer * d_w, None, None
