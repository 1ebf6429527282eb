"""The optimisers of torch by name, a container for several optimisers, and loading of state in its saved dtypes."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hypersphere._validation import require
from hypersphere.optim.muon import Muon

__all__ = ["OPTIMIZERS", "Optimizers", "restore_saved_dtypes"]

_DEFAULTS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}
# Not listed: the base class, LBFGS (needs a closure), SparseAdam (needs sparse gradients) and Muon (ours replaces it).
_EXCLUDED = ("Optimizer", "LBFGS", "SparseAdam", "Muon")

# Every other optimiser of torch under its name in lower case, and Muon; called with parameter groups and options.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): partial(value, **_DEFAULTS[name]) if name in _DEFAULTS else value
    for name, value in sorted(vars(torch.optim).items())
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in _EXCLUDED
}
OPTIMIZERS["muon"] = Muon


class Optimizers:
    """Several optimisers with the interface of one.

    Example:
        >>> network, head = torch.nn.Linear(4, 2), torch.nn.Linear(2, 3)
        >>> optimizer = Optimizers([OPTIMIZERS["sgd"](network.parameters()), OPTIMIZERS["adam"](head.parameters())])
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.1, 0.001]
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimisers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Step each optimiser."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimiser."""
        return {str(index): optimizer.state_dict() for index, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of each optimiser."""
        count = len(self.optimizers)
        require(len(state) == count, "state", f"the states of {count} optimisers", len(state))
        for index, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(index)])


def restore_saved_dtypes(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], names: Container[str] | None = None
) -> None:
    """Repeat `load_state_dict` in the saved dtypes, because torch rounds states to the dtype of the parameters.

    Args:
        optimizer: an optimiser that has loaded `state_dict`.
        state_dict: the saved state.
        names: the names of the states that are restored, all of them if None.
    """
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], saved["params"], strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and (names is None or name in names):
                    optimizer.state[p][name] = value.detach().to(p.device, copy=True)
