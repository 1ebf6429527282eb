r"""Verification of any number of pairs in bounded memory, with exact thresholds and rates.

The order of floating-point numbers is the order of their bits read as an integer, apart from the sign. `verify_blocks`
reads all scores several times. The first pass counts them by their highest 16 bits. Each further pass takes the scores
whose leading bits are those of a threshold, and counts them by their next 16 bits. After two passes for float32 and
four for float64, all bits of the thresholds and all numbers of accepted pairs are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._notebook import NotebookResult
from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features, as_labels, as_numbers, as_tensor, require_finite
from hypersphere.evaluation.roc import FARS, OperatingPoint, Roc, operating_point_lines

__all__ = ["AllPairs", "RocPoints", "verify_blocks"]

DIGIT_BITS = 16  # bits of a digit, which one pass determines; a histogram of digits has 65,536 entries
CHUNK = 2**18  # scores that are counted at a time; temporary arrays of larger chunks would not fit into the cache
Block: TypeAlias = tuple[Array, Array]
Accepts: TypeAlias = tuple[int, int]  # numbers of accepted different and of accepted same pairs
IsBeyond: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # numbers of false and of true accepts → booleans


@dataclass(frozen=True, eq=False, repr=False)
class RocPoints(NotebookResult):
    """Result of `verify_blocks`.

    Attributes:
        points: the operating points at the requested false accept rates.
        eer: equal error rate.
        same, different: numbers of pairs.
    """

    points: tuple[OperatingPoint, ...]
    eer: float
    same: int
    different: int

    @property
    def tar(self) -> dict[float, float]:
        """True accept rate by requested false accept rate."""
        return {point.requested_rate: point.true_rate for point in self.points}

    @property
    def thresholds(self) -> dict[float, float]:
        """Threshold by requested false accept rate."""
        return {point.requested_rate: point.threshold for point in self.points}

    def __repr__(self) -> str:
        heading = f"Verification of {self.same + self.different} pairs, {self.same} same"
        return "\n".join([heading, f"  EER {self.eer:.4f}", *operating_point_lines(self.points, self.different)])


class AllPairs:
    """All pairs of samples, as blocks of cosines for `verify_blocks`.

    Without a gallery, each sample is compared once with each other sample, and never with itself. With one, each sample
    is compared with each entry of the gallery. Cosines have the widest dtype of the features, and float32 at least.

    Args:
        features: (N, d) embeddings; may be memory-mapped.
        labels: (N,) integers.
        gallery: (G, d) embeddings, or None.
        gallery_labels: (G,) integers, if there is a gallery.
        block: rows per side of a block; a block has block² cosines.

    Example:
        >>> pairs = AllPairs([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], [0, 0, 1])
        >>> [(scores.numel(), int(same.sum())) for scores, same in pairs]
        [(3, 1)]
    """

    def __init__(
        self,
        features: Array,
        labels: Array,
        gallery: Array | None = None,
        gallery_labels: Array | None = None,
        *,
        block: int = 2048,
    ) -> None:
        require(is_integer(block, 1), "block", "an integer >= 1", block)
        require((gallery is None) == (gallery_labels is None), "gallery_labels", "given with a gallery", gallery_labels)
        self.features = as_features("features", features)
        self.labels = as_labels("labels", labels, len(self.features), self.features.device)
        self.gallery, self.gallery_labels = self.features, self.labels
        self.is_one_set, self.block = gallery is None, int(block)
        if gallery is not None and gallery_labels is not None:
            self.gallery = as_features("gallery", gallery, like=self.features)
            self.gallery_labels = as_labels("gallery_labels", gallery_labels, len(self.gallery), self.labels.device)

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "..."], Bool[Tensor, "..."]]]:
        dtype = torch.promote_types(self.features.dtype, self.gallery.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        for start in range(0, len(self.features), self.block):
            rows = slice(start, start + self.block)
            x = sphere.row_directions(self.features[rows].to(dtype))
            for first in range(start if self.is_one_set else 0, len(self.gallery), self.block):
                columns = slice(first, first + self.block)
                w = sphere.row_directions(self.gallery[columns].to(x))
                with torch.no_grad(), _numerics.autocast_disabled(x):
                    scores = x @ w.mT
                same = self.labels[rows, None] == self.gallery_labels[columns]
                if self.is_one_set and first == start:  # a block on the diagonal: each pair once, no row with itself
                    above = torch.ones_like(same).triu(1)
                    scores, same = scores[above], same[above]
                yield scores, same


def verify_blocks(
    blocks: Iterable[Block] | Callable[[], Iterable[Block]],
    far: Sequence[float] | Array = FARS,
    *,
    rule: str = "step",
) -> RocPoints:
    """Verify pairs whose scores are given in blocks, which are read several times.

    The operating points and the equal error rate are exactly those of `roc` for all scores together. Memory does not
    grow with the number of pairs. Scores are read twice if they are float32 or narrower, and four times if they are
    float64.

    Args:
        blocks: blocks (scores, same) of equal shape, such as `AllPairs`; or a function that returns them. They are
            read several times, so a generator must be given as a function that makes a new one.
        far: false accept rates at which to report thresholds and true accept rates.
        rule: how the curve is read at these rates, "step" or "linear"; see `Roc.at`.

    Raises:
        ValueError: if the blocks are not the same in each pass, or have no pair of one kind.

    Example:
        >>> blocks = [([0.9, 0.8], [True, False]), ([0.7, 0.3], [True, False])]
        >>> verify_blocks(blocks, far=[0.5])
        Verification of 4 pairs, 2 same
          EER 0.5000
          TAR 1.0000 at FAR 0.5, threshold 0.7000
        >>> features, labels = torch.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1]
        >>> verify_blocks(AllPairs(features, labels), far=[0.25]).tar
        {0.25: 1.0}
    """
    if isinstance(blocks, Iterator):
        raise ValueError("blocks must be readable several times: pass a list or a function, not a generator")
    requested = [float(rate) for rate in as_numbers("far", far)]
    for rate in requested:
        require(0 < rate < 1, "far", "rates in (0, 1)", rate)
    read = blocks if callable(blocks) else lambda: blocks
    counts, dtype = _count_first_digits(read)
    different, same = (int(number) for number in counts.sum(1))
    for number, kind in ((same, "positive (same)"), (different, "negative (different)")):
        if not number:
            raise ValueError(f"blocks must contain at least one {kind} pair, but none of {same + different} is")

    def crosses_eer(false_accepts: Tensor, true_accepts: Tensor) -> Tensor:
        return false_accepts / different - (1 - true_accepts / same) >= 0

    tests: list[IsBeyond] = [lambda false, true, rate=rate: false / different > rate for rate in requested]  # type: ignore[misc]
    searches = [_Search(is_beyond).refine(counts, 0, None) for is_beyond in (*tests, crosses_eer)]
    for level in range(1, torch.finfo(dtype).bits // DIGIT_BITS):
        prefixes = torch.tensor(sorted({prefix for search in searches for prefix in search.prefixes}))
        counts = _count_next_digits(read, dtype, level, prefixes)
        searches = [search.refine(counts, level, prefixes) for search in searches]
    curve = _curve_through(searches, dtype, different, same)
    points = tuple(curve.at(rate, rule=rule) for rate in requested)
    return RocPoints(points, curve.eer, same, different)


@dataclass(frozen=True)
class _Search:
    """The search for the highest score at which the numbers of accepted pairs exceed a limit, and the next higher one.

    Thresholds descend. `is_beyond` is False above some score and True from it on.

    Attributes:
        is_beyond: the limit.
        lower: the leading bits of the highest score beyond the limit.
        upper: the leading bits of the lowest score before the limit; None if there is none.
        before: numbers of pairs with scores above those that begin with `lower`.
        beyond: numbers of pairs with these scores or higher ones.
    """

    is_beyond: IsBeyond
    lower: int = 0
    upper: int | None = None
    before: Accepts = (0, 0)
    beyond: Accepts = (0, 0)

    @property
    def prefixes(self) -> list[int]:
        """The leading bits whose scores must be counted in the next pass."""
        return [self.lower] if self.upper is None else [self.lower, self.upper]

    def refine(self, counts: Int64[Tensor, "..."], level: int, prefixes: Tensor | None) -> _Search:
        """Return the search with 16 more bits of `lower` and `upper`.

        Args:
            counts: numbers of different and of same pairs by digit: (2, digits), or (prefixes, 2, digits).
            level: the number of the pass.
            prefixes: the prefixes of the counts, or None in the first pass.
        """
        lower_counts = counts if prefixes is None else counts[torch.searchsorted(prefixes, self.lower)]
        if prefixes is not None:
            numbers = tuple(beyond - before for beyond, before in zip(self.beyond, self.before, strict=True))
            is_unchanged = tuple(lower_counts.sum(1).tolist()) == numbers
            require(is_unchanged, "blocks", "the same in each pass", "different: a generator can be read only once")
        # Numbers of accepted pairs if the threshold is the lowest score with this digit, for descending digits.
        false_accepts, true_accepts = lower_counts.flip(1).cumsum(1) + torch.tensor(self.before)[:, None]
        place = int(self.is_beyond(false_accepts.double(), true_accepts.double()).nonzero()[0])
        before = self.before if place == 0 else (int(false_accepts[place - 1]), int(true_accepts[place - 1]))
        beyond = int(false_accepts[place]), int(true_accepts[place])
        digit = (1 << DIGIT_BITS) - 1 - place
        above = lower_counts.sum(0)[digit + 1 :].nonzero().flatten()
        upper = self.upper
        if len(above):
            upper = self._extend(self.lower, digit + 1 + int(above[0]), level)
        elif upper is not None and prefixes is not None:
            upper_counts = counts[torch.searchsorted(prefixes, upper)].sum(0)
            upper = self._extend(upper, int(upper_counts.nonzero()[0]), level)
        return replace(self, lower=self._extend(self.lower, digit, level), upper=upper, before=before, beyond=beyond)

    @staticmethod
    def _extend(prefix: int, digit: int, level: int) -> int:
        """Append a digit. The first one includes the sign bit, so half of its range is negative."""
        return digit - (1 << (DIGIT_BITS - 1)) if level == 0 else (prefix << DIGIT_BITS) | digit


def _curve_through(searches: Iterable[_Search], dtype: torch.dtype, different: int, same: int) -> Roc:
    """Return the curve through the points of all searches. It is exact between the two points of each search."""
    points = {(0, 0): math.inf}
    for search in searches:
        if search.upper is not None:
            points[search.before] = _score_of_key(search.upper, dtype)
        points[search.beyond] = _score_of_key(search.lower, dtype)
    points.setdefault((different, same), -math.inf)
    accepts = sorted(points)
    false_accepts, true_accepts = torch.tensor(accepts, dtype=torch.float64).unbind(1)
    return Roc(torch.tensor([points[key] for key in accepts], dtype=torch.float64), true_accepts, false_accepts)


# Counting -------------------------------------------------------------------------------------------------------------


def _count_first_digits(read: Callable[[], Iterable[Block]]) -> tuple[Int64[Tensor, "kinds digits"], torch.dtype]:
    """Return the numbers of different and of same pairs by the first digit of their score, and the dtype of scores."""
    counts = torch.zeros(2, 1 << DIGIT_BITS, dtype=torch.int64)
    dtype: torch.dtype | None = None
    for scores, same in _chunks(read()):
        require_finite("blocks", scores[:, None])
        require(dtype in (None, scores.dtype), "blocks", f"scores of one dtype, {dtype}", scores.dtype)
        dtype = scores.dtype
        digits = _keys(scores) >> (torch.finfo(dtype).bits - DIGIT_BITS)
        counts += _histogram(digits + (1 << (DIGIT_BITS - 1)), same)
    if dtype is None:
        raise ValueError("blocks must contain at least one score, but there is none")
    return counts, dtype


def _count_next_digits(
    read: Callable[[], Iterable[Block]], dtype: torch.dtype, level: int, prefixes: Int64[Tensor, " prefixes"]
) -> Int64[Tensor, "prefixes kinds digits"]:
    """Return the numbers of pairs by the next digit, for the scores that begin with each prefix."""
    counts = torch.zeros(len(prefixes), 2, 1 << DIGIT_BITS, dtype=torch.int64)
    shift = torch.finfo(dtype).bits - DIGIT_BITS * (level + 1)
    # A table of first digits excludes most scores at little cost, before the other bits are compared.
    is_listed = torch.zeros(1 << DIGIT_BITS, dtype=torch.bool)
    is_listed[(prefixes >> (DIGIT_BITS * (level - 1))) + (1 << (DIGIT_BITS - 1))] = True
    for scores, same in _chunks(read()):
        require(scores.dtype == dtype, "blocks", f"the same in each pass, with scores of {dtype}", scores.dtype)
        keys = _keys(scores)
        first = (keys >> (torch.finfo(dtype).bits - DIGIT_BITS)) + (1 << (DIGIT_BITS - 1))
        listed = is_listed.index_select(0, first.int()).nonzero().flatten()
        keys, flags = keys[listed].long(), same[listed]
        key_prefixes = keys >> (shift + DIGIT_BITS)
        for number, prefix in enumerate(prefixes.tolist()):
            has_prefix = key_prefixes == prefix
            digits = (keys[has_prefix] >> shift) & ((1 << DIGIT_BITS) - 1)
            counts[number] += _histogram(digits, flags[has_prefix])
    return counts


def _chunks(blocks: Iterable[Block]) -> Iterator[tuple[Float[Tensor, " chunk"], Bool[Tensor, " chunk"]]]:
    """Yield short vectors of scores and flags on the CPU, in float32 or float64."""
    for scores, same in blocks:
        values, flags = as_tensor("blocks", scores), as_tensor("blocks", same)
        fits = values.shape == flags.shape and not values.is_complex()
        shapes = f"{tuple(values.shape)} and {tuple(flags.shape)}"
        require(fits, "blocks", "real scores and flags of equal shape", shapes)
        if flags.dtype != torch.bool:
            if not bool(((flags == 0) | (flags == 1)).all()):
                raise ValueError("blocks must have flags that are booleans or 0 and 1, but some are not")
            flags = flags != 0
        parts = (x.flatten().split(CHUNK) for x in (_numerics.widen(values), flags))
        yield from ((part.cpu(), part_flags.cpu()) for part, part_flags in zip(*parts, strict=True) if len(part))


def _histogram(digits: Tensor, same: Bool[Tensor, " chunk"]) -> Int64[Tensor, "kinds digits"]:
    """Return the numbers of different and of same pairs by digit."""
    total, positive = (x.bincount(minlength=1 << DIGIT_BITS) for x in (digits, digits[same]))
    return torch.stack([total - positive, positive])


def _keys(scores: Float[Tensor, " chunk"]) -> Tensor:
    """Return signed integers with the bits and the order of the scores.

    >>> _keys(torch.tensor([-1.0, -0.0, 0.0, 1.0])).tolist()
    [-1065353217, 0, 0, 1065353216]
    """
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[scores.dtype]
    bits = (scores + 0.0).view(integer)  # adding zero turns −0 into 0, to which it is equal
    # The bits of negative numbers other than the sign ascend as the numbers descend, so they are inverted.
    return bits ^ ((bits >> (torch.iinfo(integer).bits - 1)) & torch.iinfo(integer).max)


def _score_of_key(key: int, dtype: torch.dtype) -> float:
    """Return the score of a key.

    >>> [_score_of_key(key, torch.float32) for key in (-1065353217, 0, 1065353216)]
    [-1.0, 0.0, 1.0]
    """
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    bits = key if key >= 0 else key ^ torch.iinfo(integer).max
    return torch.tensor([bits], dtype=integer).view(dtype).item()
