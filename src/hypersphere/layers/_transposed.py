r"""Decoupled layers that store their weight with inputs first: transposed convolutions, and `Conv1D` of Hugging Face.

A transposed convolution with stride s is a convolution with stride 1 of an input that has s − 1 zeros between
neighbouring entries, by filters that are reversed along their kernel:

    weight (in, out/groups, *kernel)  →  filters (out, in/groups, *kernel), reversed
    input of length L                 →  (L − 1)·s + 1 entries, padded by dilation·(kernel − 1) − padding on either side

The decoupled operator is defined by this convolution. A patch has the norm of the entries that the window covers, and a
filter has all weights of one output channel, as `layers_of` reads them. The inserted zeros are multiplied, too, so a
converted layer takes about s times the multiplications per dimension of the transposed convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.jit._trace import is_tracing

from hypersphere._validation import require
from hypersphere.layers._geometry import ConvGeometry
from hypersphere.layers.decoupled import DecoupledLinear, SlidingWindowLayer

__all__ = [
    "DecoupledConvTranspose1d",
    "DecoupledConvTranspose2d",
    "DecoupledConvTranspose3d",
    "DecoupledTransposedLinear",
]


class DecoupledTransposedLinear(DecoupledLinear):
    """A decoupled linear layer with a weight (in, out), as `Conv1D` of Hugging Face stores it. `convert_` makes it."""

    def forward(self, x: Tensor) -> Float[Tensor, "..."]:
        """Return the responses to `x`. The argument has its name in `Conv1D`."""
        return super().forward(x)

    @property
    def _weight_as_filters(self) -> Tensor:
        return self.weight.mT

    def _filters_as_weight(self, filters: Tensor) -> Tensor:
        return filters.mT


class _DecoupledConvTranspose(SlidingWindowLayer):
    """Mixin of the three decoupled transposed convolutions, which `convert_` makes from torch's layers.

    `DecoupledLayer.forward` receives the spread input.
    """

    in_channels: int
    padding: Any
    _output_padding: Any

    @property
    def _weight_as_filters(self) -> Tensor:
        # Exchange inputs and outputs within each group, and reverse the kernel.
        stored = self.weight  # read once, because a parametrisation computes it each time
        groups, (channels, filters, *kernel) = self.groups, stored.shape
        weight = stored.reshape(groups, channels // groups, filters, *kernel).transpose(1, 2)
        return weight.reshape(groups * filters, channels // groups, *kernel).flip(self._kernel_dims)

    def _filters_as_weight(self, filters: Tensor) -> Tensor:
        groups, (count, channels, *kernel) = self.groups, filters.shape
        weight = filters.flip(self._kernel_dims).reshape(groups, count // groups, channels, *kernel).transpose(1, 2)
        return weight.reshape(groups * channels, count // groups, *kernel)

    @property
    def _kernel_dims(self) -> tuple[int, ...]:
        return tuple(range(2, 2 + len(self.kernel_size)))

    def forward(self, input: Float[Tensor, "..."], output_size: Sequence[int] | None = None) -> Float[Tensor, "..."]:
        """Return the responses to `input`. `output_size` selects one of the possible sizes, as in torch's layer."""
        x = input
        require(isinstance(x, Tensor), "input", "a tensor of a floating-point dtype", type(x))
        if not is_tracing():  # the spread input is larger, so it is checked before
            self._check_shape(x, self.in_channels // self.groups)
        dims = len(self.kernel_size)
        settings = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        batch = x.unsqueeze(0) if self._is_single_sample(x) else x
        y = super().forward(self._spread(batch, self._output_padding(batch, output_size, *settings)))
        return y if batch is x else y.squeeze(0)

    def _spread(self, x: Tensor, output_padding: Sequence[int]) -> Tensor:
        """Insert zeros between the entries of a batch, and pad it for a convolution without padding."""
        padding: list[int] = []  # pairs (before, after) in reverse order of the dimensions, the order of F.pad
        for i, dim in enumerate(self._kernel_dims):
            length, stride = x.shape[dim], self.stride[i]
            if stride > 1:
                # Append stride − 1 zeros to every entry in a new dimension, merge it, and drop the zeros at the end.
                x = F.pad(x.unsqueeze(dim + 1), (*[0, 0] * (x.ndim - dim - 1), 0, stride - 1)).flatten(dim, dim + 1)
                x = x.narrow(dim, 0, (length - 1) * stride + 1)
            edge = self.dilation[i] * (self.kernel_size[i] - 1) - self.padding[i]  # F.pad crops if it is negative
            padding = [edge, edge + output_padding[i], *padding]
        return F.pad(x, padding)

    def _inner_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        return convolve(x, weight, bias, 1, 0, self.dilation, self.groups)

    def _to_batch(self, x: Tensor) -> tuple[Tensor, ConvGeometry]:
        # `forward` has made a batch. `_spread` has applied the stride and the padding to it.
        ones, zeros = (1,) * len(self.kernel_size), (0,) * len(self.kernel_size)
        return x, ConvGeometry(self.kernel_size, ones, zeros, self.dilation, self.groups)

    def _from_batch(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class DecoupledConvTranspose1d(_DecoupledConvTranspose, nn.ConvTranspose1d):
    """A decoupled transposed convolution over sequences (N, C, L)."""


class DecoupledConvTranspose2d(_DecoupledConvTranspose, nn.ConvTranspose2d):
    """A decoupled transposed convolution over images (N, C, H, W)."""


class DecoupledConvTranspose3d(_DecoupledConvTranspose, nn.ConvTranspose3d):
    """A decoupled transposed convolution over volumes (N, C, D, H, W)."""
