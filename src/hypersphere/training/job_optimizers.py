"""Optimisers by name: parameter groups with and without weight decay, and rotations on the orthogonal group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hypersphere._validation import is_number, require
from hypersphere.optim import OGD, param_groups
from hypersphere.rotation import rotation_parameters
from hypersphere.training.parts import Spec, make, split_spec, truth

__all__ = ["OPTIMIZERS", "Together", "build_optimizer"]

Groups = list[dict[str, Any]]


def _sgd(groups: Groups, *, lr: float = 0.1, momentum: float = 0.9, nesterov: bool = False) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=truth("optimizer.nesterov", nesterov))


def _adam(groups: Groups, *, lr: float = 1e-3, betas: Sequence[float] = (0.9, 0.999)) -> torch.optim.Optimizer:
    """Adam with weight decay added to the gradient."""
    return torch.optim.Adam(groups, lr=lr, betas=(betas[0], betas[1]))


def _adamw(groups: Groups, *, lr: float = 1e-3, betas: Sequence[float] = (0.9, 0.999)) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": _sgd, "adam": _adam, "adamw": _adamw}


class Together:
    """Several optimisers that step together, with gradients clipped to the norm `clip` if it is given."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], clip: float | None = None) -> None:
        require(clip is None or clip > 0, "optimizer.clip", "None or a positive number", clip)
        self.optimizers, self.clip = list(optimizers), clip

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the first optimiser, by parameter."""
        return self.optimizers[0].state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Step each optimiser."""
        if self.clip is not None:
            groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], self.clip)
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimiser."""
        return {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of each optimiser."""
        require(
            len(state) == len(self.optimizers), "state", f"the states of {len(self.optimizers)} optimisers", len(state)
        )
        for place, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(place)])


def build_optimizer(modules: nn.Module, on_group: Sequence[nn.Parameter], spec: Spec) -> Together:
    """Return an optimiser for all trained parameters.

    In addition to the options of the optimiser: `weight_decay`; `decay_everything`, which also decays biases and norms;
    `clip`, the largest norm of the gradient of all parameters; `rotation_lr`, the learning rate of rotations, also of
    `OGD` for those `on_group` (default: the learning rate of the optimiser).
    """
    options = dict(spec)
    decay, turning_rate = options.pop("weight_decay", 0.0), options.pop("rotation_lr", None)
    everything, clip = (
        truth("optimizer.decay_everything", options.pop("decay_everything", False)),
        options.pop("clip", None),
    )
    apart = {id(parameter) for parameter in on_group}
    groups = param_groups(modules, decay, bias=everything, normalization=everything)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in apart]
    if turning_rate is not None:
        turning = {id(p) for p in rotation_parameters(modules)} - apart
        rotations = [p for group in groups for p in group["params"] if id(p) in turning]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in turning]
        groups.append({"params": rotations, "weight_decay": 0.0, "lr": turning_rate})
    groups = [group for group in groups if group["params"]]
    require(clip is None or is_number(clip, 0), "optimizer.clip", "None or a number >= 0", clip)
    handled = ("weight_decay", "decay_everything", "clip", "rotation_lr")
    optimizers = [make("optimizer", OPTIMIZERS, options, None, groups, handled=handled)] if groups else []
    if on_group:
        optimizers.append(OGD(list(on_group), lr=_rate(options) if turning_rate is None else turning_rate))
    require(bool(optimizers), "model", "a model with trainable parameters", type(modules).__name__)
    return Together(optimizers, clip)


def _rate(spec: Spec) -> float:
    name, options = split_spec("optimizer", OPTIMIZERS, spec)
    return options.get("lr", inspect.signature(OPTIMIZERS[name]).parameters["lr"].default)
