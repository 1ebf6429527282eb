r"""Retrieval: every sample is a query, and all others are ranked by their cosine with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.evaluation._arrays import Array, as_features, as_labels

__all__ = ["Retrieval", "retrieve"]

QUERY_ROWS = 512  # queries per block of scores


@dataclass(frozen=True)
class Retrieval:
    """Result of `retrieve`.

    Attributes:
        recall_at_1: fraction of queries whose nearest neighbour has their class.
        map_at_r: mean over queries of the average precision among the R nearest neighbours, where R is the number of
            other samples of the class (Musgrave, Belongie and Lim, A Metric Learning Reality Check, ECCV 2020).
        queries: number of queries: samples whose class has another sample.
    """

    recall_at_1: float
    map_at_r: float
    queries: int


@torch.no_grad()
def retrieve(features: Array, labels: Array) -> Retrieval:
    """Search the samples of the same class among all other samples.

    Args:
        features: (N, d) embeddings. Their norms do not matter.
        labels: (N,) integers.

    Example:
        >>> retrieve([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], [0, 0, 1])
        Retrieval(recall_at_1=1.0, map_at_r=1.0, queries=2)
    """
    directions = sphere.row_directions(as_features("features", features).float())
    classes = torch.unique(as_labels("labels", labels, len(directions), directions.device), return_inverse=True)[1]
    others = torch.bincount(classes)[classes] - 1  # R of each sample
    queries = (others > 0).nonzero().flatten()
    require(len(queries) > 0, "labels", "labels with a class that has two samples", "none")
    recall, precision = 0.0, 0.0
    for rows in queries.split(QUERY_ROWS):
        cosines = directions[rows] @ directions.mT
        cosines[torch.arange(len(rows)), rows] = -torch.inf  # a query does not find itself
        depth = int(others[rows].max())
        ranks = torch.arange(1, depth + 1, device=rows.device)
        hits = classes[cosines.topk(depth).indices] == classes[rows].unsqueeze(1)
        hits &= ranks <= others[rows].unsqueeze(1)
        precision_at_rank = hits.cumsum(1) / ranks
        recall += float(hits[:, 0].sum())
        precision += float(((precision_at_rank * hits).sum(1).double() / others[rows]).sum())
    return Retrieval(recall / len(queries), precision / len(queries), len(queries))
