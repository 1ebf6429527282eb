r"""The geometry of a convolution: products with all filters, sums over all windows, and norms of patches and filters.

The squared norm of a patch is a sum over its window and over the channels of its group. Channels are summed first, so
that the window slides over one channel per group, and the window sum is computed by adding shifted slices. This never
convolves with a kernel of ones and never unfolds patches. A linear layer is the case without spatial dimensions: a
row is a patch.

Tensors with one number per patch have the shape (N, groups, 1, *places), which broadcasts with the responses
(N, groups, filters per group, *places).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import _numerics, sphere

__all__ = [
    "ConvGeometry",
    "MeasuredPatches",
    "batch_blocks",
    "filter_polar",
    "measure_patches",
    "split_batches",
]

# Entries of a block of inputs whose squares are summed together: half a megabyte in float32, which stays in cache.
SQUARES_BLOCK = 2**17


@dataclass(frozen=True)
class ConvGeometry:
    """Kernel, stride, symmetric zero padding and dilation per dimension, and groups. No dimension: a linear layer."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def to_list(self) -> list[int]:
        """Return all numbers in one list, the form in which a custom operator accepts them."""
        return [self.groups, *self.kernel, *self.stride, *self.padding, *self.dilation]

    @classmethod
    def from_list(cls, numbers: list[int]) -> ConvGeometry:
        """Invert `to_list`.

        >>> ConvGeometry.from_list(ConvGeometry((3,), (2,), (1,), (1,)).to_list())
        ConvGeometry(kernel=(3,), stride=(2,), padding=(1,), dilation=(1,), groups=1)
        """
        groups, *per_dimension = numbers
        dims = len(per_dimension) // 4
        kernel, stride, padding, dilation = (tuple(per_dimension[i * dims : (i + 1) * dims]) for i in range(4))
        return cls(kernel, stride, padding, dilation, groups)

    def split_filters(self, y: Tensor) -> Tensor:
        """View responses (N, filters, *places) as (N, groups, filters per group, *places)."""
        return y.unflatten(1, (self.groups, -1))

    def per_filter(self, values: Tensor) -> Tensor:
        """Shape one entry, or one per group or filter, to broadcast with (N, groups, filters per group, *places)."""
        ones = (1,) * len(self.kernel)
        return values.reshape(1, 1, *ones) if values.numel() == 1 else values.reshape(self.groups, -1, *ones)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the inner products of all filters with all patches, (N, filters, *places)."""
        if not self.kernel:
            return F.linear(x, weight)
        no_output_padding = (0,) * len(self.kernel)
        return torch.convolution(
            x, weight, None, self.stride, self.padding, self.dilation, False, no_output_padding, self.groups
        )

    def product_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `product` with respect to `x` and `weight`, or None where they are not needed."""
        if not self.kernel:
            return gradient @ weight if needed[0] else None, gradient.mT @ x if needed[1] else None
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.kernel),
            self.groups,
            (*needed, False),
        )
        return grad_x, grad_weight

    def window_sum(self, values: Tensor) -> Tensor:
        """Sum `values` (N, groups, *size) over the window at each place: a box filter, one dimension at a time.

        >>> ConvGeometry((3,), (1,), (1,), (1,)).window_sum(torch.ones(1, 1, 4))
        tensor([[[2., 3., 3., 2.]]])
        """
        if any(self.padding):
            values = F.pad(values, [p for p in reversed(self.padding) for _ in range(2)])
        for dim, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            # One slice per tap of the kernel: the entries that this tap meets as the window slides.
            span = values.shape[dim] - dilation * (kernel - 1)
            starts = [tap * dilation for tap in range(kernel)]
            slices = [torch.ops.aten.slice(values, dim, start, start + span, stride) for start in starts]
            values = functools.reduce(torch.add, slices)
        return values

    def window_spread(self, values: Tensor, size: torch.Size) -> Tensor:
        """Apply the transpose of `window_sum` to `values` (N, groups, *places) for an input of spatial shape `size`.

        Each entry of the result is the sum over all windows that contain it.

        >>> ConvGeometry((3,), (2,), (1,), (1,)).window_spread(torch.ones(1, 1, 2), torch.Size([4]))
        tensor([[[1., 2., 1., 1.]]])
        """
        for dim, (length, kernel, stride, padding, dilation) in enumerate(
            zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True), 2
        ):
            padded = length + 2 * padding
            span = padded - dilation * (kernel - 1)
            # The slices of `window_sum`, written instead of read. Windows overlap, so each tap adds to the result.
            spread = values.new_zeros(*values.shape[:dim], padded, *values.shape[dim + 1 :])
            for start in range(0, kernel * dilation, dilation):
                torch.ops.aten.slice(spread, dim, start, start + span, stride).add_(values)
            values = spread.narrow(dim, padding, length)  # the padding has no gradient
        return values


