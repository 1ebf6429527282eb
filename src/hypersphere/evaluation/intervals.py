r"""Percentile bootstrap intervals: pairs, the people of pairs, or groups of pairs are resampled with replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from hypersphere._validation import is_integer, is_number, require
from hypersphere.evaluation._arrays import Array, as_flags, as_labels, as_scores
from hypersphere.evaluation.roc import RankedScores, Roc

__all__ = ["Interval", "as_groups", "bootstrap", "check_statistic", "percentile_interval", "resampled_weights"]

# The statistics of a curve that `bootstrap` accepts by name.
STATISTICS: Mapping[str, Callable[[Roc], float]] = {
    "auc": lambda curve: curve.auc,
    "eer": lambda curve: curve.eer,
    "best_accuracy": lambda curve: curve.best_accuracy,
}


@dataclass(frozen=True)
class Interval:
    """A statistic and a bootstrap confidence interval.

    Attributes:
        value: the statistic of all pairs.
        low, high: the interval that contains the fraction `level` of the bootstrap values.
        level: such as 0.95.

    `float` returns the value.

    >>> print(Interval(0.975, 0.9612, 0.9833, 0.95))
    0.9750 [0.9612, 0.9833] (95 %)
    >>> float(Interval(0.975, 0.9612, 0.9833, 0.95))
    0.975
    """

    value: float
    low: float
    high: float
    level: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}] ({100 * self.level:g} %)"


def bootstrap(
    scores: Array,
    same: Array,
    statistic: str | Callable[[Roc], float] = "auc",
    *,
    identities: tuple[Array, Array] | Array | None = None,
    samples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    r"""Compute a percentile bootstrap interval of a statistic of the ROC curve.

    By default same pairs and different pairs are resampled with replacement, separately, so that their numbers do not
    change. Pairs that share a person are not independent, so these intervals are too narrow for them. With
    `identities`, people are resampled instead: if person i is drawn cᵢ times, the same pairs of i count cᵢ times, and
    the different pairs of i and j count cᵢ·cⱼ times. With one label per pair, groups of pairs are resampled.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.
        statistic: "auc", "eer", "best_accuracy", or a function of the curve: `lambda curve: curve.tar_at(1e-3)`.
        identities: labels (M,) of the first and of the second side of each pair, or one label (M,) per pair.
        samples: the number of bootstrap samples. A sample without same or without different pairs is drawn again.
        level: the fraction of the samples inside the interval.
        generator: source of randomness; the global one if None.

    Example:
        >>> scores, same = torch.arange(40.0), torch.arange(40) % 4 > 0
        >>> interval = bootstrap(scores, same, samples=200, generator=torch.Generator().manual_seed(0))
        >>> interval.low < interval.value < interval.high
        True
    """
    check_statistic(statistic)
    measure = statistic if callable(statistic) else STATISTICS[statistic]
    values = as_scores("scores", scores)
    flags = as_flags("same", same, len(values), values.device)
    # A bootstrap sample is represented by the weights of the pairs, so the scores are sorted once for all samples.
    ranked = RankedScores(values, flags)
    groups = None if identities is None else as_groups("identities", identities, flags)
    draws = resampled_weights(flags, groups, generator)
    return percentile_interval(
        measure(ranked.roc()), lambda weights: measure(ranked.roc(weights)), draws, samples, level
    )


def check_statistic(statistic: str | Callable[[Roc], float], *more_names: str) -> None:
    """Raise a `ValueError` unless `statistic` is a callable or a name in STATISTICS.

    The error lists `more_names` too, which the caller accepts and has handled before.
    """
    names = ", ".join(repr(name) for name in (*more_names, *STATISTICS))
    accepted = f"one of {names} or a callable of the curve, such as lambda roc: roc.tar_at(1e-3)"
    require(callable(statistic) or statistic in STATISTICS, "statistic", accepted, statistic)


def percentile_interval(
    value: float, measure: Callable[[Tensor], float], draws: Iterator[Tensor], samples: int, level: float
) -> Interval:
    """Return the interval of `measure` over the first `samples` weight vectors of `draws`."""
    require(is_integer(samples, 2), "samples", "an integer >= 2", samples)
    require(is_number(level, 0, 1) and 0 < level < 1, "level", "a fraction in (0, 1)", level)
    values = torch.tensor([measure(next(draws)) for _ in range(samples)], dtype=torch.float64)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    # A threshold may be infinite. Interpolating between infinite values would give NaN.
    low, high = values.quantile(tails, interpolation="linear" if values.isfinite().all() else "nearest").tolist()
    return Interval(value, low, high, level)


def as_groups(
    name: str, value: tuple[Array, Array] | Array, same: Bool[Tensor, " pairs"]
) -> Int64[Tensor, "sides pairs"]:
    """Return the identities of both sides of each pair as two rows, or one label per pair as one row.

    >>> as_groups("groups", ([0, 0], [0, 1]), torch.tensor([True, False])).tolist()
    [[0, 0], [0, 1]]
    >>> as_groups("groups", [3, 4], torch.tensor([True, False])).tolist()
    [[3, 4]]
    """
    is_sized = hasattr(value, "__len__")
    is_two_sided = is_sized and len(value) == 2 and np.ndim(value[0]) == 1
    is_one_sided = is_sized and len(value) == len(same) and np.ndim(value[0]) == 0
    accepted = f"two vectors of labels or one vector of {len(same)} labels"
    require(is_two_sided or is_one_sided, name, accepted, value)
    sides = [as_labels(name, side, len(same), same.device) for side in (value if is_two_sided else [value])]
    wrong = ((sides[0] == sides[-1]) != same).nonzero().flatten().tolist() if is_two_sided else []
    if wrong:
        raise ValueError(f"{name} must be equal exactly where same is True, which row {wrong[0]} violates")
    return torch.stack(sides)


def resampled_weights(
    same: Bool[Tensor, " pairs"], groups: Int64[Tensor, "sides pairs"] | None, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Yield an endless sequence of bootstrap samples, each as the number of times that every pair counts.

    Samples without same pairs or without different pairs have no ROC curve and are left out.

    Args:
        same: True for pairs of the same identity.
        groups: what is resampled, from `as_groups`; pairs if None.
        generator: source of randomness; the global one if None.
    """
    for weights in _resample_pairs(same, generator) if groups is None else _resample_groups(same, groups, generator):
        if bool((weights * same).any()) and bool((weights * ~same).any()):
            yield weights


def _resample_pairs(same: Tensor, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Yield weights of pairs that are drawn with replacement, same and different pairs separately."""
    members_of_kinds = [same.nonzero().flatten(), (~same).nonzero().flatten()]
    while True:
        weights = torch.zeros(len(same), dtype=torch.int64, device=same.device)
        for members in members_of_kinds:
            weights[members] = _draw_counts(len(members), generator).to(same.device)
        yield weights


def _resample_groups(same: Tensor, groups: Tensor, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Yield weights of pairs whose groups are drawn with replacement."""
    names, index = groups.unique(return_inverse=True)
    first, last = index[0], index[-1]
    while True:
        counts = _draw_counts(len(names), generator).to(same.device)
        # A same pair involves one person, a different pair two. With one label per pair, each pair is in one group.
        yield torch.where(first == last, counts[first], counts[first] * counts[last])


def _draw_counts(count: int, generator: torch.Generator | None) -> Int64[Tensor, " count"]:
    """Return how often each of `count` items occurs in `count` draws with replacement."""
    device = None if generator is None else generator.device
    return torch.randint(count, (count,), generator=generator, device=device).bincount(minlength=count)
