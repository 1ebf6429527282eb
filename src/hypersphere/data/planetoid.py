"""Citation graphs with the public split: Cora, Citeseer and Pubmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere.data._files import DamagedData, data_root, find_file, read_content, require_choice, verify_sha256
from hypersphere.data._pickles import dense_array, load_pickle, require_matrix_size
from hypersphere.data.containers import Graph

NUM_VALIDATION = 500  # the nodes that follow the training nodes (Kipf and Welling 2017)
MAX_NODE_DIGITS = 7  # a larger node number would allocate the features of more than 10 million nodes
PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
SHA256 = {
    "cora": {
        "x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
        "y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
        "tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
        "ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
        "allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
        "ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
        "graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
        "test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
    },
    "citeseer": {
        "x": "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
        "y": "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
        "tx": "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
        "ty": "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
        "allx": "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
        "ally": "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
        "graph": "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
        "test.index": "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
    },
    "pubmed": {
        "x": "fbe9cb5c47200d1b7769a26e579be3b7130b556831f9d850e77c4c74f2599b33",
        "y": "e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3",
        "tx": "4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d",
        "ty": "ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd",
        "allx": "508e538e2abdccdd54c4d3e9f49d638b4af7107d85845f66ddea5a5152658b7e",
        "ally": "0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e",
        "graph": "5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9",
        "test.index": "b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5",
    },
}


def planetoid(name: str, root: str | Path | None = None, *, verify: bool = True) -> Graph:
    """Read a citation graph with 20 training nodes per class, 500 validation nodes and 1,000 test nodes.

    Features are those of the files (words present, or tf-idf). Edges are undirected, without loops or repetitions. The
    files of Citeseer omit some isolated test nodes; these get zero features and label 0 and are in no mask, as usual.

    Args:
        name: "cora", "citeseer" or "pubmed".
        root: contains the folder citation with the eight files ind.NAME.{x, y, tx, ty, allx, ally, graph, test.index}.
        verify: compare with the published files; False reads any files in the same format. In both cases their pickles
            cannot run code.
    """
    require_choice("name", name, SHA256)
    folder = data_root(root) / "citation"
    parts: dict[str, object] = {}
    for part in PARTS:
        advice = f"Put the eight files ind.{name}.* of the Planetoid release in the folder citation."
        path = find_file([folder], (f"ind.{name}.{part}",), advice)
        content = read_content(path)
        verify_sha256(content, SHA256[name][part] if verify else None, path)
        parts[part] = _parse_index(content, path) if part == "test.index" else load_pickle(content, path)
    try:
        # Overflow in a conversion gives an infinity, which is rejected later with a better message than a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            return _assemble(parts)
    except ValueError as error:
        raise DamagedData(f"ind.{name}.* in {folder} do not fit together: {error}") from error


def cora(root: str | Path | None = None, *, verify: bool = True) -> Graph:
    """Citations between 2,708 papers on machine learning, 1,433 words, 7 classes; see planetoid."""
    return planetoid("cora", root, verify=verify)


def citeseer(root: str | Path | None = None, *, verify: bool = True) -> Graph:
    """Citations between 3,327 papers on computer science, 3,703 words, 6 classes; see planetoid."""
    return planetoid("citeseer", root, verify=verify)


def pubmed(root: str | Path | None = None, *, verify: bool = True) -> Graph:
    """Citations between 19,717 papers on diabetes, 500 words, 3 classes; see planetoid."""
    return planetoid("pubmed", root, verify=verify)


def _parse_index(content: bytes, path: Path) -> NDArray[np.int64]:
    """Return the node numbers of the file test.index."""
    fields = content.split()
    invalid = [field for field in fields if not field.isdigit() or len(field) > MAX_NODE_DIGITS]
    if invalid or not fields:
        received = f"{invalid[0]!r:.80}" if invalid else "nothing"
        raise DamagedData(
            f"{path} must contain node numbers of at most {MAX_NODE_DIGITS} digits, one per line, not {received}"
        )
    return np.array([int(field) for field in fields], dtype=np.int64)


def _assemble(parts: dict[str, object]) -> Graph:
    """Combine the parts of the eight files.

    allx and ally hold all nodes except the test nodes; the first len(y) of them are the training nodes, so x is not
    needed. tx and ty hold the test nodes in the order of test.index.
    """
    arrays = {part: dense_array(parts[part]) for part in ("y", "tx", "ty", "allx", "ally")}
    test = parts["test.index"]
    assert isinstance(test, np.ndarray)
    _check_shapes(arrays, test)
    num_other, num_nodes = len(arrays["allx"]), int(test.max()) + 1
    # Test nodes may have any number, so the size of the matrices is checked before they are allocated.
    require_matrix_size(num_nodes, arrays["allx"].shape[1] + arrays["ally"].shape[1])
    features = np.zeros((num_nodes, arrays["allx"].shape[1]), dtype=np.float32)
    one_hot = np.zeros((num_nodes, arrays["ally"].shape[1]), dtype=np.float32)
    features[:num_other], features[test] = arrays["allx"], arrays["tx"]
    one_hot[:num_other], one_hot[test] = arrays["ally"], arrays["ty"]
    if not (np.isfinite(features).all() and np.isfinite(one_hot).all()):
        raise DamagedData("features and labels must be finite, not NaN or infinite")
    # Nodes are in the order training, validation, others, test.
    num_train = len(arrays["y"])
    nodes = np.arange(num_nodes)
    validation = (nodes >= num_train) & (nodes < min(num_train + NUM_VALIDATION, num_other))
    return Graph(
        torch.from_numpy(features),
        torch.from_numpy(one_hot.argmax(axis=1).astype(np.int64)),
        torch.from_numpy(_undirected_edges(parts["graph"], num_nodes)),
        torch.from_numpy(nodes < num_train),
        torch.from_numpy(validation),
        torch.from_numpy(np.isin(nodes, test)),
        tuple(str(label) for label in range(one_hot.shape[1])),
    )


def _check_shapes(arrays: dict[str, NDArray[Any]], test: NDArray[np.int64]) -> None:
    """Raise DamagedData unless the parts have matching shapes."""
    for name, array in arrays.items():
        if array.ndim != 2:
            raise DamagedData(f"{name} must be a matrix, not of shape {array.shape}")
    num_other = len(arrays["allx"])
    shapes = {name: array.shape for name, array in arrays.items()}
    test_counts = {len(arrays["tx"]), len(arrays["ty"]), len(np.unique(test))}
    if len(arrays["ally"]) != num_other or test_counts != {len(test)}:
        raise DamagedData(
            f"features, labels and test nodes must have equal numbers, not {len(test)} test nodes for {shapes}"
        )
    if arrays["tx"].shape[1] != arrays["allx"].shape[1] or arrays["ty"].shape[1] != arrays["ally"].shape[1]:
        raise DamagedData(f"train and test must have the same features and classes, not {shapes}")
    if int(test.min()) < num_other or len(arrays["y"]) > num_other:
        raise DamagedData(f"test nodes must come after the {num_other} other nodes, not at {int(test.min())}")


def _undirected_edges(graph: object, num_nodes: int) -> NDArray[np.int64]:
    """Return every edge in both directions, once, without loops, ordered by source and target."""
    if not isinstance(graph, dict) or not all(isinstance(targets, list) for targets in graph.values()):
        raise DamagedData(f"the graph must be a dict of lists, not {type(graph).__name__}")
    edges = [(source, target) for source, targets in graph.items() for target in targets]
    # `type` instead of `isinstance`, which would accept booleans.
    if not all(type(end) is int and 0 <= end < num_nodes for edge in edges for end in edge):
        raise DamagedData(f"the graph must have nodes in 0..{num_nodes - 1}")
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    ends = ends[ends[:, 0] != ends[:, 1]]  # graph networks add loops themselves
    both_directions = np.unique(np.concatenate((ends, ends[:, ::-1])), axis=0)
    return np.ascontiguousarray(both_directions.T)
