"""Load the weights of another network and head as initial weights, where names and shapes match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["LoadReport", "load_matching_weights_"]

# Prefixes of names in a file of an objective, checkpoint, network, body or backbone, and their replacements.
_PREFIXES = (("", ""), ("objective.", ""), ("", "network."), ("", "network.body."), ("", "network.body.backbone."))
_SHOWN_NAMES = 6  # names in a message


@dataclass(frozen=True)
class LoadReport:
    """Which tensors were loaded, which kept their random initialisation, and which were unused, with the reason."""

    loaded: tuple[str, ...]
    initialized: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        text = f"loaded {len(self.loaded)} tensors ({_first_names(self.loaded)})"
        if self.initialized:
            text += f"; randomly initialised: {_first_names(self.initialized)}"
        if self.unused:
            text += f"; not loaded: {_first_names(self.unused)}"
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
    network_tensors = {f"network.{name}": value for name, value in network.state_dict().items()}
    head_parameters = {f"head.{name}": value for name, value in head.named_parameters()}
    targets = {
        name: value for name, value in {**network_tensors, **head_parameters}.items() if isinstance(value, Tensor)
    }
    given = _renamed({name: value for name, value in weights.items() if isinstance(value, Tensor)}, targets)
    matching = {name for name, value in targets.items() if name in given and given[name].shape == value.shape}
    if not matching >= head_parameters.keys():
        matching -= head_parameters.keys()
    learned = {f"network.{name}" for name, _ in network.named_parameters()} | head_parameters.keys()
    unused = [_describe_unused(name, value, targets) for name, value in given.items() if name not in matching]
    if not matching & learned:
        in_file, in_model = _first_names(unused) or "nothing", _first_names(list(targets))
        raise ValueError(f"none of the initial weights matches: the file has {in_file}; the model has {in_model}")
    for name in matching:
        targets[name].copy_(given[name])
    initialized = [name for name in targets if name not in matching]
    return LoadReport(tuple(name for name in targets if name in matching), tuple(initialized), tuple(unused))


def _renamed(given: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the given tensors by the entry of `_PREFIXES` with the most matches; omit those of regularisers."""
    candidates = [{new + name.removeprefix(old): value for name, value in given.items()} for old, new in _PREFIXES]
    best = max(candidates, key=lambda tensors: len(tensors.keys() & targets.keys()))
    return {name: value for name, value in best.items() if not name.startswith("regularizers.")}


def _describe_unused(name: str, value: Tensor, targets: Mapping[str, Tensor]) -> str:
    if name not in targets or targets[name].shape == value.shape:
        return name
    given_shape, shape = ("×".join(map(str, tensor.shape)) or "scalar" for tensor in (value, targets[name]))
    return f"{name} ({given_shape}, not {shape})"


def _first_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"
