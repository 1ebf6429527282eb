r"""The receiver operating characteristic of scored pairs, exact where scores tie.

A pair is accepted where score ≥ threshold. FAR is the share of different pairs accepted, TAR that of same pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from hypersphere._validation import require
from hypersphere.evaluation.arrays import Array, as_flags, as_scores

__all__ = ["FARS", "OperatingPoint", "Ranked", "Roc", "roc"]

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class OperatingPoint:
    """Where a curve is read: the rate asked for, the threshold, the rates there, and whether the data resolve it.

    `resolved` is False when there are fewer than 1/rate negatives, so that a single one of them exceeds the rate:
    the point then says what is accepted when no negative is ("step"), or less than one ("linear").
    """

    asked: float
    threshold: float
    false_rate: float
    true_rate: float
    resolved: bool


@dataclass(frozen=True, eq=False, repr=False)
class Roc:
    """The curve as counts: pairs of either kind accepted at each threshold, from none (threshold ∞) to all.

    Tied scores make one point. Build it with `roc`.
    """

    thresholds: Tensor
    true_accepts: Tensor
    false_accepts: Tensor

    def __repr__(self) -> str:
        return (
            f"Roc({self.positives:g} same and {self.negatives:g} different pairs, "
            f"AUC {self.auc:.4f}, EER {self.eer:.4f})"
        )

    @property
    def positives(self) -> float:
        """How many same pairs there are."""
        return float(self.true_accepts[-1])

    @property
    def negatives(self) -> float:
        """How many different pairs there are."""
        return float(self.false_accepts[-1])

    @property
    def tar(self) -> Tensor:
        """True accept rates, ascending from 0 to 1."""
        return self.true_accepts / self.true_accepts[-1]

    @property
    def far(self) -> Tensor:
        """False accept rates, ascending from 0 to 1."""
        return self.false_accepts / self.false_accepts[-1]

    @property
    def auc(self) -> float:
        """Area under the curve: the chance that a same pair scores above a different one, a tie counting one half."""
        return float(torch.trapezoid(self.tar, self.far))

    @property
    def eer(self) -> float:
        """Equal error rate: where FAR = 1 − TAR on the straight lines between the points of the curve."""
        far, excess = self.far, self.far - (1 - self.tar)
        after = int((excess >= 0).nonzero()[0])
        share = float(excess[after - 1] / (excess[after - 1] - excess[after]))
        return float(far[after - 1].lerp(far[after], share))

    def at(self, far: float, *, rule: str = "step") -> OperatingPoint:
        """The operating point at a false accept rate.

        Args:
            far: in (0, 1).
            rule: "step" takes the lowest threshold whose FAR does not exceed `far`, which one could really set;
                "linear" reads the straight line between that point and the next. They differ by less than the step of
                one negative (one group of tied scores).

        Example:
            >>> roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0]).at(0.5)
            OperatingPoint(asked=0.5, threshold=0.7, false_rate=0.5, true_rate=1.0, resolved=True)
        """
        return read_curve(self.thresholds, self.tar, self.far, self.negatives, far, "far", rule)

    def tar_at(self, far: float, *, rule: str = "step") -> float:
        """True accept rate at a false accept rate; see `at` for the rules.

        >>> roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0]).tar_at(0.1)
        0.5
        """
        return self.at(far, rule=rule).true_rate

    @property
    def best_accuracy(self) -> float:
        """The highest accuracy of any threshold, chosen on these very pairs: an upper bound, not a test result."""
        return self._best()[0]

    @property
    def best_threshold(self) -> float:
        """The threshold of `best_accuracy`, halfway to the next lower score; of equally good ones the middle one."""
        return self._best()[1]

    def _best(self) -> tuple[float, float]:
        gain = self.true_accepts - self.false_accepts
        best = (gain == gain.max()).nonzero().flatten()
        point = int(best[(len(best) - 1) // 2])
        accuracy = (float(gain[point]) + self.negatives) / (self.positives + self.negatives)
        if point in (0, len(gain) - 1):
            return accuracy, -math.inf if point else math.inf
        upper, lower = self.thresholds[point].item(), self.thresholds[point + 1].item()
        middle = upper / 2 + lower / 2
        return accuracy, middle if lower < middle <= upper else upper


class Ranked:
    """Scores sorted once, so that a curve for other weights of the pairs costs no second sort."""

    def __init__(self, scores: Tensor, same: Tensor) -> None:
        ordered, self.order = scores.sort(descending=True)
        changes = ordered[1:] != ordered[:-1]
        self.last = torch.cat([changes, changes.new_ones(1)]).nonzero().flatten()  # of each group of tied scores
        self.thresholds = torch.cat([ordered.new_full((1,), math.inf), ordered[self.last]])
        self.same = same[self.order].double()

    def roc(self, weights: Tensor | None = None) -> Roc:
        """The curve where each pair counts `weights` times (whole numbers), once if there are none."""
        weight = torch.ones_like(self.same) if weights is None else weights.double()[self.order]
        accepted = [self._accepted(weight * self.same), self._accepted(weight * (1 - self.same))]
        return Roc(self.thresholds, *accepted)

    def _accepted(self, weight: Tensor) -> Tensor:
        return torch.cat([weight.new_zeros(1), weight.cumsum(0)[self.last]])


def roc(scores: Array, same: Array) -> Roc:
    """The exact ROC curve of scored pairs.

    Args:
        scores: (M,) higher means more alike.
        same: (M,) booleans or zeros and ones.

    Example:
        >>> curve = roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0])
        >>> curve
        Roc(2 same and 2 different pairs, AUC 0.7500, EER 0.5000)
        >>> curve.best_accuracy, curve.tar_at(0.1)
        (0.75, 0.5)
    """
    values = as_scores("scores", scores)
    return Ranked(values, as_flags("same", same, len(values), values.device)).roc()


def read_curve(
    thresholds: Tensor, true: Tensor, false: Tensor, negatives: float, rate: float, argument: str, rule: str
) -> OperatingPoint:
    """Read a curve of ascending rates at a false rate, by the rules of `Roc.at`."""
    require(isinstance(rate, Real) and 0 < rate < 1, argument, "a rate in (0, 1)", rate)
    rate = float(rate)
    require(rule in ("step", "linear"), "rule", "'step' or 'linear'", rule)
    resolved = rate * negatives >= 1
    point = int((false <= rate).sum()) - 1
    threshold, here, there = thresholds[point].item(), false[point].item(), true[point].item()
    if rule == "linear" and here < rate and point + 1 < len(false):
        share = (rate - here) / (false[point + 1].item() - here)
        there += share * (true[point + 1].item() - there)
        here = rate
    return OperatingPoint(rate, threshold, here, there, resolved)
