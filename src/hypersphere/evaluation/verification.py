r"""Verification: do two embeddings show the same identity?

Pairs are accepted if their cosine reaches a threshold. The threshold for each fold is chosen on the other folds, as in
View 2 of LFW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hypersphere import sphere
from hypersphere._notebook import NotebookResult
from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import (
    Array,
    as_features,
    as_flags,
    as_labels,
    as_numbers,
    as_rows,
    as_scores,
    blocks,
)
from hypersphere.evaluation.intervals import (
    Interval,
    as_groups,
    bootstrap,
    check_statistic,
    percentile_interval,
    resampled_weights,
)
from hypersphere.evaluation.roc import FARS, OperatingPoint, RankedScores, Roc, operating_point_lines

__all__ = ["Verification", "cosine_scores", "make_folds", "pair_scores", "verify", "verify_scores"]

SCORE_ROWS = 8192  # pairs per block of `cosine_scores`


@dataclass(frozen=True, eq=False, repr=False)
class Verification(NotebookResult):
    """Result of `verify`.

    Attributes:
        scores: float64, the score of each pair when its fold was tested.
        same: True for pairs of the same identity.
        fold: the fold of each pair.
        thresholds: the threshold of each fold, chosen on the other folds.
        accuracies: the accuracy on each fold.
        roc: the curve of all scores.
        points: the operating points at the requested false accept rates.
        rule: how the curve was read at these rates, see `Roc.at`.
    """

    scores: Float[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]
    fold: Int64[Tensor, " pairs"]
    thresholds: Float[Tensor, " folds"]
    accuracies: Float[Tensor, " folds"]
    roc: Roc
    points: tuple[OperatingPoint, ...]
    rule: str = "step"

    @property
    def accuracy(self) -> float:
        """Mean accuracy over the folds, each with the threshold that was best on the other folds."""
        return float(self.accuracies.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of `accuracy`: the standard deviation over the folds divided by √folds."""
        return float(self.accuracies.std() / math.sqrt(len(self.accuracies)))

    @property
    def best_accuracy(self) -> float:
        """Accuracy at `best_threshold`: an upper bound, because the threshold is chosen on the test pairs."""
        return self.roc.best_accuracy

    @property
    def best_threshold(self) -> float:
        """The threshold with the highest accuracy on all pairs."""
        return self.roc.best_threshold

    @property
    def eer(self) -> float:
        """Equal error rate."""
        return self.roc.eer

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""
        return self.roc.auc

    @property
    def tar(self) -> dict[float, float]:
        """True accept rate by requested false accept rate."""
        return {point.requested_rate: point.true_rate for point in self.points}

    def interval(
        self,
        statistic: str | Callable[[Roc], float] = "accuracy",
        *,
        identities: tuple[Array, Array] | Array | None = None,
        samples: int = 1000,
        level: float = 0.95,
        generator: torch.Generator | None = None,
    ) -> Interval:
        """Compute a percentile bootstrap interval of a statistic.

        Args:
            statistic: "accuracy" (with the thresholds of the folds held fixed), or a statistic of `bootstrap`.
            identities, samples, level, generator: as for `bootstrap`.
        """
        if statistic != "accuracy":
            check_statistic(statistic, "accuracy")
            return bootstrap(
                self.scores,
                self.same,
                statistic,
                identities=identities,
                samples=samples,
                level=level,
                generator=generator,
            )
        # The accuracy is not a statistic of one curve: each fold has a threshold. Resample the decisions instead.
        correct = ((self.scores >= self.thresholds[self.fold]) == self.same).double()

        def mean_fold_accuracy(weights: Tensor) -> float:
            weights = weights.double()
            totals = torch.zeros_like(self.accuracies).index_add_(0, self.fold, weights)
            hits = torch.zeros_like(self.accuracies).index_add_(0, self.fold, weights * correct)
            is_drawn = totals > 0  # a bootstrap sample may contain no pair of a fold
            return float((hits[is_drawn] / totals[is_drawn]).mean())

        groups = None if identities is None else as_groups("identities", identities, self.same)
        draws = resampled_weights(self.same, groups, generator)
        return percentile_interval(self.accuracy, mean_fold_accuracy, draws, samples, level)

    def __repr__(self) -> str:
        lines = [
            f"Verification of {len(self.same)} pairs, {int(self.same.sum())} same, {len(self.accuracies)} folds",
            f"  accuracy       {self.accuracy:.4f} ± {self.standard_error:.4f}  (threshold chosen on the other folds)",
            f"  best accuracy  {self.best_accuracy:.4f}           "
            f"(threshold {self.best_threshold:.4f}, chosen on the test pairs)",
            f"  EER {self.eer:.4f}, AUC {self.auc:.4f}",
        ]
        return "\n".join([*lines, *operating_point_lines(self.points, self.roc.negatives)])


