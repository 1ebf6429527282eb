r"""The forward pass of a rotated linear layer: rotate the weight, or rotate the input, whichever is cheaper.

The output y = x·Wᵀ with W = V·Rᵀ can be computed in two ways, which differ only in the order of the products:

    weight side    y = x·(V·Rᵀ)ᵀ    rotate the rows of V, one product per layer and step
    input side     y = (x·R)·Vᵀ     rotate every input vector

V is fixed. On the input side its gradient is not needed, so the backward pass has two large products (the output, and
the gradient of x·R) instead of three. With G the gradient of y and Z = G·V the gradient of x·R, the gradients are

    of block R_i    x_iᵀ·Z_i    (x_i and Z_i are the columns that the block acts on)
    of x            Z·Rᵀ

`_InputSide` keeps only x, R and V for the backward pass. These gradients do not depend on how y was computed. So its
forward pass rotates V instead of x if V has fewer rows.

`_CayleySide` is for the Cayley transform R = 2M − I with M = (I−S)⁻¹ and fewer rows than a block has entries. Forming R
would then cost more than applying the series of M to the rows. Its parameters are the entries of S:

    u = x·M    x·R = 2u − x    w = Z·Mᵀ    gradient of x: 2w − Z    gradient of S: 2uᵀw

Products with blocks are computed in chunks of rows: the result of a batched product has the blocks first and must be
copied into rows, which is fast while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions.orthogonal import Cayley
from hypersphere.rotation.layout import BlockLayout

__all__ = [
    "backward_of_chunk",
    "cayley_linear",
    "chunks",
    "has_explicit_backward",
    "rotate_wide",
    "rotated_linear",
    "rotating_input_and_output_is_cheaper",
    "rotating_input_is_cheaper",
]

# Rows per chunk: 256 rows of 2,048 float32 numbers are 2 MB, the size of a second-level cache.
CHUNK_ROWS = 256

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def rotating_input_is_cheaper(tokens: int, out: int, layout: BlockLayout, *, x_needs_grad: bool, trains: bool) -> bool:
    """Return True if rotating the input takes fewer multiplications than rotating the weight.

    Args:
        tokens: the number of input vectors.
        out: the number of neurons.
        layout: the blocks of R. For a single block the result is False, because the weight side applies the map to
            the rows without forming R.
        x_needs_grad: whether the input needs a gradient.
        trains: whether the rotation needs a gradient.

    Example:
        >>> layout = BlockLayout(1024, blocks=32)
        >>> rotating_input_is_cheaper(4096, 1024, layout, x_needs_grad=True, trains=True)
        True
        >>> rotating_input_is_cheaper(4096, 1024, layout, x_needs_grad=False, trains=False)
        False
    """
    if layout.blocks == 1:
        return False
    if not trains and parametrize._cache_enabled:  # the rotated weight is computed once for many batches
        return False
    # Per entry of a neuron. Large products: output, and gradients of the weight or of the rotated input, and of x.
    block = layout.block_size * layout.factors
    weight_cost = tokens * out * (1 + trains + x_needs_grad) + out * block * (1 + trains)
    block_rows = min(tokens, out) + tokens * (trains + x_needs_grad)
    input_cost = tokens * out * (1 + (trains or x_needs_grad)) + block_rows * block
    return input_cost < weight_cost


def rotating_input_and_output_is_cheaper(
    tokens: int,
    shape: Sequence[int],
    outputs: BlockLayout | None,
    inputs: BlockLayout | None,
    *,
    x_needs_grad: bool,
    trains: bool,
) -> bool:
    """Return True if rotating inputs and outputs takes fewer multiplications than rotating the weight R·W₀·P.

    Args:
        tokens: the number of input vectors.
        shape: the shape (n, d) of the weight.
        outputs: the blocks of R, or None.
        inputs: the blocks of P, or None.
        x_needs_grad: whether the input needs a gradient.
        trains: whether the rotations need a gradient.

    Example:
        >>> blocks = BlockLayout(1024, blocks=16)
        >>> rotating_input_and_output_is_cheaper(1024, (1024, 1024), blocks, blocks, x_needs_grad=True, trains=True)
        True
        >>> rotating_input_and_output_is_cheaper(4096, (1024, 1024), blocks, blocks, x_needs_grad=False, trains=False)
        False
    """
    if not trains and parametrize._cache_enabled:  # the weight is computed once for many batches
        return False
    n, d = shape
    b_out, b_in = (0 if layout is None else layout.block_size for layout in (outputs, inputs))
    # The backward pass of the weight side needs the gradients of R, of W₀·P and of P, but not of W₀.
    block_products = b_out * (1 + 2 * trains) + b_in * (1 + trains)
    weight_cost = tokens * n * d * (1 + trains + x_needs_grad) + n * d * block_products
    blocks = tokens * (n * b_out + d * b_in)
    input_and_output_cost = tokens * n * d * (1 + (trains or x_needs_grad)) + blocks * (1 + trains + x_needs_grad)
    return input_and_output_cost < weight_cost


def rotated_linear(
    x: Float[Tensor, "*batch d"],
    matrices: Float[Tensor, "..."],
    v: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    layout: BlockLayout,
) -> Float[Tensor, "*batch n"]:
    """Return (x·R)·Vᵀ + bias.

    Args:
        x: the input.
        matrices: the blocks of R in float32 or wider, as `RowMap.matrix` returns them.
        v: the neurons. They may be in half precision.
        bias: the bias, or None.
        layout: the blocks of R.
    """
    rows = x.reshape(-1, layout.size)
    if has_explicit_backward(rows, v, matrices):
        y = _InputSide.apply(layout, rows, matrices, v)
        y = y if bias is None else y.add_(bias)
    else:
        y = F.linear(rotate_wide(layout, rows, matrices), v, bias)
    return y.reshape(*x.shape[:-1], v.shape[0])


def cayley_linear(
    x: Float[Tensor, "*batch d"],
    method: Cayley,
    free: Float[Tensor, "..."],
    v: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    layout: BlockLayout,
) -> Float[Tensor, "*batch n"] | None:
    """Return (x·R)·Vᵀ + bias for a Cayley transform R with one factor, or None where R must be formed.

    R is formed if there are as many rows as entries of a block, or if the series of M cannot be used.

    Args:
        x: the input.
        method: the Cayley transform.
        free: its parameters, in float32 or wider.
        v: the neurons. They may be in half precision.
        bias: the bias, or None.
        layout: the blocks of R.
    """
    rows_per_block = x.numel() // max(layout.block_size if layout.shared else layout.size, 1)
    if rows_per_block >= layout.block_size or not has_explicit_backward(x, v):
        return None
    expanded = method.series(free)
    if expanded is None:
        return None
    entries, series = expanded
    y = _CayleySide.apply(layout, x.reshape(-1, layout.size), entries, v, *series)
    y = y if bias is None else y.add_(bias)
    return y.reshape(*x.shape[:-1], v.shape[0])


def has_explicit_backward(x: Tensor, v: Tensor, *others: Tensor) -> bool:
    """Return True if an explicit backward pass may be used for these inputs, neurons and other tensors."""
    return (
        x.dtype == v.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and _numerics.custom_backward_allowed(x, v, *others)
    )


def rotate_wide(layout: BlockLayout, x: Tensor, matrices: Tensor) -> Tensor:
    """Return x·R in ordinary operations: in the dtype of the matrices, rounded to the dtype of x."""
    with _numerics.autocast_disabled(x):
        return _numerics.narrow(layout.rotate_inputs(matrices, x.to(matrices.dtype)), x.dtype)


class _InputSide(torch.autograd.Function):
    """(x·R)·Vᵀ with an explicit backward pass."""

    @staticmethod
    def forward(ctx: Any, layout: BlockLayout, x: Tensor, matrices: Tensor, v: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, matrices, v)
        return _output(layout, x, matrices, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrices, v = ctx.saved_tensors
        layout, needs = ctx.layout, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def output(x: Tensor, matrices: Tensor, v: Tensor) -> Tensor:
                return rotate_wide(layout, x, matrices) @ v.mT

            return None, *differentiable_gradients(output, (x, matrices, v), needs, grad)
        with _numerics.autocast_disabled(grad):
            return None, *_gradients(layout, x, matrices, v, grad, needs)


class _CayleySide(torch.autograd.Function):
    """(x·R)·Vᵀ for a Cayley transform R of one factor, as a function of the entries of S, without forming R."""

    @staticmethod
    def forward(
        ctx: Any, layout: BlockLayout, x: Tensor, entries: Tensor, v: Tensor, s: Tensor, square: Tensor, terms: int
    ) -> Tensor:
        ctx.layout, ctx.terms = layout, terms
        parts = layout.split(x.to(entries.dtype))
        u = factorizations.apply_skew_series(parts, factorizations.SkewSeries(s, square, terms))  # x·M
        ctx.save_for_backward(x, entries, v, u, s, square)
        return layout.join(2 * u - parts, len(x)).to(x.dtype) @ v.mT  # x·R = 2u − x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, entries, v, u, s, square = ctx.saved_tensors
        layout: BlockLayout = ctx.layout
        needs = needs_x, needs_entries, needs_v = ctx.needs_input_grad[1:4]
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def output(x: Tensor, entries: Tensor, v: Tensor) -> Tensor:
                eye = torch.eye(layout.block_size, dtype=entries.dtype, device=entries.device)
                matrices = Cayley().expression(entries, eye.expand(*entries.shape[:-1], -1, -1)).mT
                return rotate_wide(layout, x, matrices) @ v.mT

            return None, *differentiable_gradients(output, (x, entries, v), needs, grad), None, None, None
        grad_x = grad_entries = grad_v = None
        with _numerics.autocast_disabled(grad):
            parts = layout.split((grad @ v).to(entries.dtype))  # Z, the gradient of x·R
            series = factorizations.SkewSeries(s, square, ctx.terms)
            w = factorizations.apply_skew_series(parts, series, transposed=True)  # Z·Mᵀ
            if needs_x:  # Z·Rᵀ = 2w − Z
                grad_x = layout.join(2 * w - parts, len(x)).to(x.dtype)
            if needs_entries:  # the skew part of 2uᵀw
                grad_entries = factorizations.pack_skew(factorizations.product(u.mT, w)).mul_(2)
            if needs_v:  # Gᵀ·(x·R), with x·R = 2u − x
                rotated = layout.join(2 * u - layout.split(x.to(entries.dtype)), len(x))
                grad_v = grad.mT @ rotated.to(grad.dtype)
        return None, grad_x, grad_entries, grad_v, None, None, None


def _output(layout: BlockLayout, x: Tensor, matrices: Tensor, v: Tensor) -> Tensor:
    """Return (x·R)·Vᵀ = x·(V·Rᵀ)ᵀ: rotate the one of x and V that has fewer rows."""
    if len(v) < len(x):
        return x @ _rotate_in_chunks(layout, v, matrices, inverse=True).mT
    return _rotate_in_chunks(layout, x, matrices) @ v.mT


def _gradients(
    layout: BlockLayout, x: Tensor, matrices: Tensor, v: Tensor, grad: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, of the blocks and of V for the gradient G of (x·R)·Vᵀ, where they are needed."""
    needs_x, needs_matrices, needs_v = needs
    grad_matrices = None
    z = grad @ v  # Z, the gradient of x·R; the gradient Z·Rᵀ of x overwrites it
    factors = layout.of_factors(matrices)
    grads = [torch.zeros_like(blocks) for blocks in factors] if needs_matrices else None
    for x_rows, z_rows in chunks(x, z):
        backward_of_chunk(layout, factors, x_rows, z_rows, grads, needs_x)
    if grads is not None:
        grad_matrices = torch.stack(grads) if layout.factors > 1 else grads[0]
    grad_v = grad.mT @ _rotate_in_chunks(layout, x, matrices) if needs_v else None  # Gᵀ·(x·R)
    return z if needs_x else None, grad_matrices, grad_v


