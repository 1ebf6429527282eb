r"""Verification: are these two the same? Decided by a threshold on the cosine, which is chosen on other folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.evaluation.arrays import Array, as_features, as_flags, as_labels, as_scores, blocks
from hypersphere.evaluation.bootstrap import Interval, bootstrap, check_statistic, interval
from hypersphere.evaluation.roc import FARS, OperatingPoint, Ranked, Roc
from hypersphere.evaluation.scores import cosine_scores

__all__ = ["Verification", "make_folds", "verify", "verify_scores"]


@dataclass(frozen=True, eq=False, repr=False)
class Verification:
    """What `verify` found. Scores of a pair are those with which its own fold was tested."""

    scores: Tensor
    same: Tensor
    fold: Tensor
    thresholds: Tensor
    accuracies: Tensor
    roc: Roc
    points: tuple[OperatingPoint, ...]

    @property
    def accuracy(self) -> float:
        """Mean accuracy over the folds, each with the threshold that was best on the others."""
        return float(self.accuracies.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of that mean: the deviation over the folds, divided by √folds."""
        return float(self.accuracies.std() / math.sqrt(len(self.accuracies)))

    @property
    def best_accuracy(self) -> float:
        """Accuracy with the best threshold for all the pairs, chosen on themselves: an upper bound."""
        return self.roc.best_accuracy

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
        """True accept rate at each false accept rate that was asked for."""
        return {point.asked: point.true_rate for point in self.points}

    def interval(
        self,
        statistic: str | Callable[[Roc], float] = "accuracy",
        *,
        identities: tuple[Array, Array] | None = None,
        samples: int = 1000,
        level: float = 0.95,
        generator: torch.Generator | None = None,
    ) -> Interval:
        """Bootstrap interval of "accuracy" (thresholds held as they are) or of a statistic of `bootstrap`."""
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
        right = ((self.scores >= self.thresholds[self.fold]) == self.same).double()

        def accuracy(weights: Tensor) -> float:
            weight = weights.double()
            totals = torch.zeros_like(self.accuracies).index_add_(0, self.fold, weight)
            hits = torch.zeros_like(self.accuracies).index_add_(0, self.fold, weight * right)
            return float((hits[totals > 0] / totals[totals > 0]).mean())

        return interval(
            self.accuracy,
            accuracy,
            self.same,
            identities=identities,
            samples=samples,
            level=level,
            generator=generator,
        )

    def __repr__(self) -> str:
        lines = [
            f"Verification of {len(self.same)} pairs, {int(self.same.sum())} same, {len(self.accuracies)} folds",
            f"  accuracy        {self.accuracy:.4f} ± {self.standard_error:.4f}  (threshold from the other folds)",
            f"  best threshold  {self.best_accuracy:.4f}           (chosen on the same pairs)",
            f"  EER {self.eer:.4f}, AUC {self.auc:.4f}",
        ]
        lines += [
            f"  TAR {p.true_rate:.4f} at FAR {p.asked:.0e}"
            + ("" if p.resolved else f"  (not resolved by {self.roc.negatives:g} different pairs)")
            for p in self.points
        ]
        return "\n".join(lines)


def verify(
    first: Array,
    second: Array,
    same: Array,
    *,
    folds: int | Array = 10,
    subtract_mean: bool = False,
    far: Sequence[float] = FARS,
    rule: str = "step",
) -> Verification:
    """Verify pairs of embeddings by their cosine, as View 2 of LFW asks.

    Args:
        first, second: (M, d) embeddings of the two of each pair, of any length.
        same: (M,) booleans or zeros and ones.
        folds: how many (see `make_folds`), or the fold 0, 1, … of each pair.
        subtract_mean: before the cosine, subtract the mean embedding of the training folds, for each fold anew.
        far: false accept rates at which the true accept rate is wanted.
        rule: how the curve is read there, "step" or "linear"; see `Roc.at`.

    Returns:
        A `Verification`; print it, or read `accuracy`, `accuracies`, `best_accuracy`, `eer`, `auc`, `tar[1e-3]`, `roc`.

    Example:
        >>> first = torch.tensor([[1.0, 0.0]] * 20)
        >>> second = torch.tensor([[3.0, 0.1], [0.1, 3.0]] * 10)
        >>> verify(first, second, [True, False] * 10, far=[0.1, 0.01])
        Verification of 20 pairs, 10 same, 10 folds
          accuracy        1.0000 ± 0.0000  (threshold from the other folds)
          best threshold  1.0000           (chosen on the same pairs)
          EER 0.0000, AUC 1.0000
          TAR 1.0000 at FAR 1e-01
          TAR 1.0000 at FAR 1e-02  (not resolved by 10 different pairs)
    """
    one = as_features("first", first)
    two = as_features("second", second, like=one).to(one.device)
    require(len(one) == len(two), "second", f"{len(one)} rows, as many as first", len(two))
    flags = as_flags("same", same, len(one), one.device)
    fold = _folds_of(folds, flags)
    if not subtract_mean:
        scores = cosine_scores(one, two)
        return _verification(lambda held_out: scores, flags, fold, far, rule)
    count = int(fold.max()) + 1
    sums = torch.zeros(count, one.shape[1], dtype=torch.float64, device=one.device)
    for side in (one, two):
        for start, block in blocks(side):
            sums.index_add_(0, fold[start : start + len(block)], block.double())
    sizes = 2 * fold.bincount()
    means = (sums.sum(0) - sums) / (sizes.sum() - sizes)[:, None]
    return _verification(lambda held_out: cosine_scores(one, two, center=means[held_out]), flags, fold, far, rule)


