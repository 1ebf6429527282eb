"""Build the optimiser of an experiment: parameter groups, and separate optimisers of rotations and sampled classes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hypersphere._validation import is_number, require
from hypersphere.models import layer_depths
from hypersphere.optim import OPTIMIZERS, Hyperball, Optimizers, RowAdamW, RowSGD, param_groups
from hypersphere.rotation import rotation_parameters
from hypersphere.training.components import MENUS, create
from hypersphere.training.config import Component
from hypersphere.training.objective import Objective
from hypersphere.training.rotations import TrainedRotation

__all__ = ["GroupOptions", "build_optimizer"]


@dataclass(frozen=True)
class GroupOptions:
    """Options of every optimiser that define its parameter groups.

    Attributes:
        weight_decay: weight decay of weights.
        decay_everything: also decay biases and the parameters of normalisation layers.
        layer_decay: factor of the learning rate per layer, from the output to the input.
        rotation_lr: learning rate of rotations, by default that of all parameters.
        rotation_decay: weight decay of rotations.
        hyperball: keep the norm of each "matrix" or "row" of the weights, see `hypersphere.optim.Hyperball`.
    """

    weight_decay: float = 0.0
    decay_everything: bool = False
    layer_decay: float | None = None
    rotation_lr: float | None = None
    rotation_decay: float = 0.0
    hyperball: str | None = None

    def __post_init__(self) -> None:
        layer_decay, rotation_lr = self.layer_decay, self.rotation_lr
        is_bool = isinstance(self.decay_everything, bool)
        require(is_bool, "optimizer.decay_everything", "true or false", self.decay_everything)
        for name in ("weight_decay", "rotation_decay"):
            require(is_number(getattr(self, name), 0), f"optimizer.{name}", "a number >= 0", getattr(self, name))
        is_rate = rotation_lr is None or is_number(rotation_lr, 0)
        require(is_rate, "optimizer.rotation_lr", "null or a number >= 0", rotation_lr)
        is_factor = layer_decay is None or (is_number(layer_decay, 0, 1) and layer_decay > 0)
        require(is_factor, "optimizer.layer_decay", "null or a number in (0, 1]", layer_decay)
        is_choice = self.hyperball in (None, "matrix", "row")
        require(is_choice, "optimizer.hyperball", "null, 'matrix' or 'row'", self.hyperball)


def build_optimizer(
    objective: Objective, component: Component, rotation: TrainedRotation, *, sampled: nn.Parameter | None = None
) -> Optimizers:
    """Return an optimiser for all trained parameters.

    Args:
        objective: network and head.
        component: name and options of the optimiser, including those of `GroupOptions`.
        rotation: its parameters on the orthogonal group get a separate optimiser.
        sampled: class vectors of which each step trains a sample. They get an optimiser that moves only the drawn rows.
    """
    component, options = MENUS["optimizer"].split(component)
    rate = _learning_rate(component)
    rotation_rate = rate if options.rotation_lr is None else options.rotation_lr
    decay_all = options.decay_everything
    groups = param_groups(objective, options.weight_decay, bias=decay_all, normalization=decay_all)
    # Parameters that the main optimiser does not train: rotations on the orthogonal group, and sampled class vectors.
    separate = {id(parameter) for parameter in rotation.orthogonal_parameters}
    # The first group has the parameters with weight decay.
    is_decayed = sampled is not None and any(parameter is sampled for parameter in groups[0]["params"])
    if sampled is not None:
        separate.add(id(sampled))
    # All other rotations are a group of the main optimiser if they have a learning rate or decay.
    has_group = options.rotation_lr is not None or options.rotation_decay > 0
    grouped_rotations = {id(p) for p in rotation_parameters(objective)} - separate if has_group else set()
    rotations = [p for group in groups for p in group["params"] if id(p) in grouped_rotations]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in separate | grouped_rotations]
    if options.layer_decay is not None:
        groups = _split_by_depth(groups, objective.network, rate, options.layer_decay)
    groups.append({"params": rotations, "weight_decay": options.rotation_decay, "lr": rotation_rate})
    groups = [group for group in groups if group["params"]]

    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        main: torch.optim.Optimizer = create(component, "optimizer", groups)
        optimizers.append(main if options.hyperball is None else Hyperball(main, per=options.hyperball))
    if rotation.orthogonal_parameters:
        optimizers.append(rotation.orthogonal_optimizer(rotation.orthogonal_parameters, lr=rotation_rate))
    if sampled is not None:
        decay = options.weight_decay if is_decayed else 0.0
        optimizers.append(_row_optimizer(component, sampled, rate, decay))
    require(bool(optimizers), "model", "a model with trainable parameters", type(objective.network).__name__)
    return Optimizers(optimizers)


def _row_optimizer(component: Component, sampled: nn.Parameter, rate: float, decay: float) -> torch.optim.Optimizer:
    """Return the optimiser of sampled class vectors: `RowAdamW` for variants of Adam, otherwise `RowSGD`."""
    options = component.options
    if "adam" in component.name.lower():
        return RowAdamW([sampled], lr=rate, betas=options.get("betas", (0.9, 0.999)), weight_decay=decay)
    # Unless it is given, the default momentum of the main optimiser, which the menu stores as a keyword of a `partial`.
    momentum = options.get("momentum", getattr(OPTIMIZERS.get(component.name), "keywords", {}).get("momentum", 0.0))
    return RowSGD([sampled], lr=rate, momentum=momentum, weight_decay=decay)


def _split_by_depth(
    groups: list[dict[str, Any]], network: nn.Module, rate: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Split groups by depth: every layer between a parameter and the head multiplies its rate by `layer_decay`."""
    body = cast(nn.Module, network.body)
    depths = layer_depths(body)
    deepest = max(depths.values(), default=0)
    distances = {id(parameter): deepest + 1 - depths[name] for name, parameter in body.named_parameters()}
    split: dict[tuple[int, int], dict[str, Any]] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            distance = distances.get(id(parameter), 0)
            new_group = {**group, "params": [], "lr": rate * layer_decay**distance}
            split.setdefault((index, distance), new_group)["params"].append(parameter)
    return list(split.values())


def _learning_rate(component: Component) -> float:
    """Return the learning rate of an optimiser, given or by default."""
    rate = component.options.get("lr")
    if rate is None and component.name in OPTIMIZERS:
        rate = inspect.signature(OPTIMIZERS[component.name]).parameters["lr"].default
    rate = 1e-3 if rate is None else rate
    require(is_number(rate, 0), "optimizer.lr", "a number >= 0", rate)
    return float(rate)
