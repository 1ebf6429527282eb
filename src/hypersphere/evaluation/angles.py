r"""Angles between features: histograms over pairs, angular Fisher score, visual hardness, bounds on the margin m."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_attribute
from hypersphere._validation import is_integer, is_number, require
from hypersphere.evaluation._arrays import Array, as_features, as_flags, as_labels, blocks
from hypersphere.evaluation.verification import cosine_scores

__all__ = [
    "M_MIN_BINARY",
    "M_MIN_MULTICLASS",
    "AngleDistribution",
    "AngleHistograms",
    "angular_fisher_score",
    "angular_visual_hardness",
    "class_angles",
    "inter_class_angle",
    "intra_class_angle",
    "pair_angles",
    "smallest_angle",
    "smallest_margin",
]

BLOCK_ROWS = 1024  # features per block of a cosine matrix
BLOCK_CLASSES = 4096  # class vectors per block of a cosine matrix


# Distributions of angles ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class AngleDistribution:
    """Angles of the positive or of the negative pairs, in radians.

    Attributes:
        histogram: number of pairs per bin.
        mean, std, min, max: computed from the angles, not from the bins.
    """

    histogram: Int64[Tensor, " bins"]
    mean: float
    std: float
    min: float
    max: float

    least = deprecated_attribute("least", "min")
    greatest = deprecated_attribute("greatest", "max")

    @property
    def count(self) -> int:
        """Number of pairs."""
        return int(self.histogram.sum())

    def __repr__(self) -> str:
        mean, std, low, high = (math.degrees(angle) for angle in (self.mean, self.std, self.min, self.max))
        return f"{self.count} pairs at {mean:.1f}° ± {std:.1f}°, {low:.1f}° to {high:.1f}°"


@dataclass(frozen=True, eq=False, repr=False)
class AngleHistograms:
    """Angles of positive and of negative pairs, in the same bins on [0, π].

    Attributes:
        edges: (bins + 1,) float64, in radians.
        positive, negative: the two distributions.
    """

    edges: Float[Tensor, " edges"]
    positive: AngleDistribution
    negative: AngleDistribution

    @property
    def overlap(self) -> float:
        """Common area of the two normalised histograms: 0 if they are disjoint, 1 if they are equal."""
        fractions = [distribution.histogram / distribution.count for distribution in (self.positive, self.negative)]
        return float(torch.minimum(*fractions).sum())

    @property
    def margin(self) -> float:
        """Smallest negative angle minus largest positive angle. If it is positive, a threshold separates the pairs."""
        return self.negative.min - self.positive.max

    def __repr__(self) -> str:
        return f"AngleHistograms(positive: {self.positive}; negative: {self.negative}; overlap {self.overlap:.3f})"


def pair_angles(first: Array, second: Array, same: Array, *, bins: int = 180) -> AngleHistograms:
    """Compute the distributions of the angles of given pairs.

    Args:
        first, second: (M, d) embeddings.
        same: (M,) booleans, or zeros and ones.
        bins: number of bins of equal width on [0, π].

    Example:
        >>> pair_angles(torch.eye(2), torch.ones(2, 2) * torch.tensor([[1.0], [-1.0]]), [True, False], bins=4)
        AngleHistograms(positive: 1 pairs at 45.0° ± 0.0°, 45.0° to 45.0°; negative: 1 pairs at 135.0° ± 0.0°, 135.0°
        to 135.0°; overlap 0.000)
    """
    angles = sphere.angle(cosine_scores(first, second))
    flags = as_flags("same", same, len(angles), angles.device)
    return _histograms([(angles, flags)], bins, "same")


def class_angles(features: Array, labels: Array, *, bins: int = 180) -> AngleHistograms:
    """Compute the distributions of the angles of all N(N−1)/2 pairs of features, without an N×N matrix.

    Args:
        features: (N, d).
        labels: (N,) integers. A pair is positive if its labels are equal.
        bins: number of bins of equal width on [0, π].

    Example:
        >>> class_angles(torch.eye(3), [0, 0, 1]).negative
        2 pairs at 90.0° ± 0.0°, 90.0° to 90.0°
    """
    x = as_features("features", features)
    y = as_labels("labels", labels, len(x), x.device)
    return _histograms(_all_pairs(x, y), bins, "labels")


def smallest_angle(w: Array) -> float:
    """Return the smallest angle between two rows of `w`, in radians: how far neurons or class vectors are separated.

    >>> round(smallest_angle(torch.eye(3)), 4)
    1.5708
    """
    x = as_features("w", w)
    require(len(x) >= 2, "w", "a matrix (N, d) with at least two rows", tuple(x.shape))
    no_labels = torch.zeros(len(x), device=x.device)
    return min(float(angles.min()) for angles, _ in _all_pairs(x, no_labels))


def _all_pairs(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the angles of the pairs i < j and whether their labels agree, one block of pairs at a time."""
    for start, rows in blocks(x, BLOCK_ROWS):
        # Blocks to the left of the diagonal would repeat pairs.
        for offset, columns in blocks(x[start:], BLOCK_ROWS):
            # In float32, rounding of a cosine near 1 would move small angles by up to 5e-4.
            angles = sphere.angle(sphere.cosines(rows.double(), columns.double()))
            same = y[start : start + len(rows), None] == y[start + offset : start + offset + len(columns)]
            if offset:
                yield angles.flatten(), same.flatten()
            elif len(rows) > 1:  # a block on the diagonal: the pairs above it
                above = torch.ones_like(same).triu(1)
                yield angles[above], same[above]


