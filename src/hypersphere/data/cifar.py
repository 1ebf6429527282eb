"""The binary records of CIFAR: label bytes, then 32x32 red, green and blue planes; plain or gzipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hypersphere.data.content import check_sum, read_content
from hypersphere.data.errors import DamagedData, check_choice
from hypersphere.data.labelled import LabelledImages
from hypersphere.data.root import data_root, find

PIXELS = 3 * 32 * 32
CIFAR10_FILES: dict[str, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
CIFAR100_FILES: dict[str, tuple[str, ...]] = {"train": ("train.bin",), "test": ("test.bin",)}
FIFTH_SUMS = {
    "train.bin": "be83d5ea8b6d3b113460a4486580e805954487a33f3eb533c6ef734ba8682200",
    "test.bin": "26bf37c977bebf5697a918308609790a7a66b496c463c7cfecf053a089deed00",
}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)  # fmt: skip


def parse_records(content: bytes, label_bytes: int, classes: int, path: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels (N,) of a record file; the last label byte is the class."""
    width = label_bytes + PIXELS
    if not content or len(content) % width:
        raise DamagedData(f"{path} must hold whole records of {width} bytes, not {len(content)} bytes")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, width)
    labels = records[:, label_bytes - 1].to(torch.int64)
    if int(labels.max()) >= classes:
        raise DamagedData(f"{path} must hold labels 0..{classes - 1}, not {int(labels.max())}")
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def cifar10(root: str | Path | None = None, split: str = "train", *, verify: bool = True) -> LabelledImages:
    """Small colour photographs, 32x32, 10 classes: 50,000 train and 10,000 test.

    Args:
        root: holds the folder cifar-10-batches-bin with data_batch_1.bin .. data_batch_5.bin and test_batch.bin,
            gzipped or plain.
        split: "train" or "test".
        verify: every class must come 5,000 (train) or 1,000 (test) times; False reads any number of records.
    """
    folder, each = data_root(root) / "cifar-10-batches-bin", {"train": 5000, "test": 1000}
    return _read(folder, CIFAR10_FILES, split, 1, CIFAR10_CLASSES, each if verify else None, {})


def cifar100(root: str | Path | None = None, split: str = "train", *, verify: bool = True) -> LabelledImages:
    """Small colour photographs, 32x32, 100 classes (the fine labels): 50,000 train and 10,000 test.

    Args:
        root: holds the folder cifar-100-binary with train.bin and test.bin, gzipped or plain.
        split: "train" or "test".
        verify: every class must come 500 (train) or 100 (test) times; False reads any number of records.
    """
    folder, each = data_root(root) / "cifar-100-binary", {"train": 500, "test": 100}
    return _read(folder, CIFAR100_FILES, split, 2, CIFAR100_CLASSES, each if verify else None, {})


def cifar100_fifth(root: str | Path | None = None, split: str = "train", *, verify: bool = True) -> LabelledImages:
    """A fixed part of CIFAR-100, 32x32 colour, 100 classes: 10,000 train and 5,000 test.

    Args:
        root: holds the folder cifar100-fifth with train.bin and test.bin in the record of CIFAR-100, gzipped or plain.
        split: "train" or "test".
        verify: compare with the known sums; False reads any number of records.
    """
    folder, each = data_root(root) / "cifar100-fifth", {"train": 100, "test": 50}
    sums = FIFTH_SUMS if verify else {}
    return _read(folder, CIFAR100_FILES, split, 2, CIFAR100_CLASSES, each if verify else None, sums)


def _read(
    folder: Path,
    files: dict[str, tuple[str, ...]],
    split: str,
    label_bytes: int,
    classes: tuple[str, ...],
    each: dict[str, int] | None,
    sums: dict[str, str],
) -> LabelledImages:
    check_choice("split", split, files)
    advice = f"Put the binary version of the dataset, gzipped or plain, in the folder {folder.name}."
    records = None if each is None else each[split] * len(classes) // len(files[split]) + 1
    most = None if records is None else records * (label_bytes + PIXELS)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for name in files[split]:
        path = find([folder], (name, f"{name}.gz"), advice)
        content = read_content(path, most)
        image, label = parse_records(content, label_bytes, len(classes), path)
        if name in sums:
            check_sum(content, sums[name], path)
        images.append(image)
        labels.append(label)
    data = LabelledImages(torch.cat(images), torch.cat(labels), classes)
    if each is not None:
        _check_balance(data.labels, each[split], len(classes), folder, files[split])
    return data


def _check_balance(labels: Tensor, each: int, classes: int, folder: Path, names: Sequence[str]) -> None:
    counts = torch.bincount(labels, minlength=classes)
    if (counts != each).any():
        odd = int((counts != each).nonzero()[0])
        raise DamagedData(
            f"{', '.join(names)} in {folder} must hold {each} images of every class, "
            f"not {int(counts[odd])} of class {odd}; pass verify=False to read them anyway"
        )
