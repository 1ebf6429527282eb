"""The state of all random number generators that training may use."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from hypersphere._validation import require

__all__ = ["RandomState"]


class RandomState:
    """The state of the generators of Python, NumPy, torch and the accelerator (if in use), and of given generators.

    It consists of tensors, numbers and text, so that a checkpoint can hold it. After restoring it, the same random
    numbers are drawn again, bit for bit.

    Args:
        generators: additional generators by name.

    Example:
        >>> state = RandomState()
        >>> before = state.state_dict()
        >>> drawn = float(torch.rand(())), random.random(), numpy.random.rand()
        >>> state.load_state_dict(before)
        >>> drawn == (float(torch.rand(())), random.random(), numpy.random.rand())
        True
    """

    def __init__(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        self.generators = dict(generators or {})

    def __repr__(self) -> str:
        return f"RandomState({', '.join(['python', 'numpy', 'torch', *self.generators])})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators."""
        version, words, gauss = random.getstate()
        return {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": _converted(numpy.random.get_state(legacy=False), numpy.ndarray, torch.tensor),  # noqa: NPY002
            "torch": torch.get_rng_state(),  # of the CPU
            "accelerator": _accelerator_states(),
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of all generators."""
        saved, expected = sorted(state["generators"]), sorted(self.generators)
        require(saved == expected, "state", f"the state of the generators {expected}", saved)
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        numpy.random.set_state(_converted(state["numpy"], Tensor, Tensor.numpy))  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        for name, generator in self.generators.items():
            generator.set_state(state["generators"][name])
        if state["accelerator"] is not None:
            _restore_accelerator(state["accelerator"])


def _accelerator_states() -> list[Tensor] | None:
    """Return the state of each accelerator, or None if none is in use."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return None  # reading the state would initialise it
    return module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]


def _restore_accelerator(states: list[Tensor]) -> None:
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count != len(states):
        reason = f"it was saved for {len(states)}, and this machine has {count}"
        warnings.warn(f"the random state of accelerators was not restored: {reason}", stacklevel=3)
        return
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    else:
        module.set_rng_state(states[0])


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dictionaries in which values of type `kind` are converted."""
    if isinstance(value, dict):
        return {key: _converted(item, kind, convert) for key, item in value.items()}
    return convert(value) if isinstance(value, kind) else value
