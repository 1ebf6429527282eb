"""Fold rotations into the neurons every n steps and continue with other dimensions: the engine of S-OPT and POET."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hypersphere._validation import is_integer, require
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.rotate import neurons_of, rotated_layers
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = ["PeriodicFold"]


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

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Count one training step, and fold and draw dimensions after every `every` steps.

        Args:
            optimizer: its state of the folded parameters is dropped, because momentum refers to the old dimensions.

        Returns:
            True if the rotations were folded.
        """
        self.steps += 1
        if self.steps % self.every:
            return False
        for module, rotation in self._folded_layers():
            is_rotated = any(r is rotation for _, _, r in rotated_layers(module))
            if not is_rotated:
                kind = type(self).__name__
                raise ValueError(f"a layer of this model ({type(module).__name__}) was folded; create a new {kind}")
            neurons = neurons_of(module, rotation.part.parameter)
            rotation.fold(neurons)
            rotation.redraw(neurons, self.steps // self.every)
            if optimizer is not None:
                for parameter in rotation.parameters():
                    optimizer.state.pop(parameter, None)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter. Dimensions and seeds are buffers of the model."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.steps = int(state["steps"])
