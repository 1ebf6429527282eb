r"""Several class vectors per class: sub-centres, and the labels that they show to be wrong (Deng et al., ECCV 2020).

A class with K centres keeps its clean samples near one of them, the dominant centre, and wrongly labelled samples near
the others. Rows jK to jK + K − 1 of the weight are the centres of class j.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import require

__all__ = ["LabelAngles", "class_vectors", "gather_winners", "label_angles", "largest_per_class", "scatter_winners"]

_ROWS_PER_BLOCK = 2**14


def largest_per_class(products: Tensor, centers: int) -> tuple[Tensor, Tensor]:
    """Return the largest of the K products of each class, (B, C·K) → (B, C), and the centre in [0, K) that has it.

    >>> [t.tolist() for t in largest_per_class(torch.tensor([[0.1, 0.3, 0.5, 0.2]]), 2)]
    [[[0.30000001192092896, 0.5]], [[1, 0]]]
    """
    values, winners = products.unflatten(1, (products.shape[1] // centers, centers)).max(2)
    return values, winners


def gather_winners(values: Tensor, winners: Tensor) -> Tensor:
    """Return the entries of `values` at the winning centres: (B, C·K) or (1, C·K) → (B, C)."""
    classes = winners.shape[1]
    by_class = values.unflatten(1, (classes, values.shape[1] // classes)).expand(winners.shape[0], -1, -1)
    return by_class.gather(2, winners.unsqueeze(2)).squeeze(2)


def scatter_winners(values: Tensor, winners: Tensor, centers: int) -> Tensor:
    """Return zeros (B, C·K) with the `values` (B, C) at the winning centres, the transpose of `largest_per_class`."""
    rows = values.new_zeros(*values.shape, centers)
    return rows.scatter_(2, winners.unsqueeze(2), values.unsqueeze(2)).flatten(1)


class LabelAngles(NamedTuple):
    """How far samples are from the dominant centre of their label.

    Attributes:
        dominant: (C,) the centre in [0, K) that is nearest to most samples of its class; 0 for a class without samples.
        counts: (C, K) the number of samples of each class that are nearest to each of its centres.
        angles: (N,) the angle in radians of each sample to the dominant centre of its label; 0 for ignored samples.
        exceeds: (N,) True for samples whose angle exceeds the threshold, which probably have a wrong label.
    """

    dominant: Int[Tensor, " classes"]
    counts: Int[Tensor, "classes centers"]
    angles: Float[Tensor, " samples"]
    exceeds: Bool[Tensor, " samples"]


@torch.no_grad()
def label_angles(weight: Tensor, centers: int, x: Tensor, y: Tensor, max_angle: float) -> LabelAngles:
    """Return the dominant centres of all classes and the angles of the samples to them.

    Args:
        weight: (C·K, d) centres.
        centers: K.
        x: (N, d) features.
        y: (N,) labels in [0, C), or −1 for samples that do not count.
        max_angle: the threshold in radians.
    """
    vectors = sphere.normalize(_numerics.widen(weight)).unflatten(0, (len(weight) // centers, centers))
    counted = y >= 0
    counts = torch.zeros(vectors.shape[:2], dtype=torch.int64, device=y.device)
    cosines = []
    for rows, labels in zip(x.split(_ROWS_PER_BLOCK), y.split(_ROWS_PER_BLOCK), strict=True):
        directions = sphere.normalize(_numerics.widen(rows)).to(vectors.dtype)
        cosines.append(torch.einsum("nd,nkd->nk", directions, vectors[labels.clamp_min(0)]))
    to_centers = torch.cat(cosines) if cosines else vectors.new_zeros(0, centers)
    counts.index_put_((y.clamp_min(0), to_centers.argmax(1)), counted.long(), accumulate=True)
    dominant = counts.argmax(1)
    angles = sphere.angle(to_centers.gather(1, dominant[y.clamp_min(0)].unsqueeze(1)).squeeze(1))
    angles = angles.masked_fill(~counted, 0)
    return LabelAngles(dominant, counts, angles, angles > max_angle)


@torch.no_grad()
def class_vectors(
    head: Any, x: Float[Tensor, "samples dim"], y: Int[Tensor, " samples"]
) -> Float[Tensor, "classes dim"]:
    """Return one class vector per class on the CPU, without gradient.

    Args:
        head: a head. With several centres per class, the dominant ones are returned; other heads need no samples.
        x: (N, d) features on the CPU.
        y: (N,) labels in [0, C).

    Raises:
        ValueError: the classes of a `ShardedHead` are distributed over processes. Its `full_state_dict` gathers them.

    Example:
        >>> from hypersphere.heads import arcface
        >>> class_vectors(arcface(8, 3, centers=2), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).shape
        torch.Size([3, 8])
    """
    weight = head.weight.detach().cpu()
    local_head = getattr(head, "head", head)  # the part of a `ShardedHead` in this process
    centers = getattr(local_head, "num_centers", 1)  # other modules with a weight have one vector per class
    classes = len(weight) // centers
    accepted = "one that holds all of its class vectors in this process (see ShardedHead.full_state_dict)"
    received = f"one with {classes} of {getattr(head, 'num_classes', classes)} classes"
    require(getattr(head, "num_classes", classes) == classes, "head", accepted, received)
    if centers == 1:
        return weight
    dominant = label_angles(weight, centers, x, y, 0.0).dominant
    return weight.unflatten(0, (len(dominant), centers))[torch.arange(len(dominant)), dominant]
