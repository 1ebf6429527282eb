"""What a head makes of its arguments: the defaults, the checks, and what they stand for."""

from __future__ import annotations

import numbers
from typing import Any, TypedDict

import torch
from torch import Tensor

from hypersphere._validation import is_number, require
from hypersphere.functions.angular import Angular, Cosine
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Magnitude, Sphere
from hypersphere.functions.margin import Margin
from hypersphere.heads.annealing import Annealing, Ramp

__all__ = [
    "DEFAULTS",
    "HeadOptions",
    "check_choices",
    "check_penalties",
    "check_schedules",
    "check_sizes",
    "checked_class_weights",
    "magnitude_of",
    "tensor_fields",
]

GRADIENTS = ("true", "detached", "normalized")
REDUCTIONS = ("mean", "sum", "none")

DEFAULTS: dict[str, Any] = {
    "radius": "feature",
    "weight_norm": True,
    "angular": Cosine(),
    "margin": None,
    "annealing": None,
    "ramp": None,
    "gradient": "true",
    "energy_weight": 0.0,
    "norm_weight": 0.0,
    "norm_target": 30.0,
    "label_smoothing": 0.0,
    "ignore_index": -100,
    "reduction": "mean",
}


class HeadOptions(TypedDict, total=False):
    """What every preset takes beside its own arguments, and hands to `AngularHead` as it is."""

    annealing: Annealing | None
    ramp: Ramp | None
    gradient: str
    class_weights: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str


def check_sizes(in_features: int, num_classes: int) -> None:
    """Refuse a head without features or without a choice."""
    require(_whole(in_features, 1), "in_features", "a whole number >= 1", in_features)
    require(_whole(num_classes, 2), "num_classes", "a whole number >= 2", num_classes)


def check_choices(*, gradient: str, reduction: str, label_smoothing: float, ignore_index: int) -> None:
    """Refuse options that do not exist."""
    require(gradient in GRADIENTS, "gradient", f"one of {', '.join(map(repr, GRADIENTS))}", gradient)
    require(reduction in REDUCTIONS, "reduction", f"one of {', '.join(map(repr, REDUCTIONS))}", reduction)
    smooth = is_number(label_smoothing, 0, 1) and label_smoothing < 1
    require(smooth, "label_smoothing", "a number in [0, 1)", label_smoothing)
    require(_whole(ignore_index, -(2**63)), "ignore_index", "a whole number", ignore_index)


def check_schedules(margin: object, annealing: object, ramp: object) -> None:
    """Refuse a schedule that is none, or that has no margin to act on."""
    for name, schedule in (("annealing", annealing), ("ramp", ramp)):
        require(schedule is None or callable(schedule), name, "a schedule or None", schedule)
        require(schedule is None or margin is not None, name, "None when there is no margin", schedule)


def check_penalties(energy_weight: float, norm_weight: float, norm_target: float, reduction: str) -> None:
    """Refuse weights below 0, and penalties of a batch where rows are asked for."""
    require(is_number(energy_weight, 0), "energy_weight", "a number >= 0", energy_weight)
    require(is_number(norm_weight, 0), "norm_weight", "a number >= 0", norm_weight)
    require(is_number(norm_target, 0) and norm_target > 0, "norm_target", "a positive number", norm_target)
    penalised = energy_weight > 0 or norm_weight > 0
    require(reduction == "mean" or not penalised, "reduction", "'mean' with an energy or norm weight", reduction)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def magnitude_of(radius: str | float, weight_norm: bool) -> Magnitude:
    """ρ(x)·ν(w) of the head as one of the magnitudes h that layers use."""
    if radius == "feature":
        return Linear() if weight_norm else InnerProduct()
    fits = is_number(radius, 0) and float(radius) > 0
    require(fits, "radius", "'feature' or a positive number", radius)
    fixed = Sphere(alpha=float(radius))
    return fixed if weight_norm else LinearlyWeighted(fixed)


def checked_class_weights(weights: Tensor | None, num_classes: int) -> Tensor | None:
    """One finite number ≥ 0 a class, as a copy of the head's own."""
    if weights is None:
        return None
    weights = torch.as_tensor(weights)
    fits = weights.shape == (num_classes,) and bool((weights >= 0).all()) and bool(weights.isfinite().all())
    require(fits, "class_weights", f"{num_classes} finite numbers >= 0", tuple(weights.shape))
    return weights.detach().clone().to(torch.float64 if weights.dtype == torch.float64 else torch.float32)


def tensor_fields(owner: str, entry: object) -> dict[str, Tensor]:
    """Tensors that a g or ψ of ours holds (a learned k), by field; more than one number is refused in a head."""
    if not isinstance(entry, (Angular, Margin)):
        return {}
    found = {name: value for name, value in vars(entry).items() if isinstance(value, Tensor)}
    for name, value in found.items():
        require(value.numel() == 1, f"{name} of {owner}", "one number in a head", tuple(value.shape))
    return found
