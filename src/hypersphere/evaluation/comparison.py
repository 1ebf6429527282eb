"""Compare paired measurements: their mean difference with a confidence interval, or their rank correlation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere._validation import is_integer, is_number, require
from hypersphere.evaluation._arrays import Array, as_scores

__all__ = ["PairedDifference", "paired_difference", "rank_correlation", "student_quantile"]


@dataclass(frozen=True)
class PairedDifference:
    """The mean of paired differences, with the ends of its confidence interval.

    Attributes:
        mean: mean of the differences.
        low, high: ends of the interval; infinite for a single pair.
        pairs: number of pairs.
    """

    mean: float
    low: float
    high: float
    pairs: int

    def verdict(self, higher_is_better: bool) -> str:
        """Return "yes" if the interval says that the first method is better, "no" if worse, else "not resolved".

        >>> paired_difference([3.0, 2.9, 3.1], [3.5, 3.6, 3.5]).verdict(higher_is_better=False)
        'yes'
        """
        if self.low > 0 or self.high < 0:
            return "yes" if (self.low > 0) == higher_is_better else "no"
        return "not resolved"


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Return the mean of `first[i] − second[i]` with a Student confidence interval.

    Runs with the same seed share the initial weights and the order of the data where possible, so their
    differences vary less than the values.

    Args:
        first, second: values by seed, in the same order.
        confidence: probability that the interval contains the population mean.

    Example:
        >>> difference = paired_difference([2.0, 3.0, 4.0], [1.0, 1.5, 3.5])
        >>> round(difference.mean, 3), round(difference.low, 3), round(difference.high, 3)
        (1.0, -0.242, 2.242)
    """
    if not len(first) == len(second) > 0:
        raise ValueError(f"first and second must have the same length >= 1, not {len(first)} and {len(second)}")
    for name, values in (("first", first), ("second", second)):
        invalid = [value for value in values if not is_number(value, -math.inf)]
        require(not invalid, name, "finite numbers", invalid[:1])
    require(is_number(confidence, 0, 1) and 0 < confidence < 1, "confidence", "a number between 0 and 1", confidence)
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return PairedDifference(mean, -math.inf, math.inf, 1)
    error = statistics.stdev(differences) / math.sqrt(count)
    half = student_quantile(0.5 + confidence / 2, count - 1) * error
    return PairedDifference(mean, mean - half, mean + half, count)


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, by bisection of its cumulative distribution function.

    Args:
        probability: in (0, 1).
        degrees: degrees of freedom.

    >>> round(student_quantile(0.975, 4), 4), round(student_quantile(0.975, 1), 3)
    (2.7764, 12.706)
    """
    require(0 < probability < 1, "probability", "a number between 0 and 1", probability)
    require(is_integer(degrees, 1), "degrees", "an integer >= 1", degrees)
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(60):  # each step adds one bit, and a float has 53
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t) for t >= 0, from the finite sums for integer degrees of freedom (Abramowitz & Stegun 26.7)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    if degrees % 2 == 1:
        # 2/π·(θ + sin θ·(cos θ + 2/3·cos³θ + 2·4/(3·5)·cos⁵θ + …)), with (ν − 1)/2 terms in the sum
        term, total = cosine, 0.0
        for k in range(1, degrees - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        return 0.5 + (theta + sine * total) / math.pi
    # sin θ·(1 + 1/2·cos²θ + 1·3/(2·4)·cos⁴θ + …), with ν/2 terms in the sum
    term, total = 1.0, 0.0
    for k in range(0, degrees, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 0.5 + sine * total / 2


def rank_correlation(first: Array, second: Array) -> float:
    """Return Spearman's rank correlation: the correlation of the ranks, with the mean rank for equal values.

    It is NaN if all values of one side are equal.

    Args:
        first, second: (N,) measurements of the same N >= 2 samples.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 9.0, 100.0]), 6)
        1.0
    """
    a, b = as_scores("first", first), as_scores("second", second)
    if not len(a) == len(b) >= 2:
        raise ValueError(f"first and second must have the same length >= 2, not {len(a)} and {len(b)}")
    x, y = (ranks - ranks.mean() for ranks in (_mean_ranks(a), _mean_ranks(b)))
    scale = math.sqrt(float(x.square().sum() * y.square().sum()))
    return float(torch.dot(x, y)) / scale if scale > 0 else math.nan


def _mean_ranks(values: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Return ranks from 1; equal values share the mean of their ranks.

    >>> _mean_ranks(torch.tensor([3.0, 1.0, 3.0]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[index]