def verify(
    first: Array,
    second: Array,
    same: Array,
    *,
    folds: int | Array = 10,
    subtract_mean: bool = False,
    far: Sequence[float] | Array = FARS,
    rule: str = "step",
) -> Verification:
    """Verify pairs of embeddings by their cosine, with the protocol of LFW's View 2.

    Args:
        first, second: (M, d) embeddings of the two sides of each pair. Their norms do not matter.
        same: (M,) booleans, or zeros and ones.
        folds: the number of folds (see `make_folds`), or (M,) the fold of each pair, numbered from 0.
        subtract_mean: for each fold, subtract the mean embedding of the other folds before computing cosines.
        far: false accept rates at which to report the true accept rate.
        rule: how the curve is read at these rates, "step" or "linear"; see `Roc.at`.

    Returns:
        A `Verification`. Print it, or read `accuracy`, `best_accuracy`, `eer`, `auc`, `tar[1e-3]`, `roc`.

    Example:
        >>> first = torch.tensor([[1.0, 0.0]] * 20)
        >>> second = torch.tensor([[3.0, 0.1], [0.1, 3.0]] * 10)
        >>> verify(first, second, [True, False] * 10, far=[0.1, 0.01])
        Verification of 20 pairs, 10 same, 10 folds
          accuracy       1.0000 ± 0.0000  (threshold chosen on the other folds)
          best accuracy  1.0000           (threshold 0.5164, chosen on the test pairs)
          EER 0.0000, AUC 1.0000
          TAR 1.0000 at FAR 0.1, threshold 0.9994
          TAR 1.0000 at FAR 0.01, threshold 0.9994  (not resolved by 10 different pairs)
    """
    left, right = _as_pairs(first, second)
    flags = as_flags("same", same, len(left), left.device)
    fold = _as_folds(folds, flags)
    if not subtract_mean:
        scores = cosine_scores(left, right)
        return _cross_validate(lambda test_fold: scores, flags, fold, far, rule)
    # The mean is part of what is fitted on the other folds, so each test fold has different scores for all pairs.
    means = _means_of_other_folds(left, right, fold)
    return _cross_validate(
        lambda test_fold: cosine_scores(left, right, center=means[test_fold]), flags, fold, far, rule
    )


def verify_scores(
    scores: Array, same: Array, *, folds: int | Array = 10, far: Sequence[float] | Array = FARS, rule: str = "step"
) -> Verification:
    """Verify pairs from their scores, where higher means more similar. The other arguments are those of `verify`.

    >>> verify_scores([0.9, 0.2, 0.8, 0.1], [1, 0, 1, 0], folds=2).accuracy
    1.0
    """
    values = as_scores("scores", scores)
    flags = as_flags("same", same, len(values), values.device)
    return _cross_validate(lambda test_fold: values, flags, _as_folds(folds, flags), far, rule)


def cosine_scores(first: Array, second: Array, *, center: Array | None = None) -> Float[Tensor, " pairs"]:
    """Return the cosines of corresponding rows in float64, computed in blocks.

    Args:
        first, second: (M, d) embeddings.
        center: (d,) a vector that is subtracted from all embeddings, or None.

    Example:
        >>> cosine_scores([[1.0, 0.0]], [[1.0, 1.0]])
        tensor([0.7071], dtype=torch.float64)
    """
    left, right = _as_pairs(first, second)
    dim = left.shape[1]
    origin = torch.zeros(dim, dtype=torch.float64) if center is None else as_scores("center", center)
    require(len(origin) == dim, "center", f"a vector of {dim} numbers", tuple(origin.shape))
    origin = origin.to(left.device)
    # Float64 keeps cosines apart that would tie in float32, so the ROC curve has the order of the exact scores.
    scores = [
        sphere.cosine(a.double() - origin, b.double() - origin)
        for (_, a), (_, b) in zip(blocks(left, SCORE_ROWS), blocks(right, SCORE_ROWS), strict=True)
    ]
    return torch.cat(scores)


def pair_scores(features: Array, first: Array, second: Array) -> Float[Tensor, " pairs"]:
    """Return the cosines of listed pairs of rows in float64, computed in blocks.

    Unlike `cosine_scores(features[first], features[second])`, this never stores the embeddings of all pairs.

    Args:
        features: (N, d) embeddings.
        first, second: (M,) row numbers of the two sides of each pair.

    Example:
        >>> pair_scores([[1.0, 0.0], [1.0, 1.0]], [0, 0], [1, 0])
        tensor([0.7071, 1.0000], dtype=torch.float64)
    """
    x = as_features("features", features)
    left = as_rows("first", first, None, len(x), x.device)
    right = as_rows("second", second, len(left), len(x), x.device)
    pairs = zip(left.split(SCORE_ROWS), right.split(SCORE_ROWS), strict=True)
    return torch.cat([sphere.cosine(x[a].double(), x[b].double()) for a, b in pairs])


