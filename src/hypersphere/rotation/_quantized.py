r"""Fixed neurons stored as 8-bit integers: v ≈ s·q with q in −127…127 and one scale s = max|v|/127 per neuron.

`Int8Neurons` is the first parametrisation of a quantised weight, and rotations follow it. The layer then stores the
integers as `parametrizations.weight.original0` and the scales as `parametrizations.weight.original1`. The neurons are
computed from them whenever the weight is read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import WeightPart

__all__ = ["Int8Neurons", "int8_linear"]

_LARGEST = 127  # −128 is not used, so that v and −v have opposite integers


class Int8Neurons(nn.Module):
    """Store a weight as integers with one scale per neuron.

    The rounding error of an entry is at most half a scale, max|v|/254 of its neuron v. For neurons with normally
    distributed entries this is about 1 % of the norm.

    Args:
        part: where the weight stores its neurons.
    """

    def __init__(self, part: WeightPart) -> None:
        super().__init__()
        self.orientation, self.stacked = part.orientation, part.stacked

    def right_inverse(self, weight: Float[Tensor, "..."]) -> tuple[Int8[Tensor, "..."], Float[Tensor, "..."]]:
        """Return the integers, and the scales in the dtype of the weight."""
        wide = _numerics.widen(weight.detach())
        largest = wide.abs().amax(self._dimensions_of_a_neuron(weight.ndim), keepdim=True)
        # The scale is rounded to the dtype of the weight first. The integers then fit the rounded scale.
        scale = _numerics.narrow(largest / _LARGEST, weight.dtype)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        integers = (wide / scale.to(wide.dtype)).round().clamp(-_LARGEST, _LARGEST)
        return integers.to(torch.int8), scale

    def forward(self, integers: Int8[Tensor, "..."], scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the neurons in the dtype of the scales."""
        return integers.to(scale.dtype) * scale

    def _dimensions_of_a_neuron(self, ndim: int) -> tuple[int, ...]:
        if self.orientation == "columns":  # (…, in, out)
            return (ndim - 2,)
        if self.stacked:  # (experts, out, in)
            return (2,)
        # (in, out, …) of a transposed convolution, whose groups share the scales, or (out, in, …)
        counts_neurons = 1 if self.orientation == "transposed" else 0
        return tuple(dim for dim in range(ndim) if dim != counts_neurons)


def int8_linear(
    x: Float[Tensor, "*batch d"],
    integers: Int8[Tensor, "n d"],
    scale: Float[Tensor, "n 1"],
    bias: Float[Tensor, " n"] | None,
) -> Float[Tensor, "*batch n"]:
    """Return x·Vᵀ + bias for quantised neurons V. No copy of V in floating point is kept for the backward pass."""
    if (
        torch.is_autocast_enabled(x.device.type)
        or x.dtype != scale.dtype
        or not _numerics.custom_backward_allowed(x, integers, scale)
    ):
        return F.linear(x, integers.to(scale.dtype) * scale, bias)
    y = _Int8Linear.apply(x, integers, scale)
    return y if bias is None else y + bias


class _Int8Linear(torch.autograd.Function):
    """x·Vᵀ for fixed neurons V = s·q."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(integers, scale)
        return x @ (integers.to(scale.dtype) * scale).mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        integers, scale = ctx.saved_tensors
        with _numerics.autocast_disabled(grad):
            return grad @ (integers.to(scale.dtype) * scale), None, None