@dataclass(frozen=True)
class _Moments:
    """Statistics of one block of angles, from which `_distribution` combines those of all blocks."""

    histogram: Tensor
    sum: float
    sum_of_squares: float
    min: float
    max: float


def _histograms(pairs: Iterable[tuple[Tensor, Tensor]], bins: int, argument: str) -> AngleHistograms:
    """Return the distributions of blocks of (angles, same). Error messages name the caller's `argument`."""
    require(is_integer(bins, 1), "bins", "an integer >= 1", bins)
    positive: list[_Moments] = []
    negative: list[_Moments] = []
    for angles, same in pairs:
        for moments, selected in ((positive, angles[same]), (negative, angles[~same])):
            if len(selected):
                moments.append(_moments(selected, bins))
    for moments, kind in ((positive, "positive (same)"), (negative, "negative (different)")):
        if not moments:
            raise ValueError(f"{argument} must give at least one {kind} pair, but there is none")
    edges = torch.linspace(0, math.pi, bins + 1, dtype=torch.float64)
    return AngleHistograms(edges, _distribution(positive), _distribution(negative))


def _moments(angles: Tensor, bins: int) -> _Moments:
    """Return the statistics of one block of angles."""
    # The clamp puts the angle π, the end of the last bin, into this bin.
    histogram = (angles * (bins / math.pi)).long().clamp(max=bins - 1).bincount(minlength=bins)
    low, high = angles.aminmax()
    return _Moments(histogram, float(angles.sum()), float(angles.square().sum()), float(low), float(high))


def _distribution(parts: Sequence[_Moments]) -> AngleDistribution:
    """Combine the statistics of all blocks."""
    histogram = torch.stack([part.histogram for part in parts]).sum(0)
    count = int(histogram.sum())
    mean = math.fsum(part.sum for part in parts) / count
    variance = math.fsum(part.sum_of_squares for part in parts) / count - mean**2
    std = math.sqrt(max(variance, 0.0))  # rounding may make the variance of equal angles negative
    return AngleDistribution(histogram, mean, std, min(part.min for part in parts), max(part.max for part in parts))


# Scores of features --------------------------------------------------------------------------------------------------


def angular_fisher_score(features: Array, labels: Array) -> float:
    r"""Compute the angular Fisher score AFS = S_w/S_b; lower is more discriminative (thesis, equation A.1).

    S_w = Σ_i Σ_{x∈X_i} (1 − cos⟨x, m_i⟩) sums over the classes i with mean features m_i, and
    S_b = Σ_i n_i (1 − cos⟨m_i, m⟩) with the mean m of all features. The score is ∞ if all class means are parallel, as
    for collapsed features, that is, if S_b is not larger than the rounding error of the features' dtype.

    Args:
        features: (N, d).
        labels: (N,) integers, of at least two classes, one of them with two or more samples.

    Example:
        >>> angular_fisher_score(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0, 1]))
        0.0
    """
    original = as_features("features", features)
    x = original.double()  # in float32, 1 − cos of nearly parallel vectors would lose its digits
    y = as_labels("labels", labels, len(x), x.device)
    classes, index, counts = y.unique(return_inverse=True, return_counts=True)
    require(len(classes) >= 2, "labels", "labels of at least two classes", classes.tolist())
    # With one sample per class, S_w is 0 for any features.
    if int(counts.max()) < 2:
        raise ValueError("labels must contain a class with two or more samples, but every class has one")
    sums = torch.zeros(len(classes), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, index, x)
    class_means = sums / counts[:, None]
    mean = x.mean(0, keepdim=True).expand_as(class_means)
    within = float((1 - sphere.cosine(x, class_means[index])).sum())
    between = float((counts * (1 - sphere.cosine(class_means, mean))).sum())
    # Collapsed features differ by the rounding of their dtype before the conversion, so it sets the tolerance.
    if between <= len(x) * _numerics.parallel_tolerance(original.dtype):
        return math.inf
    return max(within / between, 0.0)  # rounding may raise cosines above 1 and make `within` negative


