"""The idx files of MNIST and Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hypersphere.data.content import LARGEST_FILE, check_sum, read_content
from hypersphere.data.errors import DamagedData, MissingData, check_choice
from hypersphere.data.labelled import LabelledImages
from hypersphere.data.root import data_root, find

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MNIST_SUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
FASHION_SUMS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
DIGITS = tuple(str(digit) for digit in range(10))
CLOTHES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


def read_idx(path: Path, dimensions: int, expected: str | None) -> Tensor:
    """The uint8 array of an idx file: two zero bytes, the type 8, the number of dimensions, the sizes, the data.

    The header is checked first, then no more is read than it asks for; `expected` is the SHA-256 of all bytes.
    """
    start = 4 + 4 * dimensions
    shape = _shape(read_content(path, start), dimensions, path)
    count = math.prod(shape)
    content = read_content(path, start + count + 1)
    if len(content) - start != count:
        found = "more" if len(content) - start > count else len(content) - start
        raise DamagedData(f"{path} must hold {count} bytes for shape {shape}, not {found}")
    if expected is not None:
        check_sum(content, expected, path)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(shape)


def _shape(header: bytes, dimensions: int, path: Path) -> tuple[int, ...]:
    magic = bytes((0, 0, 8, dimensions))
    if header[:4] != magic:
        raise DamagedData(f"{path} must begin with the idx magic {magic.hex()}, not {header[:4].hex() or 'nothing'}")
    if len(header) < 4 + 4 * dimensions:
        raise DamagedData(f"{path} must have a header of {4 + 4 * dimensions} bytes, not {len(header)}")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    if math.prod(max(side, 1) for side in shape) > LARGEST_FILE:
        raise DamagedData(f"{path} must have a shape of at most {LARGEST_FILE} bytes, not {shape}")
    return shape


def mnist(root: str | Path | None = None, split: str = "train", *, verify: bool = True) -> LabelledImages:
    """Handwritten digits, 28x28 grey, 10 classes: 60,000 train and 10,000 test.

    Args:
        root: holds the folder mnist (or MNIST/raw) with the four idx files, gzipped or plain.
        split: "train" or "test".
        verify: compare the decompressed files with the published ones; False reads any well-formed idx files.
    """
    folder = data_root(root)
    advice = "Put the four idx files of MNIST, gzipped or plain, in the folder mnist."
    return _read([folder / "mnist", folder / "MNIST" / "raw"], split, DIGITS, MNIST_SUMS if verify else {}, advice)


def fashion_mnist(root: str | Path | None = None, split: str = "train", *, verify: bool = True) -> LabelledImages:
    """Articles of clothing, 28x28 grey, 10 classes: 60,000 train and 10,000 test.

    Args:
        root: holds the folder fashion-mnist (or FashionMNIST/raw) with the four idx files, gzipped or plain. When they
            are not there, /usr/share/datasets/fashion-mnist is read: the Debian package dataset-fashion-mnist.
        split: "train" or "test".
        verify: compare the decompressed files with the published ones; False reads any well-formed idx files.
    """
    folders = [DEBIAN_FASHION]
    try:
        folder = data_root(root)
        folders = [folder / "fashion-mnist", folder / "FashionMNIST" / "raw", DEBIAN_FASHION]
    except MissingData:
        if root is not None or not DEBIAN_FASHION.is_dir():
            raise
    advice = (
        "Install the Debian package dataset-fashion-mnist, or put the four idx files of Fashion-MNIST, "
        "gzipped or plain, in the folder fashion-mnist."
    )
    return _read(folders, split, CLOTHES, FASHION_SUMS if verify else {}, advice)


def _read(
    folders: Sequence[Path], split: str, classes: tuple[str, ...], sums: dict[str, str], advice: str
) -> LabelledImages:
    check_choice("split", split, FILES)
    arrays = []
    for name, dimensions in zip(FILES[split], (3, 1), strict=True):
        path = find(folders, (f"{name}.gz", name), advice)
        arrays.append(read_idx(path, dimensions, sums.get(name)))
    images, labels = arrays
    if len(images) != len(labels):
        raise DamagedData(f"{path} must hold {len(images)} labels, one an image, not {len(labels)}")
    if len(labels) and int(labels.max()) >= len(classes):
        raise DamagedData(f"{path} must hold labels 0..{len(classes) - 1}, not {int(labels.max())}")
    return LabelledImages(images.unsqueeze(1), labels.to(torch.int64), classes)
