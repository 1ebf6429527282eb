r"""Stochastic rotations: turn p of d dimensions at a time, fold, and draw others (S-OPT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._validation import choose, is_integer, require
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.rowmap import RowMap
from hypersphere.rotation.convert import attach, original_of, rotated_layers
from hypersphere.rotation.layout import Layout
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.selection import neurons_of, select

__all__ = ["Stochastic"]


class Stochastic:
    r"""Train a model by small rotations R_p of randomly drawn dimensions (OPT, Algorithm 1).

    Every `every` steps R_p is folded into the neurons, other dimensions are drawn and R_p is the identity again.
    Turning any p dimensions of all neurons keeps their energy (OPT, theorem 2). The first layer is turned as a whole.

    Args:
        model: its layers are rotated in place, as by `rotate_`; `fold_` makes it plain again.
        fraction: p for each layer: a share of d in (0, 1], a number of dimensions (an int), or a mapping from layer
            names to either.
        every: N_in, the steps between folds.
        method: a name or object of `hypersphere.orthogonal`.
        where: which layers, by name and module; all but the output layer if None.
        output: whether the output layer may be among the layers.
        whole_first: whether the first layer is turned as a whole.
        generator: where the dimensions are drawn from; seeded from the global seed if None.

    Example:
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> stochastic = Stochastic(model, fraction=0.5, every=2)
        >>> [stochastic.step() for _ in range(4)]
        [False, True, False, True]
    """

    def __init__(
        self,
        model: nn.Module,
        fraction: float | int | Mapping[str, float | int] = 0.25,
        every: int = 750,
        method: str | RowMap = "cayley",
        *,
        where: Callable[[str, nn.Module], bool] | None = None,
        output: bool = False,
        whole_first: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        require(is_integer(every, 1), "every", "a whole number >= 1", every)
        chosen = choose(ORTHOGONALS, method, "method")
        require(isinstance(chosen, RowMap), "method", "a name or an object of `hypersphere.orthogonal`", method)
        layers = select(model, where, output=output)
        if isinstance(fraction, Mapping):
            unknown, names = set(fraction) - {name for name, _ in layers}, ", ".join(repr(name) for name, _ in layers)
            require(not unknown, "fraction", f"a mapping from names of layers, {names}", sorted(unknown, key=str))
        counts = []
        for i, (name, layer) in enumerate(layers):
            size = neurons_of(name, layer).flatten(1).shape[1]
            counts.append(size if whole_first and i == 0 else _count(fraction, name, size))
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        self.every = every
        self.steps = 0
        self.partial: list[tuple[nn.Module, Rotation]] = []
        for (_, layer), count in zip(layers, counts, strict=True):
            weight = layer.weight
            assert isinstance(weight, Tensor)
            size = weight.flatten(1).shape[1]
            dimensions = None if count == size else self._draw(size, count).to(weight.device)
            turning = Rotation(chosen, Layout(count), dimensions=dimensions, like=weight)
            attach(layer, turning)
            if dimensions is not None:
                self.partial.append((layer, turning))

    def __repr__(self) -> str:
        turned = ", ".join(f"{len(t.dimensions)}" for _, t in self.partial if t.dimensions is not None)
        return f"Stochastic(every={self.every}, steps={self.steps}, dimensions turned: [{turned}])"

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Count a training step; fold and draw anew when it is time, and say whether that was so.

        Args:
            optimizer: its state of the parameters that start again (momentum of other dimensions) is dropped.
        """
        self.steps += 1
        if self.steps % self.every:
            return False
        for layer, turning in self.partial:
            rotated = any(t is turning for _, _, t in rotated_layers(layer))
            require(rotated, "model", "rotated still to go on, but a layer of it was folded", type(layer).__name__)
            neurons = original_of(layer)
            turning.fold(neurons)
            assert turning.dimensions is not None
            turning.dimensions.copy_(self._draw(neurons.flatten(1).shape[1], len(turning.dimensions)))
            if optimizer is not None:
                optimizer.state.pop(turning.parameter, None)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter and the random state; the dimensions are buffers of the model."""
        return {"steps": self.steps, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.steps = int(state["steps"])
        self.generator.set_state(state["generator"])

    def _draw(self, size: int, count: int) -> Tensor:
        return torch.randperm(size, generator=self.generator)[:count].sort().values


def _count(fraction: float | int | Mapping[str, float | int], name: str, size: int) -> int:
    """p of a layer, from a share, a number, or a mapping of names to either."""
    if isinstance(fraction, Mapping):
        require(name in fraction, "fraction", f"a mapping with an entry for every layer, {name!r} among them", fraction)
        fraction = fraction[name]
    if isinstance(fraction, int) and not isinstance(fraction, bool):
        accepted = f"a number of dimensions in [2, {size}] of layer {name!r}, or a share of them as a float in (0, 1]"
        require(2 <= fraction <= size, "fraction", accepted, fraction)
        return fraction
    require(isinstance(fraction, float) and 0 < fraction <= 1, "fraction", "a share in (0, 1]", fraction)
    return min(size, max(2, round(fraction * size)))