def make_folds(same: Array, folds: int = 10) -> Int64[Tensor, " pairs"]:
    """Return the fold of each pair. Same pairs and different pairs are each divided into runs of equal length.

    Runs follow the order of the pairs, and their lengths differ by at most one.

    For the pairs of LFW in the order of its file these are the ten official folds. Pairs that share a person should be
    in the same fold. If the order of the pairs does not ensure this, pass the fold of each pair to `verify` instead.

    >>> make_folds([True, True, False, False, True, True, False, False], 2)
    tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """
    flags = as_flags("same", same, None, None)
    require(is_integer(folds, 2), "folds", "an integer >= 2, or the fold of each pair", folds)
    folds = int(folds)
    fold = torch.zeros(len(flags), dtype=torch.int64, device=flags.device)
    for members, kind in ((flags, "same"), (~flags, "different")):
        count = int(members.sum())
        require(folds <= count, "folds", f"at most {count}, the number of {kind} pairs", folds)
        # The i-th of `count` pairs is in run ⌊i·folds/count⌋.
        fold[members] = torch.arange(count, device=flags.device) * folds // count
    return fold


def _as_pairs(first: Array, second: Array) -> tuple[Tensor, Tensor]:
    """Return both sides of the pairs as matrices of the same shape."""
    left = as_features("first", first)
    right = as_features("second", second, like=left).to(left.device)
    accepted = f"a matrix with {len(left)} rows, as many as first"
    require(len(left) == len(right), "second", accepted, tuple(right.shape))
    return left, right


def _as_folds(folds: int | Array, same: Tensor) -> Tensor:
    """Return the fold of each pair. Every fold must contain same and different pairs."""
    # A scalar of Python, NumPy or torch is the number of folds; `make_folds` rejects scalars that are not integers.
    if isinstance(folds, int) or np.ndim(folds) == 0:
        return make_folds(same, cast(int, folds))
    fold = as_labels("folds", folds, len(same), same.device)
    require(int(fold.min()) >= 0, "folds", "integers >= 0", int(fold.min()))
    count = int(fold.max()) + 1
    # The upper bound rejects a huge fold number before `bincount` allocates memory for it.
    require(2 <= count <= len(fold), "folds", "at least two folds, numbered from 0 without a gap", f"{count} folds")
    for members, kind in ((same, "same"), (~same, "different")):
        empty = (fold[members].bincount(minlength=count) == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"folds must each contain same and different pairs, but fold {empty[0]} has no {kind} pair"
            )
    return fold


def _means_of_other_folds(left: Tensor, right: Tensor, fold: Tensor) -> Float[Tensor, "folds dim"]:
    """Return, for each fold, the mean embedding of all other folds."""
    sums = torch.zeros(int(fold.max()) + 1, left.shape[1], dtype=torch.float64, device=left.device)
    for side in (left, right):
        for start, rows in blocks(side):
            sums.index_add_(0, fold[start : start + len(rows)], rows.double())
    sizes = 2 * fold.bincount()  # every pair has two embeddings
    # The sum of all other folds is the total minus the sum of this fold.
    return (sums.sum(0) - sums) / (sizes.sum() - sizes)[:, None]


def _cross_validate(
    scores_for: Callable[[int], Tensor], same: Tensor, fold: Tensor, far: Sequence[float] | Array, rule: str
) -> Verification:
    """Test each fold with the threshold that is best on the other folds.

    Args:
        scores_for: maps the number of the test fold to the scores of all pairs.
        same: True for pairs of the same identity.
        fold: the fold of each pair.
        far, rule: as in `verify`.
    """
    test_scores = torch.empty(len(same), dtype=torch.float64, device=same.device)
    thresholds, accuracies = [], []
    for test_fold in range(int(fold.max()) + 1):
        scores = scores_for(test_fold)
        is_test = fold == test_fold
        # The threshold must not depend on the test fold.
        threshold = RankedScores(scores[~is_test], same[~is_test]).roc().best_threshold
        test_scores[is_test] = scores[is_test]
        thresholds.append(threshold)
        accuracies.append(float(((scores[is_test] >= threshold) == same[is_test]).double().mean()))
    # One curve over the test scores of all folds. With `subtract_mean` their centres differ between folds.
    curve = RankedScores(test_scores, same).roc()
    points = tuple(curve.at(rate, rule=rule) for rate in as_numbers("far", far))
    per_fold = torch.tensor([thresholds, accuracies], dtype=torch.float64, device=same.device)
    return Verification(test_scores, same, fold, per_fold[0], per_fold[1], curve, points, rule)
