"""Digits and clothes: MNIST and Fashion-MNIST (idx files, plain or gzipped) and the digits inside scikit-learn."""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hypersphere._validation import require_package
from hypersphere.data._files import (
    MAX_FILE_BYTES,
    DamagedData,
    MissingData,
    accept_root_first,
    data_root,
    find_file,
    read_content,
    require_choice,
    verify_sha256,
)
from hypersphere.data.containers import LabelledImages

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# Checksums of the decompressed files, because gzip files contain a date.
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
FASHION_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
DIGIT_CLASSES = tuple(str(digit) for digit in range(10))
FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
DIGITS_TEST_PER_CLASS = 50  # of about 180


@accept_root_first(*FILES)
def mnist(split: str = "train", root: str | Path | None = None, *, verify: bool = True) -> LabelledImages:
    """Handwritten digits, 28x28 grey, 10 classes: 60,000 train and 10,000 test.

    Args:
        split: "train" or "test".
        root: contains the folder mnist (or MNIST/raw) with the four idx files, gzipped or plain.
        verify: compare the decompressed files with the published ones; False reads any well-formed idx files.
    """
    folder = data_root(root)
    advice = "Put the four idx files of MNIST, gzipped or plain, in the folder mnist."
    sha256 = MNIST_SHA256 if verify else {}
    return _read_split([folder / "mnist", folder / "MNIST" / "raw"], split, DIGIT_CLASSES, sha256, advice)


@accept_root_first(*FILES)
def fashion_mnist(split: str = "train", root: str | Path | None = None, *, verify: bool = True) -> LabelledImages:
    """Articles of clothing, 28x28 grey, 10 classes: 60,000 train and 10,000 test.

    Args:
        split: "train" or "test".
        root: contains the folder fashion-mnist (or FashionMNIST/raw) with the four idx files, gzipped or plain. If
            they are missing, those of the Debian package dataset-fashion-mnist in /usr/share/datasets/fashion-mnist
            are read.
        verify: compare the decompressed files with the published ones; False reads any well-formed idx files.
    """
    folders = [DEBIAN_FASHION]
    try:
        folder = data_root(root)
        folders = [folder / "fashion-mnist", folder / "FashionMNIST" / "raw", DEBIAN_FASHION]
    except MissingData:
        # Without any root, the Debian folder is enough. A root that was given must exist.
        if root is not None or not DEBIAN_FASHION.is_dir():
            raise
    advice = (
        "Install the Debian package dataset-fashion-mnist, or put the four idx files of Fashion-MNIST, "
        "gzipped or plain, in the folder fashion-mnist."
    )
    return _read_split(folders, split, FASHION_CLASSES, FASHION_SHA256 if verify else {}, advice)


def digits(split: str = "train", root: str | Path | None = None) -> LabelledImages:
    """Handwritten digits, 8x8 grey, 10 classes, inside scikit-learn: 1,297 train and 500 test, no file needed.

    The test set is the last 50 images of every class in scikit-learn's order; nothing is drawn at random. The grey
    values 0..16 become 0..255 by rounding, which keeps all 17 levels distinct.

    Args:
        split: "train" or "test".
        root: not used. It is accepted so that all loaders can be called in the same way.

    Example:
        >>> digits("test")
        LabelledImages(500 images 1x8x8, 10 classes)
    """
    require_choice("split", split, FILES)
    table = _digits_table()
    labels = table[:, 64].astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[-DIGITS_TEST_PER_CLASS:]] = True
    in_split = is_test if split == "test" else ~is_test
    images = np.rint(table[in_split, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    return LabelledImages(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels[in_split]), DIGIT_CLASSES)


def _digits_table() -> np.ndarray:
    """Return one row per image of scikit-learn: its 64 grey values and its label.

    The file is read without importing scikit-learn, which takes longer than importing torch.
    """
    spec = importlib.util.find_spec("sklearn")
    path = Path(spec.origin if spec is not None and spec.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    source = require_package("sklearn.datasets", "scikit-learn", "eval").load_digits()
    return np.column_stack([source.data, source.target])


def _read_split(
    folders: Sequence[Path], split: str, classes: tuple[str, ...], sha256: dict[str, str], advice: str
) -> LabelledImages:
    """Read the images and labels of a split. Files without an entry in `sha256` are not verified."""
    require_choice("split", split, FILES)
    arrays = []
    for name, dimensions in zip(FILES[split], (3, 1), strict=True):
        path = find_file(folders, (f"{name}.gz", name), advice)
        arrays.append(_read_idx(path, dimensions, sha256.get(name)))
    images, labels = arrays
    if len(images) != len(labels):
        raise DamagedData(f"{path} must contain {len(images)} labels, one per image, not {len(labels)}")
    if len(labels) and int(labels.max()) >= len(classes):
        raise DamagedData(f"{path} must contain labels in 0..{len(classes) - 1}, not {int(labels.max())}")
    return LabelledImages(images.unsqueeze(1), labels.to(torch.int64), classes)


def _read_idx(path: Path, dimensions: int, expected_sha256: str | None) -> Tensor:
    """Return the uint8 array of an idx file.

    The file has two zero bytes, the type 8 (uint8), the number of dimensions, the sizes as big-endian 32-bit integers,
    then the data. The header is checked first; no more is read than it announces.
    """
    header_bytes = 4 + 4 * dimensions
    shape = _parse_idx_header(read_content(path, header_bytes), dimensions, path)
    count = math.prod(shape)
    content = read_content(path, header_bytes + count + 1)  # one byte more detects a file that is too long
    data_bytes = len(content) - header_bytes
    if data_bytes != count:
        raise DamagedData(
            f"{path} must have {count} bytes for shape {shape}, not {'more' if data_bytes > count else data_bytes}"
        )
    verify_sha256(content, expected_sha256, path)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header_bytes:].reshape(shape)


def _parse_idx_header(header: bytes, dimensions: int, path: Path) -> tuple[int, ...]:
    """Return the shape that an idx header announces."""
    magic = bytes((0, 0, 8, dimensions))
    if header[:4] != magic:
        raise DamagedData(f"{path} must begin with the idx magic {magic.hex()}, not {header[:4].hex() or 'nothing'}")
    if len(header) < 4 + 4 * dimensions:
        raise DamagedData(f"{path} must have a header of {4 + 4 * dimensions} bytes, not {len(header)}")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    # Count a size of zero as one, so that it does not hide huge sizes next to it.
    if math.prod(max(size, 1) for size in shape) > MAX_FILE_BYTES:
        raise DamagedData(f"{path} must have a shape of at most {MAX_FILE_BYTES} bytes, not {shape}")
    return shape
