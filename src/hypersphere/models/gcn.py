"""The two-layer graph convolutional network."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.models._blocks import ChannelFactory, LayerFactory, make_layers, relu, require_num_classes

__all__ = ["GCN", "normalized_adjacency"]


def normalized_adjacency(edge_index: Tensor, num_nodes: int, *, dense: bool = False) -> Float[Tensor, "nodes nodes"]:
    r"""Return Â = D̃^−½ (A + I) D̃^−½, with D̃ the row sums of A + I (thesis, 7.5.4; E.10 misprints the exponent's sign).

    Args:
        edge_index: int64 (2, edges), sources in the first row and targets in the second. Repeated edges count once.
        num_nodes: number of nodes.
        dense: return a dense tensor instead of a sparse one.

    Example:
        >>> normalized_adjacency(torch.tensor([[0, 1], [1, 0]]), 2, dense=True)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    fits = edge_index.ndim == 2 and len(edge_index) == 2 and edge_index.dtype == torch.int64
    require(fits, "edge_index", "int64 (2, edges)", (edge_index.dtype, tuple(edge_index.shape)))
    low, high = (int(end) for end in edge_index.aminmax()) if edge_index.numel() else (0, -1)
    require(low >= 0 and high < num_nodes, "edge_index", f"nodes in 0..{num_nodes - 1}", (low, high))
    loops = torch.arange(num_nodes, device=edge_index.device).expand(2, -1)
    # A node with a loop in the graph has the entry 2 in A + I; `coalesce` below adds the two values.
    edges = torch.cat([edge_index.unique(dim=1), loops], dim=1)
    ones = torch.ones(edges.shape[1], dtype=torch.get_default_dtype(), device=edges.device)
    # Every node has a loop, so no degree is zero.
    inverse_root_degree = torch.zeros_like(ones[:num_nodes]).index_add_(0, edges[1], ones).rsqrt()
    values = inverse_root_degree[edges[0]] * inverse_root_degree[edges[1]]
    shape = (num_nodes, num_nodes)
    # Row i of Â collects what node i receives, so targets are rows.
    sparse = torch.sparse_coo_tensor(edges.flip(0), values, shape, check_invariants=True).coalesce()
    return sparse.to_dense() if dense else sparse


class GCN(nn.Module):
    r"""Z = Â·activation(Â X W₀)·W₁ (Kipf and Welling 2017; thesis, 7.5.4).

    Maps nodes (nodes, in_features) and Â to features Â·activation(Â X W₀), (nodes, hidden), which a head classifies:
    Â(H W₁) = (Â H)W₁. With `num_classes` the network has the layer W₁ and returns logits.

    Args:
        in_features: numbers per node.
        hidden: neurons of the hidden layer.
        dropout: fraction of numbers dropped before each layer in training.
        num_classes, bias, linear, activation: see `hypersphere.models`. The authors' layers have no biases.

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
        linear: LayerFactory = nn.Linear,
        activation: ChannelFactory | None = relu,
    ) -> None:
        super().__init__()
        require_num_classes(num_classes)
        self.feature_dim = hidden
        self.dropout = nn.Dropout(dropout)
        self.hidden = linear(in_features, hidden, bias=bias)
        self.activation = nn.Sequential(*make_layers(hidden, activation))
        self.classifier = None if num_classes is None else nn.Linear(hidden, num_classes, bias=bias)
        # Glorot initialisation, as in the authors' code. Layers of other factories keep theirs.
        for layer in (self.hidden, self.classifier):
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def forward(
        self, nodes: Float[Tensor, "nodes in_features"], adjacency: Float[Tensor, "nodes nodes"]
    ) -> Float[Tensor, "nodes outputs"]:
        """Map nodes to features (nodes, hidden) or logits (nodes, num_classes). Both inputs may be dense or sparse."""
        # (Â X) W₀ = Â (X W₀), and the right-hand side multiplies Â by 16 columns instead of thousands.
        hidden = self.activation(adjacency @ self._hidden_layer(nodes))
        # Â is applied before W₁ here, so that the result is a feature for any head.
        features = adjacency @ self.dropout(hidden)
        return features if self.classifier is None else self.classifier(features)

    def _hidden_layer(self, nodes: Tensor) -> Tensor:
        """Apply dropout and the layer W₀."""
        if not nodes.is_sparse:
            return self.hidden(self.dropout(nodes))
        # Entries that are not stored are zero with or without dropout, so it acts on the stored values only.
        nodes = nodes.coalesce()
        dropped = torch.sparse_coo_tensor(
            nodes.indices(), self.dropout(nodes.values()), nodes.shape, is_coalesced=True, check_invariants=False
        )
        if type(self.hidden).forward is not nn.Linear.forward:
            return self.hidden(dropped.to_dense())  # other layers than X Wᵀ + b need dense rows
        weight, bias = self.hidden.weight, self.hidden.bias
        product = torch.sparse.mm(dropped, cast(Tensor, weight).mT)
        return product if bias is None else product + bias
