r"""Training by orthogonal equivalence: rotate outputs and inputs of fixed random weights, W = R·W₀·P (POET).

POET stands for reparameterized training via orthogonal equivalence transformation.

This module selects the layers and draws W₀ and the seeds. `two_sided` computes the weight of one layer, and
`PeriodicFold` folds the rotations into W₀ and draws other blocks every few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._layer_selection import NeuronLayer
from hypersphere._validation import choose, guard_save_pretrained, is_integer, is_number, require
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.rotation.rotate import attach, rotatable_layers, save_obstacle, unparametrized_rows
from hypersphere.rotation.stochastic import PeriodicFold
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = ["Equivalence"]


class Equivalence(PeriodicFold):
    r"""Train a model by orthogonal equivalence: W = R·W₀·P with W₀ fixed, R and P learned rotations (POET).

    R mixes the outputs of a layer and P its inputs. Both are block diagonal after random permutations of the outputs
    and inputs. Every `every` steps they are folded into W₀, in float64, other permutations are drawn, and R and P are
    reset to the identity. The singular values of W never change. `Stochastic` is the one-sided case with a single
    block.

    The permutations are functions of seeds and the number of folds. The seeds are buffers of the model, so processes
    that share the model's state (`DistributedDataParallel`, a checkpoint) draw the same permutations, even if their
    random number generators are seeded differently.

    A weight in half precision is rounded at every fold, which changes its singular values by about the precision of
    its dtype. The parameters of R and P are never narrower than float32.

    Args:
        model: its layers are rotated in place: linear layers, convolutions and heads, as by `rotate_`. A filter of a
            convolution is one row of W. `fold_` makes the model plain again.
        block_size: b, the largest size of the blocks. An output or input dimension of s entries has k = ⌈s/b⌉ blocks
            of ⌊s/k⌋ entries, which is b if b divides s. Fewer than k entries are left over. They are not rotated until
            the next fold, when others are.
        every: the number of steps between folds.
        sides: "both", "input" (R = I, the angles between neurons are fixed) or "output" (P = I).
        start: W₀. "normalized" draws its entries from N(0, 1) and scales its rows to the norm `scale`. "keep" takes
            the present weights, to fine-tune a trained model.
        method: a name or an object of `hypersphere.orthogonal`.
        scale: the norm of the rows of W₀ if they are drawn. 1 keeps the mean square of the inputs. √2 also makes up for
            a ReLU between layers without normalisation.
        where: a function of name and module that selects layers. By default all but the output layer.
        output: rotate the output layer, too.
        output_layer: the name of the output layer, as in `rotate_`.
        generator: the random number generator for the seeds and for W₀. By default torch's global one.
        report: print which layers are rotated with which blocks, and which layers are skipped and why.

    Example:
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> equivalence = Equivalence(model, block_size=4, every=2)
        >>> [equivalence.step() for _ in range(4)]
        [False, True, False, True]

    Reference:
        Qiu et al., Reparameterized LLM Training via Orthogonal Equivalence Transformation, NeurIPS 2025.
    """

    def __init__(
        self,
        model: nn.Module,
        block_size: int = 64,
        every: int = 200,
        sides: str = "both",
        start: str = "normalized",
        method: str | RowMap = "cayley",
        *,
        scale: float = 1.0,
        where: Callable[[str, nn.Module], bool] | None = None,
        output: bool = False,
        output_layer: str | Sequence[str] | None = "auto",
        generator: torch.Generator | None = None,
        report: bool = False,
    ) -> None:
        super().__init__(every)
        require(is_integer(block_size, 2), "block_size", "an integer >= 2", block_size)
        require(sides in ("both", "input", "output"), "sides", "'both', 'input' or 'output'", sides)
        require(start in ("normalized", "keep"), "start", "'normalized' or 'keep'", start)
        require(is_number(scale, 0) and scale > 0, "scale", "a positive number", scale)
        require(isinstance(report, bool), "report", "a bool", report)
        chosen = choose(ORTHOGONALS, method, "method")
        require(isinstance(chosen, RowMap), "method", "a name or an object of `hypersphere.orthogonal`", method)
        self.block_size = block_size
        self.sides = sides
        selection = rotatable_layers(model, where, output=output, output_layer=output_layer)
        # R would mix the outputs of different experts.
        selection = selection.without(lambda layer: "it holds several experts" if layer.part.stacked else None)
        # All rotations are made before the first one is attached, so that an error leaves the model unchanged.
        plans: list[tuple[NeuronLayer, TwoSidedRotation, Tensor]] = []
        for layer in selection:
            weight = unparametrized_rows(layer)
            seeds = {
                f"{side}_seed": int(torch.randint(2**62, (), generator=generator)) if sides in (side, "both") else None
                for side in ("output", "input")
            }
            rotation = TwoSidedRotation(chosen, block_size, **seeds, like=weight)
            rows = weight if start == "keep" else _normalized_rows(weight, scale, generator)
            plans.append((layer, rotation, rotation.permuted(rows)))
        for layer, rotation, rows in plans:
            attach(layer, rotation, rows)
        guard_save_pretrained(model, save_obstacle)
        self.layers: list[tuple[nn.Module, TwoSidedRotation]] = [
            (cast(nn.Module, layer.module), rotation) for layer, rotation, _ in plans
        ]
        """The modules with their rotations."""
        if report:
            print(selection.report())
            print("blocks:")
            for layer, rotation, _ in plans:
                print(f"  {layer.name}  {_describe_blocks(rotation)}")

    def __repr__(self) -> str:
        return (
            f"Equivalence(block_size={self.block_size}, every={self.every}, sides={self.sides!r}, steps={self.steps}, "
            f"layers={len(self.layers)})"
        )

    def _folded_layers(self) -> list[tuple[nn.Module, TwoSidedRotation]]:
        return self.layers


def _normalized_rows(like: Tensor, scale: float, generator: torch.Generator | None) -> Float[Tensor, "n d"]:
    """Return Gaussian rows of norm `scale`, drawn in float32 on the CPU, so that all dtypes and devices agree."""
    rows = torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu")
    wide = _numerics.widen(like.new_empty(0)).dtype
    return (scale * sphere.normalize(rows.to(wide))).to(like)


def _describe_blocks(rotation: TwoSidedRotation) -> str:
    """Return number and size of the blocks in words."""
    parts = []
    for name, side, order in (
        ("outputs", rotation.output, rotation.output_order),
        ("inputs", rotation.input, rotation.input_order),
    ):
        if side is not None and order is not None:
            layout, rest = side.layout, len(order) - side.layout.size
            text = f"{name}: {layout.blocks} {'block' if layout.blocks == 1 else 'blocks'} of {layout.block_size}"
            parts.append(f"{text} and {rest} not rotated" if rest else text)
    return ", ".join(parts)
