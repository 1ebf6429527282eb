"""The exponential moving average of weights, which often generalises better than the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require

__all__ = ["MovingAverage"]


class MovingAverage:
    """The exponential moving average of the weights of a module: a ← decay·a + (1 − decay)·w after each step.

    Buffers, such as the statistics of BatchNorm, are not averaged. Averages are in float32 or wider: half precision
    would round small changes away.

    Args:
        module: the module.
        decay: in [0, 1).

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> nn.init.zeros_(layer.weight), (average := MovingAverage(layer, 0.75))
        (Parameter containing: tensor([[0.]], requires_grad=True), MovingAverage(decay=0.75))
        >>> nn.init.ones_(layer.weight), average.update()
        (Parameter containing: tensor([[1.]], requires_grad=True), None)
        >>> with average.applied():
        ...     print(layer.weight.item())
        0.25
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        require(is_number(decay, 0) and decay < 1, "decay", "a number in [0, 1)", decay)
        self.module, self.decay = module, decay
        self._weights = dict(module.named_parameters())
        self.averages = {name: _numerics.widen(p.detach().clone()) for name, p in self._weights.items()}

    def __repr__(self) -> str:
        return f"MovingAverage(decay={self.decay})"

    @torch.no_grad()
    def update(self) -> None:
        """Include the current weights.

        Raises:
            ValueError: if a weight was replaced, as `head.grow` does. Create a new average then.
        """
        self._require_same_weights()
        # Each process averages its part of a sharded weight, because one call cannot mix DTensors with other tensors.
        averages, weights = (
            [
                _numerics.widen(tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach())
                for tensor in tensors
            ]
            for tensors in (self.averages.values(), self._weights.values())
        )
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def _require_same_weights(self) -> None:
        """Raise a `ValueError` if parameters were replaced: rows of the new ones may belong to other classes."""
        for module in self.module.modules():
            if hasattr(module, "reshard"):  # FSDP keeps complete copies of some weights after an evaluation
                module.reshard()  # type: ignore[operator]
        current = dict(self.module.named_parameters())
        replaced = [name for name in current | self._weights if current.get(name) is not self._weights.get(name)]
        if replaced:
            names = ", ".join(replaced)
            raise ValueError(f"parameters were replaced, as by `head.grow`: {names}; create a new MovingAverage")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights of the module by their averages within the context; for errors see `update`."""
        # The averages are not exchanged with the weights, which may be narrower and would round them.
        weights = {name: parameter.detach().clone() for name, parameter in self._weights.items()}
        self._replace_weights(self.averages)
        try:
            yield
        finally:
            self._replace_weights(weights)

    @torch.no_grad()
    def _replace_weights(self, values: Mapping[str, Tensor]) -> None:
        self._require_same_weights()
        for name, parameter in self._weights.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module with averaged weights."""
        by_parameter = {id(parameter): self.averages[name] for name, parameter in self._weights.items()}
        # A tied weight has one average, but the state dict lists it under all its names.
        named = self.module.named_parameters(remove_duplicate=False)
        return {**self.module.state_dict(), **{name: by_parameter[id(parameter)] for name, parameter in named}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages."""
        for name, average in self.averages.items():
            average.copy_(state[name])
