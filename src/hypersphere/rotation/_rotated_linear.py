r"""The forward pass of a rotated linear layer: rotate the weight, or rotate the input, whichever is cheaper.

The output y = x·Wᵀ with W = V·Rᵀ can be computed in two ways, which differ only in the order of the products:

    weight side    y = x·(V·Rᵀ)ᵀ    rotate the rows of V, one product per layer and step
    input side     y = (x·R)·Vᵀ     rotate every input vector

V is fixed. On the input side its gradient is not needed, so the backward pass has two large products (the output, and
the gradient of x·R) instead of three. With G the gradient of y and Z = G·V that of x·R, the gradients are

    of block R_i    x_iᵀ·Z_i    (x_i and Z_i are the columns that the block acts on)
    of x            Z·Rᵀ

`_InputSide` keeps only x, R and V for the backward pass.

The Cayley transform is R = 2M − I with M = (I−S)⁻¹, a product of I+S, I+S², I+S⁴, …. With fewer rows than a block has
entries, the rows are multiplied by these factors, and M is never formed (`_CayleySide`):

    u = x·M    x·R = 2u − x    w = Z·Mᵀ    gradient of x: 2w − Z    gradient of S: 2uᵀw

Products with blocks are computed in chunks of rows: the
result of a batched product has the blocks first and must be copied into rows, which is fast while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parametrize

from hypersphere import _numerics
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions._autograd import differentiable_gradients, only_reverse_mode
from hypersphere.functions.orthogonal import Cayley
from hypersphere.rotation.layout import BlockLayout

__all__ = [
    "CHUNK_ROWS",
    "backward_of_chunk",
    "cayley_linear",
    "has_explicit_backward",
    "input_side_is_cheaper",
    "rotated_linear",
]

# Rows per chunk: 256 rows of 2,048 float32 numbers are 2 MB, the size of a second-level cache.
CHUNK_ROWS = 256


def input_side_is_cheaper(tokens: int, out: int, layout: BlockLayout, *, x_needs_grad: bool, trains: bool) -> bool:
    """Return True if rotating the input takes fewer multiplications than rotating the weight.

    Args:
        tokens: the number of input vectors.
        out: the number of neurons.
        layout: the blocks of R. A single block is never cheaper: its map need not form R for the weight side.
        x_needs_grad: whether the input needs a gradient.
        trains: whether the rotation needs a gradient.

    Example:
        >>> layout = BlockLayout(1024, blocks=32)
        >>> input_side_is_cheaper(4096, 1024, layout, x_needs_grad=True, trains=True)
        True
        >>> input_side_is_cheaper(4096, 1024, layout, x_needs_grad=False, trains=False)
        False
    """
    if layout.blocks == 1:
        return False
    if not trains and parametrize._cache_enabled:  # the rotated weight is computed once for many batches
        return False
    # Per entry of a neuron. Large products: output, and gradients of the weight or of the rotated input, and of x.
    block = layout.block_size * layout.factors
    weight_side = tokens * out * (1 + trains + x_needs_grad) + out * block * (1 + trains)
    input_side = tokens * out * (1 + (trains or x_needs_grad)) + tokens * block * (1 + trains + x_needs_grad)
    return input_side < weight_side


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
    if has_explicit_backward(rows, v) and only_reverse_mode(matrices):
        y = _InputSide.apply(layout, rows, matrices, v)
        y = y if bias is None else y + bias
    else:
        y = F.linear(_rotated(layout, rows, matrices), v, bias)
    return y.reshape(*x.shape[:-1], v.shape[0])


def has_explicit_backward(x: Tensor, v: Tensor) -> bool:
    """Return True if the explicit backward passes of this module may be used for these inputs and neurons."""
    return x.dtype == v.dtype and not torch.is_autocast_enabled(x.device.type) and only_reverse_mode(x, v)


def cayley_linear(
    x: Float[Tensor, "*batch d"],
    free: Float[Tensor, "..."],
    powers: Sequence[Float[Tensor, "..."]],
    v: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    layout: BlockLayout,
) -> Float[Tensor, "*batch n"]:
    """Return (x·R)·Vᵀ + bias for a Cayley transform R with one factor. `has_explicit_backward` must be True.

    Args:
        x: the input.
        free: the entries of S, in float32 or wider.
        powers: S, S², S⁴, …, as `Cayley.factored` returns them.
        v: the neurons. They may be in half precision.
        bias: the bias, or None.
        layout: the blocks of R.
    """
    y = _CayleySide.apply(layout, x.reshape(-1, layout.size), free, v, *powers)
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], v.shape[0])


def _rotated(layout: BlockLayout, x: Tensor, matrices: Tensor) -> Tensor:
    """Return x·R in ordinary operations: in float32 or wider, rounded to the dtype of x."""
    with _numerics.autocast_disabled(x):
        return _numerics.narrow(layout.rotate_inputs(matrices, x.to(matrices.dtype)), x.dtype)


class _InputSide(torch.autograd.Function):
    """(x·R)·Vᵀ with an explicit backward pass."""

    @staticmethod
    def forward(ctx: Any, layout: BlockLayout, x: Tensor, matrices: Tensor, v: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, matrices, v)
        return _rotate_in_chunks(layout, x, matrices) @ v.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrices, v = ctx.saved_tensors
        layout: BlockLayout = ctx.layout
        _, needs_x, needs_matrices, needs_v = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def output(x: Tensor, matrices: Tensor, v: Tensor) -> Tensor:
                return _rotated(layout, x, matrices) @ v.mT

            return None, *differentiable_gradients(output, (x, matrices, v), ctx.needs_input_grad[1:], grad)
        with _numerics.autocast_disabled(grad):
            z = grad @ v  # Z, the gradient of x·R; the gradient of x overwrites it
            factors = layout.of_factors(matrices)
            grads = [torch.zeros_like(blocks) for blocks in factors] if needs_matrices else None
            for x_rows, z_rows in zip(x.split(CHUNK_ROWS), z.split(CHUNK_ROWS), strict=True):
                backward_of_chunk(layout, factors, x_rows, z_rows, grads, needs_x)
            grad_v = grad.mT @ _rotate_in_chunks(layout, x, matrices) if needs_v else None
        grad_matrices = None if grads is None else torch.stack(grads) if layout.factors > 1 else grads[0]
        return None, z if needs_x else None, grad_matrices, grad_v


class _CayleySide(torch.autograd.Function):
    """(x·R)·Vᵀ for a Cayley transform R, with the gradient of its free parameters: one node of the graph."""

    @staticmethod
    def forward(ctx: Any, layout: BlockLayout, x: Tensor, free: Tensor, v: Tensor, *powers: Tensor) -> Tensor:
        ctx.layout = layout
        rows_per_block = len(x) * (layout.blocks if layout.shared else 1)
        ctx.forms_matrix = rows_per_block >= layout.block_size
        if ctx.forms_matrix:
            resolvent = factorizations.skew_resolvent(powers)
            matrices = 2 * resolvent
            matrices.diagonal(dim1=-2, dim2=-1).sub_(1)
            ctx.save_for_backward(x, free, v, resolvent, matrices)
            return _rotate_in_chunks(layout, x, matrices) @ v.mT
        parts = layout.split(x.to(free.dtype))
        u = factorizations.apply_skew_resolvent(parts, powers)
        ctx.save_for_backward(x, free, v, u, *powers)
        return layout.join(2 * u - parts, len(x)).to(x.dtype) @ v.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, free, v, *saved = ctx.saved_tensors
        layout: BlockLayout = ctx.layout
        _, needs_x, needs_free, needs_v, *needs_powers = ctx.needs_input_grad
        nothing = [None] * len(needs_powers)
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def output(x: Tensor, free: Tensor, v: Tensor) -> Tensor:
                eye = torch.eye(layout.block_size, dtype=free.dtype, device=free.device)
                matrices = Cayley().expression(free, eye.expand(*free.shape[:-1], -1, -1)).mT
                return _rotated(layout, x, matrices) @ v.mT

            needs = (needs_x, needs_free, needs_v)
            return None, *differentiable_gradients(output, (x, free, v), needs, grad), *nothing
        grad_free = grad_x = None
        with _numerics.autocast_disabled(grad):
            z = grad @ v  # Z, the gradient of x·R; the gradient of x overwrites it
            if ctx.forms_matrix:
                resolvent, matrices = saved
                grad_x, grad_r = _backward_of_rotation(layout, x, z, matrices, needs_x, needs_free)
                if grad_r is not None:  # dM = M·dS·M
                    left = factorizations.product(resolvent.mT, grad_r)
                    grad_free = factorizations.pack_skew(factorizations.product(left, resolvent.mT)).mul_(2)
            else:
                u, *powers = saved
                parts = layout.split(z.to(free.dtype))
                w = factorizations.apply_skew_resolvent(parts, powers, transposed=True)
                grad_x = layout.join(2 * w - parts, len(x)).to(x.dtype) if needs_x else None
                grad_free = factorizations.pack_skew(factorizations.product(u.mT, w)).mul_(2) if needs_free else None
            grad_v = None
            if needs_v:
                matrices = saved[1] if ctx.forms_matrix else Cayley().matrix(free)
                grad_v = grad.mT @ _rotate_in_chunks(layout, x, matrices)
        return None, grad_x if needs_x else None, grad_free, grad_v, *nothing


def _backward_of_rotation(
    layout: BlockLayout, x: Tensor, z: Tensor, matrices: Tensor, needs_x: bool, needs_matrices: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the blocks of one factor, for the gradient Z of x·R. Z may be overwritten."""
    if len(x) <= CHUNK_ROWS:  # one chunk: no sums over chunks
        parts = layout.split(z.to(matrices.dtype))
        grad_x = layout.join(factorizations.product(parts, matrices.mT), len(x)).to(x.dtype) if needs_x else None
        inputs = layout.split(x.to(matrices.dtype)).mT
        return grad_x, factorizations.product(inputs, parts) if needs_matrices else None
    grads = [torch.zeros_like(matrices)] if needs_matrices else None
    for x_rows, z_rows in zip(x.split(CHUNK_ROWS), z.split(CHUNK_ROWS), strict=True):
        backward_of_chunk(layout, (matrices,), x_rows, z_rows, grads, needs_x)
    return z if needs_x else None, None if grads is None else grads[0]


