"""What the loaders return: labelled images and point clouds, both map-style data sets, and graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from hypersphere._validation import require
from hypersphere.data.images import as_floats

Indices = Tensor | Sequence[int] | Sequence[bool]


@dataclass(frozen=True, eq=False)
class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Images with one label each. An item is a float32 image in [0, 1] and an int.

    Attributes:
        images: uint8 (N, C, H, W).
        labels: int64 (N,), positions in `classes`.
        classes: names of the classes.
        names: names of the images, such as paths, or empty. Pair files refer to them.

    Example:
        >>> images = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
        >>> data = LabelledImages(images, torch.tensor([0, 1]), ("cat", "dog"))
        >>> image, label = data[1]
        >>> image.max().item(), data.classes[label]
        (1.0, 'dog')
    """

    images: UInt8[Tensor, "items channels height width"]
    labels: Int64[Tensor, " items"]
    classes: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_tensor("images", self.images, torch.uint8, "(N, C, H, W)", self.images.ndim == 4)
        _require_labels(self.labels, len(self.images), self.classes)
        fits = len(self.names) in (0, len(self.images))
        require(fits, "names", f"empty or one per image ({len(self.images)})", len(self.names))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Float32[Tensor, "channels height width"], int]:
        return as_floats(self.images[index]), int(self.labels[index])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.images.shape[1:]))
        return f"LabelledImages({len(self)} images {shape}, {len(self.classes)} classes)"

    def tensors(self) -> tuple[Float32[Tensor, "items channels height width"], Int64[Tensor, " items"]]:
        """Return all images as float32 in [0, 1], and all labels."""
        return as_floats(self.images), self.labels

    def subset(self, indices: Indices) -> LabelledImages:
        """Return the images at these positions, or where this mask is True. The classes stay the same."""
        index = to_positions(indices, len(self))
        names = tuple(self.names[position] for position in index.tolist()) if self.names else ()
        return replace(self, images=self.images[index], labels=self.labels[index], names=names)

    def of_classes(self, classes: Sequence[str]) -> LabelledImages:
        """Return the images of these classes, with labels 0, 1, ... in the given order."""
        positions, labels = relabel(self.labels, self.classes, classes)
        return replace(self.subset(positions), labels=labels, classes=tuple(classes))


@dataclass(frozen=True, eq=False)
class PointClouds(Dataset[tuple[Tensor, int]]):
    """Point clouds with one label each. An item is a (P, 3) tensor and an int.

    Attributes:
        points: float32 (N, P, 3).
        labels: int64 (N,), positions in `classes`.
        classes: names of the classes.
    """

    points: Float32[Tensor, "items points 3"]
    labels: Int64[Tensor, " items"]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        fits = self.points.ndim == 3 and self.points.shape[2] == 3
        require_tensor("points", self.points, torch.float32, "(N, P, 3)", fits)
        _require_labels(self.labels, len(self.points), self.classes)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Float32[Tensor, "points 3"], int]:
        return self.points[index], int(self.labels[index])

    def __repr__(self) -> str:
        return f"PointClouds({len(self)} clouds of {self.points.shape[1]} points, {len(self.classes)} classes)"

    def subset(self, indices: Indices) -> PointClouds:
        """Return the clouds at these positions, or where this mask is True. The classes stay the same."""
        index = to_positions(indices, len(self))
        return replace(self, points=self.points[index], labels=self.labels[index])


