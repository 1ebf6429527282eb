"""Load the weights of another network and head as initial weights, where names and shapes match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["LoadReport", "load_matching_weights_"]

# Prefixes of names in files and their replacements: weights of an objective, checkpoint, network, body or backbone.
_PREFIXES = (("", ""), ("objective.", ""), ("", "network."), ("", "network.body."), ("", "network.body.backbone."))
_MOST = 6  # names in a message


@dataclass(frozen=True)
class LoadReport:
    """Which tensors were loaded, which kept their random initialisation, and which were unused, with the reason."""

    loaded: tuple[str, ...]
    initialized: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        text = f"loaded {len(self.loaded)} tensors ({_some(self.loaded)})"
        if self.initialized:
            text += f"; randomly initialised: {_some(self.initialized)}"
        if self.unused:
            text += f"; not loaded: {_some(self.unused)}"
        if any(".parametrizations." in name for name in self.unused):
            text += "; to load rotated layers, fold that run first (hypersphere fold)"
        return text


@torch.no_grad()
def load_matching_weights_(network: nn.Module, head: nn.Module, weights: Mapping[str, object]) -> LoadReport:
    """Load the weights with matching names and shapes into a network and a head, in place.

    A network loads what matches, including buffers. A head loads all its parameters or none, and no step counter.

    Args:
        network, head: modules before any rotation.
        weights: tensors by name, with the names of an objective, a checkpoint, a network, its body, or the backbone of
            an `Embedder`.

    Raises:
        ValueError: if no weight matches.

    Example:
        >>> source = {"weight": torch.ones(2, 3), "bias": torch.ones(4)}
        >>> network, head = nn.Linear(3, 2), nn.Linear(2, 5)
        >>> print(load_matching_weights_(network, head, source))
        loaded 1 tensors (network.weight); randomly initialised: network.bias, ...; not loaded: network.bias (4, not 2)
    """
    of_network = {f"network.{name}": value for name, value in network.state_dict().items()}
    of_head = {f"head.{name}": value for name, value in head.named_parameters()}
    ours = {name: value for name, value in {**of_network, **of_head}.items() if isinstance(value, Tensor)}
    theirs = _renamed({name: value for name, value in weights.items() if isinstance(value, Tensor)}, ours)
    fitting = {name for name, value in ours.items() if name in theirs and theirs[name].shape == value.shape}
    if not fitting >= of_head.keys():
        fitting -= of_head.keys()
    learned = {f"network.{name}" for name, _ in network.named_parameters()} | of_head.keys()
    unused = [_reason(name, value, ours) for name, value in theirs.items() if name not in fitting]
    if not fitting & learned:
        there, here = _some(unused) or "nothing", _some(list(ours))
        raise ValueError(f"none of the initial weights matches: the file has {there}; the model has {here}")
    for name in fitting:
        ours[name].copy_(theirs[name])
    initialized = [name for name in ours if name not in fitting]
    return LoadReport(tuple(name for name in ours if name in fitting), tuple(initialized), tuple(unused))


def _renamed(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the given tensors with the prefix under which most names match; drop those of regularisers."""
    ways = [{new + name.removeprefix(old): value for name, value in theirs.items()} for old, new in _PREFIXES]
    best = max(ways, key=lambda way: len(way.keys() & ours.keys()))
    return {name: value for name, value in best.items() if not name.startswith("regularizers.")}


def _reason(name: str, value: Tensor, ours: Mapping[str, Tensor]) -> str:
    if name not in ours or ours[name].shape == value.shape:
        return name
    there, here = ("×".join(map(str, tensor.shape)) or "scalar" for tensor in (value, ours[name]))
    return f"{name} ({there}, not {here})"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST])
    return shown if len(names) <= _MOST else f"{shown} and {len(names) - _MOST} more"
