r"""Retrieval: the samples of a query's class are searched among all other samples, or in a gallery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.evaluation._arrays import Array, as_features, as_labels, as_numbers

__all__ = ["Retrieval", "retrieve"]

QUERY_ROWS = 512  # most queries per block of scores
BLOCK_SCORES = 2**25  # scores per block, 134 MB in float32; a block has fewer queries if there are many entries


@dataclass(frozen=True)
class Retrieval:
    """Result of `retrieve`. A query has R mates: entries of its class, other than itself.

    Attributes:
        recall: for each k, the fraction of queries with a mate among the k nearest entries.
        r_precision: mean over queries of the fraction of mates among the R nearest entries.
        map_at_r: mean over queries of (1/R)·Σ P(i)·rel(i) over the ranks i ≤ R, where P(i) is the precision among the i
            nearest entries and rel(i) is 1 for a mate (Musgrave, Belongie and Lim, A Metric Learning Reality Check,
            ECCV 2020).
        queries: number of queries over which the means are taken.
        without_mates: number of samples that have no mate.
    """

    recall: dict[int, float]
    r_precision: float
    map_at_r: float
    queries: int
    without_mates: int

    @property
    def recall_at_1(self) -> float:
        """The fraction of queries whose nearest entry has their class."""
        return self.recall[1]

    def __repr__(self) -> str:
        recalls = ", ".join(f"recall@{k} {value:.4f}" for k, value in self.recall.items())
        means = f"R-precision {self.r_precision:.4f}, MAP@R {self.map_at_r:.4f}"
        return f"Retrieval({self.queries} queries, {self.without_mates} without mates: {recalls}, {means})"


@torch.no_grad()
def retrieve(
    features: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    *,
    ks: Sequence[int] | Array = (1, 5, 10),
    without_mates: str = "skip",
) -> Retrieval:
    """Rank entries by their cosine with each query, and measure where its mates are.

    Without a gallery, each sample is a query and all others are its entries: a query never finds itself. Entries of
    another class whose cosine is equal to that of a mate, or less than 16·eps below it, are ranked before the mate. A
    network that maps all samples to one point therefore finds no mate before the others.

    Args:
        features: (N, d) embeddings of the queries. Their norms do not matter.
        labels: (N,) integers.
        gallery: (G, d) embeddings of the entries; None to search among the other queries.
        gallery_labels: (G,) integers, if there is a gallery.
        ks: the numbers of nearest entries for the recall; 1 is always included.
        without_mates: what to do with a query without mates: "skip" leaves it out of all means, "miss" counts it as
            zero in all of them.

    Example:
        >>> features, labels = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], [0, 0, 1]
        >>> retrieve(features, labels, ks=[1])
        Retrieval(2 queries, 1 without mates: recall@1 1.0000, R-precision 1.0000, MAP@R 1.0000)
        >>> round(retrieve(features, labels, without_mates="miss").map_at_r, 4)
        0.6667
    """
    x = sphere.row_directions(as_features("features", features))
    classes = as_labels("labels", labels, len(x), x.device)
    require((gallery is None) == (gallery_labels is None), "gallery_labels", "given with a gallery", gallery_labels)
    entries, entry_classes = x, classes
    if gallery is not None and gallery_labels is not None:
        entries = sphere.row_directions(as_features("gallery", gallery, like=x)).to(x.device)
        entry_classes = as_labels("gallery_labels", gallery_labels, len(entries), x.device)
        dtype = torch.promote_types(x.dtype, entries.dtype)
        x, entries = x.to(dtype), entries.to(dtype)
    require(without_mates in ("skip", "miss"), "without_mates", "'skip' or 'miss'", without_mates)
    requested = as_numbers("ks", ks)
    require(all(is_integer(k, 1) for k in requested), "ks", "integers >= 1", ks)
    depths = sorted({1, *map(int, requested)})

    # R of each query: the number of entries of its class, without itself.
    _, codes = torch.cat([classes, entry_classes]).unique(return_inverse=True)
    mates = codes[len(classes) :].bincount(minlength=int(codes.max()) + 1)[codes[: len(classes)]]
    mates = mates - 1 if gallery is None else mates
    queries = (mates > 0).nonzero().flatten()
    if not len(queries):
        accepted = "a class that has two samples" if gallery is None else "a class in common with gallery_labels"
        raise ValueError(f"labels must have {accepted}, but there is none")

    max_neighbours = len(entries) - (gallery is None)  # entries that a query can find
    totals = torch.zeros(2 + len(depths), dtype=torch.float64, device=x.device)
    for rows in queries.split(max(1, min(QUERY_ROWS, BLOCK_SCORES // len(entries)))):
        mate_counts = mates[rows, None]
        is_mate = entry_classes == classes[rows, None]
        with _numerics.autocast_disabled(x):
            cosines = x[rows] @ entries.mT
        cosines -= _numerics.tie_tolerance(x.dtype) * is_mate  # a tie counts against the query
        if gallery is None:
            cosines[torch.arange(len(rows), device=x.device), rows] = -torch.inf
        nearest = cosines.topk(min(max(int(mate_counts.max()), depths[-1]), max_neighbours)).indices
        hits = is_mate.gather(1, nearest).double()
        ranks = torch.arange(1, hits.shape[1] + 1, device=x.device)
        hits_to_r = hits * (ranks <= mate_counts)
        precisions = hits_to_r.cumsum(1) / ranks
        recalls = [hits[:, :k].amax(1).sum() for k in depths]
        precision_sums = [
            (hits_to_r.sum(1) / mate_counts[:, 0]).sum(),
            ((precisions * hits_to_r).sum(1) / mate_counts[:, 0]).sum(),
        ]
        totals += torch.stack([*precision_sums, *recalls])
    count = len(queries) if without_mates == "skip" else len(x)
    r_precision, map_at_r, *recall = (totals / count).tolist()
    return Retrieval(dict(zip(depths, recall, strict=True)), r_precision, map_at_r, count, len(x) - len(queries))