def _rotate_in_chunks(layout: BlockLayout, rows: Tensor, matrices: Tensor, *, inverse: bool = False) -> Tensor:
    """Return rows·R, or rows·Rᵀ, rounded to the dtype of the rows."""
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for source, target in chunks(rows, result):
        wide = source.to(matrices.dtype)
        if layout.factors > 1:
            target.copy_(layout.rotate_rows(matrices, wide) if inverse else layout.rotate_inputs(matrices, wide))
        else:  # `split` of the contiguous result is a view, so the product is copied only once
            product = factorizations.product(layout.split(wide), matrices.mT if inverse else matrices)
            layout.split(target).copy_(product)
    return result


def chunks(a: MaybeTensor, b: Tensor) -> Iterator[tuple[MaybeTensor, Tensor]]:
    """Yield the same rows of two tensors, `CHUNK_ROWS` at a time. The first one may be None."""
    if len(b) <= CHUNK_ROWS:
        yield a, b
    elif a is None:
        yield from ((a, rows) for rows in b.split(CHUNK_ROWS))
    else:
        yield from zip(a.split(CHUNK_ROWS), b.split(CHUNK_ROWS), strict=True)


def backward_of_chunk(
    layout: BlockLayout,
    factors: Sequence[Tensor],
    x: Tensor | None,
    z: Tensor,
    grads: list[Tensor] | None,
    needs_x: bool,
) -> None:
    """Add the gradients of the blocks to `grads`, and replace the rows Z by the gradient Z·Rᵀ of x if it is needed.

    x is only read for the gradients of the blocks, and may be None without them.
    """
    n, dtype, last = len(z), factors[0].dtype, len(factors) - 1
    inputs: list[Tensor] = []
    if grads is not None:
        assert x is not None
        # The input of every factor: x·R = ((x·B_{m−1})⋯B₁)·B₀, so the input of the last factor is x itself.
        inputs.append(x.to(dtype))
        for j in range(last, 0, -1):
            inputs.append(layout.join(layout.split(inputs[-1], j) @ factors[j], n, j))
    grad = z.to(dtype)
    for j, blocks in enumerate(factors):  # from the factor that acts last to the first one
        parts = layout.split(grad, j)
        if grads is not None:  # the gradient x_iᵀ·Z_i of every block of this factor
            factorizations.add_product_(grads[j], layout.split(inputs.pop(), j).mT, parts)
        if j < last:  # the gradient of the input of this factor, which is the output of the next one
            grad = layout.join(parts @ blocks.mT, n, j)
        elif needs_x:  # the gradient of x
            product = factorizations.product(parts, blocks.mT)
            # The parts of the first factor are a view of the rows, which saves a copy.
            if j == 0:
                view = layout.split(z)
                assert view.data_ptr() == z.data_ptr()  # a copy would lose the gradient
                view.copy_(product)
            else:
                z.copy_(layout.join(product, n, j))