# Patch norms ---------------------------------------------------------------------------------------------------------


class MeasuredPatches(NamedTuple):
    """The input of the products with the filters, and the norms of its patches.

    The range scales are powers of two against overflow; the table at the top of `_operator` lists them. `x` is the
    scaled input. `reciprocal` is computed from `x`, because products of `x` times `reciprocal` are cosines. `norm` is
    computed from the input itself, because the magnitude depends on it. Therefore

        norm·reciprocal = (norm range scale)/(input range scale),

    which is 1 for ordinary inputs except in float16.

    Attributes:
        x: the input times the input range scale, (N, channels, *size).
        norm: norms of the patches of the input times the norm range scale, (N, groups, 1, *places), 0 for a zero patch.
        reciprocal: 1/norms of the patches of `x` in the same shape, 0 for a zero patch.
        square_range_scale: (N, 1, *ones).
    """

    x: Tensor
    norm: Tensor
    reciprocal: Tensor
    square_range_scale: Tensor


def measure_patches(x: Tensor, geometry: ConvGeometry, *, with_graph: bool) -> MeasuredPatches:
    """Measure all patches of `x` (N, channels, *size). The result is differentiable if `with_graph` is True.

    >>> measure_patches(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), ConvGeometry(), with_graph=False).norm.flatten()
    tensor([5., 0.])
    """
    measure = _measure_with_graph if with_graph else _measure_without_graph
    if x.dtype != torch.float16:
        return measure(x, geometry)
    # A product with a unit filter is at most ‖x‖ ≤ 128·√d for patches of d entries, below 65504 up to d = 260,000.
    # Therefore `absorb_response_factor` keeps unit filters in float16.
    input_range_scale = 128 * _numerics.unit_scale(_sample_peak(x))
    patches = measure((x * input_range_scale).to(x.dtype), geometry)
    return patches._replace(norm=patches.norm / input_range_scale.unsqueeze(1))


@torch.no_grad()
def _measure_without_graph(x: Tensor, geometry: ConvGeometry) -> MeasuredPatches:
    """Measure patches in blocks. Products are computed from `x` itself, so that it keeps its graph."""
    if torch.compiler.is_compiling():  # the compiler fuses ordinary operations into one pass
        patches, square_range_scale = _measure_with_graph(x, geometry), _numerics.safe_scale(_sample_peak(x))
        reciprocal = patches.reciprocal * square_range_scale.unsqueeze(1)
        return patches._replace(x=x, reciprocal=reciprocal, square_range_scale=square_range_scale)
    wide = _numerics.compute_dtype(x.dtype)
    squares = torch.empty(len(x), geometry.groups, *x.shape[2:], dtype=wide, device=x.device)
    square_range_scale = torch.empty(len(x), *[1] * (x.ndim - 1), dtype=wide, device=x.device)
    # The peak, the scaled block and its squares are computed while the block is in cache.
    for block in batch_blocks(SQUARES_BLOCK, x[:1].numel(), x):
        square_range_scale[block] = _numerics.safe_scale(_sample_peak(x[block]))
        scaled = x[block] * square_range_scale[block]  # a new tensor in float32 or wider, which the squares overwrite
        torch.sum(scaled.mul_(scaled).unflatten(1, (geometry.groups, -1)), 2, out=squares[block])
    norm, reciprocal = _norm_and_reciprocal(geometry.window_sum(squares), square_range_scale)
    return MeasuredPatches(x, norm, reciprocal, square_range_scale)


def _measure_with_graph(x: Tensor, geometry: ConvGeometry) -> MeasuredPatches:
    """Measure patches in differentiable operations. The input is scaled, so that squares have accurate gradients."""
    input_range_scale = _numerics.safe_scale(_sample_peak(x))
    scaled = (x * input_range_scale).to(x.dtype)  # exact, because the scale is a power of two
    squares = _numerics.widen(scaled).square().unflatten(1, (geometry.groups, -1)).sum(2)
    norm, reciprocal = _norm_and_reciprocal(geometry.window_sum(squares))
    return MeasuredPatches(
        scaled, norm / input_range_scale.unsqueeze(1), reciprocal, torch.ones_like(input_range_scale)
    )