@torch.no_grad()
def angular_visual_hardness(features: Array, labels: Array, weight: Array) -> Float[Tensor, " samples"]:
    r"""Compute AVH(x) = θ(w_y, x)/Σ_i θ(w_i, x) for each sample; smaller is easier (thesis, section 1.1).

    Args:
        features: (N, d).
        labels: (N,) in [0, C).
        weight: (C, d) class vectors, for example `head.weight`.

    Returns:
        One value per sample, in float32 or wider. It is 1/C for a zero feature, which is at the same angle to every
        class vector, and for a feature that coincides with all class vectors.

    Example:
        >>> angular_visual_hardness(torch.tensor([[1.0, 1.0], [0.0, 2.0]]), [0, 0], torch.eye(2))
        tensor([0.5000, 1.0000])

    Reference:
        Chen et al., Angular Visual Hardness, ICML 2020.
    """
    x = as_features("features", features)
    w = as_features("weight", weight, like=x).to(x.device)
    y = as_labels("labels", labels, len(x), x.device)
    outside = ((y < 0) | (y >= len(w))).nonzero().flatten().tolist()
    if outside:
        raise ValueError(f"labels must be in [0, {len(w)}), not {int(y[outside[0]])} (row {outside[0]})")
    dtype = torch.promote_types(torch.float32, torch.promote_types(x.dtype, w.dtype))
    hardness = []
    for start, rows in blocks(x, BLOCK_ROWS):
        rows = rows.to(dtype)
        total = rows.new_zeros(len(rows))
        for _, vectors in blocks(w, BLOCK_CLASSES):
            total += sphere.angle(sphere.cosines(rows, vectors.to(dtype))).sum(1)
        # Compute the angle to the target separately: the blocks above are only summed, not stored.
        targets = w[y[start : start + len(rows)]].to(dtype)
        target_angle = sphere.angle(sphere.cosine(rows, targets))
        # If all angles are zero, AVH is 0/0. All classes are equally close, so each has the share 1/C.
        hardness.append(torch.where(total > 0, target_angle / total.masked_fill(total == 0, 1), 1 / len(w)))
    return torch.cat(hardness)


# Bounds on the margin of A-Softmax (thesis, section 2.3.5) -----------------------------------------------------------
#
# For two class vectors at the angle θ₁₂, A-Softmax assigns a sample to class 1 if m·θ₁ < θ₂. The largest angle between
# samples of one class should be smaller than the smallest angle between samples of two classes. m_min is the smallest m
# that ensures this.

M_MIN_BINARY = 2 + math.sqrt(3)
"""Lower bound of m_min for two classes (property 2)."""

M_MIN_MULTICLASS = 3.0
"""Lower bound of m_min for three or more evenly spaced classes (property 3)."""


def smallest_margin(classes: int) -> float:
    """Return the lower bound of m_min for the given number of classes.

    >>> round(smallest_margin(2), 3), smallest_margin(10)
    (3.732, 3.0)
    """
    require(is_integer(classes, 2), "classes", "an integer >= 2", classes)
    return M_MIN_BINARY if classes == 2 else M_MIN_MULTICLASS


def inter_class_angle(m: float, between: float) -> float:
    """Return the smallest angle between samples of two classes, (m−1)/(m+1)·θ₁₂.

    Args:
        m: the margin, at least 1.
        between: the angle θ₁₂ between the class vectors, in (0, π].

    Example:
        >>> inter_class_angle(3, between=1.0)
        0.5
    """
    _check_margin(m, between)
    return (m - 1) / (m + 1) * between


def intra_class_angle(m: float, between: float, *, classes: int = 2) -> float:
    """Return the largest angle between samples of a class, in the plane of the class vectors (equations 2.21 to 2.23).

    For two classes it is θ₁₂/(m−1) + θ₁₂/(m+1) if θ₁₂ ≤ (m−1)π/m, else 2π/(m+1). For more classes, with neighbours at
    the angle θ₁₂ on both sides, it is 2θ₁₂/(m+1).

    Args:
        m: the margin, at least 1.
        between: the angle θ₁₂ between neighbouring class vectors, in (0, π].
        classes: number of classes.

    Example:
        >>> intra_class_angle(3, between=1.0), intra_class_angle(3, between=1.0, classes=3)
        (0.75, 0.5)
    """
    _check_margin(m, between)
    require(is_integer(classes, 2), "classes", "an integer >= 2", classes)
    if classes > 2:
        return 2 * between / (m + 1)
    if m * between > (m - 1) * math.pi:  # always true for m = 1, so the last line never divides by zero
        return 2 * math.pi / (m + 1)
    return between / (m - 1) + between / (m + 1)


def _check_margin(m: float, between: float) -> None:
    require(is_number(m, 1), "m", "a number >= 1", m)
    require(is_number(between, 0, math.pi) and between > 0, "between", "an angle in (0, pi]", between)
