r"""Stochastic rotations: rotate p of d dimensions at a time, fold, and draw other dimensions (S-OPT).

`PeriodicFold` counts the steps, folds the rotations and draws again. `Stochastic` chooses which layers and how many
dimensions of each are rotated. `hypersphere.rotation.Equivalence` uses the same engine for rotations of both sides.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from hypersphere._deprecation import deprecated_attribute
from hypersphere._validation import choose, guard_save_pretrained, is_integer, require
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.optim import Optimizers
from hypersphere.rotation.layout import BlockLayout
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.rotate import (
    attach,
    original_weight,
    rotatable_layers,
    rotated_layers,
    save_obstacle,
    unparametrized_rows,
)
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = ["PeriodicFold", "Stochastic"]

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
        """Count one training step, and fold and draw dimensions after every `every` steps.

        If an error is raised, the model, the optimiser and the counter are unchanged.

        Args:
            optimizer: its state of the folded parameters is dropped, because momentum refers to the old dimensions. It
                may be a `hypersphere.optim.Optimizers`.

        Returns:
            True if the rotations were folded.
        """
        optimizers = [] if optimizer is None else getattr(optimizer, "optimizers", [optimizer])
        has_state = all(hasattr(one, "state") for one in optimizers)
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
                    for one in optimizers:
                        one.state.pop(parameter, None)
        self.steps = steps
        return steps % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter. Dimensions and seeds are buffers of the model."""
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
        chosen = choose(ORTHOGONALS, method, "method")
        require(isinstance(chosen, RowMap), "method", "a name or an object of `hypersphere.orthogonal`", method)
        selection = rotatable_layers(model, where, output=output, output_layer=output_layer)
        if isinstance(fraction, Mapping):
            names = [layer.name for layer in selection]
            unknown = sorted(set(fraction) - set(names), key=str)
            accepted = f"a mapping from names of layers, {', '.join(map(repr, names))}"
            require(not unknown, "fraction", accepted, unknown)
        self.partially_rotated: list[tuple[nn.Module, Rotation]] = []
        """The modules in which only some dimensions are rotated. Layers with p = d need no folds."""
        # All rotations are made before the first one is attached, so that an error leaves the model unchanged.
        rotations = []
        for i, layer in enumerate(selection):
            weight = unparametrized_rows(layer)
            size = weight.shape[1]
            count = size if whole_first and i == 0 else _dimension_count(fraction, layer.name, size)
            if count == size:
                rotations.append(Rotation(chosen, BlockLayout(size), like=weight))
                continue
            layout = BlockLayout(count)
            seed = int(torch.randint(2**62, (), generator=generator))
            dimensions = layout.draw_order(size, seed, 0)[:count].to(weight.device)
            rotations.append(Rotation(chosen, layout, dimensions=dimensions, seed=seed, like=weight))
            self.partially_rotated.append((cast(nn.Module, layer.module), rotations[-1]))
        for layer, rotation in zip(selection, rotations, strict=True):
            attach(layer, rotation)
        guard_save_pretrained(model, save_obstacle)
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
