"""CIFAR-10, CIFAR-100 and a fifth of CIFAR-100 in the binary version, plain or gzipped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hypersphere.data._files import (
    DamagedData,
    accept_root_first,
    data_root,
    find_file,
    read_content,
    require_choice,
    verify_sha256,
)
from hypersphere.data.containers import LabelledImages

PIXEL_BYTES = 3 * 32 * 32  # one byte per pixel and channel
CIFAR10_FILES: dict[str, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
CIFAR100_FILES: dict[str, tuple[str, ...]] = {"train": ("train.bin",), "test": ("test.bin",)}
FIFTH_SHA256 = {
    "train.bin": "be83d5ea8b6d3b113460a4486580e805954487a33f3eb533c6ef734ba8682200",
    "test.bin": "26bf37c977bebf5697a918308609790a7a66b496c463c7cfecf053a089deed00",
}
# In the order of the labels in the files.
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


@accept_root_first(*CIFAR10_FILES)
def cifar10(split: str = "train", root: str | Path | None = None, *, verify: bool = True) -> LabelledImages:
    """Small colour photographs, 32x32, 10 classes: 50,000 train and 10,000 test.

    Args:
        split: "train" or "test".
        root: contains the folder cifar-10-batches-bin with data_batch_1.bin .. data_batch_5.bin and test_batch.bin,
            gzipped or plain.
        verify: require 5,000 (train) or 1,000 (test) images of every class; False accepts any number of records.
    """
    folder, per_class = data_root(root) / "cifar-10-batches-bin", {"train": 5000, "test": 1000}
    return _read_split(folder, split, CIFAR10_FILES, CIFAR10_CLASSES, per_class, verify, {})


@accept_root_first(*CIFAR100_FILES)
def cifar100(split: str = "train", root: str | Path | None = None, *, verify: bool = True) -> LabelledImages:
    """Small colour photographs, 32x32, 100 classes (the fine labels): 50,000 train and 10,000 test.

    Args:
        split: "train" or "test".
        root: contains the folder cifar-100-binary with train.bin and test.bin, gzipped or plain.
        verify: require 500 (train) or 100 (test) images of every class; False accepts any number of records.
    """
    folder, per_class = data_root(root) / "cifar-100-binary", {"train": 500, "test": 100}
    return _read_split(folder, split, CIFAR100_FILES, CIFAR100_CLASSES, per_class, verify, {})


@accept_root_first(*CIFAR100_FILES)
def cifar100_fifth(split: str = "train", root: str | Path | None = None, *, verify: bool = True) -> LabelledImages:
    """A fixed part of CIFAR-100, 32x32 colour, 100 classes: 10,000 train and 5,000 test.

    Args:
        split: "train" or "test".
        root: contains the folder cifar100-fifth with train.bin and test.bin in the format of CIFAR-100, gzipped or
            plain.
        verify: compare with the checksums of the library; False accepts any number of records.
    """
    folder, per_class = data_root(root) / "cifar100-fifth", {"train": 100, "test": 50}
    return _read_split(folder, split, CIFAR100_FILES, CIFAR100_CLASSES, per_class, verify, FIFTH_SHA256)


def _read_split(
    folder: Path,
    split: str,
    files: dict[str, tuple[str, ...]],
    classes: tuple[str, ...],
    per_class: dict[str, int],
    verify: bool,
    sha256: dict[str, str],
) -> LabelledImages:
    """Read the files of a split; with `verify`, compare the numbers of images per class and the known checksums."""
    require_choice("split", split, files)
    advice = f"Put the binary version of the data set, gzipped or plain, in the folder {folder.name}."
    label_bytes = 2 if classes is CIFAR100_CLASSES else 1  # see _parse_records
    # Reading one record more than expected is enough to detect a file that is too long.
    records_per_file = per_class[split] * len(classes) // len(files[split])
    limit = (records_per_file + 1) * (label_bytes + PIXEL_BYTES) if verify else None
    parts = []
    for name in files[split]:
        path = find_file([folder], (name, f"{name}.gz"), advice)
        content = read_content(path, limit)
        parts.append(_parse_records(content, label_bytes, len(classes), path))
        verify_sha256(content, sha256.get(name) if verify else None, path)
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    # Checksums are published for the archives, not for the files in them. Class counts detect truncated files.
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    for label, count in enumerate(counts):
        if verify and count != per_class[split]:
            raise DamagedData(
                f"{', '.join(files[split])} in {folder} must contain {per_class[split]} images of every class, "
                f"not {count} of class {label}; pass verify=False to read them anyway"
            )
    return LabelledImages(images, labels, classes)


def _parse_records(content: bytes, label_bytes: int, num_classes: int, path: Path) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 32, 32) and labels (N,) of a file.

    A record has the label (one byte; in CIFAR-100 a coarse label, which is ignored, and the fine label), then the red,
    green and blue planes.
    """
    record_bytes = label_bytes + PIXEL_BYTES
    if not content or len(content) % record_bytes:
        raise DamagedData(f"{path} must contain complete records of {record_bytes} bytes, not {len(content)} bytes")
    # `frombuffer` warns about read-only memory, so copy to a bytearray.
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, record_bytes)
    labels = records[:, label_bytes - 1].to(torch.int64)
    if int(labels.max()) >= num_classes:
        raise DamagedData(f"{path} must contain labels in 0..{num_classes - 1}, not {int(labels.max())}")
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels
