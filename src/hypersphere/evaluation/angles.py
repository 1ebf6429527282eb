r"""How the angles of positive and negative pairs are spread, and how small the smallest is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import is_integer, require
from hypersphere.evaluation.arrays import Array, as_features, as_flags, as_labels, blocks
from hypersphere.evaluation.scores import cosine_scores

__all__ = ["AngleDistribution", "AngleHistograms", "class_angles", "pair_angles", "smallest_angle"]

ROWS = 1024


@dataclass(frozen=True, eq=False, repr=False)
class AngleDistribution:
    """Angles of one kind of pairs, in radians: counts in each bin and the moments, which do not depend on bins."""

    histogram: Tensor
    mean: float
    std: float
    least: float
    greatest: float

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return int(self.histogram.sum())

    def __repr__(self) -> str:
        mean, std, least, greatest = (math.degrees(a) for a in (self.mean, self.std, self.least, self.greatest))
        return f"{self.count} pairs at {mean:.1f}° ± {std:.1f}°, {least:.1f}° to {greatest:.1f}°"


@dataclass(frozen=True, eq=False, repr=False)
class AngleHistograms:
    """Angles of positive and of negative pairs in the same bins on [0, π].

    Attributes:
        edges: (bins + 1,) float64, in radians.
        positive, negative: the distributions.
    """

    edges: Tensor
    positive: AngleDistribution
    negative: AngleDistribution

    @property
    def overlap(self) -> float:
        """The area that the two normalised histograms share: 0 where they are apart, 1 where they are equal."""
        shares = [kind.histogram / kind.count for kind in (self.positive, self.negative)]
        return float(torch.minimum(*shares).sum())

    @property
    def margin(self) -> float:
        """Smallest negative minus greatest positive angle: above 0, every threshold between them is free of error."""
        return self.negative.least - self.positive.greatest

    def __repr__(self) -> str:
        return f"AngleHistograms(positive: {self.positive}; negative: {self.negative}; overlap {self.overlap:.3f})"


def pair_angles(first: Array, second: Array, same: Array, *, bins: int = 180) -> AngleHistograms:
    """Angles of given pairs.

    Args:
        first, second: (M, d) embeddings.
        same: (M,) booleans or zeros and ones.
        bins: of equal width on [0, π].

    Example:
        >>> pair_angles(torch.eye(2), torch.ones(2, 2) * torch.tensor([[1.0], [-1.0]]), [True, False], bins=4)
        AngleHistograms(positive: 1 pairs at 45.0° ± 0.0°, 45.0° to 45.0°; negative: 1 pairs at 135.0° ± 0.0°, 135.0°
        to 135.0°; overlap 0.000)
    """
    angles = sphere.angle(cosine_scores(first, second))
    flags = as_flags("same", same, len(angles), angles.device)
    return _histograms([(angles, flags)], bins, "same")


def class_angles(features: Array, labels: Array, *, bins: int = 180) -> AngleHistograms:
    """Angles of all N(N−1)/2 pairs of labelled features, in blocks: no N×N matrix is made.

    Args:
        features: (N, d).
        labels: (N,) integers; a pair is positive where they agree.
        bins: of equal width on [0, π].

    Example:
        >>> class_angles(torch.eye(3), [0, 0, 1]).negative
        2 pairs at 90.0° ± 0.0°, 90.0° to 90.0°
    """
    x = as_features("features", features)
    y = as_labels("labels", labels, len(x), x.device)
    return _histograms(_all_pairs(x, y), bins, "labels")


def smallest_angle(w: Array) -> float:
    """The smallest angle, in radians, between two rows of `w`: the separation of neurons or class vectors.

    >>> round(smallest_angle(torch.eye(3)), 4)
    1.5708
    """
    x = as_features("w", w)
    require(len(x) >= 2, "w", "a matrix (N, d) with at least two rows", tuple(x.shape))
    return min(float(angles.min()) for angles, _ in _all_pairs(x, torch.zeros(len(x), device=x.device)))


def _all_pairs(x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Angles and agreement of labels of every pair i < j, a block at a time."""
    for start, rows in blocks(x, ROWS):
        for offset, columns in blocks(x[start:], ROWS):
            angles = sphere.angle(sphere.cosines(rows.double(), columns.double()))
            same = y[start : start + len(rows), None] == y[start + offset : start + offset + len(columns)]
            if offset:
                yield angles.flatten(), same.flatten()
            elif len(rows) > 1:
                above = torch.ones_like(same).triu(1)
                yield angles[above], same[above]


def _histograms(pieces: Iterable[tuple[Tensor, Tensor]], bins: int, argument: str) -> AngleHistograms:
    require(is_integer(bins, 1), "bins", "a whole number >= 1", bins)
    gathered: dict[bool, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {True: [], False: []}
    for angles, same in pieces:
        for kind, found in ((True, angles[same]), (False, angles[~same])):
            if len(found):
                counts = (found * (bins / math.pi)).long().clamp(max=bins - 1).bincount(minlength=bins)
                moments = torch.stack([found.sum(), found.square().sum()])
                gathered[kind].append((counts, moments, found.min(), found.max()))
    for kind, name in ((True, "positive (same)"), (False, "negative (different)")):
        require(bool(gathered[kind]), argument, f"such that there is a {name} pair", "none")
    edges = torch.linspace(0, math.pi, bins + 1, dtype=torch.float64)
    return AngleHistograms(edges, _distribution(gathered[True]), _distribution(gathered[False]))


def _distribution(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> AngleDistribution:
    histogram, moments, least, greatest = (torch.stack(of) for of in zip(*parts, strict=True))
    counts = histogram.sum(0)
    mean, square = (moments.sum(0) / counts.sum()).tolist()
    std = math.sqrt(max(square - mean**2, 0.0))
    return AngleDistribution(counts, mean, std, float(least.min()), float(greatest.max()))
