r"""How a convolution goes over its input: inner products with all filters, sums over all windows, and their transposes.

‖x‖² of a patch is a sum over the window and the channels of a group. Channels are summed first, so that the window
is walked over one channel a group, by shifted sums: never a kernel of ones, never unfolded patches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Walk"]


@dataclass(frozen=True)
class Walk:
    """The way of a convolution, per dimension, with the same zeros on both sides; no dimension: a linear layer."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def numbers(self) -> list[int]:
        """All of it in one list, as operators of torch take it."""
        return [self.groups, *self.kernel, *self.stride, *self.padding, *self.dilation]

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> Walk:
        """Make the walk of such a list.

        >>> Walk.of_numbers(Walk((3,), (2,), (1,), (1,)).numbers())
        Walk(kernel=(3,), stride=(2,), padding=(1,), dilation=(1,), groups=1)
        """
        groups, *rest = numbers
        count = len(rest) // 4
        kernel, stride, padding, dilation = (tuple(rest[i * count : (i + 1) * count]) for i in range(4))
        return cls(kernel, stride, padding, dilation, groups)

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

    def window_spread(self, s: Tensor, size: torch.Size) -> Tensor:
        """Add up `s` (N, groups, …) over the windows that a place of an input of that `size` lies in: the transpose.

        >>> Walk((3,), (2,), (1,), (1,)).window_spread(torch.ones(1, 1, 2), torch.Size([4]))
        tensor([[[1., 2., 1., 1.]]])
        """
        for dim, (length, kernel, stride, padding, dilation) in enumerate(
            zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True), 2
        ):
            padded = length + 2 * padding
            span = padded - dilation * (kernel - 1)
            spread = s.new_zeros(*s.shape[:dim], padded, *s.shape[dim + 1 :])
            for start in range(0, kernel * dilation, dilation):
                torch.ops.aten.slice(spread, dim, start, start + span, stride).add_(s)
            s = spread.narrow(dim, padding, length)
        return s
