r"""The parametrisation of a layer that is rotated on both sides: W = R·W₀·P (orthogonal equivalence, POET).

R mixes the n outputs, P the d inputs. Both are block diagonal after a permutation, so that they have few parameters and
cost little. `TwoSidedRotation` holds one `Rotation` per side, which provides the free parameters, the map and the
layout. The layer stores W₀ in the order of the blocks:

    parametrizations.weight.original    Ŵ₀ = W₀ with its rows in the order of R's blocks and its columns in P's
    layer.weight                        W, in the order of the outputs and inputs

A linear layer need not form W. It rotates its inputs and outputs where that is cheaper (`two_sided_linear`). With "^"
for the order of the blocks, and x, y as rows:

    x̂ = x in the order of P's blocks    u = x̂·P̂ᵀ    z = u·Ŵ₀ᵀ    ŷ = z·R̂ᵀ    y = ŷ in the order of the outputs

W₀ is fixed, so its gradient is not needed. Forward and backward pass have two large products, z and Ĝ·R̂·Ŵ₀, instead of
the three of a linear layer, and six products with blocks. With Ĝ the gradient of ŷ, the gradients are

    of block R_i    Ĝ_iᵀ·z_i             Z = Ĝ·R̂, the gradient of z
    of block P_i    U_iᵀ·x̂_i             U = Z·Ŵ₀, the gradient of u
    of x            U·P̂ in the order of the inputs

Since W₀ is stored in the order of the blocks, only x, y and their gradients are reordered, by one gather of columns
each, in chunks of rows that stay in the cache. The backward pass keeps x, which the layer before it has computed
anyway, and z.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import WeightPart
from hypersphere.functions._autograd import differentiable_gradients
from hypersphere.functions._rowmap import RowMap
from hypersphere.rotation._rotated_linear import (
    backward_of_chunk,
    chunks,
    has_explicit_backward,
    rotating_input_and_output_is_cheaper,
)
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation, WeightState

__all__ = ["TwoSidedRotation"]


class TwoSidedRotation(nn.Module):
    r"""Rotate outputs and inputs of one layer: W = R·W₀·P, with W₀ fixed. W has the singular values of W₀.

    The weight is computed at every read, as by `Rotation`. The forward pass of a linear layer rotates its inputs and
    outputs instead, where that is cheaper.

    A dimension of s entries has k = ⌈s/b⌉ blocks of ⌊s/k⌋ entries, which is the block size b if it divides s. The
    remaining entries, fewer than k, are not rotated until the next draw.

    Args:
        method: an object of `hypersphere.orthogonal`.
        block_size: b, the largest size of a block.
        output_seed: the seed from which the order of the outputs is drawn, None for R = I.
        input_seed: the seed from which the order of the inputs is drawn, None for P = I.
        like: the weight. The free parameters take its device, and its dtype or float32 if that is wider.

    Attributes:
        output: free parameters and seed of R, or None.
        input: free parameters and seed of P, or None.
        output_order: the output at each position of R's blocks, or None.
        input_order: the input at each position of P's blocks, or None.
    """

    output: Rotation | None
    input: Rotation | None
    output_order: Tensor | None
    input_order: Tensor | None
    original_state: WeightState  # set when the rotation is attached to a layer
    part: WeightPart = WeightPart()

    def __init__(
        self,
        method: RowMap,
        block_size: int,
        *,
        output_seed: int | None,
        input_seed: int | None,
        like: Float[Tensor, "n ..."],
    ) -> None:
        super().__init__()
        for side, size, seed in (("output", len(like), output_seed), ("input", like[0].numel(), input_seed)):
            rotation = order = None
            if seed is not None:
                layout = _equal_blocks(size, block_size)
                rotation = Rotation(method, layout, seed=seed, like=like)
                order = layout.draw_order(size, seed, 0).to(like.device)
            self.register_module(side, rotation)
            # Orders are buffers, so that processes and checkpoints that share the model's state share them.
            self.register_buffer(f"{side}_order", order)

    @property
    def rotations(self) -> list[Rotation]:
        """The rotations of the two sides, R first."""
        return [rotation for rotation in (self.output, self.input) if rotation is not None]

    @property
    def keeps_angles(self) -> bool:
        """True if the angles between neurons stay as in W₀: only the inputs are rotated. R mixes the neurons."""
        return self.output is None and all(rotation.keeps_angles for rotation in self.rotations)

    @property
    def layer_name(self) -> str:
        """The name of the layer in the model, for error messages."""
        return self.rotations[0].layer_name

    @layer_name.setter
    def layer_name(self, name: str) -> None:
        for rotation in self.rotations:
            rotation.layer_name = name

    # The weight ------------------------------------------------------------------------------------------------------

    def forward(self, neurons: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return W for Ŵ₀, with the shape, dtype and memory format of `neurons`."""
        with _numerics.autocast_disabled(neurons):
            rows = self.part.rows(_numerics.widen_parameter(neurons))
            rows = self._rotate(rows, _numerics.widen_parameter)
            return self.part.with_rows(neurons, self.unpermuted(_numerics.narrow(rows, neurons.dtype)))

    def _rotate(self, rows: Tensor, widen: Callable[[Tensor], Tensor]) -> Tensor:
        """Return R̂·Ŵ₀·P̂, in the order of the blocks."""
        if self.input is not None and self.input_order is not None:
            blocks = OrderedBlocks(self.input.layout, self.input_order)
            rows = blocks.multiply(rows, self._matrices(self.input, widen))
        if self.output is not None:
            r, layout = self._matrices(self.output, widen), self.output.layout
            # The rows of one block are consecutive, so the blocks of R multiply blocks of rows.
            rotated = (r @ rows[: layout.size].reshape(layout.blocks, layout.block_size, -1)).flatten(0, 1)
            rows = rotated if layout.size == len(rows) else torch.cat([rotated, rows[layout.size :]])
        return rows

    @staticmethod
    def _matrices(rotation: Rotation, widen: Callable[[Tensor], Tensor]) -> Tensor:
        with rotation.layer_named_in_errors():
            return rotation.method.matrix(widen(rotation.parameter))

    def permuted(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return a weight with its rows and columns in the order of the blocks."""
        # Autograd saves the indices. `DistributedDataParallel` writes to buffers in every forward pass, which would
        # invalidate saved ones, so save a copy.
        rows = rows if self.output_order is None else rows.index_select(0, self.output_order.clone())
        return rows if self.input_order is None else rows.index_select(1, self.input_order.clone())

    def unpermuted(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Undo `permuted`."""
        rows = rows if self.output_order is None else rows.index_select(0, self.output_order.argsort())
        return rows if self.input_order is None else rows.index_select(1, self.input_order.argsort())

    def rotates_input(self, x: Float[Tensor, "*batch d"], weight: Tensor) -> bool:
        """Return True if a linear layer should rotate its inputs and outputs instead of its stored weight."""
        if not self.part.is_whole or x.shape[-1:] != weight.shape[1:]:
            return False
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        layouts = [None if rotation is None else rotation.layout for rotation in (self.output, self.input)]
        tokens = x.numel() // max(weight.shape[1], 1)
        return rotating_input_and_output_is_cheaper(
            tokens, weight.shape, *layouts, x_needs_grad=needs_grad, trains=trains
        )

    def linear_output(
        self, x: Float[Tensor, "*batch d"], stored: Sequence[Tensor], bias: Float[Tensor, " n"] | None
    ) -> Float[Tensor, "*batch n"]:
        """Return x·(R·W₀·P)ᵀ + bias, where `stored` is the weight Ŵ₀ alone."""
        (neurons,) = stored
        with _numerics.autocast_disabled(neurons):
            outputs, r = self._ordered_blocks(self.output, self.output_order)
            inputs, p = self._ordered_blocks(self.input, self.input_order)
        return two_sided_linear(x, r, p, neurons, bias, outputs, inputs)

    def _ordered_blocks(
        self, rotation: Rotation | None, order: Tensor | None
    ) -> tuple[OrderedBlocks | None, Tensor | None]:
        """Return layout and order of one side, and its matrices."""
        if rotation is None or order is None:
            return None, None
        # Autograd may save the order, see `permuted`.
        return OrderedBlocks(rotation.layout, order.clone()), self._matrices(rotation, _numerics.widen_parameter)

    # Folding ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fold(self, neurons: Float[Tensor, "..."]) -> None:
        """Replace Ŵ₀ by R̂·Ŵ₀·P̂, computed in float64, and restart from R = P = I."""
        self.require_finite()
        rows = self._rotate(_numerics.to_float64(self.part.rows(neurons)), _numerics.to_float64)
        self.part.write(neurons, _numerics.narrow(rows, neurons.dtype))
        for rotation in self.rotations:
            rotation.parameter.copy_(rotation.identity())

    @torch.no_grad()
    def redraw(self, neurons: Float[Tensor, "..."], folds: int) -> None:
        """Draw other orders after fold number `folds`, and store W₀ in the new order. R and P must be I."""
        rows = self.unpermuted(self.part.rows(neurons))
        for rotation, order in ((self.output, self.output_order), (self.input, self.input_order)):
            if rotation is not None and order is not None:
                seed = int(cast(Tensor, rotation.seed))
                order.copy_(rotation.layout.draw_order(len(order), seed, folds))
        self.part.write(neurons, self.permuted(rows))

    def require_finite(self) -> None:
        """Raise a `ValueError` if a free parameter is not finite."""
        for rotation in self.rotations:
            rotation.require_finite()

    require_foldable = require_finite


def _equal_blocks(size: int, block_size: int) -> BlockLayout:
    """Return ⌈size/block_size⌉ equal blocks, as large as possible."""
    blocks = -(-size // block_size)
    return BlockLayout(size // blocks * blocks, blocks)


# The forward pass of a linear layer -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OrderedBlocks:
    """The blocks of R or P, and the order of the entries that they act on.

    Attributes:
        layout: the blocks. They act on the first `layout.size` entries of the order and leave the others unchanged.
        order: the entry of a vector at each position of the blocks.
    """

    layout: BlockLayout
    order: Int[Tensor, " size"]

    def sort(self, x: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
        """Return the columns of x in the order of the blocks."""
        return x.index_select(1, self.order)

    def unsort(self, x: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
        """Undo `sort`."""
        return x.index_select(1, self.order.argsort())

    def multiply(self, x: Float[Tensor, "n size"], matrices: Float[Tensor, "..."]) -> Float[Tensor, "n size"]:
        """Return x times the block-diagonal matrix. The columns of x are in the order of the blocks."""
        size = self.layout.size
        if size == x.shape[1]:
            return self.layout.rotate_inputs(matrices, x)
        return torch.cat([self.layout.rotate_inputs(matrices, x[:, :size]), x[:, size:]], 1)


def two_sided_linear(
    x: Float[Tensor, "*batch d"],
    r: Float[Tensor, "..."] | None,
    p: Float[Tensor, "..."] | None,
    v: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    outputs: OrderedBlocks | None,
    inputs: OrderedBlocks | None,
) -> Float[Tensor, "*batch n"]:
    """Return x·(R·W₀·P)ᵀ + bias.

    Args:
        x: the input.
        r: the blocks of R in float32 or wider, or None for R = I.
        p: the blocks of P in float32 or wider, or None for P = I.
        v: W₀, with rows and columns in the order of the blocks. It may be in half precision.
        bias: the bias, or None.
        outputs: layout and order of R, None if R = I.
        inputs: layout and order of P, None if P = I.
    """
    rows = x.reshape(-1, v.shape[1])
    # Rows are multiplied by the transposed blocks: y = R·x as a row is xᵀ·Rᵀ.
    r_t, p_t = (None if blocks is None else blocks.mT for blocks in (r, p))
    others = [t for t in (r_t, p_t) if t is not None]
    if has_explicit_backward(rows, v, *others):
        y = _TwoSided.apply(outputs, inputs, rows, r_t, p_t, v)
    else:
        y = _two_sided(outputs, inputs, rows, r_t, p_t, v)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.reshape(*x.shape[:-1], v.shape[0])


def _two_sided(
    outputs: OrderedBlocks | None,
    inputs: OrderedBlocks | None,
    x: Tensor,
    r_t: Tensor | None,
    p_t: Tensor | None,
    v: Tensor,
) -> Tensor:
    """Return x·(R·W₀·P)ᵀ in ordinary operations."""
    if inputs is not None and p_t is not None:
        x = _multiply_wide(inputs, inputs.sort(x), p_t)
    z = F.linear(x, v)
    return z if outputs is None or r_t is None else outputs.unsort(_multiply_wide(outputs, z, r_t))


def _multiply_wide(blocks: OrderedBlocks, x: Tensor, matrices: Tensor) -> Tensor:
    """Return x times the blocks, in float32 or wider, rounded to the dtype of x."""
    with _numerics.autocast_disabled(x):
        return _numerics.narrow(blocks.multiply(x.to(matrices.dtype), matrices), x.dtype)


class _TwoSided(torch.autograd.Function):
    """x·(R·W₀·P)ᵀ with an explicit backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: OrderedBlocks | None,
        inputs: OrderedBlocks | None,
        x: Tensor,
        r_t: Tensor | None,
        p_t: Tensor | None,
        v: Tensor,
    ) -> Tensor:
        u = _rotate_inputs(inputs, x, p_t)
        y = z = u @ v.mT
        if outputs is not None and r_t is not None:  # y = z·R̂ᵀ in the order of the outputs
            y, inverse = torch.empty_like(z), outputs.order.argsort()
            for rows, result in chunks(z, y):
                product = outputs.multiply(rows.to(r_t.dtype), r_t)
                torch.index_select(product.to(y.dtype), 1, inverse, out=result)
        ctx.outputs, ctx.inputs = outputs, inputs
        needs_z = outputs is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(x, r_t, p_t, v, z if needs_z else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, r_t, p_t, v, z = ctx.saved_tensors
        outputs: OrderedBlocks | None = ctx.outputs
        inputs: OrderedBlocks | None = ctx.inputs
        needs_x, needs_r, needs_p, needs_v = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # create_graph=True: the gradients must themselves be differentiable

            def output(x: Tensor, r_t: Tensor | None, p_t: Tensor | None, v: Tensor) -> Tensor:
                return _two_sided(outputs, inputs, x, r_t, p_t, v)

            gradients = differentiable_gradients(output, (x, r_t, p_t, v), ctx.needs_input_grad[2:], grad)
            return None, None, *gradients
        with _numerics.autocast_disabled(grad):
            grad_r = torch.zeros_like(r_t) if needs_r else None
            grad_p = torch.zeros_like(p_t) if needs_p else None
            if outputs is not None:
                # Ĝ, which is overwritten by Z = Ĝ·R̂, the gradient of z. The blocks of R get Ĝ_iᵀ·z_i.
                grad = outputs.sort(grad)
                _backward_of_blocks(outputs, r_t, z, grad, grad_r, needs_x=True)
            grad_x = None
            if needs_x or needs_p:
                # U = Z·Ŵ₀, which is overwritten by the gradient U·P̂ of x. The blocks of P get U_iᵀ·x̂_i.
                grad_x = grad @ v
                if inputs is not None:
                    _backward_of_input(inputs, p_t, x, grad_x, grad_p, needs_x)
            grad_v = grad.mT @ _rotate_inputs(inputs, x, p_t) if needs_v else None  # Zᵀ·u
        return None, None, grad_x if needs_x else None, grad_r, grad_p, grad_v


def _rotate_inputs(inputs: OrderedBlocks | None, x: Tensor, p_t: Tensor | None) -> Tensor:
    """Return x̂·P̂ᵀ, rounded to the dtype of x."""
    if inputs is None or p_t is None:
        return x
    rotated = torch.empty_like(x)
    for rows, result in chunks(x, rotated):
        result.copy_(inputs.multiply(inputs.sort(rows).to(p_t.dtype), p_t))
    return rotated


def _backward_of_blocks(
    blocks: OrderedBlocks,
    matrices: Tensor,
    x: Tensor | None,
    grad: Tensor,
    grad_matrices: Tensor | None,
    *,
    needs_x: bool,
) -> None:
    """Add the gradient of the blocks, and overwrite the gradient of the product by the gradient of x if it is needed.

    x may be None if the blocks need no gradient.
    """
    grads = None if grad_matrices is None else [grad_matrices]
    size = blocks.layout.size  # the other columns pass through unchanged
    for x_rows, grad_rows in chunks(None if x is None else x[:, :size], grad[:, :size]):
        backward_of_chunk(blocks.layout, (matrices,), x_rows, grad_rows, grads, needs_x)


def _backward_of_input(
    inputs: OrderedBlocks, matrices: Tensor, x: Tensor, grad: Tensor, grad_matrices: Tensor | None, needs_x: bool
) -> None:
    """Add the gradient of P's blocks, and overwrite U by the gradient of x if it is needed."""
    inverse = inputs.order.argsort()
    for x_rows, grad_rows in chunks(x, grad):
        sorted_rows = None if grad_matrices is None else inputs.sort(x_rows)
        _backward_of_blocks(inputs, matrices, sorted_rows, grad_rows, grad_matrices, needs_x=needs_x)
        if needs_x:  # back to the order of the inputs
            grad_rows.copy_(grad_rows.index_select(1, inverse))
