import pickle
from collections import defaultdict

import numpy as np
import pytest
import torch

from hypersphere.data import DATASETS, DamagedData, planetoid

sparse = pytest.importorskip("scipy.sparse")


@pytest.fixture
def small(write, tmp_path):
    """Nodes 0-2 are in allx (0 and 1 train), 3 and 5 are test nodes, 4 is isolated and omitted."""
    features = np.arange(12, dtype=np.float32).reshape(3, 4) % 5
    parts = {
        "x": sparse.csr_matrix(features[:2]),
        "y": np.eye(2, dtype=np.int32)[[0, 1]],
        "tx": sparse.csr_matrix(np.array([[9, 0, 0, 0], [0, 0, 0, 7]], dtype=np.float64)),
        "ty": np.eye(2, dtype=np.int32)[[1, 1]],
        "allx": sparse.csr_matrix(features),
        "ally": np.asfortranarray(np.eye(2, dtype=np.int32)[[0, 1, 1]]),
        "graph": defaultdict(list, {0: [1, 1, 0], 1: [0], 2: [5, 3], 3: [2], 4: [], 5: []}),
    }

    def write_parts(**change):
        for name, value in (parts | change).items():
            write(f"citation/ind.cora.{name}", pickle.dumps(value, protocol=3))
        write("citation/ind.cora.test.index", b"5\n3\n")
        return tmp_path

    return write_parts


def test_planetoid_assembles_the_parts(small):
    graph = planetoid("cora", small(), verify=False)
    assert graph.features.tolist()[3:] == [[0, 0, 0, 7], [0, 0, 0, 0], [9, 0, 0, 0]]
    assert graph.features[1].tolist() == [4, 0, 1, 2]
    assert graph.labels.tolist() == [0, 1, 1, 1, 0, 1]
    assert graph.edge_index.tolist() == [[0, 1, 2, 2, 3, 5], [1, 0, 3, 5, 2, 2]]
    assert graph.train.tolist() == [True, True, False, False, False, False]
    assert graph.val.tolist() == [False, False, True, False, False, False]
    assert graph.test.tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": {0: [6]}}, "nodes in 0..5"),
        ({"graph": {"0": [1]}}, "nodes in 0..5"),
        ({"graph": [0]}, "dict of lists"),
        ({"ty": np.zeros((1, 2), dtype=np.int32)}, "equal numbers"),
        ({"ally": np.zeros((3, 3), dtype=np.int32)}, "same features and classes"),
        ({"allx": sparse.csr_matrix(np.zeros((4, 4))), "ally": np.zeros((4, 2))}, "after the 4 other nodes, not at 3"),
        ({"y": np.zeros(2)}, "must be a matrix"),
        ({"allx": np.array(1.0)}, "allx must be a matrix, not of shape"),
        ({"tx": np.array([[np.nan, 0, 0, 0], [0, 0, 0, 0]])}, "must be finite"),
        ({"tx": sparse.csr_matrix(np.array([[1e300, 0, 0, 0], [0, 0, 0, 0]]))}, "must be finite"),
        ({"ty": np.array([[np.nan, 0], [0, 0]])}, "must be finite"),
        ({"y": 7}, "must be an array, not int"),
        ({"y": np.array([["a"]])}, "arrays must have a numeric dtype"),
        ({"y": np.array([[object()]], dtype=object)}, "numeric dtype, not 'O8'"),
    ],
)
def test_planetoid_rejects_inconsistent_parts(small, change, message):
    with pytest.raises(DamagedData, match=message):
        planetoid("cora", small(**change), verify=False)


def test_planetoid_verifies_checksums_and_lists_the_names(small):
    with pytest.raises(DamagedData, match="SHA-256"):
        planetoid("cora", small())
    with pytest.raises(ValueError, match="name must be one of 'cora', 'citeseer', 'pubmed', not 'dblp'"):
        planetoid("dblp", small())


@pytest.mark.parametrize("number", [b"five", b"1000000000", b"1" + b"0" * 30, b"9" * 5000])
def test_planetoid_rejects_an_invalid_index(small, write, number):
    root = small()
    write("citation/ind.cora.test.index", b"3\n" + number + b"\n")
    with pytest.raises(DamagedData, match=r"test\.index must contain node numbers of at most 7 digits, one per line"):
        planetoid("cora", root, verify=False)


def test_planetoid_rejects_an_index_that_makes_a_matrix_too_large(small, write, monkeypatch):
    root = small()
    write("citation/ind.cora.test.index", b"3\n9999999\n")
    monkeypatch.setattr("hypersphere.data._pickles.MAX_MATRIX_ENTRIES", 2**20)
    with pytest.raises(DamagedData, match="at most 1048576 entries, not 10000000x6"):
        planetoid("cora", root, verify=False)


@pytest.mark.parametrize(
    ("name", "nodes", "features", "classes", "edges"),
    [
        ("cora", 2708, 1433, 7, 5278),
        ("citeseer", 3327, 3703, 6, 4552),
        ("pubmed", 19717, 500, 3, 44324),
    ],
)
def test_planetoid_reads_graphs_of_the_published_sizes(real, name, nodes, features, classes, edges):
    graph = DATASETS[name](real("citation"))
    assert graph.features.shape == (nodes, features)
    assert len(graph.classes) == classes
    assert graph.edge_index.shape == (2, 2 * edges)
    assert torch.bincount(graph.labels[graph.train]).tolist() == [20] * classes
    assert (int(graph.val.sum()), int(graph.test.sum())) == (500, 1000)


def test_planetoid_features_equal_those_unpickled_by_scipy(real):
    """For a file with a verified checksum, ordinary unpickling is safe and an independent reference."""
    root = real("citation")
    graph = planetoid("cora", root)
    with (root / "citation" / "ind.cora.allx").open("rb") as file, pytest.warns(DeprecationWarning, match="deprecated"):
        expected = pickle.load(file, encoding="latin1")
    assert np.array_equal(graph.features[: expected.shape[0]].numpy(), expected.toarray())
