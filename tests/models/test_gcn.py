import numpy as np
import pytest
import torch

import hypersphere as hs
from hypersphere.layers import DecoupledLinear
from hypersphere.models import GCN, normalized_adjacency

EDGES = torch.tensor([[0, 1, 1, 2, 1, 3], [1, 0, 2, 1, 2, 3]])  # one edge twice, one loop; node 4 has no edge


@pytest.fixture
def adjacency():
    """The normalised adjacency of EDGES in NumPy."""
    a = np.zeros((5, 5))
    for source, target in EDGES.T.tolist():
        a[target, source] = 1
    a += np.eye(5)
    root = np.diag(a.sum(1) ** -0.5)
    return root @ a @ root


def test_normalized_adjacency_matches_numpy(adjacency):
    dense, sparse = (normalized_adjacency(EDGES, 5, dense=dense) for dense in (True, False))
    np.testing.assert_allclose(dense.numpy(), adjacency, atol=1e-6)
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), dense)


def test_normalized_adjacency_of_a_graph_without_edges_is_the_identity():
    no_edges = torch.empty(2, 0, dtype=torch.int64)
    assert normalized_adjacency(no_edges, 2, dense=True).tolist() == [[1, 0], [0, 1]]


def test_gcn_matches_its_formula(adjacency):
    torch.manual_seed(0)
    dense, sparse = (normalized_adjacency(EDGES, 5, dense=dense) for dense in (True, False))
    model, x = GCN(4, 3, num_classes=2).eval(), torch.rand(5, 4)
    w0, w1 = (w.detach().double().numpy().T for w in (model.hidden.weight, model.classifier.weight))
    expected = adjacency @ np.maximum(adjacency @ x.double().numpy() @ w0, 0) @ w1
    np.testing.assert_allclose(model(x, dense).detach().numpy(), expected, atol=1e-6)
    torch.testing.assert_close(model(x, sparse), model(x, dense))
    torch.testing.assert_close(model(x.to_sparse(), sparse), model(x, dense))
    model(x, sparse).sum().backward()
    assert GCN(4, 3).eval()(x, sparse).shape == (5, 3)


def test_gcn_accepts_decoupled_layers_on_dense_and_sparse_nodes():
    torch.manual_seed(0)
    model, x = GCN(4, 3, linear=DecoupledLinear).eval(), torch.rand(5, 4)
    adjacency = normalized_adjacency(EDGES, 5)
    torch.testing.assert_close(model(x.to_sparse(), adjacency), model(x, adjacency))
    model(x, adjacency).sum().backward()


def test_gcn_accepts_a_graph_of_the_data_package():
    masks = torch.zeros(3, 3, dtype=torch.bool).fill_diagonal_(True)
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = hs.data.Graph(torch.rand(3, 4), torch.tensor([0, 1, 0]), edges, *masks, ("a", "b"))
    adjacency = normalized_adjacency(graph.edge_index, len(graph))
    assert GCN(4, num_classes=2)(graph.features, adjacency).shape == (3, 2)


@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (torch.tensor([[0], [5]]), r"edge_index must be nodes in 0\.\.2, not \(0, 5\)"),
        (torch.zeros(3, 2), r"edge_index must be int64 \(2, edges\)"),
    ],
)
def test_normalized_adjacency_rejects_invalid_edges(edge_index, message):
    with pytest.raises(ValueError, match=message):
        normalized_adjacency(edge_index, 3)
