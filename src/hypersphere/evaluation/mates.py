r"""The protocol of MegaFace: the rank of each mate of a probe among distractors, and verification against them.

Every ordered pair of images of one person is a trial: one is the probe, the other is the only image of this person in
a gallery of distractors. A probe with n mates is therefore ranked n times, unlike in `identify`, where all images of a
person are in the gallery together and the best one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features, as_labels, as_numbers, blocks
from hypersphere.evaluation.roc import Roc

__all__ = ["MateRanks", "rank_mates"]

PROBE_ROWS = 512  # probes per block of scores
BINS = 2**20  # bins of cosines in [-1, 1], for a ROC curve of billions of pairs


@dataclass(frozen=True, eq=False, repr=False)
class MateRanks:
    """Result of `rank_mates`.

    Attributes:
        probe, mate: positions of the two images of each trial.
        scores: cosine of each trial.
        ranks: rank of the mate, from 1, for each number of distractors.
        negatives: number of cosines of probes with all distractors in each of 2^20 bins on [−1, 1], ascending.
    """

    probe: Int64[Tensor, " trials"]
    mate: Int64[Tensor, " trials"]
    scores: Float[Tensor, " trials"]
    ranks: dict[int, Int64[Tensor, " trials"]]
    negatives: Int64[Tensor, " bins"]

    def rate(self, rank: int = 1, distractors: int | None = None) -> float:
        """Return the fraction of trials whose mate has `rank` or a better one, by default among all distractors."""
        require(is_integer(rank, 1), "rank", "an integer >= 1", rank)
        count = max(self.ranks) if distractors is None else distractors
        require(count in self.ranks, "distractors", f"one of {', '.join(map(str, self.ranks))}", distractors)
        return float((self.ranks[count] <= rank).double().mean())

    def cmc(self, depth: int = 100) -> Float[Tensor, " depth"]:
        """Return the rates at ranks 1, 2, …, `depth` among all distractors."""
        require(is_integer(depth, 1), "depth", "an integer >= 1", depth)
        ranks = self.ranks[max(self.ranks)]
        return ranks[ranks <= depth].bincount(minlength=depth + 1)[1:].cumsum(0).double() / len(ranks)

    def roc(self) -> Roc:
        """Return the curve of verification: trials are same pairs, probes with all distractors are different pairs.

        Scores are rounded down to the lower edges of the bins, multiples of 2^-19. For exact rates and thresholds, pass
        the scores of the trials and the blocks of `AllPairs` for probes and distractors to `verify_blocks`.
        """
        positives = _histogram(self.scores.double())
        occupied = ((positives + self.negatives) > 0).nonzero().flatten().flip(0)
        edges = occupied.double() * (2 / BINS) - 1
        zero = edges.new_zeros(1)
        accepts = (torch.cat([zero, counts[occupied].double().cumsum(0)]) for counts in (positives, self.negatives))
        return Roc(torch.cat([zero + torch.inf, edges]), *accepts)

    def __repr__(self) -> str:
        return f"MateRanks({len(self.scores)} trials, {max(self.ranks)} distractors: rank-1 {self.rate():.4f})"


@torch.no_grad()
def rank_mates(
    probes: Array,
    labels: Array,
    distractors: Array,
    *,
    sizes: Sequence[int] | Array | None = None,
    block: int = 8192,
) -> MateRanks:
    """Rank every mate of every probe among distractors by its cosine with the probe (thesis, table 2.10).

    The rank is one plus the number of distractors whose cosine with the probe is at least that of the mate; cosines
    that differ by less than 16·eps are tied. Memory does not grow with the number of distractors.

    Args:
        probes: (P, d) embeddings of people with two or more images.
        labels: (P,) integers, the people.
        distractors: (D, d) embeddings of other people; may be memory-mapped.
        sizes: numbers n of distractors: also rank among only the first n. By default, rank among all D.
        block: distractors per block of scores.

    Example:
        >>> result = rank_mates(torch.eye(3)[[0, 0, 1, 1]], [0, 0, 1, 1], torch.eye(3)[2:])
        >>> result
        MateRanks(4 trials, 1 distractors: rank-1 1.0000)
        >>> result.roc().tar_at(0.5)
        1.0
    """
    x = as_features("probes", probes)
    people = as_labels("labels", labels, len(x), x.device)
    distractor_features = as_features("distractors", distractors, like=x)
    require(is_integer(block, 1), "block", "an integer >= 1", block)
    requested = [] if sizes is None else as_numbers("sizes", sizes)
    are_sizes = all(is_integer(size, 1, len(distractor_features)) for size in requested)
    require(are_sizes, "sizes", f"integers in 1..{len(distractor_features)}, the number of distractors", sizes)
    counts = sorted({*requested, len(distractor_features)})
    dtype = torch.promote_types(torch.float32, torch.promote_types(x.dtype, distractor_features.dtype))
    unit = sphere.row_directions(x.to(dtype))
    probe, mate = _trials(people)
    scores = (unit[probe] * unit[mate]).sum(1)
    # One row per probe and one column per mate, padded, so that `searchsorted` handles all mates of a probe at once.
    mates_per_probe = probe.bincount(minlength=len(x))
    column = torch.arange(len(probe), device=x.device) - (mates_per_probe.cumsum(0) - mates_per_probe)[probe]
    thresholds = unit.new_zeros(len(x), int(mates_per_probe.max()))
    # A distractor within the tolerance below the mate is tied with it, and ties count against the mate.
    thresholds[probe, column] = scores - _numerics.tie_tolerance(dtype)
    rivals = torch.zeros_like(thresholds, dtype=torch.int64)
    negatives = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    ranks: dict[int, Tensor] = {}
    starts = [0, *counts[:-1]]
    for first, last in zip(starts, counts, strict=True):
        for _, rows in blocks(distractor_features[first:last], block):
            directions = sphere.row_directions(rows.to(unit))
            for start, part in blocks(unit, PROBE_ROWS):
                with _numerics.autocast_disabled(part):
                    part_scores = part @ directions.mT
                negatives += _histogram(part_scores.double().flatten())
                rows_of_part = slice(start, start + len(part))
                below = torch.searchsorted(part_scores.sort(dim=1).values, thresholds[rows_of_part])
                rivals[rows_of_part] += len(directions) - below
        ranks[last] = rivals[probe, column] + 1
    return MateRanks(probe, mate, scores, ranks, negatives)


def _trials(people: Tensor) -> tuple[Tensor, Tensor]:
    """Return all ordered pairs (probe, mate) of images of the same person, sorted by probe.

    >>> _trials(torch.tensor([7, 5, 7]))
    (tensor([0, 2]), tensor([2, 0]))
    """
    pairs = []
    for start, part in blocks(people, PROBE_ROWS):
        same = part[:, None] == people
        same[torch.arange(len(part)), torch.arange(start, start + len(part))] = False
        pairs.append(same.nonzero() + same.new_tensor([[start, 0]], dtype=torch.int64))
    probe, mate = torch.cat(pairs).unbind(1)
    if not len(probe):
        raise ValueError("labels must contain a person with two or more images, but every person has one")
    return probe, mate


def _histogram(scores: Tensor) -> Int64[Tensor, " bins"]:
    """Return the number of scores per bin; the last bin includes 1."""
    return ((scores + 1) * (BINS / 2)).long().clamp(0, BINS - 1).bincount(minlength=BINS)
