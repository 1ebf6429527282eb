r"""How sure a number is: percentile intervals over resampled pairs or resampled identities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.evaluation.arrays import Array, as_flags, as_labels, as_scores
from hypersphere.evaluation.roc import Ranked, Roc

__all__ = ["STATISTICS", "Interval", "bootstrap"]

STATISTICS: Mapping[str, Callable[[Roc], float]] = {
    "auc": lambda curve: curve.auc,
    "eer": lambda curve: curve.eer,
    "best_accuracy": lambda curve: curve.best_accuracy,
}


@dataclass(frozen=True)
class Interval:
    """A value and where it lies in `level` of the resampled draws.

    >>> print(Interval(0.975, 0.9612, 0.9833, 0.95))
    0.9750 [0.9612, 0.9833] (95 %)
    """

    value: float
    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}] ({100 * self.level:g} %)"


def bootstrap(
    scores: Array,
    same: Array,
    statistic: str | Callable[[Roc], float] = "auc",
    *,
    identities: tuple[Array, Array] | None = None,
    samples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    r"""Percentile bootstrap interval of a number read from the ROC curve.

    Pairs of either kind are drawn with replacement, each kind as often as it is there. Pairs that share a person are
    not independent, though, and such intervals are too narrow; with `identities`, people are drawn instead: one drawn c
    times counts its same pairs c times, and a different pair of people i, j counts cᵢ·cⱼ times.

    Args:
        scores: (M,) higher means more alike.
        same: (M,) booleans or zeros and ones.
        statistic: "auc", "eer", "best_accuracy", or a callable of the curve: `lambda curve: curve.tar_at(1e-3)`.
        identities: labels (M,) of the first and of the second of each pair.
        samples: how many draws. One without a pair of either kind is drawn again.
        level: share of the draws inside the interval.
        generator: of the random draws; the global seed without one.

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
    ranked = Ranked(values, flags)
    return interval(
        measure(ranked.roc()),
        lambda weights: measure(ranked.roc(weights)),
        flags,
        identities=identities,
        samples=samples,
        level=level,
        generator=generator,
    )


def check_statistic(statistic: str | Callable[[Roc], float], *more: str) -> None:
    """Refuse what is neither a callable nor a name of STATISTICS or of `more`."""
    names = ", ".join(repr(name) for name in (*more, *STATISTICS))
    accepted = f"one of {names} or a callable of the curve, such as lambda roc: roc.tar_at(1e-3)"
    require(callable(statistic) or statistic in STATISTICS, "statistic", accepted, statistic)


def interval(
    value: float,
    measure: Callable[[Tensor], float],
    same: Tensor,
    *,
    identities: tuple[Array, Array] | None,
    samples: int,
    level: float,
    generator: torch.Generator | None,
) -> Interval:
    """The interval of what `measure` makes of the weights of the pairs."""
    require(is_integer(samples, 2), "samples", "a whole number >= 2", samples)
    require(0 < level < 1, "level", "a share in (0, 1)", level)
    draws = _draw_pairs(same, generator) if identities is None else _draw_identities(same, identities, generator)
    found: list[float] = []
    while len(found) < samples:
        weights = next(draws)
        if bool((weights * same).any()) and bool((weights * ~same).any()):
            found.append(measure(weights))
    tail = (1 - level) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = torch.tensor(found, dtype=torch.float64).quantile(ends).tolist()
    return Interval(value, low, high, level)


def _draw_pairs(same: Tensor, generator: torch.Generator | None) -> Iterator[Tensor]:
    kinds = [same.nonzero().flatten(), (~same).nonzero().flatten()]
    while True:
        weights = torch.zeros(len(same), dtype=torch.int64, device=same.device)
        for kind in kinds:
            weights[kind] = _draw(len(kind), generator).to(same.device)
        yield weights


def _draw_identities(
    same: Tensor, identities: tuple[Array, Array], generator: torch.Generator | None
) -> Iterator[Tensor]:
    require(len(identities) == 2, "identities", "two vectors of labels", f"{len(identities)} of them")
    first, second = (as_labels("identities", labels, len(same), same.device) for labels in identities)
    wrong = ((first == second) != same).nonzero().flatten().tolist()
    require(not wrong, "identities", "equal exactly where same is True", f"so at row {wrong[0] if wrong else 0}")
    people, index = torch.cat([first, second]).unique(return_inverse=True)
    left, right = index.chunk(2)
    while True:
        drawn = _draw(len(people), generator).to(same.device)
        yield torch.where(same, drawn[left], drawn[left] * drawn[right])


def _draw(count: int, generator: torch.Generator | None) -> Tensor:
    """How often each of `count` things comes in as many draws with replacement."""
    return torch.randint(count, (count,), generator=generator).bincount(minlength=count)
