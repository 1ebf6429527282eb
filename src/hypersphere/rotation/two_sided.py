r"""The parametrisation of a layer that is rotated on both sides: W = R·W₀·P (orthogonal equivalence, POET).

R mixes the n outputs, P the d inputs. Both are block diagonal after a permutation, so that they have few parameters and
cost little. `TwoSidedRotation` holds one `Rotation` per side, which provides the free parameters, the map and the
layout. The layer stores W₀ in the order of the blocks:

    parametrizations.weight.original    Ŵ₀ = W₀ with its rows in the order of R's blocks and its columns in that of P's
    layer.weight                        W, in the order of the outputs and inputs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._layer_selection import WeightPart
from hypersphere.functions._rowmap import RowMap
from hypersphere.rotation._two_sided_linear import OrderedBlocks, activations_are_cheaper, two_sided_linear
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation, WeightState, replace_rows, rows_of

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
    def method(self) -> RowMap | None:
        """The map, or None if R is learned: then the angles between neurons change, as by no rotation of neurons."""
        return None if self.output is not None or self.input is None else self.input.method

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
            rows = rows_of(self.part, _numerics.widen_parameter(neurons))
            rows = self._rotate(rows, _numerics.widen_parameter)
            return replace_rows(self.part, neurons, self.in_order_of_layer(_numerics.narrow(rows, neurons.dtype)))

    def _rotate(self, rows: Tensor, widen: Callable[[Tensor], Tensor]) -> Tensor:
        """Return R̂·Ŵ₀·P̂, in the order of the blocks."""
        if self.input is not None:
            p, size = self._matrices(self.input, widen), self.input.layout.size
            rotated = self.input.layout.rotate_inputs(p, rows[:, :size])
            rows = rotated if size == rows.shape[1] else torch.cat([rotated, rows[:, size:]], 1)
        if self.output is not None:
            r, layout = self._matrices(self.output, widen), self.output.layout
            # The rows of one block are consecutive, so the blocks of R multiply blocks of rows.
            rotated = (r @ rows[: layout.size].reshape(layout.blocks, layout.block_size, -1)).flatten(0, 1)
            rows = rotated if layout.size == len(rows) else torch.cat([rotated, rows[layout.size :]])
        return rows

    @staticmethod
    def _matrices(rotation: Rotation, widen: Callable[[Tensor], Tensor]) -> Tensor:
        with rotation.layer_named_in_errors():
            return rotation.method(widen(rotation.parameter))

    def in_order_of_blocks(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return a weight with its rows and columns in the order of the blocks."""
        # Autograd saves the indices. `DistributedDataParallel` writes to buffers in every forward pass, which would
        # invalidate saved ones, so save a copy.
        rows = rows if self.output_order is None else rows.index_select(0, self.output_order.clone())
        return rows if self.input_order is None else rows.index_select(1, self.input_order.clone())

    def in_order_of_layer(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Undo `in_order_of_blocks`."""
        rows = rows if self.output_order is None else rows.index_select(0, self.output_order.argsort())
        return rows if self.input_order is None else rows.index_select(1, self.input_order.argsort())

    def forward_linear(
        self, x: Float[Tensor, "*batch d"], neurons: Float[Tensor, "n d"], bias: Float[Tensor, " n"] | None
    ) -> Float[Tensor, "*batch n"] | None:
        """Return the output of a linear layer by rotating inputs and outputs, or None to rotate the weight."""
        if x.shape[-1:] != neurons.shape[1:]:
            return None
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        layouts = [None if rotation is None else rotation.layout for rotation in (self.output, self.input)]
        tokens = x.numel() // max(neurons.shape[1], 1)
        if not activations_are_cheaper(tokens, neurons.shape, *layouts, x_needs_grad=needs_grad, trains=trains):
            return None
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
        # Autograd may save the order, see `in_order_of_blocks`.
        return OrderedBlocks(rotation.layout, order.clone()), self._matrices(rotation, _numerics.widen_parameter)

    # Merging ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fold(self, neurons: Float[Tensor, "..."]) -> None:
        """Replace Ŵ₀ by R̂·Ŵ₀·P̂, computed in float64, and restart from R = P = I."""
        self.require_finite()
        rows = self._rotate(_numerics.to_float64(rows_of(self.part, neurons)), _numerics.to_float64)
        self.part.write(neurons, _numerics.narrow(rows, neurons.dtype), self.part.shape_of(neurons))
        for rotation in self.rotations:
            rotation.parameter.copy_(rotation.identity())

    @torch.no_grad()
    def redraw(self, neurons: Float[Tensor, "..."], folds: int) -> None:
        """Draw other orders after fold number `folds`, and store W₀ in the new order. R and P must be I."""
        rows = self.in_order_of_layer(rows_of(self.part, neurons))
        for rotation, order in ((self.output, self.output_order), (self.input, self.input_order)):
            if rotation is not None and order is not None:
                seed = int(cast(Tensor, rotation.seed))
                order.copy_(rotation.layout.draw_order(len(order), seed, folds))
        self.part.write(neurons, self.in_order_of_blocks(rows), self.part.shape_of(neurons))

    def require_finite(self) -> None:
        """Raise a `ValueError` if a free parameter is not finite."""
        for rotation in self.rotations:
            rotation.require_finite()


def _equal_blocks(size: int, block_size: int) -> BlockLayout:
    """Return ⌈size/block_size⌉ equal blocks, as large as possible."""
    blocks = -(-size // block_size)
    return BlockLayout(size // blocks * blocks, blocks)