def _rotate_in_chunks(layout: BlockLayout, x: Tensor, matrices: Tensor) -> Tensor:
    """Return x·R, rounded to the dtype of x."""
    if len(x) <= CHUNK_ROWS:
        return layout.rotate_inputs(matrices, x.to(matrices.dtype)).to(x.dtype)
    rotated = torch.empty_like(x)
    for rows, result in zip(x.split(CHUNK_ROWS), rotated.split(CHUNK_ROWS), strict=True):
        result.copy_(layout.rotate_inputs(matrices, rows.to(matrices.dtype)))
    return rotated


def backward_of_chunk(
    layout: BlockLayout, factors: Sequence[Tensor], x: Tensor, z: Tensor, grads: list[Tensor] | None, needs_x: bool
) -> None:
    """Add the gradients of the blocks to `grads`, and replace the rows Z by the gradient Z·Rᵀ of x if it is needed."""
    n, dtype = len(x), factors[0].dtype
    # The input of every factor: x·R = ((x·B_{m−1})⋯B₁)·B₀, so that of the last factor is x itself.
    inputs = [x.to(dtype)]
    for j in range(len(factors) - 1, 0, -1):
        inputs.append(layout.join(layout.split(inputs[-1], j) @ factors[j], n, j))
    grad = z.to(dtype)
    for j, blocks in enumerate(factors):  # from the factor that acts last to the first one
        parts = layout.split(grad, j)
        if grads is not None:
            grads[j] += layout.split(inputs.pop(), j).mT @ parts
        if needs_x or j < len(factors) - 1:
            grad = layout.join(parts @ blocks.mT, n, j)
    if needs_x:
        z.copy_(grad)
