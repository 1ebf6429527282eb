r"""Isotonic regression of labels on scores by pooling adjacent violators (PAV)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["IsotonicBlocks", "IsotonicMap", "pool_adjacent_violators"]


@dataclass(frozen=True, eq=False)
class IsotonicBlocks:
    """Consecutive ranges of scores with a strictly increasing fraction of same pairs.

    Attributes:
        low, high: the lowest and the highest score of each block, ascending.
        same, different: numbers of same and of different pairs in each block, float64.
    """

    low: Float[Tensor, " blocks"]
    high: Float[Tensor, " blocks"]
    same: Float[Tensor, " blocks"]
    different: Float[Tensor, " blocks"]

    @property
    def llrs(self) -> Float[Tensor, " blocks"]:
        """Log-likelihood ratios log[(same/P) / (different/N)]; −∞ and ∞ for blocks of one kind."""
        return (self.same / self.same.sum()).log() - (self.different / self.different.sum()).log()


def pool_adjacent_violators(
    scores: Float[Tensor, " pairs"], same: Tensor, weights: Tensor | None = None
) -> IsotonicBlocks:
    """Return the blocks of the non-decreasing step function that is closest to the labels in least squares.

    The same blocks maximise the likelihood, and their ends are the corners of the convex hull of the ROC curve (Fawcett
    and Niculescu-Mizil, PAV and the ROC convex hull, Machine Learning 2007). Tied scores share a block.

    Args:
        scores: (M,) float64.
        same: (M,) True for same pairs.
        weights: (M,) the number of times that each pair counts; once if None.

    Example:
        >>> blocks = pool_adjacent_violators(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 0, 1]))
        >>> blocks.same.tolist(), blocks.different.tolist()
        ([0.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    """
    if weights is not None:
        counted = weights > 0
        scores, same, weights = scores[counted], same[counted], weights[counted]
    weights = torch.ones_like(scores, dtype=torch.float64) if weights is None else weights.double()
    values, index = scores.unique(return_inverse=True)  # ascending
    low, high = values, values
    counts, positives = (
        torch.zeros_like(values, dtype=torch.float64).index_add_(0, index, numbers)
        for numbers in (weights, weights * same)
    )
    while True:
        fractions = positives / counts
        starts = torch.ones_like(fractions, dtype=torch.bool)
        starts[1:] = fractions[1:] > fractions[:-1]
        if bool(starts.all()):
            return IsotonicBlocks(low, high, positives, counts - positives)
        # The result of PAV does not depend on the order of pooling, so all non-increasing runs are pooled at once.
        block = starts.cumsum(0) - 1
        low, high = low[starts], high[torch.cat([starts[1:], starts.new_ones(1)])]
        counts, positives = (
            torch.zeros_like(low, dtype=torch.float64).index_add_(0, block, numbers) for numbers in (counts, positives)
        )


@dataclass(frozen=True)
class IsotonicMap:
    """Log-likelihood ratios by isotonic regression.

    Attributes:
        low, high: the lowest and the highest score of each block, ascending.
        probabilities: the fraction of same pairs in each block.
        odds: log(P/N) of the numbers of same and of different pairs.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    probabilities: tuple[float, ...]
    odds: float

    @classmethod
    def fit(cls, scores: Tensor, same: Tensor, quality: None, weights: Tensor, prior: float) -> IsotonicMap:
        """Fit the map. Neither the blocks nor their ratios depend on the prior."""
        blocks = pool_adjacent_violators(scores, same, weights)
        positives, negatives = blocks.same.sum(), blocks.different.sum()
        # Fractions of 0 and 1 would give infinite ratios. All other fractions are within these bounds.
        lowest = float(1 / (positives + negatives + 2))
        fractions = (blocks.same / (blocks.same + blocks.different)).clamp(lowest, 1 - lowest)
        odds = float((positives / negatives).log())
        low, high, probabilities = (tuple(column.tolist()) for column in (blocks.low, blocks.high, fractions))
        return cls(low, high, probabilities, odds)

    def llr(self, score: Tensor, quality: Tensor | None = None) -> Tensor:
        """Return log-likelihood ratios. Probabilities are constant within blocks and linear between them."""
        columns = [torch.tensor(c, dtype=torch.float64, device=score.device) for c in (self.low, self.high)]
        ends = torch.stack(columns, 1).flatten()  # low and high of the first block, of the second, …
        values = torch.tensor(self.probabilities, dtype=torch.float64, device=score.device).repeat_interleave(2)
        inside = score.clamp(ends[0], ends[-1])
        right = torch.searchsorted(ends, inside).clamp(1, len(ends) - 1)
        width = ends[right] - ends[right - 1]
        fraction = torch.where(width > 0, (inside - ends[right - 1]) / width, 0)
        return torch.logit(values[right - 1].lerp(values[right], fraction)) - self.odds

    def score_at(self, llr: float, quality: float | None = None) -> float:
        """Return the threshold that accepts the blocks whose ratio is at least `llr`.

        It is halfway between two blocks, −∞ if all blocks are accepted and ∞ if none is.
        """
        ratios = torch.logit(torch.tensor(self.probabilities, dtype=torch.float64)) - self.odds
        first = int((ratios < llr).sum())
        if first in (0, len(ratios)):
            return -torch.inf if first == 0 else torch.inf
        return self.high[first - 1] / 2 + self.low[first] / 2
