"""Labelled tensors as map-style datasets: images and point clouds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hypersphere._validation import require


def as_indices(indices: Tensor | Sequence[int] | Sequence[bool], count: int) -> Tensor:
    """Positions in 0..count-1 as an int64 tensor, from positions or from a mask of `count` booleans."""
    index = torch.as_tensor(indices)
    if index.numel() == 0 and index.dtype != torch.bool:
        return torch.empty(0, dtype=torch.int64)
    if index.dtype == torch.bool:
        if index.shape != (count,):
            raise ValueError(f"indices as a mask must have shape ({count},), not {tuple(index.shape)}")
        return index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex():
        raise ValueError(f"indices must be one row of integers or booleans, not {index.dtype} {tuple(index.shape)}")
    index = index.long()
    if index.min() < 0 or index.max() >= count:
        raise IndexError(f"indices must be in 0..{count - 1}, not {int(index.min())}..{int(index.max())}")
    return index


def check_labels(labels: Tensor, count: int, classes: tuple[str, ...]) -> None:
    """Raise a ValueError unless there is one int64 label an item and each names a class."""
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(f"labels must be int64 ({count},), not {labels.dtype} {tuple(labels.shape)}")
    if count and (labels.min() < 0 or labels.max() >= len(classes)):
        found = f"{int(labels.min())}..{int(labels.max())}"
        raise ValueError(f"labels must be in 0..{len(classes) - 1}, one a class, not {found}")


def class_positions(wanted: Sequence[str], classes: tuple[str, ...]) -> Tensor:
    """For every class its place among the wanted ones, or len(wanted) for a class that is not wanted."""
    require(len(set(wanted)) == len(wanted), "classes", "different names", list(wanted))
    known = {name: place for place, name in enumerate(classes)}
    places = torch.full((len(classes),), len(wanted), dtype=torch.int64)
    for place, name in enumerate(wanted):
        require(name in known, "classes", f"among the {len(classes)} classes of the dataset", name)
        places[known[name]] = place
    return places


@dataclass(frozen=True, eq=False)
class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Images as uint8 (N, C, H, W) with one label each; an item is a float32 image in [0, 1] and an int.

    `names`, where there are any, tell the images apart (a path, a drawer); pair files refer to them.

    >>> data = LabelledImages(torch.full((2, 1, 4, 4), 255, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
    >>> image, label = data[1]
    >>> image.max().item(), data.classes[label]
    (1.0, 'dog')
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(f"images must be uint8 (N, C, H, W), not {self.images.dtype} {tuple(self.images.shape)}")
        check_labels(self.labels, len(self.images), self.classes)
        fits = len(self.names) in (0, len(self.images))
        require(fits, "names", f"none or one an image ({len(self.images)})", len(self.names))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.images.shape[1:]))
        return f"LabelledImages({len(self)} images {shape}, {len(self.classes)} classes)"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All images as float32 in [0, 1], and all labels."""
        return self.images.float() / 255, self.labels

    def subset(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> LabelledImages:
        """The images at these positions (or under this mask), with the same classes."""
        index = as_indices(indices, len(self))
        names = tuple(self.names[place] for place in index.tolist()) if self.names else ()
        return replace(self, images=self.images[index], labels=self.labels[index], names=names)

    def of_classes(self, classes: Sequence[str]) -> LabelledImages:
        """Only the images of these classes, relabelled 0, 1, ... in the order given."""
        places = class_positions(classes, self.classes)[self.labels]
        part = self.subset(places < len(classes))
        return replace(part, labels=places[places < len(classes)], classes=tuple(classes))


@dataclass(frozen=True, eq=False)
class PointClouds(Dataset[tuple[Tensor, int]]):
    """Point clouds as float32 (N, P, 3) with one label each; an item is a (P, 3) tensor and an int."""

    points: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.points.dtype != torch.float32 or self.points.ndim != 3 or self.points.shape[2] != 3:
            raise ValueError(f"points must be float32 (N, P, 3), not {self.points.dtype} {tuple(self.points.shape)}")
        check_labels(self.labels, len(self.points), self.classes)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.labels[index])

    def __repr__(self) -> str:
        return f"PointClouds({len(self)} clouds of {self.points.shape[1]} points, {len(self.classes)} classes)"

    def subset(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> PointClouds:
        """The clouds at these positions (or under this mask), with the same classes."""
        index = as_indices(indices, len(self))
        return replace(self, points=self.points[index], labels=self.labels[index])
