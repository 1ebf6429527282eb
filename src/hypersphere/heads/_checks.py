"""What a head accepts: options and their combinations, features and labels; and the check that scores are finite.

`VALUES` lists the accepted values of single options, `EXCLUSIONS` the combinations that are not allowed. Both are
checked by the constructor of `AngularHead`, `VALUES` first. A new option needs a line in the first table and one line
in the second for every other option that it cannot be combined with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions.angular import Cosine
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Magnitude, Sphere
from hypersphere.heads.fused_loss import LOG_SUM_EXP

if TYPE_CHECKING:
    from hypersphere.heads._score_functions import ScoreFunctions
    from hypersphere.heads.head import AngularHead

__all__ = [
    "EXCLUSIONS",
    "VALUES",
    "NonFiniteScoresError",
    "check_combinations",
    "check_values",
    "checked_class_weights",
    "checked_margin_strengths",
    "int64_labels",
    "magnitude_of",
    "require_features",
    "require_finite_scores",
    "require_labels",
    "without_ignored",
]

_GRADIENTS = ("true", "detached", "normalized")
_REDUCTIONS = ("mean", "sum", "none")


# Values of single options --------------------------------------------------------------------------------------------


class Accepted(NamedTuple):
    """The values that an option accepts, in words for the message and as a predicate."""

    description: str
    contains: Callable[[Any], bool]


_BOOLEAN = Accepted("True or False", lambda value: isinstance(value, bool))
_SCHEDULE = Accepted("a schedule or None", lambda value: value is None or callable(value))
_WEIGHT = Accepted("a number >= 0", lambda value: is_number(value, 0))

VALUES: dict[str, Accepted] = {
    "in_features": Accepted("an integer >= 1", lambda value: is_integer(value, 1)),
    "num_classes": Accepted("an integer >= 2", lambda value: is_integer(value, 2)),
    "normalize_weight": _BOOLEAN,
    "bias": _BOOLEAN,
    "centers": Accepted("an integer in [1, 255]", lambda value: is_integer(value, 1, 255)),
    "gradient": Accepted(f"one of {', '.join(map(repr, _GRADIENTS))}", lambda value: value in _GRADIENTS),
    "reduction": Accepted(f"one of {', '.join(map(repr, _REDUCTIONS))}", lambda value: value in _REDUCTIONS),
    "label_smoothing": Accepted("a number in [0, 1)", lambda value: is_number(value, 0, 1) and value < 1),
    "ignore_index": Accepted("an integer", lambda value: is_integer(value, -(2**63))),
    "annealing": _SCHEDULE,
    "ramp": _SCHEDULE,
    "energy_weight": _WEIGHT,
    "norm_weight": _WEIGHT,
    "norm_target": Accepted("a positive number", lambda value: is_number(value, 0) and value > 0),
    "energy_start": Accepted("an integer >= 0", lambda value: is_integer(value, 0)),
    "hard_negatives": Accepted("an integer >= 0", lambda value: is_integer(value, 0)),
    "hard_margin": Accepted("an angle in [0, pi]", lambda value: is_number(value, 0, math.pi)),
    "interclass_filter": Accepted(
        "a cosine in [-1, 1] or None", lambda value: value is None or is_number(value, -1, 1)
    ),
    "curriculum": Accepted(
        "a number in [0, 1) or None", lambda value: value is None or (is_number(value, 0, 1) and value < 1)
    ),
}
"""The accepted values of each option. The others are checked where they are converted: `radius` by `magnitude_of`,
`angular` and `margin` by their menus, and numbers per class by `checked_class_weights` and `checked_margin_strengths`.
"""


def check_values(head: AngularHead, **others: Any) -> None:
    """Raise a `ValueError` that names the first option of a head with a value that it does not accept.

    Args:
        head: a head, which has most options as attributes.
        others: options that are not attributes of the head.
    """
    for name, accepted in VALUES.items():
        value = others[name] if name in others else getattr(head, name)
        require(accepted.contains(value), name, accepted.description, value)


# Combinations of options ---------------------------------------------------------------------------------------------


class Exclusion(NamedTuple):
    """Options that exclude each other.

    Attributes:
        message: what must change; `{head.reduction}` stands for the value of an option.
        applies: returns True for an `AngularHead`, and its `ScoreFunctions`, whose options are not allowed.
    """

    message: str
    applies: Callable[[Any, Any], bool]


def _is_a_softmax(head: AngularHead, functions: ScoreFunctions) -> bool:
    """Return True for scores ‖x‖·cos θ with a margin on the target alone."""
    has_target_margin = functions.margin is not None and not functions.margin_changes_others
    is_cosine = type(functions.angular) is Cosine
    return has_target_margin and is_cosine and head.radius == "feature" and head.normalize_weight


def _has_penalty(functions: ScoreFunctions) -> bool:
    """Return True if the margin has a penalty on feature norms."""
    return functions.margin is not None and functions.margin.norm_penalty(torch.ones(1)) is not None


EXCLUSIONS: tuple[Exclusion, ...] = (
    # Schedules
    Exclusion(
        "annealing must be None when there is no margin, not {head.annealing!r}",
        lambda head, functions: head.annealing is not None and functions.margin is None,
    ),
    Exclusion(
        "ramp must be None when there is no margin, not {head.ramp!r}",
        lambda head, functions: head.ramp is not None and functions.margin is None,
    ),
    # Penalties are means over a batch.
    Exclusion(
        "reduction must be 'mean' with an energy or norm weight, not {head.reduction!r}",
        lambda head, _: head.reduction != "mean" and (head.energy_weight > 0 or head.norm_weight > 0),
    ),
    Exclusion(
        "reduction must be 'mean' with the margin {head.margin.__class__.__name__}, which has a penalty, not "
        "{head.reduction!r}",
        lambda head, functions: head.reduction != "mean" and _has_penalty(functions),
    ),
    # Other classes
    Exclusion(
        "hard_negatives must be 0 with a curriculum, not {head.hard_negatives!r}",
        lambda head, _: head.hard_negatives > 0 and head.curriculum is not None,
    ),
    Exclusion(
        "interclass_filter must be None with label smoothing, which needs all classes, not {head.interclass_filter!r}",
        lambda head, _: head.interclass_filter is not None and head.label_smoothing > 0,
    ),
    Exclusion(
        "curriculum must be None without a margin, not {head.curriculum!r}",
        lambda head, functions: head.curriculum is not None and functions.margin is None,
    ),
    # The threshold ψ(θ_y) of a curriculum is computed before the scores, so it must not depend on them.
    Exclusion(
        "curriculum needs a margin that does not follow the feature norms of the batch",
        lambda head, functions: (
            head.curriculum is not None and functions.margin is not None and functions.margin.uses_norm_statistics
        ),
    ),
    Exclusion(
        "curriculum with several centres needs normalize_weight=True",
        lambda head, _: head.curriculum is not None and head.num_centers > 1 and not head.normalize_weight,
    ),
    # The normalized gradient is defined for A-Softmax only.
    Exclusion(
        "gradient='normalized' needs a margin on the target, radius='feature', normalize_weight=True and "
        "angular='cosine'",
        lambda head, functions: head.gradient == "normalized" and not _is_a_softmax(head, functions),
    ),
    Exclusion(
        "gradient must be 'true' or 'detached' with options for other classes, not {head.gradient!r}",
        lambda head, functions: head.gradient == "normalized" and functions.changes_negatives,
    ),
    # The centre with the largest score would depend on the margin.
    Exclusion(
        "centers must be 1 if norms are kept and the margin changes other classes, not {head.num_centers!r}",
        lambda head, functions: head.num_centers > 1 and not head.normalize_weight and functions.margin_changes_others,
    ),
    # AdaCos: s = √2·log(C−1) must be positive, and it replaces all norms.
    Exclusion(
        "num_classes must be at least 3 with radius='adaptive', not {head.num_classes!r}",
        lambda head, _: head.radius == "adaptive" and head.num_classes < 3,
    ),
    Exclusion(
        "normalize_weight must be True with radius='adaptive', not {head.normalize_weight!r}",
        lambda head, _: head.radius == "adaptive" and not head.normalize_weight,
    ),
    Exclusion(
        "bias must be False with radius='adaptive', not True",
        lambda head, _: head.radius == "adaptive" and head.bias is not None,
    ),
    Exclusion(
        "radius must be a number if feature norms are used or classes are binary, not {head.radius!r}",
        lambda head, functions: (
            head.radius == "adaptive" and (head._uses_feature_norm or head.class_reduction is not LOG_SUM_EXP)
        ),
    ),
    # Margins per class scale the margin of the target.
    Exclusion(
        "class_margins and class_sizes need a margin that changes the target alone",
        lambda head, functions: (
            head.class_margins is not None and (functions.margin is None or functions.margin_changes_others)
        ),
    ),
)
"""All combinations of options that are not allowed, each with its message. The first that applies is reported."""


def check_combinations(head: AngularHead, functions: ScoreFunctions) -> None:
    """Raise a `ValueError` with the message of the first exclusion that applies."""
    for exclusion in EXCLUSIONS:
        if exclusion.applies(head, functions):
            raise ValueError(exclusion.message.format(head=head))


# The meaning of options ----------------------------------------------------------------------------------------------


def magnitude_of(radius: str | float, normalize_weight: bool) -> Magnitude:
    """Return h(‖w‖, ‖x‖) as one of the magnitudes that layers use."""
    if radius == "feature":
        return Linear() if normalize_weight else InnerProduct()
    is_positive = is_number(radius, 0) and float(radius) > 0
    accepted = "'feature' or a positive number, or 'adaptive' for that of AdaCos"
    require(is_positive or radius == "adaptive", "radius", accepted, radius)
    fixed = Sphere(alpha=1.0 if radius == "adaptive" else float(radius))
    return fixed if normalize_weight else LinearlyWeighted(fixed)


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


# Features, labels and scores -----------------------------------------------------------------------------------------


class NonFiniteScoresError(ValueError):
    """Finite features have scores that are not finite: class vectors diverged, or a score overflows."""


def require_features(x: Tensor, in_features: int) -> None:
    """Raise a `ValueError` unless `x` is a dense floating-point matrix with `in_features` columns."""
    require(isinstance(x, Tensor), "x", "a tensor of features", type(x).__name__)
    if x.ndim != 2 or x.shape[1] != in_features or not x.is_floating_point() or x.layout != torch.strided:
        raise ValueError(
            f"x must be dense floating-point features of shape (B, {in_features}), not {x.dtype} {tuple(x.shape)}"
        )


def int64_labels(y: Tensor, batch: int) -> Tensor:
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


def without_ignored(x: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    """Return the features with ignored rows set to zero, so that NaN in an ignored row has no effect."""
    return x.masked_fill((y == ignore_index).unsqueeze(1), 0)


def require_finite_scores(result: Tensor, x: Tensor, weight: Tensor) -> None:
    """Raise an error that names a row of the features or of the weight if a loss or score is not finite."""
    if not _numerics.values_readable(result) or bool(torch.isfinite(result.detach()).all()):
        return
    # Features first: if they are not finite, the input is wrong. Everything else means that training diverged.
    _numerics.require_finite_rows("x", x)
    try:
        _numerics.require_finite_rows("weight", weight)
    except ValueError as error:
        raise NonFiniteScoresError(str(error)) from None
    # All inputs are finite, so a product has overflowed, most likely in the row with the largest norm.
    norms = sphere.norm(_numerics.to_float64(x.detach()))
    row = int(norms.argmax())
    largest = float(sphere.norm(_numerics.to_float64(weight.detach())).max())
    raise NonFiniteScoresError(
        f"x must give scores that {result.dtype} can represent, but row {row} overflows: ‖x‖ = {norms[row]:.3g}, "
        f"and class vectors have norms up to {largest:.3g}"
    )
