r"""Costs of decisions on scored pairs: detection costs, the cost of log-likelihood ratios, and the loss of calibration.

The detection cost of a threshold is DCF = c_miss·π·P_miss + c_fa·(1 − π)·P_fa, where π is the prior probability of a
same pair, P_miss the fraction of same pairs below the threshold and P_fa the fraction of different pairs that reach it.
It is divided by min(c_miss·π, c_fa·(1 − π)), the cost of the better of "accept all pairs" and "reject all pairs".
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hypersphere._validation import is_number, require
from hypersphere.evaluation._arrays import Array, as_flags, as_scores
from hypersphere.evaluation._isotonic import pool_adjacent_violators
from hypersphere.evaluation.roc import RankedScores, Roc

__all__ = [
    "actual_dcf",
    "bayes_threshold",
    "calibration_loss",
    "cllr",
    "cost_weights",
    "costs_at_points",
    "min_cllr",
    "min_dcf",
    "require_prior",
]


def min_dcf(scores: Array, same: Array, prior: float = 0.01, c_miss: float = 1.0, c_fa: float = 1.0) -> float:
    """Return the lowest normalised detection cost of any threshold, including "reject all pairs".

    The threshold is chosen on the test pairs, so this is a lower bound of `actual_dcf`.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.
        prior: π, the prior probability of a same pair.
        c_miss: the cost of rejecting a same pair.
        c_fa: the cost of accepting a different pair.

    Example:
        >>> min_dcf([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0], prior=0.5)
        0.5
    """
    values = as_scores("scores", scores)
    curve = RankedScores(values, as_flags("same", same, len(values), values.device)).roc()
    weights = cost_weights(prior, c_miss, c_fa)
    return float(costs_at_points(curve, *weights).min()) / min(weights)


def actual_dcf(
    llrs: Array,
    same: Array,
    prior: float = 0.01,
    c_miss: float = 1.0,
    c_fa: float = 1.0,
    *,
    threshold: float | None = None,
) -> float:
    """Return the normalised detection cost at the Bayes threshold log[c_fa·(1 − π) / (c_miss·π)].

    Args:
        llrs: (M,) natural log-likelihood ratios, such as `Calibration.llr` gives. With `threshold`, any scores.
        same, prior, c_miss, c_fa: as for `min_dcf`.
        threshold: use this threshold instead of the Bayes threshold.

    Example:
        >>> actual_dcf([2.0, 1.0, -1.0, -3.0], [1, 0, 1, 0], prior=0.5)
        1.0
        >>> min_dcf([2.0, 1.0, -1.0, -3.0], [1, 0, 1, 0], prior=0.5)
        0.5
    """
    values = as_scores("llrs", llrs)
    flags = as_flags("same", same, len(values), values.device)
    miss_weight, false_weight = weights = cost_weights(prior, c_miss, c_fa)
    if threshold is None:
        threshold = bayes_threshold(prior, c_miss, c_fa)
    require(not math.isnan(threshold), "threshold", "a number", threshold)
    accepted = values >= threshold
    miss_rate = float((~accepted[flags]).double().mean())
    false_rate = float(accepted[~flags].double().mean())
    return (miss_weight * miss_rate + false_weight * false_rate) / min(weights)


def cllr(llrs: Array, same: Array) -> float:
    r"""Return the cost of log-likelihood ratios, ½[E_same log₂(1 + e^−ℓ) + E_diff log₂(1 + e^ℓ)], in bits.

    It is 0 for perfect ratios and 1 for ratios that are all 1 (ℓ = 0); misleading ratios cost more than 1 (Brümmer
    and du Preez, Application-independent evaluation of speaker detection, 2006).

    Args:
        llrs: (M,) natural log-likelihood ratios.
        same: (M,) booleans, or zeros and ones.

    Example:
        >>> cllr([0.0, 0.0], [1, 0])
        1.0
    """
    values = as_scores("llrs", llrs)
    flags = as_flags("same", same, len(values), values.device)
    same_loss, different_loss = F.softplus(-values[flags]).mean(), F.softplus(values[~flags]).mean()
    return float(same_loss + different_loss) / (2 * math.log(2))


def min_cllr(scores: Array, same: Array) -> float:
    """Return the lowest `cllr` of any monotone function of the scores, which isotonic regression (PAV) gives.

    It measures how well the scores discriminate; it does not depend on their scale.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.

    Example:
        >>> min_cllr([3.0, 2.0, 1.0, 0.0], [1, 1, 0, 0]), min_cllr([5.0, 5.0], [1, 0])
        (0.0, 1.0)
    """
    values = as_scores("scores", scores)
    blocks = pool_adjacent_violators(values, as_flags("same", same, len(values), values.device))
    # A block of one kind has an infinite ratio, whose loss is zero for the pairs of that kind. There are none of the
    # other kind, but 0·∞ would be NaN, so the sums leave them out.
    losses = []
    for counts, sign in ((blocks.same, -1), (blocks.different, 1)):
        present = counts > 0
        losses.append(float((counts * F.softplus(sign * blocks.llrs))[present].sum() / counts.sum()))
    return sum(losses) / (2 * math.log(2))


def calibration_loss(llrs: Array, same: Array) -> float:
    """Return `cllr` − `min_cllr`: the cost of wrong scale and offset, in bits. It is 0 for calibrated ratios.

    >>> round(calibration_loss([30.0, 20.0, -20.0, 10.0], [1, 0, 1, 0]), 3)
    17.345
    """
    return cllr(llrs, same) - min_cllr(llrs, same)


def cost_weights(prior: float, c_miss: float, c_fa: float) -> tuple[float, float]:
    """Return c_miss·π and c_fa·(1 − π), the factors of the two error rates in the detection cost."""
    require_prior(prior)
    for name, value in (("c_miss", c_miss), ("c_fa", c_fa)):
        require(is_number(value, 0) and value > 0, name, "a positive number", value)
    return float(c_miss * prior), float(c_fa * (1 - prior))


def require_prior(prior: float) -> float:
    """Return the prior, which must be a probability in (0, 1)."""
    require(is_number(prior, 0, 1) and 0 < prior < 1, "prior", "a probability in (0, 1)", prior)
    return float(prior)


def bayes_threshold(prior: float, c_miss: float = 1.0, c_fa: float = 1.0) -> float:
    """Return log[c_fa·(1 − π) / (c_miss·π)], the log-likelihood ratio from which on a pair is accepted.

    Args:
        prior, c_miss, c_fa: as for `min_dcf`.

    Example:
        >>> bayes_threshold(0.5), round(bayes_threshold(0.01), 4)
        (0.0, 4.5951)
    """
    miss_weight, false_weight = cost_weights(prior, c_miss, c_fa)
    return math.log(false_weight / miss_weight)


def costs_at_points(curve: Roc, miss_weight: float, false_weight: float) -> Float[Tensor, " points"]:
    """Return the detection cost at each point of a curve, not normalised."""
    return miss_weight * (1 - curve.tar) + false_weight * curve.far
