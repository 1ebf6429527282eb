"""Generated data: patterns with noise, which need no files, and samples with the shape of published data sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.data.containers import Graph
from hypersphere.data.images import height_and_width
from hypersphere.data.sources import TensorSource
from hypersphere.data.splits import DataSplit, split_source, with_label_noise

KINDS = ("images", "points", "graph")
NOISE = 0.25  # relative to the pattern
# Published data sets by name: shape of a sample, and number of training classes.
IMAGES: dict[str, tuple[tuple[int, int, int], int]] = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "cifar100_fifth": ((3, 32, 32), 100),
    "omniglot": ((1, 28, 28), 964),
    "lfw": ((1, 112, 96), 5749),
    "imagenet": ((3, 224, 224), 1000),
    "mini_imagenet": ((3, 84, 84), 64),
    "casia_webface": ((3, 112, 96), 10575),
    "imdb_face": ((3, 112, 96), 59000),
    "ms_celeb": ((3, 112, 96), 86876),
    "image_folder": ((3, 112, 96), 2),  # with an option `size`
}
POINTS = {"modelnet10": 10, "modelnet40": 40}
GRAPHS = {"cora": (1433, 7), "citeseer": (3703, 6), "pubmed": (500, 3)}  # features of a node, and classes


def generated(
    root: Path | None,
    *,
    kind: str = "images",
    size: int = 8,
    channels: int = 1,
    classes: int = 4,
    per_class: int = 16,
    open_set: bool = False,
    label_noise: float = 0.0,
    seed: int = 0,
) -> DataSplit:
    """Random patterns with noise, one per class; no files are read.

    `kind` is "images" (`channels` × `size` × `size`), "points" (clouds of `size` points) or "graph" (nodes with `size`
    features, in cliques of one class). A quarter of the `per_class` samples of each of the `classes`, or with
    `open_set` a quarter of the classes, is used for validation. `label_noise` is the fraction of the training samples
    that get a wrong label. `seed` selects the patterns and the wrong labels.
    """
    require(kind in KINDS, "data.kind", f"one of {', '.join(KINDS)}", kind)
    for name, value, least in (("size", size, 1), ("channels", channels, 1), ("classes", classes, 2)):
        require(is_integer(value, least), f"data.{name}", f"an integer >= {least}", value)
    require(is_integer(per_class, 4), "data.per_class", "an integer >= 4", per_class)
    require(not open_set or kind != "graph", "data.open_set", "false for a graph", open_set)
    generator = torch.Generator().manual_seed(seed)
    shape = {"images": (channels, size, size), "points": (size, 3), "graph": (size,)}[kind]
    labels = torch.arange(classes).repeat(per_class)
    patterns = torch.rand(classes, *shape, generator=generator)[labels]
    samples = (1 - NOISE) * patterns + NOISE * torch.rand(len(labels), *shape, generator=generator)
    names = tuple(f"class {label}" for label in range(classes))
    if kind == "graph":
        return with_label_noise(_graph(samples, labels, names), label_noise, seed)
    inputs = (255 * samples).round().to(torch.uint8) if kind == "images" else 2 * samples - 1
    source = TensorSource(inputs, labels, names)
    return with_label_noise(split_source(source, "class" if open_set else "sample", 0.25, seed), label_noise, seed)


def _graph(features: Tensor, labels: Tensor, names: tuple[str, ...]) -> DataSplit:
    """Return a graph that joins all nodes of a class; half of the nodes are for training, a quarter for validation."""
    same = labels[:, None] == labels
    edges = same.fill_diagonal_(False).nonzero().T.contiguous()
    nodes = torch.arange(len(labels))
    part = nodes // len(names) % 4  # samples of a class are `len(names)` apart
    masks = part <= 1, part == 2, part == 3
    graph = Graph(features, labels, edges, *masks, names)
    train, test = (TensorSource(nodes[mask], labels[mask], names) for mask in (masks[0], masks[2]))
    return DataSplit(train, test, graph=graph)


def published_outline(name: str, options: Mapping[str, Any]) -> DataSplit | None:
    """Return a few random samples with the shape of a published data set; None if its shape is not known.

    Args:
        name: an entry of the data menu.
        options: its options; `size`, `pool`, `grey` and `points` change the shape.

    Example:
        >>> published_outline("cifar10", {"pool": 2}).train[0].shape
        torch.Size([3, 16, 16])
    """
    if name == "generated":
        return generated(None, **options)
    if name in GRAPHS:
        features, classes = GRAPHS[name]
        return generated(None, kind="graph", size=features, classes=classes)
    if name in POINTS:
        return generated(None, kind="points", size=int(options.get("points", 1024)), classes=POINTS[name])
    if name not in IMAGES:
        return None
    (channels, height, width), classes = IMAGES[name]
    height, width = height_and_width(options.get("size")) or (height, width)
    if "grey" in options and options["grey"] is not None:
        channels = 1 if options["grey"] else 3
    pool = int(options.get("pool") or 1)
    shape = [channels, height // pool, width // pool]
    return DataSplit.random_like(
        {"shape": shape, "dtype": "uint8", "classes": [str(label) for label in range(classes)]}
    )
