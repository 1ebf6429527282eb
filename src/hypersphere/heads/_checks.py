"""Checks of batches and of the settings of heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import is_integer, is_number, require

__all__ = [
    "check_features",
    "check_labels",
    "check_loss_options",
    "check_negatives",
    "check_penalties",
    "check_schedules",
    "checked_class_weights",
    "checked_margin_strengths",
    "require_labels",
]

_GRADIENTS = ("true", "detached", "normalized")
_REDUCTIONS = ("mean", "sum", "none")


# Batches -------------------------------------------------------------------------------------------------------------


def check_features(x: Tensor, in_features: int) -> None:
    """Raise a `ValueError` unless `x` is a dense floating-point matrix with `in_features` columns."""
    require(isinstance(x, Tensor), "x", "a tensor of features", type(x).__name__)
    if x.ndim != 2 or x.shape[1] != in_features or not x.is_floating_point() or x.layout != torch.strided:
        raise ValueError(
            f"x must be dense floating-point features of shape (B, {in_features}), not {x.dtype} {tuple(x.shape)}"
        )


def check_labels(y: Tensor, batch: int) -> Tensor:
    """Return the labels in int64, or raise a `ValueError` unless `y` is a vector of `batch` integers.

    Values are not read. In a narrow dtype a label could equal an ignored one: -100 is 156 in uint8.
    """
    require(isinstance(y, Tensor), "y", "a tensor of labels", type(y).__name__)
    if y.shape != (batch,) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be {batch} integer labels, one per row of x, not {y.dtype} {tuple(y.shape)}")
    return y.long()


def require_labels(y: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise a `ValueError` that names the first label that is neither a class nor ignored."""
    if not _numerics.values_readable(y):
        return
    is_bad = (y != ignore_index) & ((y < 0) | (y >= num_classes))
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(f"y must be in [0, {num_classes}), but row {row} is {int(y[row])}")


# Settings ------------------------------------------------------------------------------------------------------------


def check_loss_options(gradient: str, reduction: str, label_smoothing: float, ignore_index: int) -> None:
    """Raise a `ValueError` that names an invalid option of the loss."""
    require(gradient in _GRADIENTS, "gradient", f"one of {', '.join(map(repr, _GRADIENTS))}", gradient)
    require(reduction in _REDUCTIONS, "reduction", f"one of {', '.join(map(repr, _REDUCTIONS))}", reduction)
    is_fraction = is_number(label_smoothing, 0, 1) and label_smoothing < 1
    require(is_fraction, "label_smoothing", "a number in [0, 1)", label_smoothing)
    require(is_integer(ignore_index, -(2**63)), "ignore_index", "an integer", ignore_index)


def check_schedules(margin: object, annealing: object, ramp: object) -> None:
    """Raise a `ValueError` if a schedule is not callable, or there is no margin to schedule."""
    for name, schedule in (("annealing", annealing), ("ramp", ramp)):
        require(schedule is None or callable(schedule), name, "a schedule or None", schedule)
        require(schedule is None or margin is not None, name, "None when there is no margin", schedule)


def check_penalties(energy_weight: float, norm_weight: float, norm_target: float, reduction: str) -> None:
    """Raise a `ValueError` that names an invalid weight of a penalty."""
    require(is_number(energy_weight, 0), "energy_weight", "a number >= 0", energy_weight)
    require(is_number(norm_weight, 0), "norm_weight", "a number >= 0", norm_weight)
    require(is_number(norm_target, 0) and norm_target > 0, "norm_target", "a positive number", norm_target)
    has_penalty = energy_weight > 0 or norm_weight > 0
    require(reduction == "mean" or not has_penalty, "reduction", "'mean' with an energy or norm weight", reduction)


def check_negatives(
    hard_negatives: int,
    hard_margin: float,
    interclass_filter: float | None,
    curriculum: float | None,
    label_smoothing: float,
) -> None:
    """Raise a `ValueError` that names an invalid option for wrong classes."""
    require(is_integer(hard_negatives, 0), "hard_negatives", "an integer >= 0", hard_negatives)
    require(is_number(hard_margin, 0, math.pi), "hard_margin", "an angle in [0, pi]", hard_margin)
    is_cosine = interclass_filter is None or is_number(interclass_filter, -1, 1)
    require(is_cosine, "interclass_filter", "a cosine in [-1, 1] or None", interclass_filter)
    is_rate = curriculum is None or (is_number(curriculum, 0, 1) and curriculum < 1)
    require(is_rate, "curriculum", "a number in [0, 1) or None", curriculum)
    require(not (hard_negatives and curriculum is not None), "hard_negatives", "0 with a curriculum", hard_negatives)
    is_plain = interclass_filter is None or label_smoothing == 0
    require(is_plain, "interclass_filter", "None with label smoothing, which needs all classes", interclass_filter)


def checked_class_weights(weights: Tensor | None, num_classes: int) -> Tensor | None:
    """Return a float copy of C finite weights >= 0."""
    return None if weights is None else _class_numbers("class_weights", weights, num_classes, 0, "finite numbers >= 0")


def checked_margin_strengths(margins: Tensor | None, sizes: Tensor | None, num_classes: int) -> Tensor | None:
    r"""Return the strength of the margin of each class, (C,) in [0, 1], or None if all are 1.

    Args:
        margins: the strengths.
        sizes: the numbers n_j of samples; the strengths are (min n/n_j)^¼ (LDAM).
        num_classes: C.
    """
    if margins is not None and sizes is not None:
        raise ValueError("class_sizes cannot be combined with class_margins or with m as a tensor")
    if sizes is not None:
        counts = _class_numbers("class_sizes", sizes, num_classes, 1, "numbers >= 1")
        return (counts.min() / counts) ** 0.25
    if margins is None:
        return None
    strengths = _class_numbers("class_margins", margins, num_classes, 0, "numbers in [0, 1]")
    require(bool((strengths <= 1).all()), "class_margins", f"{num_classes} numbers in [0, 1]", float(strengths.max()))
    return strengths


def _class_numbers(name: str, values: Tensor, num_classes: int, least: float, accepted: str) -> Tensor:
    """Return a float copy of C finite numbers."""
    values = torch.as_tensor(values)
    accepted = f"{num_classes} {accepted}"
    require(values.shape == (num_classes,), name, accepted, tuple(values.shape))
    is_bad = (values < least) | ~values.isfinite()
    require(not bool(is_bad.any()), name, accepted, values[is_bad][:1].tolist())
    return values.detach().clone().to(torch.float64 if values.dtype == torch.float64 else torch.float32)
