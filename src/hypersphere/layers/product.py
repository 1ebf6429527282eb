r"""Inner products with all filters, and norms of all patches, from one look at the input.

‖x‖² of a patch is a sum over the window and the channels of a group. Channels are summed first, so that the window
is walked over one channel a group, by shifted sums: never a kernel of ones, never unfolded patches.

A convolution keeps its input for backward, and the squares need nothing more; their gradient is added to the
convolution's own in place. In eager mode that is a function of its own, elsewhere plain operations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import sphere

__all__ = [
    "Walk",
    "by_hand",
    "cache_chunks",
    "patch_norms",
    "products_and_squares",
    "require_first_order",
    "sample_peak",
]


def by_hand(*tensors: Tensor) -> bool:
    """Whether to take the backward that is written by hand: in eager mode, outside `torch.func`, with real numbers."""
    return sphere.inspectable(*tensors) and torch._C._functorch.peek_interpreter_stack() is None


def require_first_order() -> None:
    """Refuse to build a graph of a backward that is written by hand; without this the graph would silently be cut."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "decoupled layers have no gradient of the gradient in eager mode (create_graph=True): "
            "take it through torch.func, which uses plain operations"
        )


@dataclass(frozen=True)
class Walk:
    """How a convolution goes over its input, per dimension, with the same zeros on both sides; no dimension: linear."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ⟨w, patch⟩ for every filter and place."""
        if not self.kernel:
            return F.linear(x, weight)
        still = (0,) * len(self.kernel)
        return torch.convolution(x, weight, None, self.stride, self.padding, self.dilation, False, still, self.groups)

    def product_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what `gradient` of the product is for `x` and `weight`, as far as wanted."""
        if not self.kernel:
            return gradient @ weight if wanted[0] else None, gradient.mT @ x if wanted[1] else None
        still = [0] * len(self.kernel)
        to_x, to_weight, _ = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            still,
            self.groups,
            (*wanted, False),
        )
        return to_x, to_weight

    def window_sum(self, s: Tensor) -> Tensor:
        """Add up `s` (N, groups, …) over the window at each of its places: one box filter, a dimension at a time.

        >>> Walk((3,), (1,), (1,), (1,)).window_sum(torch.ones(1, 1, 4))
        tensor([[[2., 3., 3., 2.]]])
        """
        if any(self.padding):
            s = F.pad(s, [p for p in reversed(self.padding) for _ in range(2)])
        for dim, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            span = s.shape[dim] - dilation * (kernel - 1)
            starts = [tap * dilation for tap in range(kernel)]
            shifted = [torch.ops.aten.slice(s, dim, start, start + span, stride) for start in starts]
            s = functools.reduce(torch.add, shifted)
        return s


def products_and_squares(x: Tensor, weight: Tensor, walk: Walk) -> tuple[Tensor, Tensor, Tensor]:
    """Return ⟨w, patch⟩ (N, filters, …), Σ (scale·x)² over the channels of each group (N, groups, …), and the scale.

    The scale (N, 1, …) keeps the squares of a sample inside their type; it is 1 for ordinary numbers.
    """
    if by_hand(x, weight):
        return _ProductsAndSquares.apply(x, weight, walk)
    scale = sphere.safe_scale(sample_peak(x))
    return walk.product(x, weight), (x * scale).square().unflatten(1, (walk.groups, -1)).sum(2), scale


def sample_peak(x: Tensor) -> Tensor:
    """The largest absolute entry of each sample of `x` (N, …), as (N, 1, …) in float32 or wider."""
    flat = x.detach().flatten(1)
    peak = sphere.widen(torch.maximum(flat.amax(1), -flat.amin(1)))
    return peak.reshape(-1, *[1] * (x.ndim - 1))


def patch_norms(squares: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Turn Σ (scale·x)² (N, groups, …) into ‖x‖ and 1/‖x‖, both (N, groups, 1, …) and both 0 for a zero patch.

    >>> patch_norms(torch.tensor([[25.0], [0.0]]), torch.ones(2, 1))
    (tensor([[[5.]],
    <BLANKLINE>
            [[0.]]]), tensor([[[0.2000]],
    <BLANKLINE>
            [[0.0000]]]))
    """
    zero = sphere.vanishes(squares)
    length = squares.masked_fill(zero, 1.0).sqrt()
    norm, reciprocal = (length / scale).masked_fill(zero, 0.0), (scale / length).masked_fill(zero, 0.0)
    return norm.unsqueeze(2), reciprocal.unsqueeze(2)


def cache_chunks(x: Tensor) -> list[slice]:
    """Slices of a batch, each small enough for several passes to share the cache."""
    size = max(1, 2**17 * len(x) // max(1, x.numel()))
    return [slice(start, start + size) for start in range(0, len(x), size)]


class _ProductsAndSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, walk: Walk) -> tuple[Tensor, Tensor, Tensor]:
        products = walk.product(x, weight)
        scale = sphere.safe_scale(sample_peak(x))
        squares = torch.empty(len(x), walk.groups, *x.shape[2:], dtype=scale.dtype, device=x.device)
        for part in cache_chunks(x):
            scaled = x[part] * scale[part]
            torch.sum(scaled.mul_(scaled).unflatten(1, (walk.groups, -1)), 2, out=squares[part])
        ctx.save_for_backward(x, weight, scale)
        ctx.walk = walk
        ctx.mark_non_differentiable(scale)
        return products, squares, scale

    @staticmethod
    def backward(ctx: Any, to_products: Tensor, to_squares: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        require_first_order()
        x, weight, scale = ctx.saved_tensors
        groups = ctx.walk.groups
        to_x, to_weight = ctx.walk.product_gradients(to_products, x, weight, ctx.needs_input_grad[:2])
        if to_x is not None:
            factor = (2 * scale * to_squares).unsqueeze(2)
            for part in cache_chunks(x):
                scaled = x[part] * scale[part]  # the scale in two steps, because its square may leave the type
                to_x[part].unflatten(1, (groups, -1)).addcmul_(scaled.unflatten(1, (groups, -1)), factor[part])
        return to_x, to_weight, None