def verify_scores(
    scores: Array, same: Array, *, folds: int | Array = 10, far: Sequence[float] = FARS, rule: str = "step"
) -> Verification:
    """Verify pairs that are scored already, higher meaning more alike; otherwise as `verify`.

    >>> verify_scores([0.9, 0.2, 0.8, 0.1], [1, 0, 1, 0], folds=2).accuracy
    1.0
    """
    values = as_scores("scores", scores)
    flags = as_flags("same", same, len(values), values.device)
    return _verification(lambda held_out: values, flags, _folds_of(folds, flags), far, rule)


def make_folds(same: Array, folds: int = 10) -> Tensor:
    """The fold of each pair: same pairs are cut, in their order, into `folds` equal runs, and so are different ones.

    On the pairs of LFW in the order of their file these are its own ten folds. Pairs that share a person should share
    a fold; where the order does not see to that, give `verify` folds of your own.

    >>> make_folds([True, True, False, False, True, True, False, False], 2)
    tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """
    flags = as_flags("same", same, len(same), same.device if isinstance(same, Tensor) else torch.device("cpu"))
    require(is_integer(folds, 2), "folds", "a whole number >= 2, or the fold of each pair", folds)
    folds = int(folds)
    fold = torch.zeros(len(flags), dtype=torch.int64, device=flags.device)
    for kind, name in ((flags, "same"), (~flags, "different")):
        count = int(kind.sum())
        require(folds <= count, "folds", f"at most {count}, the number of {name} pairs", folds)
        fold[kind] = torch.arange(count, device=flags.device) * folds // count
    return fold


def _folds_of(folds: int | Array, same: Tensor) -> Tensor:
    if isinstance(folds, int) or np.ndim(folds) == 0:
        return make_folds(same, cast(int, folds))
    fold = as_labels("folds", folds, len(same), same.device)
    require(int(fold.min()) >= 0, "folds", "numbers 0, 1, …", int(fold.min()))
    count = int(fold.max()) + 1
    require(2 <= count <= len(fold), "folds", "at least two folds, numbered from 0 without a gap", f"{count} folds")
    for kind, name in ((same, "same"), (~same, "different")):
        lacking = (fold[kind].bincount(minlength=count) == 0).nonzero().flatten().tolist()
        require(not lacking, "folds", "such that every fold has pairs of either kind", f"fold {lacking} without {name}")
    return fold


def _verification(
    scores_of: Callable[[int], Tensor], same: Tensor, fold: Tensor, far: Sequence[float], rule: str
) -> Verification:
    """`scores_of` gives the scores of all pairs for a fold that is held out."""
    tested = torch.empty(len(same), dtype=torch.float64, device=same.device)
    thresholds, accuracies = [], []
    for held_out in range(int(fold.max()) + 1):
        here = scores_of(held_out)
        test = fold == held_out
        threshold = Ranked(here[~test], same[~test]).roc().best_threshold
        tested[test] = here[test]
        thresholds.append(threshold)
        accuracies.append(float(((here[test] >= threshold) == same[test]).double().mean()))
    curve = Ranked(tested, same).roc()
    points = tuple(curve.at(rate, rule=rule) for rate in far)
    numbers = torch.tensor([thresholds, accuracies], dtype=torch.float64, device=same.device)
    return Verification(tested, same, fold, numbers[0], numbers[1], curve, points)
