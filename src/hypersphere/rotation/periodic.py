r"""Rotations that are folded and drawn again periodically: stochastic rotations (S-OPT) and equivalence (POET).

    Stochastic     W = V·Rᵀ       rotate p of d dimensions of the neurons, then draw other dimensions
    Equivalence    W = R·W₀·P     rotate outputs and inputs in blocks, then draw other permutations

Both choose the layers and draw the seeds. `parametrization` and `two_sided` compute the weight of one layer.
`PeriodicFold` counts the steps, folds the rotations into the fixed weight and draws again.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_attribute
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions._rowmap import RowMap
from hypersphere.optim import Optimizers
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation, orthogonal_map
from hypersphere.rotation.rotate import (
    Plan,
    attach_all,
    original_weight,
    require_any_layer,
    rotatable_layers,
    rotated_layers,
    unparametrized_rows,
)
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = ["Equivalence", "PeriodicFold", "Stochastic"]

RotatedShare = float | int | Mapping[str, float | int]


class PeriodicFold(abc.ABC):
    """Count training steps, and fold and redraw the rotations of some layers after every `every` steps.

    The draws are a function of seeds, which are buffers of the model, and of the number of folds.

    Attributes:
        every: the number of steps between folds.
        steps: the number of steps so far.
    """

    def __init__(self, every: int) -> None:
        require(is_integer(every, 1), "every", "an integer >= 1", every)
        self.every = every
        self.steps = 0

    @abc.abstractmethod
    def _folded_layers(self) -> Sequence[tuple[nn.Module, Rotation | TwoSidedRotation]]:
        """Return the modules whose rotations are folded and redrawn, with their rotations."""

    def step(self, optimizer: torch.optim.Optimizer | Optimizers | None = None) -> bool:
        """Count one training step; after every `every` steps, fold the rotations and draw again.

        If an error is raised, the model, the optimiser and the counter are unchanged.

        Args:
            optimizer: its state of the folded parameters is dropped, because momentum refers to the
                rotations before the fold. It may be a `hypersphere.optim.Optimizers`.

        Returns:
            True if the rotations were folded.
        """
        optimizers = [] if optimizer is None else getattr(optimizer, "optimizers", [optimizer])
        has_state = all(hasattr(member, "state") for member in optimizers)
        require(has_state, "optimizer", "None, an optimiser of torch or `Optimizers`", type(optimizer).__name__)
        steps = self.steps + 1
        if steps % self.every == 0:
            layers = self._folded_layers()
            for module, rotation in layers:
                if not any(r is rotation for _, _, r in rotated_layers(module)):
                    kind = type(self).__name__
                    raise ValueError(f"a layer of this model ({type(module).__name__}) was folded; create a new {kind}")
                rotation.require_foldable()
            for module, rotation in layers:
                neurons = original_weight(module, rotation.part.parameter)
                rotation.fold(neurons)
                rotation.redraw(neurons, steps // self.every)
                for parameter in rotation.parameters():
                    for member in optimizers:
                        member.state.pop(parameter, None)
        self.steps = steps
        return steps % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter. Dimensions, orders and seeds are buffers of the model."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.steps = int(state["steps"])


class Stochastic(PeriodicFold):
    r"""Train a model by small rotations R_p of randomly drawn dimensions (OPT, algorithm 1).

    Every `every` steps R_p is folded into the neurons, other dimensions are drawn, and R_p is reset to the identity.
    Rotating any p dimensions of all neurons keeps their energy (OPT, theorem 2).

    The dimensions are a function of a seed and the number of folds. The seeds are buffers of the model, so processes
    that share the model's state (`DistributedDataParallel`, a checkpoint) draw the same dimensions, even if their
    random number generators are seeded differently.

    Args:
        model: its layers are rotated in place, as by `rotate_`. `fold_` makes it plain again.
        fraction: p for each layer: a share of d in (0, 1], a number of dimensions (an int), or a mapping from layer
            names to either.
        every: N_in, the number of steps between folds.
        method: a name or an object of `hypersphere.orthogonal`.
        where: a function of name and module that selects layers. By default all but the output layer.
        output: rotate the output layer, too.
        output_layer: the name of the output layer, as in `rotate_`.
        whole_first: rotate all dimensions of the first layer.
        generator: the random number generator for the seeds. By default torch's global one.
        report: print which layers are rotated, and which are skipped and why.

    Example:
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> stochastic = Stochastic(model, fraction=0.5, every=2)
        >>> [stochastic.step() for _ in range(4)]
        [False, True, False, True]
    """

    def __init__(
        self,
        model: nn.Module,
        fraction: RotatedShare = 0.25,
        every: int = 750,
        method: str | RowMap = "cayley",
        *,
        where: Callable[[str, nn.Module], bool] | None = None,
        output: bool = False,
        output_layer: str | Sequence[str] | None = "auto",
        whole_first: bool = True,
        generator: torch.Generator | None = None,
        report: bool = False,
    ) -> None:
        super().__init__(every)
        for name, flag in (("whole_first", whole_first), ("report", report)):
            require(isinstance(flag, bool), name, "a bool", flag)
        method = orthogonal_map(method)
        selection = rotatable_layers(model, where, output=output, output_layer=output_layer)
        if isinstance(fraction, Mapping):
            names = [layer.name for layer in selection]
            unknown = sorted(set(fraction) - set(names), key=str)
            accepted = f"a mapping from names of layers, {', '.join(map(repr, names))}"
            require(not unknown, "fraction", accepted, unknown)
        self.partially_rotated: list[tuple[nn.Module, Rotation]] = []
        """The modules in which only some dimensions are rotated. Layers with p = d need no folds."""
        # All rotations are made before the first one is attached, so that an error leaves the model unchanged.
        plans: list[Plan] = []
        for i, layer in enumerate(selection):
            rows = unparametrized_rows(layer)
            size = rows.shape[1]
            count = size if whole_first and i == 0 else _dimension_count(fraction, layer.name, size)
            seed = dimensions = None
            if count < size:
                seed = int(torch.randint(2**62, (), generator=generator))
                dimensions = BlockLayout(count).draw_order(size, seed, 0)[:count].to(rows.device)
            rotation = Rotation(method, BlockLayout(count), dimensions=dimensions, seed=seed, like=rows)
            plans.append((layer, rotation, None))
            if count < size:
                self.partially_rotated.append((cast(nn.Module, layer.module), rotation))
        attach_all(model, plans)
        if report:
            print(selection.report())

    partial = deprecated_attribute("partial", "partially_rotated")

    def __repr__(self) -> str:
        counts = ", ".join(str(rotation.layout.size) for _, rotation in self.partially_rotated)
        return f"Stochastic(every={self.every}, steps={self.steps}, dimensions=[{counts}])"

    def _folded_layers(self) -> list[tuple[nn.Module, Rotation]]:
        return self.partially_rotated


def _dimension_count(fraction: RotatedShare, name: str, size: int) -> int:
    """Return p of a layer from a share, a number, or a mapping of names to either."""
    if isinstance(fraction, Mapping):
        require(name in fraction, "fraction", f"a mapping with an entry for every layer, {name!r} among them", fraction)
        fraction = fraction[name]
    if isinstance(fraction, int) and not isinstance(fraction, bool):
        accepted = f"a number of dimensions in [2, {size}] of layer {name!r}, or a share of them as a float in (0, 1]"
        require(2 <= fraction <= size, "fraction", accepted, fraction)
        return fraction
    require(isinstance(fraction, float) and 0 < fraction <= 1, "fraction", "a share in (0, 1]", fraction)
    return min(size, max(2, round(fraction * size)))


class Equivalence(PeriodicFold):
    r"""Train a model by orthogonal equivalence: W = R·W₀·P with W₀ fixed, R and P learned rotations (POET).

    POET stands for reparameterized training via orthogonal equivalence transformation.

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
        method = orthogonal_map(method)
        self.block_size = block_size
        self.sides = sides
        selection = rotatable_layers(model, where, output=output, output_layer=output_layer)
        # R would mix the outputs of different experts.
        selection = selection.without(lambda layer: "it holds several experts" if layer.part.stacked else None)
        require_any_layer(selection)
        # All rotations are made before the first one is attached, so that an error leaves the model unchanged.
        plans: list[Plan] = []
        self.layers: list[tuple[nn.Module, TwoSidedRotation]] = []
        """The modules with their rotations."""
        for layer in selection:
            rows = unparametrized_rows(layer)
            seeds = {
                f"{side}_seed": int(torch.randint(2**62, (), generator=generator)) if sides in (side, "both") else None
                for side in ("output", "input")
            }
            rotation = TwoSidedRotation(method, block_size, **seeds, like=rows)
            rows = rows if start == "keep" else _normalized_rows(rows, scale, generator)
            plans.append((layer, rotation, rotation.permuted(rows)))
            self.layers.append((cast(nn.Module, layer.module), rotation))
        attach_all(model, plans)
        if report:
            print(selection.report())
            print("blocks:")
            for layer, (_, rotation) in zip(selection, self.layers, strict=True):
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
    wide = _numerics.compute_dtype(like.dtype)
    return (scale * sphere.normalize(rows.to(wide))).to(like)


def _describe_blocks(rotation: TwoSidedRotation) -> str:
    """Return number and size of the blocks in words."""
    parts = []
    for name, side, order in (
        ("outputs", rotation.output, rotation.output_order),
        ("inputs", rotation.input, rotation.input_order),
    ):
        if side is not None and order is not None:
            layout, fixed = side.layout, len(order) - side.layout.size
            text = f"{name}: {layout.blocks} {'block' if layout.blocks == 1 else 'blocks'} of {layout.block_size}"
            parts.append(f"{text} and {fixed} not rotated" if fixed else text)
    return ", ".join(parts)
