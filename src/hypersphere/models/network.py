"""A model with normalised inputs, and the choice of a model that suits given data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.data import Graph
from hypersphere.models.gcn import normalized_adjacency

__all__ = ["Network", "auto_model"]


class Network(nn.Module):
    """Map inputs to features: normalise the inputs, (x − mean)/deviation, and apply the body of a model.

    On a graph the inputs are indices of nodes: the body is applied to all nodes, and the features of the given ones are
    returned.

    Args:
        body: maps normalised inputs to features; has an attribute `feature_dim`.
        mean, deviation: tensors that broadcast over the inputs; 0 and 1 by default.
        graph: the graph, if the inputs are nodes.
    """

    mean: Tensor
    deviation: Tensor
    nodes: Tensor | None
    adjacency: Tensor | None

    def __init__(
        self,
        body: nn.Module,
        mean: Tensor | None = None,
        deviation: Tensor | None = None,
        graph: Graph | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.feature_dim = int(body.feature_dim)  # type: ignore[arg-type]
        self.register_buffer("mean", torch.zeros(()) if mean is None else mean)
        self.register_buffer("deviation", torch.ones(()) if deviation is None else deviation)
        nodes = None if graph is None else _normalize_rows(graph.features).to_sparse()
        adjacency = None if graph is None else normalized_adjacency(graph.edge_index, len(graph.features))
        self.register_buffer("nodes", nodes, persistent=False)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to features (B, feature_dim); uint8 images are scaled to [0, 1]."""
        if self.nodes is not None:
            return self.body(self.nodes, self.adjacency)[inputs]
        if inputs.dtype == torch.uint8:
            inputs = inputs.float() / 255
        return self.body((inputs - self.mean) / self.deviation)


def _normalize_rows(features: Tensor) -> Tensor:
    """Scale rows to the sum 1; rows without a positive sum do not change."""
    sums = features.sum(1, keepdim=True)
    return features / torch.where(sums > 0, sums, 1)


def auto_model(shape: tuple[int, ...], classes: int, *, graph: bool = False) -> tuple[str, dict[str, Any]]:
    """Return the name and options of a model that suits inputs of a shape and a number of classes.

    Small images get a small convolutional network, photographs a ResNet-18. The dimension of the features grows with
    the number of classes.

    >>> auto_model((1, 8, 8), 10)
    ('embedding_cnn', {'feature_dim': 64, 'widths': [32, 64, 64]})
    >>> auto_model((3, 112, 112), 1000)
    ('resnet18', {})
    """
    if graph:
        return "gcn", {}
    if len(shape) != 3:
        return ("pointnet" if len(shape) == 2 else "mlp"), {}
    side = min(shape[1:])
    if side >= 96:
        return "resnet18", {}
    dim = 64 if classes <= 100 else 128 if classes <= 1000 else 256
    # Each stage halves the image, which must not become empty.
    widths = [32, 64, 64] if side < 24 else [32, 64, 128] if side < 48 else [32, 64, 128, 256]
    while 2 ** len(widths) > side and len(widths) > 1:
        widths.pop()
    return "embedding_cnn", {"feature_dim": dim, "widths": widths}