@dataclass(frozen=True, eq=False)
class Graph:
    """One undirected graph with features and a label per node, and three disjoint sets of nodes.

    Attributes:
        features: float32 (N, F).
        labels: int64 (N,), positions in `classes`.
        edge_index: int64 (2, E), sources in the first row and targets in the second. Every edge appears in both
            directions.
        train: bool (N,), True for the training nodes.
        val: bool (N,), True for the validation nodes.
        test: bool (N,), True for the test nodes.
        classes: names of the classes.
    """

    features: Float32[Tensor, "nodes features"]
    labels: Int64[Tensor, " nodes"]
    edge_index: Int64[Tensor, "2 edges"]
    train: Bool[Tensor, " nodes"]
    val: Bool[Tensor, " nodes"]
    test: Bool[Tensor, " nodes"]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        require_tensor("features", self.features, torch.float32, "(N, F)", self.features.ndim == 2)
        nodes, edges = len(self.features), self.edge_index
        _require_labels(self.labels, nodes, self.classes)
        require_tensor("edge_index", edges, torch.int64, "(2, E)", edges.ndim == 2 and len(edges) == 2)
        if edges.numel():
            low, high = (int(end) for end in edges.aminmax())
            require(low >= 0 and high < nodes, "edge_index", f"nodes in 0..{nodes - 1}", (low, high))
        for name, mask in (("train", self.train), ("val", self.val), ("test", self.test)):
            require_tensor(name, mask, torch.bool, f"({nodes},)", mask.shape == (nodes,))
        # A node in two sets would leak from training to testing.
        shared = int((self.train.int() + self.val.int() + self.test.int() > 1).sum())
        require(not shared, "train, val and test", "disjoint", f"{shared} shared nodes")

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        nodes, features = self.features.shape
        return (
            f"Graph({nodes} nodes, {self.edge_index.shape[1]} edges, {features} features, {len(self.classes)} classes)"
        )


def relabel(
    labels: Int64[Tensor, " items"], known: Sequence[str], classes: Sequence[str]
) -> tuple[Int64[Tensor, " positions"], Int64[Tensor, " positions"]]:
    """Return the positions of the items of `classes`, and their new labels 0, 1, ... in the order of `classes`.

    `known` are the names of the old labels.

    >>> relabel(torch.tensor([0, 1, 2, 1]), "abc", "cb")
    (tensor([1, 2, 3]), tensor([1, 0, 1]))
    """
    require_different_names(classes)
    old_label = {name: label for label, name in enumerate(known)}
    # A table from old to new labels relabels all items with one index operation.
    dropped = len(classes)  # the new label of all other classes
    new_labels = torch.full((len(known),), dropped, dtype=torch.int64)
    for label, name in enumerate(classes):
        require(name in old_label, "classes", f"among the {len(old_label)} classes of the data", name)
        new_labels[old_label[name]] = label
    positions = (new_labels[labels] < dropped).nonzero().flatten()
    return positions, new_labels[labels[positions]]


def to_positions(indices: Indices, count: int) -> Int64[Tensor, " positions"]:
    """Return positions in 0..count-1, given positions or a mask of `count` booleans."""
    index = torch.as_tensor(indices)
    # An empty list has dtype float32.
    if index.numel() == 0 and index.dtype != torch.bool:
        return torch.empty(0, dtype=torch.int64)
    if index.dtype == torch.bool:
        require(index.shape == (count,), "indices", f"of shape ({count},) as a mask", tuple(index.shape))
        return index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex():
        raise ValueError(f"indices must be 1-d integers or booleans, not {index.dtype} {tuple(index.shape)}")
    index = index.long()  # not all smaller integer types support comparison and indexing
    if index.min() < 0 or index.max() >= count:
        raise IndexError(f"indices must be in 0..{count - 1}, not {int(index.min())}..{int(index.max())}")
    return index


def require_tensor(argument: str, value: Tensor, dtype: torch.dtype, shape: str, has_shape: bool) -> None:
    """Raise a ValueError unless the tensor has this dtype and shape."""
    if value.dtype != dtype or not has_shape:
        accepted = f"{str(dtype).removeprefix('torch.')} {shape}"
        raise ValueError(f"{argument} must be {accepted}, not {value.dtype} {tuple(value.shape)}")


def require_different_names(classes: Sequence[str]) -> None:
    """Raise a ValueError that gives the first repeated name, if there is one."""
    repeated = next((name for name, count in Counter(classes).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"classes must be different names, not {repeated!r} twice")


def _require_labels(labels: Tensor, count: int, classes: tuple[str, ...]) -> None:
    """Raise a ValueError unless there are `count` int64 labels that are positions in `classes`."""
    require_tensor("labels", labels, torch.int64, f"({count},)", labels.shape == (count,))
    if count:
        low, high = (int(label) for label in labels.aminmax())
        fits = low >= 0 and high < len(classes)
        require(fits, "labels", f"positions in `classes`, 0..{len(classes) - 1}", f"{low}..{high}")
