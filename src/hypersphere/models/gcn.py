"""The two-layer graph convolutional network."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models.units import ByChannels, Maker, layers_by, relu

__all__ = ["GCN", "normalized_adjacency"]


def normalized_adjacency(edge_index: Tensor, num_nodes: int, *, dense: bool = False) -> Tensor:
    r"""Â = D̃^−½ (A + I) D̃^−½ with D̃ the row sums of A + I (thesis, 7.5.4; its E.10 misprints the exponent's sign).

    Args:
        edge_index: (2, E), sources above, targets below; an edge that occurs twice counts once.
        num_nodes: N.
        dense: whether to return an ordinary tensor; a sparse one otherwise.

    Example:
        >>> normalized_adjacency(torch.tensor([[0, 1], [1, 0]]), 2, dense=True)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    fits = edge_index.ndim == 2 and len(edge_index) == 2 and edge_index.dtype == torch.int64
    require(fits, "edge_index", "int64 (2, E)", (edge_index.dtype, tuple(edge_index.shape)))
    low, high = (int(end) for end in edge_index.aminmax()) if edge_index.numel() else (0, -1)
    require(low >= 0 and high < num_nodes, "edge_index", f"nodes from 0 to {num_nodes - 1}", (low, high))
    nodes = torch.arange(num_nodes, device=edge_index.device)
    edges = torch.cat([edge_index.unique(dim=1), nodes.expand(2, -1)], dim=1)
    weights = torch.ones(edges.shape[1], dtype=torch.get_default_dtype(), device=edges.device)
    scale = torch.zeros_like(weights[:num_nodes]).index_add_(0, edges[1], weights).rsqrt()  # a loop each: no zeros
    values = scale[edges[0]] * scale[edges[1]]
    shape = (num_nodes, num_nodes)
    sparse = torch.sparse_coo_tensor(edges.flip(0), values, shape, check_invariants=True).coalesce()
    return sparse.to_dense() if dense else sparse


class GCN(nn.Module):
    r"""Z = Â·activation(Â X W₀)·W₁ (Kipf and Welling 2017; thesis, 7.5.4).

    As Â(H W₁) = (Â H)W₁, it maps nodes to features Â·activation(Â X W₀) of (N, hidden), and a head classifies them;
    with `num_classes` it holds W₁ itself and gives logits.

    Args:
        in_features: numbers of a node.
        hidden: neurons of the hidden layer.
        num_classes: None for features, a number for logits.
        dropout: share of the numbers dropped before each layer in training.
        bias: whether layers have biases; the authors' have none.
        linear: maker of W₀, called as `nn.Linear` is; W₁ is an `nn.Linear`.
        activation: maker of an activation from a number of neurons, or None.

    Example:
        >>> adjacency = normalized_adjacency(torch.tensor([[0, 1], [1, 0]]), 3)
        >>> GCN(4, num_classes=2)(torch.rand(3, 4), adjacency).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        hidden: int = 16,
        *,
        num_classes: int | None = None,
        dropout: float = 0.5,
        bias: bool = False,
        linear: Maker = nn.Linear,
        activation: ByChannels | None = relu,
    ) -> None:
        super().__init__()
        self.feature_dim = hidden
        self.dropout = nn.Dropout(dropout)
        self.hidden = linear(in_features, hidden, bias=bias)
        self.activation = nn.Sequential(*layers_by((activation,), hidden))
        self.classifier = None if num_classes is None else nn.Linear(hidden, num_classes, bias=bias)
        for layer in (self.hidden, self.classifier):
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        """Map nodes (N, F) and Â (N, N), each dense or sparse, to features (N, hidden) or logits (N, num_classes)."""
        hidden = self.activation(adjacency @ self._first(nodes))
        features = adjacency @ self.dropout(hidden)
        return features if self.classifier is None else self.classifier(features)

    def _first(self, nodes: Tensor) -> Tensor:
        """The hidden layer after dropout; sparse nodes are made dense only for a layer that is not linear."""
        if not nodes.is_sparse:
            return self.hidden(self.dropout(nodes))
        nodes = nodes.coalesce()
        dropped = torch.sparse_coo_tensor(
            nodes.indices(), self.dropout(nodes.values()), nodes.shape, is_coalesced=True, check_invariants=False
        )
        if type(self.hidden).forward is not nn.Linear.forward:
            return self.hidden(dropped.to_dense())
        weight, bias = self.hidden.weight, self.hidden.bias
        product = torch.sparse.mm(dropped, cast(Tensor, weight).mT)
        return product if bias is None else product + bias
