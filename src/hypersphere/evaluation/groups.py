"""Error rates of each group of pairs at a common threshold, for example by a column of metadata."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

from hypersphere._validation import require
from hypersphere.evaluation._arrays import Array, as_flags, as_scores, as_tensor
from hypersphere.evaluation.intervals import Interval
from hypersphere.evaluation.roc import choose_threshold

__all__ = ["GroupRates", "rates_by_group"]


@dataclass(frozen=True)
class GroupRates:
    """Error rates of one group of pairs. Created by `rates_by_group`.

    Attributes:
        threshold: scores at or above it are accepted.
        same, different: numbers of pairs of each kind.
        false_rejects: number of same pairs below the threshold.
        false_accepts: number of different pairs at or above it.
    """

    threshold: float
    same: int
    different: int
    false_rejects: int
    false_accepts: int

    @property
    def far(self) -> float:
        """False accept rate; NaN without different pairs."""
        return self.false_accepts / self.different if self.different else math.nan

    @property
    def frr(self) -> float:
        """False reject rate; NaN without same pairs."""
        return self.false_rejects / self.same if self.same else math.nan

    def far_interval(self, level: float = 0.95) -> Interval:
        """Return the false accept rate with its Wilson interval, as if pairs were independent."""
        return _wilson(self.false_accepts, self.different, level)

    def frr_interval(self, level: float = 0.95) -> Interval:
        """Return the false reject rate with its Wilson interval, as if pairs were independent."""
        return _wilson(self.false_rejects, self.same, level)


def rates_by_group(
    scores: Array,
    same: Array,
    groups: Array,
    *,
    threshold: float | None = None,
    far: float | None = None,
) -> dict[Hashable, GroupRates]:
    """Compute the error rates of each group at one threshold for all groups.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.
        groups: (M,) the group of each pair: text or integers.
        threshold: the threshold. Exactly one of `threshold` and `far` must be given.
        far: choose the threshold at this false accept rate of all pairs, by the "step" rule of `Roc.at`.

    Returns:
        Rates by group, in ascending order of the groups.

    Example:
        >>> scores, same = [0.9, 0.4, 0.8, 0.3, 0.6, 0.1], [1, 1, 1, 0, 0, 0]
        >>> rates = rates_by_group(scores, same, ["a", "b", "a", "a", "b", "b"], threshold=0.5)
        >>> {group: (rate.far, rate.frr) for group, rate in rates.items()}
        {'a': (0.0, 0.0), 'b': (0.5, 1.0)}
    """
    values = as_scores("scores", scores)
    flags = as_flags("same", same, len(values), values.device)
    column = np.asarray(groups.cpu() if isinstance(groups, torch.Tensor) else groups)
    if column.dtype == object and all(isinstance(entry, str) for entry in column.flat):
        column = column.astype(str)  # pandas stores strings as objects
    is_column = column.shape == (len(values),) and column.dtype.kind in "biuUS"
    require(is_column, "groups", f"a vector of {len(values)} texts or integers", f"{column.dtype} {column.shape}")
    names, index = np.unique(column, return_inverse=True)
    codes = as_tensor("groups", index.reshape(-1)).to(values.device)
    chosen = choose_threshold(values, flags, far, threshold)
    accepted = values >= chosen
    counts = [
        codes[kind].bincount(minlength=len(names)).tolist()
        for kind in (flags, ~flags, flags & ~accepted, ~flags & accepted)
    ]
    return {name: GroupRates(chosen, *row) for name, row in zip(names.tolist(), zip(*counts, strict=True), strict=True)}


def _wilson(errors: int, pairs: int, level: float) -> Interval:
    """Return the fraction errors/pairs with its Wilson score interval; NaN without pairs.

    >>> print(_wilson(0, 20, 0.95))
    0.0000 [0.0000, 0.1611] (95 %)
    """
    require(isinstance(level, float) and 0 < level < 1, "level", "a fraction in (0, 1)", level)
    if not pairs:
        return Interval(math.nan, math.nan, math.nan, level)
    rate, z = errors / pairs, NormalDist().inv_cdf(0.5 + level / 2)
    centre = rate + z**2 / (2 * pairs)
    half = z * math.sqrt(rate * (1 - rate) / pairs + (z / (2 * pairs)) ** 2)
    scale = 1 + z**2 / pairs
    # Rounding must not move an end beyond 0 or 1.
    return Interval(rate, max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0), level)
