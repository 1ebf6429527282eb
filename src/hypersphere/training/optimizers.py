"""Optimisers by name, with parameter groups: weight decay, layer-wise learning rates, rotations, sampled classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hypersphere._validation import is_number, require
from hypersphere.optim import OGD, OGDAdam, param_groups
from hypersphere.rotation import rotation_parameters
from hypersphere.training.components import create
from hypersphere.training.config import Component

__all__ = ["GROUP_OPTIONS", "OPTIMIZERS", "Optimizers", "build_optimizer"]

_DEFAULTS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}}
_OTHER_INTERFACE = ("Optimizer", "LBFGS", "SparseAdam", "Muon")  # a closure; only sparse gradients; only matrices

# Every optimiser of torch under its name in small letters, called with parameter groups and options.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): partial(value, **_DEFAULTS[name]) if name in _DEFAULTS else value
    for name, value in sorted(vars(torch.optim).items())
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in _OTHER_INTERFACE
}

# Options of every optimiser that define its parameter groups.
GROUP_OPTIONS: dict[str, Any] = {
    "weight_decay": 0.0,
    "decay_everything": False,
    "layer_decay": None,
    "rotation_lr": None,
    "rotation_decay": 0.0,
}


class Optimizers:
    """Several optimisers that step together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the first optimiser, by parameter."""
        return self.optimizers[0].state

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
        return {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of each optimiser."""
        count = len(self.optimizers)
        require(len(state) == count, "state", f"the states of {count} optimisers", len(state))
        for place, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(place)])


def build_optimizer(
    modules: nn.Module,
    component: Component,
    *,
    on_group: Sequence[nn.Parameter] = (),
    group_options: Mapping[str, Any] | None = None,
    sampled: nn.Parameter | None = None,
    layers_to_output: Callable[[], Mapping[int, int]] = dict,
    create_: Callable[..., Any] = create,
) -> Optimizers:
    """Return an optimiser for all trained parameters.

    In addition to the options of the optimiser, `component` may have `weight_decay`; `decay_everything`, which also
    decays biases and norms; `layer_decay`, the factor of the learning rate per layer counted from the output;
    `rotation_lr` and `rotation_decay`, learning rate and weight decay of rotations.

    Args:
        modules: network and head.
        component: name and options of the optimiser.
        on_group: rotations that are trained by descent on the orthogonal group.
        group_options: options of that descent; "adam" selects `OGDAdam`.
        sampled: class vectors of which each step trains a sample. They get an optimiser without momentum for rows that
            were not drawn.
        layers_to_output: returns the number of layers from each parameter, by identity, to the output.
        create_: creates the optimiser, see `hypersphere.training.components.create`.
    """
    options = dict(component.options)
    chosen = {key: options.pop(key, default) for key, default in GROUP_OPTIONS.items()}
    decay, layer_decay = chosen["weight_decay"], chosen["layer_decay"]
    everything = chosen["decay_everything"]
    require(isinstance(everything, bool), "optimizer.decay_everything", "true or false", everything)
    for name in ("weight_decay", "rotation_decay", "rotation_lr"):
        fits = is_number(chosen[name], 0) or (name == "rotation_lr" and chosen[name] is None)
        require(fits, f"optimizer.{name}", "a number >= 0", chosen[name])
    is_factor = layer_decay is None or (is_number(layer_decay, 0, 1) and layer_decay > 0)
    require(is_factor, "optimizer.layer_decay", "null or a number in (0, 1]", layer_decay)

    component = Component(component.name, options)
    rate = _learning_rate(component)
    rotation_rate = rate if chosen["rotation_lr"] is None else chosen["rotation_lr"]
    groups = param_groups(modules, decay, bias=everything, normalization=everything)
    apart = {id(parameter) for parameter in on_group}
    if sampled is not None:
        decayed = any(parameter is sampled for parameter in groups[0]["params"]) and decay > 0
        accepted = "0 if head.sample is set, because decay would also change class vectors that were not drawn"
        require(not decayed, "optimizer.weight_decay", accepted, decay)
        apart.add(id(sampled))
    turning = {id(p) for p in rotation_parameters(modules)} - apart
    if chosen["rotation_lr"] is None and not chosen["rotation_decay"]:
        turning = set()
    rotations = [p for group in groups for p in group["params"] if id(p) in turning]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in apart | turning]
    if layer_decay is not None:
        groups = _split_by_depth(groups, layers_to_output(), rate, layer_decay)
    if rotations:
        groups.append({"params": rotations, "weight_decay": chosen["rotation_decay"], "lr": rotation_rate})
    groups = [group for group in groups if group["params"]]

    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(create_(component, "optimizer", groups, handled=GROUP_OPTIONS))
    if on_group:
        more = dict(group_options or {})
        kind = OGDAdam if more.pop("adam", False) else OGD
        optimizers.append(kind(list(on_group), lr=rotation_rate, **more))
    if sampled is not None:
        adaptive = "adam" in component.name.lower()
        optimizers.append((torch.optim.SparseAdam if adaptive else torch.optim.SGD)([sampled], lr=rate))
    require(bool(optimizers), "model", "a model with trainable parameters", type(modules).__name__)
    return Optimizers(optimizers)


def _split_by_depth(
    groups: list[dict[str, Any]], distances: Mapping[int, int], rate: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Split groups by the number of layers up to the output, which lower the learning rate."""
    split: dict[tuple[int, int], dict[str, Any]] = {}
    for place, group in enumerate(groups):
        for parameter in group["params"]:
            distance = distances.get(id(parameter), 0)
            lower = {**group, "params": [], "lr": rate * layer_decay**distance}
            split.setdefault((place, distance), lower)["params"].append(parameter)
    return list(split.values())


def _learning_rate(component: Component) -> float:
    """Return the learning rate of an optimiser, given or by default."""
    rate = component.options.get("lr")
    if rate is None and component.name in OPTIMIZERS:
        rate = inspect.signature(OPTIMIZERS[component.name]).parameters["lr"].default
    rate = 1e-3 if rate is None else rate
    require(is_number(rate, 0), "optimizer.lr", "a number >= 0", rate)
    return float(rate)
