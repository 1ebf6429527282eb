"""Shapes and classes of published data sets, to build networks for data that are not on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypersphere.data.generated import generated
from hypersphere.data.images import height_and_width
from hypersphere.data.splits import DataSplit

__all__ = ["published_outline"]

# By name: shape of a sample, and number of training classes.
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
    return DataSplit.blank({"shape": shape, "dtype": "uint8", "classes": [str(label) for label in range(classes)]})
