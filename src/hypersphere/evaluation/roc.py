r"""The ROC and DET curves of scored pairs, without binning and with exact handling of ties.

A pair is accepted if score ≥ threshold. The false accept rate (FAR) is the fraction of different pairs that are
accepted. The true accept rate (TAR) is the fraction of same pairs that are accepted. The receiver operating
characteristic (ROC) is the TAR by FAR; the detection error trade-off (DET) is the false reject rate by FAR.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere._deprecation import deprecated_attribute
from hypersphere._notebook import NotebookResult
from hypersphere._validation import require
from hypersphere.evaluation._arrays import Array, as_flags, as_scores

__all__ = [
    "FARS",
    "DetCurve",
    "OperatingPoint",
    "RankedScores",
    "Roc",
    "choose_threshold",
    "det_curve",
    "operating_point_lines",
    "read_curve",
    "roc",
]

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""False accept rates that verification reports by default."""


@dataclass(frozen=True)
class OperatingPoint:
    """One point of a curve, at a requested false rate (FAR, or FPIR for open-set identification).

    Attributes:
        requested_rate: the requested false rate.
        threshold: scores at or above it are accepted.
        false_rate, true_rate: the rates at this threshold, or interpolated rates.
        resolved: False if there are too few negatives to measure the rate: accepting a single one exceeds it. The point
            then has a threshold above all negatives ("step"), or interpolates up to the first negative ("linear").
    """

    requested_rate: float
    threshold: float
    false_rate: float
    true_rate: float
    resolved: bool

    asked = deprecated_attribute("asked", "requested_rate")


