"""Norms and directions of filters, with a backward that projects once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.layers.by_hand import by_hand, on_accelerator, require_first_order

__all__ = ["direction"]


class _Direction(torch.autograd.Function):
    """‖w‖ and ŵ of rows: ∂w = (∂ŵ − ⟨∂ŵ, ŵ⟩ŵ)/‖w‖ + ∂‖w‖·ŵ, and nothing for a zero row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        split = sphere.polar if on_accelerator(rows) else sphere.row_polar  # which looks at the numbers
        norm, unit = split(rows.detach())
        ctx.save_for_backward(norm, unit)
        ctx.dtype = rows.dtype
        return norm, unit

    @staticmethod
    def backward(ctx: Any, to_norm: Tensor, to_unit: Tensor) -> Tensor:
        require_first_order()
        norm, unit = ctx.saved_tensors
        reciprocal = norm.reciprocal().masked_fill(norm == 0, 0.0)
        along = torch.bmm(to_unit.unsqueeze(1), unit.unsqueeze(2)).squeeze(2)
        return (to_unit * reciprocal).addcmul_(unit, torch.addcmul(to_norm, along, reciprocal, value=-1)).to(ctx.dtype)


def direction(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split filters (K, …) into norms (K,) in float32 or wider and directions in the shape and type of `weight`."""
    rows = weight.flatten(1)
    norm, unit = _Direction.apply(rows) if by_hand(weight) else sphere.polar(rows)
    return norm.flatten(), unit.to(weight.dtype).view_as(weight)