def _sample_peak(x: Tensor) -> Tensor:
    """Return the largest absolute entry of each sample of `x` (N, *shape) as (N, *ones), in float32 or wider."""
    flat = x.detach().flatten(1)
    peak = _numerics.widen(torch.maximum(flat.amax(1), -flat.amin(1)))
    return peak.reshape(-1, *[1] * (x.ndim - 1))


def _norm_and_reciprocal(squares: Tensor, square_range_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Turn squared norms (N, groups, *places) of scaled patches into ‖x‖ and 1/‖x‖ (N, groups, 1, *places)."""
    is_zero = _numerics.squared_norm_is_zero(squares)
    # Replace the norm of a zero patch before the square root, whose derivative at 0 is infinite.
    length = squares.masked_fill(is_zero, 1.0).sqrt()
    norm, reciprocal = (
        (length, length.reciprocal())
        if square_range_scale is None
        else (length / square_range_scale, square_range_scale / length)
    )
    return norm.masked_fill(is_zero, 0.0).unsqueeze(2), reciprocal.masked_fill(is_zero, 0.0).unsqueeze(2)


# Norms and directions of filters -------------------------------------------------------------------------------------


class _FilterPolar(torch.autograd.Function):
    """Norms ‖w‖ and directions ŵ of rows. Backward is ∂w = (∂ŵ − ⟨∂ŵ, ŵ⟩ŵ)/‖w‖ + ∂‖w‖·ŵ, and 0 for a zero row."""

    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        wide = _numerics.widen(rows)
        if wide.dtype != torch.float32 or _numerics.on_accelerator(rows):
            return sphere.polar(wide)
        # Squares of all float32 numbers are in the range of float64, so no scaling is necessary.
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True, dtype=torch.float64)
        is_zero = length < _numerics.zero_floor(rows.dtype)  # False for NaN, so that a NaN stays visible
        reciprocal = length.reciprocal().masked_fill_(is_zero, 0.0)
        return length.masked_fill_(is_zero, 0.0).to(wide.dtype), wide * reciprocal.to(wide.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad_norm: Tensor, grad_unit: Tensor) -> Tensor:
        # Out-of-place operations on the outputs, so that autograd can differentiate this function again.
        norm, unit = ctx.saved_tensors
        reciprocal = norm.masked_fill(norm == 0, 1.0).reciprocal().masked_fill(norm == 0, 0.0)
        along = torch.linalg.vecdot(grad_unit, unit, dim=1).unsqueeze(1)
        return torch.addcmul(grad_unit * reciprocal, unit, grad_norm - along * reciprocal).to(ctx.dtype)


def filter_polar(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split filters (K, ...) into norms (K,) in float32 or wider and directions in the shape and dtype of `weight`.

    >>> filter_polar(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    (tensor([5., 0.]), tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]]))
    """
    rows = weight.flatten(1)
    use_function = _numerics.custom_backward_allowed(weight) and weight.numel() > 0
    norm, unit = _FilterPolar.apply(rows) if use_function else sphere.polar(rows)
    return norm.flatten(), unit.to(weight.dtype).view_as(weight)


# Blocks of a batch ---------------------------------------------------------------------------------------------------


def batch_blocks(entries: int, entries_per_sample: int, x: Tensor) -> list[slice]:
    """Cut the batch of `x` into equal slices of about `entries` numbers per thread.

    The intermediate results of such a block stay in cache, and each block reuses the memory of the one before. On an
    accelerator neither is an advantage, so the batch is one block.

    >>> batch_blocks(1_000_000, 6, torch.arange(5))
    [slice(0, 5, None)]
    """
    if _numerics.on_accelerator(x):
        return [slice(0, len(x))]
    count = max(1, -(-len(x) * entries_per_sample // (entries * torch.get_num_threads())))
    step = max(1, -(-len(x) // count))
    return [slice(start, start + step) for start in range(0, max(1, len(x)), step)]


def split_batches(entries: int, entries_per_sample: int, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Iterate over the blocks of several tensors with the same batch. The blocks of None are None."""
    blocks = batch_blocks(entries, entries_per_sample, next(t for t in tensors if t is not None))
    return zip(*([None] * len(blocks) if t is None else [t[block] for block in blocks] for t in tensors), strict=True)