def operating_point_lines(points: Iterable[OperatingPoint], negatives: float) -> list[str]:
    """Return one line per point, for the `repr` of results.

    >>> operating_point_lines([OperatingPoint(0.01, 0.75, 0.0, 0.5, False)], 10)
    ['  TAR 0.5000 at FAR 0.01, threshold 0.7500  (not resolved by 10 different pairs)']
    """
    return [
        f"  TAR {point.true_rate:.4f} at FAR {point.requested_rate:g}, threshold {point.threshold:.4f}"
        + ("" if point.resolved else f"  (not resolved by {negatives:g} different pairs)")
        for point in points
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Roc(NotebookResult):
    """A ROC curve, stored as numbers of accepted pairs. Created by `roc`.

    It has one point per distinct score, preceded by the threshold ∞, which accepts no pair.

    Attributes:
        thresholds: float64, descending from ∞.
        true_accepts, false_accepts: float64, numbers of same and of different pairs accepted at each threshold.
    """

    thresholds: Float[Tensor, " points"]
    true_accepts: Float[Tensor, " points"]
    false_accepts: Float[Tensor, " points"]

    def __repr__(self) -> str:
        return (
            f"Roc({self.positives:g} same and {self.negatives:g} different pairs, "
            f"AUC {self.auc:.4f}, EER {self.eer:.4f})"
        )

    @property
    def positives(self) -> float:
        """Number of same pairs."""
        return float(self.true_accepts[-1])

    @property
    def negatives(self) -> float:
        """Number of different pairs."""
        return float(self.false_accepts[-1])

    @property
    def tar(self) -> Float[Tensor, " points"]:
        """True accept rates, ascending from 0 to 1."""
        return self.true_accepts / self.true_accepts[-1]

    @property
    def far(self) -> Float[Tensor, " points"]:
        """False accept rates, ascending from 0 to 1."""
        return self.false_accepts / self.false_accepts[-1]

    @property
    def auc(self) -> float:
        """Area under the curve: the probability that a same pair scores higher than a different pair; ties count ½."""
        return float(torch.trapezoid(self.tar, self.far))

    @property
    def eer(self) -> float:
        """Equal error rate: the FAR at which FAR = 1 − TAR, interpolated linearly between the points of the curve."""
        # The difference of the two error rates rises from −1 to 1. Find the segment where it crosses zero.
        far, excess = self.far, self.far - (1 - self.tar)
        after = int((excess >= 0).nonzero()[0])
        fraction = float(excess[after - 1] / (excess[after - 1] - excess[after]))
        return float(far[after - 1].lerp(far[after], fraction))

    def at(self, far: float, *, rule: str = "step") -> OperatingPoint:
        """Return the operating point at a false accept rate.

        Args:
            far: a rate in (0, 1).
            rule: "step" uses the lowest threshold whose FAR does not exceed `far`, so the rates are those of an actual
                threshold. "linear" interpolates between this point and the next one.

        Example:
            >>> roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0]).at(0.5)
            OperatingPoint(requested_rate=0.5, threshold=0.7, false_rate=0.5, true_rate=1.0, resolved=True)
        """
        return read_curve(self.thresholds, self.tar, self.far, self.negatives, far, "far", rule)

    def tar_at(self, far: float, *, rule: str = "step") -> float:
        """Return the true accept rate at a false accept rate. The arguments are those of `at`.

        >>> roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0]).tar_at(0.1)
        0.5
        """
        return self.at(far, rule=rule).true_rate

    @property
    def best_accuracy(self) -> float:
        """The highest accuracy of any threshold: an upper bound, because the threshold is chosen on the test pairs."""
        return self._best()[0]

    @property
    def best_threshold(self) -> float:
        """The threshold of `best_accuracy`, halfway to the next lower score; the middle one if several are best."""
        return self._best()[1]

    def _best(self) -> tuple[float, float]:
        """Return the highest accuracy and its threshold."""
        # Correct decisions are true accepts plus rejected negatives, so the accuracy is largest where the difference
        # of the two counts is.
        gain = self.true_accepts - self.false_accepts
        best_points = (gain == gain.max()).nonzero().flatten()
        point = int(best_points[(len(best_points) - 1) // 2])
        accuracy = (float(gain[point]) + self.negatives) / (self.positives + self.negatives)
        if point == 0:  # reject all pairs
            return accuracy, math.inf
        if point == len(gain) - 1:  # accept all pairs
            return accuracy, -math.inf
        upper, lower = self.thresholds[point].item(), self.thresholds[point + 1].item()
        middle = upper / 2 + lower / 2  # halve first: the sum of two huge scores may overflow
        # Two adjacent floating-point numbers have no number in between, and the rounded middle may equal the lower one.
        return accuracy, middle if lower < middle <= upper else upper


class RankedScores:
    """Sorted scores, from which the curve for any weights of the pairs follows without another sort."""

    def __init__(self, scores: Float[Tensor, " pairs"], same: Tensor) -> None:
        ranked, self.order = scores.sort(descending=True)
        changes = ranked[1:] != ranked[:-1]
        # The last position in each group of tied scores: a threshold accepts a group completely or not at all.
        self.last = torch.cat([changes, changes.new_ones(1)]).nonzero().flatten()
        self.thresholds = torch.cat([ranked.new_full((1,), math.inf), ranked[self.last]])
        self.same = same[self.order].double()

    def roc(self, weights: Tensor | None = None) -> Roc:
        """Return the curve in which pair i counts `weights[i]` times, or once if `weights` is None."""
        weight = torch.ones_like(self.same) if weights is None else weights.double()[self.order]
        return Roc(self.thresholds, self._accepted(weight * self.same), self._accepted(weight * (1 - self.same)))

    def _accepted(self, weight: Tensor) -> Tensor:
        """Return the total weight accepted at each threshold. Sums of integers are exact in float64."""
        return torch.cat([weight.new_zeros(1), weight.cumsum(0)[self.last]])


def roc(scores: Array, same: Array) -> Roc:
    """Compute the exact ROC curve of scored pairs.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.

    Example:
        >>> curve = roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0])
        >>> curve
        Roc(2 same and 2 different pairs, AUC 0.7500, EER 0.5000)
        >>> curve.best_accuracy, curve.tar_at(0.1)
        (0.75, 0.5)
    """
    values = as_scores("scores", scores)
    return RankedScores(values, as_flags("same", same, len(values), values.device)).roc()


def choose_threshold(
    scores: Float[Tensor, " pairs"], same: Tensor, far: float | None, threshold: float | None
) -> float:
    """Return the given threshold, or that of the operating point at a false accept rate.

    >>> choose_threshold(torch.tensor([0.9, 0.8, 0.7, 0.3]), torch.tensor([1, 0, 1, 0]), far=0.5, threshold=None)
    0.699999988079071
    """
    if (far is None) == (threshold is None):
        raise ValueError(f"exactly one of far and threshold must be given, not {far!r} and {threshold!r}")
    if threshold is None:
        return RankedScores(scores, same).roc().at(far).threshold  # type: ignore[arg-type]
    require(isinstance(threshold, Real) and not math.isnan(threshold), "threshold", "a number", threshold)
    return float(threshold)


def read_curve(
    thresholds: Float[Tensor, " points"],
    true_rates: Float[Tensor, " points"],
    false_rates: Float[Tensor, " points"],
    negatives: float,
    rate: float,
    argument: str,
    rule: str,
) -> OperatingPoint:
    """Return the point of a curve at the false rate `rate`, by the rules of `Roc.at`.

    Args:
        thresholds, true_rates, false_rates: the points of the curve, with ascending rates.
        negatives: the number of negatives, whose reciprocal is the smallest positive false rate.
        rate: the requested false rate.
        argument: the name of the caller's argument, for the error message.
        rule: "step" or "linear".
    """
    require(isinstance(rate, Real) and 0 < rate < 1, argument, "a rate in (0, 1)", rate)
    rate = float(rate)
    require(rule in ("step", "linear"), "rule", "'step' or 'linear'", rule)
    point = int((false_rates <= rate).sum()) - 1  # the last point that does not exceed the rate
    false_rate, true_rate = false_rates[point].item(), true_rates[point].item()
    if rule == "linear" and false_rate < rate and point + 1 < len(false_rates):
        fraction = (rate - false_rate) / (false_rates[point + 1].item() - false_rate)
        true_rate += fraction * (true_rates[point + 1].item() - true_rate)
        false_rate = rate
    # Divide like the rates of the curve: in floating point 49·(1/49) is less than 1.
    resolved = 1 / negatives <= rate
    return OperatingPoint(rate, thresholds[point].item(), false_rate, true_rate, resolved)


@dataclass(frozen=True, eq=False, repr=False)
class DetCurve:
    """Points of a DET curve. Created by `det_curve`.

    Attributes:
        thresholds: float64, descending from ∞.
        far: false accept rates, ascending from 0 to 1.
        frr: false reject rates 1 − TAR, descending from 1 to 0.
    """

    thresholds: Float[Tensor, " points"]
    far: Float[Tensor, " points"]
    frr: Float[Tensor, " points"]

    @property
    def probit_far(self) -> Float[Tensor, " points"]:
        """Φ⁻¹(FAR), the abscissa of the plot; ∓∞ at the rates 0 and 1."""
        return torch.special.ndtri(self.far)

    @property
    def probit_frr(self) -> Float[Tensor, " points"]:
        """Φ⁻¹(FRR), the ordinate of the plot; ±∞ at the rates 1 and 0."""
        return torch.special.ndtri(self.frr)

    def __repr__(self) -> str:
        return f"DetCurve({len(self.thresholds)} points)"


def det_curve(scores: Array, same: Array) -> DetCurve:
    """Compute the DET curve of scored pairs, with the points of `roc`.

    If the scores of both kinds are normally distributed, the curve is a straight line on probit axes.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.

    Example:
        >>> curve = det_curve([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0])
        >>> curve.far.tolist(), curve.frr.tolist()
        ([0.0, 0.0, 0.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.0, 0.0])
        >>> curve.probit_far[2:4].tolist()
        [0.0, 0.0]
    """
    curve = roc(scores, same)
    return DetCurve(curve.thresholds, curve.far, 1 - curve.tar)
