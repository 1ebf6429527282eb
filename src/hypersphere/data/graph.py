"""A graph with a feature row and a label a node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere.data.labelled import check_labels


@dataclass(frozen=True, eq=False)
class Graph:
    """One undirected graph: features (N, F), labels (N,), every edge in both directions, three disjoint node masks.

    Attributes:
        features: float32 (N, F).
        labels: int64 (N,).
        edge_index: int64 (2, E), sources above, targets below.
        train, val, test: bool (N,).
        classes: a name a class.
    """

    features: Tensor
    labels: Tensor
    edge_index: Tensor
    train: Tensor
    val: Tensor
    test: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.features.dtype != torch.float32 or self.features.ndim != 2:
            raise ValueError(f"features must be float32 (N, F), not {self.features.dtype} {tuple(self.features.shape)}")
        nodes, edges = len(self.features), self.edge_index
        check_labels(self.labels, nodes, self.classes)
        if edges.dtype != torch.int64 or edges.ndim != 2 or len(edges) != 2:
            raise ValueError(f"edge_index must be int64 (2, E), not {edges.dtype} {tuple(edges.shape)}")
        if edges.numel() and (edges.min() < 0 or edges.max() >= nodes):
            found = f"{int(edges.min())}..{int(edges.max())}"
            raise ValueError(f"edge_index must name nodes 0..{nodes - 1}, not {found}")
        masks = {"train": self.train, "val": self.val, "test": self.test}
        for name, mask in masks.items():
            if mask.dtype != torch.bool or mask.shape != (nodes,):
                raise ValueError(f"{name} must be bool ({nodes},), not {mask.dtype} {tuple(mask.shape)}")
        if (self.train.int() + self.val.int() + self.test.int() > 1).any():
            raise ValueError("train, val and test must be disjoint, not share a node")

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        nodes, features = self.features.shape
        return (
            f"Graph({nodes} nodes, {self.edge_index.shape[1]} edges, {features} features, {len(self.classes)} classes)"
        )
