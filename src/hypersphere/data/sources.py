"""Sources: samples that are read one by one on demand, with their labels in memory.

A source is cheap to open and to send to worker processes. It never keeps a decoded sample. Names are stored as one
array of bytes: reading a Python string changes its reference count, so a forked worker would copy the memory of all
strings in a list.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from numpy.typing import NDArray
from torch import Tensor

from hypersphere._validation import printable, require, warn_user
from hypersphere.data._files import DamagedData, MissingData
from hypersphere.data.containers import (
    Indices,
    LabelledImages,
    PointClouds,
    relabel,
    require_different_names,
    to_positions,
)
from hypersphere.data.images import (
    FITS,
    IMAGE_SUFFIXES,
    BrokenSample,
    Size,
    decode_image,
    grey_in_header,
    height_and_width,
    is_image,
    read_image_file,
)

HEADERS_TO_CHECK = 256  # images whose headers decide whether a source is grey
SIZES_TO_CHECK = 10_000  # files whose sizes are part of a fingerprint
CONTENTS_TO_CHECK = 200  # files whose first bytes are part of a fingerprint
BYTES_TO_CHECK = 2**20  # read from each of these files


@runtime_checkable
class Source(Protocol):
    """Samples with labels.

    Attributes:
        labels: int64 (N,), positions in `classes`.
        classes: names of the classes.
    """

    @property
    def labels(self) -> Int64[Tensor, " items"]: ...  # noqa: D102

    @property
    def classes(self) -> tuple[str, ...]: ...  # noqa: D102

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tensor: ...

    def name(self, index: int) -> str:
        """Return the name of a sample, such as its path."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that change if samples are added, removed, renamed or moved to another class."""
        ...


class Names(Sequence[str]):
    """An immutable list of strings, stored as one array of bytes and one of offsets.

    >>> names = Names(["cat/1.png", "dog/1.png"])
    >>> len(names), names[1]
    (2, 'dog/1.png')
    """

    def __init__(self, names: Iterable[str]) -> None:
        content, ends = bytearray(), array("q", [0])
        for name in names:
            content += os.fsencode(name)  # file names need not be valid UTF-8
            ends.append(len(content))
        self._content: NDArray[np.uint8] = np.frombuffer(bytes(content), dtype=np.uint8)
        self._ends: NDArray[np.int64] = np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be in {-len(self)}..{len(self) - 1}, not {index}")
        index %= len(self)
        return os.fsdecode(self._content[self._ends[index] : self._ends[index + 1]].tobytes())

    def take(self, positions: NDArray[np.int64]) -> Names:
        """Return the names at these positions."""
        return Names(self[int(position)] for position in positions)

    def digest(self) -> str:
        """Return a checksum of all names and their order."""
        return digest(self._content.tobytes(), self._ends.tobytes())


def digest(*parts: bytes) -> str:
    """Return a short checksum of byte strings and of their lengths."""
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(len(part).to_bytes(8, "little"))
        checksum.update(part)
    return checksum.hexdigest()[:16]


def common_fingerprint(classes: Sequence[str], labels: Tensor) -> dict[str, Any]:
    """Return the part of a fingerprint that all sources have."""
    return {
        "count": len(labels),
        "classes": digest(*(name.encode("utf-8", "surrogateescape") for name in classes)),
        "labels": digest(labels.numpy().tobytes()),
    }


def spaced_positions(count: int, most: int) -> list[int]:
    """Return at most `most` positions in 0..count-1, evenly spaced.

    >>> spaced_positions(10, 4), spaced_positions(3, 4)
    ([0, 2, 5, 7], [0, 1, 2])
    """
    chosen = min(count, most)
    return [position * count // chosen for position in range(chosen)]


def first_sample(source: Source) -> Tensor:
    """Return the first sample that can be decoded."""
    problem = ""
    for index in range(len(source)):
        try:
            return source[index]
        except BrokenSample as error:  # reported when it is loaded, if another sample can be decoded
            problem = problem or str(error)
    raise DamagedData(f"data must contain at least one readable sample, but {problem or 'there is none'}")


class TensorSource:
    """Samples in memory: uint8 images (N, C, H, W), point clouds (N, P, 3), or other inputs (N, …).

    Args:
        inputs: the samples (N, …).
        labels: int64 (N,), positions in `classes`.
        classes: names of the classes.
        names: names of the samples; by default their positions.

    Example:
        >>> source = TensorSource(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1]), ("a", "b"))
        >>> len(source), source[2].shape, source.name(2)
        (3, torch.Size([1, 8, 8]), '2')
    """

    def __init__(
        self,
        inputs: Shaped[Tensor, "items ..."],
        labels: Int64[Tensor, " items"],
        classes: Sequence[str],
        names: Sequence[str] = (),
    ) -> None:
        require(len(inputs) == len(labels), "labels", f"one label per input ({len(inputs)})", len(labels))
        require(len(names) in (0, len(inputs)), "names", f"empty or one name per input ({len(inputs)})", len(names))
        self.inputs, self.labels, self.classes = inputs, labels, tuple(classes)
        self._names = names if isinstance(names, Names) else Names(names)

    @classmethod
    def of(cls, data: LabelledImages | PointClouds) -> TensorSource:
        """Return the source of the images or point clouds that a loader returned."""
        if isinstance(data, PointClouds):
            return cls(data.points, data.labels, data.classes)
        return cls(data.images, data.labels, data.classes, data.names)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Tensor:
        return self.inputs[index]

    def name(self, index: int) -> str:
        """Return the name of a sample, or its position if samples have no names."""
        return self._names[index] if len(self._names) else str(index)

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of the labels, the names and evenly spaced samples."""
        rows = self.inputs[spaced_positions(len(self), 1000)].contiguous()
        content = digest(rows.cpu().view(-1).view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
        return common_fingerprint(self.classes, self.labels) | {"names": self._names.digest(), "content": content}

    def subset(self, positions: Tensor) -> TensorSource:
        """Return the samples at these positions."""
        names = self._names.take(positions.numpy()) if len(self._names) else ()
        return TensorSource(self.inputs[positions], self.labels[positions], self.classes, names)


class Subset:
    """Some samples of a source, optionally with other labels and classes."""

    def __init__(
        self, source: Source, positions: Tensor, labels: Tensor | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.source, self.positions = source, positions
        self.labels = source.labels[positions] if labels is None else labels
        self.classes = source.classes if classes is None else tuple(classes)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Tensor:
        return self.source[int(self.positions[index])]

    def name(self, index: int) -> str:
        """Return the name of a sample."""
        return self.source.name(int(self.positions[index]))

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the source and a checksum of the selection."""
        positions = digest(self.positions.numpy().tobytes())
        return common_fingerprint(self.classes, self.labels) | {
            "positions": positions,
            "source": self.source.fingerprint(),
        }


def subset(source: Source, indices: Indices) -> Source:
    """Return the samples at these positions, or where this mask is True. The classes stay the same.

    Samples in memory are copied; others are still read on demand.
    """
    positions = to_positions(indices, len(source))
    return source.subset(positions) if isinstance(source, TensorSource) else Subset(source, positions)


def with_labels(source: Source, labels: Tensor, classes: Sequence[str]) -> Source:
    """Return all samples with other labels, which are positions in `classes`. No sample is copied or read."""
    if isinstance(source, TensorSource):
        return TensorSource(source.inputs, labels, classes, source._names)
    return Subset(source, torch.arange(len(source)), labels, classes)


def of_classes(source: Source, classes: Sequence[str]) -> Source:
    """Return the samples of these classes, with labels 0, 1, ... in the given order."""
    positions, labels = relabel(source.labels, source.classes, classes)
    if isinstance(source, TensorSource):
        part = source.subset(positions)
        return TensorSource(part.inputs, labels, classes, part._names)
    return Subset(source, positions, labels, classes)


class ImageSource(ABC):
    """Images that are decoded on demand. Subclasses define `read` and `name`.

    Args:
        labels: int64 (N,), positions in `classes`.
        classes: names of the classes.
        size: resize every image to (height, width), or to a square; without it all images must have the same size.
        grey: True for one channel, False for three; None decides by the headers of up to 256 images.
        fit: "stretch" changes the aspect ratio; "crop" keeps it and cuts off what is outside the centre.
    """

    def __init__(
        self,
        labels: Tensor,
        classes: Sequence[str],
        *,
        size: Size = None,
        grey: bool | None = None,
        fit: str = "stretch",
    ) -> None:
        require(fit in FITS, "fit", f"one of {', '.join(FITS)}", fit)
        self.labels, self.classes = labels, tuple(classes)
        self.size, self.fit = height_and_width(size), fit
        self._grey_was_given = grey is not None
        self.grey = self._all_grey() if grey is None else grey
        self._first_shape: tuple[int, ...] | None = None  # of the first decoded image, if `size` is None

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        name, content = self.name(index), self.read(index)
        if self.grey and not self._grey_was_given and not grey_in_header(content, name):
            raise ValueError(
                f"grey must be True or False, because {printable(name)} has colours and other images have none"
            )
        image = decode_image(content, name, size=self.size, grey=self.grey, fit=self.fit, fast=True)
        if self.size is None:
            self._check_shape(tuple(image.shape[1:]), name)
        return image

    def _check_shape(self, shape: tuple[int, ...], name: str) -> None:
        if self._first_shape is None:
            self._first_shape = shape
        if shape != self._first_shape:
            sizes = " and ".join(f"{height}x{width}" for height, width in (self._first_shape, shape))
            raise ValueError(
                f"images must have the same size, not {sizes} ({printable(name)}); "
                "pass size=(height, width) to resize them"
            )

    def _all_grey(self) -> bool:
        """Return True if all of up to 256 evenly spaced images are grey."""
        for index in spaced_positions(len(self), HEADERS_TO_CHECK):
            try:
                if not grey_in_header(self.read(index), self.name(index)):
                    return False
            except BrokenSample:
                continue  # reported when it is loaded
        return len(self) > 0


class FileSource(ImageSource):
    """Images in separate files.

    Args:
        folder: folder to which the names refer.
        names: paths of the images.
        labels, classes, size, grey, fit: see ImageSource.
    """

    def __init__(
        self,
        folder: Path,
        names: Names,
        labels: Tensor,
        classes: Sequence[str],
        *,
        size: Size = None,
        grey: bool | None = None,
        fit: str = "stretch",
    ) -> None:
        self.folder, self.names = folder, names
        super().__init__(labels, classes, size=size, grey=grey, fit=fit)

    def name(self, index: int) -> str:
        """Return the path of an image in the folder."""
        return self.names[index]

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        return read_image_file(self.folder / self.names[index], self.names[index])

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of classes and names, the sizes of up to 10,000 files and the first bytes of up to 200."""
        return common_fingerprint(self.classes, self.labels) | file_fingerprint(self.names, self.folder)


class ImageFolderSource(FileSource):
    """Images in one subfolder per class, read from the folder when they are needed.

    Images are ordered by class and file name. Files and folders whose name begins with a dot are skipped. A class
    folder without images gives a warning.

    Args:
        root: the folder.
        classes: read only these classes, in this order. No other subfolder is opened.
        size, grey, fit: see ImageSource.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        classes: Sequence[str] | None = None,
        size: Size = None,
        grey: bool | None = None,
        fit: str = "stretch",
    ) -> None:
        folder = Path(root).expanduser()
        subfolders = class_folders(folder, classes)
        counts: list[int] = []

        def scan() -> Iterator[str]:
            for subfolder in subfolders:
                files = image_files(subfolder)
                counts.append(len(files))
                yield from (f"{subfolder.name}/{file}" for file in files)

        names = Names(scan())
        empty = [subfolder.name for subfolder, count in zip(subfolders, counts, strict=True) if not count]
        present = [subfolder.name for subfolder, count in zip(subfolders, counts, strict=True) if count]
        report_classes(folder, present, empty, classes)
        labels = torch.arange(len(present)).repeat_interleave(torch.tensor([count for count in counts if count]))
        super().__init__(folder, names, labels, present, size=size, grey=grey, fit=fit)


def file_fingerprint(names: Names, folder: Path) -> dict[str, str]:
    """Return checksums of the names, and of the sizes and first bytes of evenly spaced files in the folder."""

    def file_size(index: int) -> int:
        try:
            return (folder / names[index]).stat().st_size
        except OSError:
            return -1

    def first_bytes(index: int) -> bytes:
        path = folder / names[index]
        try:
            if not path.is_file():  # reading a pipe would wait
                return b""
            with path.open("rb") as file:
                return file.read(BYTES_TO_CHECK)
        except OSError:
            return b""

    sizes = np.array([file_size(index) for index in spaced_positions(len(names), SIZES_TO_CHECK)], dtype="<i8")
    contents = (first_bytes(index) for index in spaced_positions(len(names), CONTENTS_TO_CHECK))
    checksums = "".join(digest(content) for content in contents)  # one file in memory at a time
    return {"names": names.digest(), "content": digest(sizes.tobytes(), checksums.encode())}


def class_folders(root: Path, classes: Sequence[str] | None) -> list[Path]:
    """Return the subfolders of a folder in alphabetical order, or those of the given classes that exist."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "not found"
        raise MissingData(f"{root} {problem}. Give a folder with one subfolder of images per class.")
    if classes is None:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        return [root / name for name in names]
    require_different_names(classes)
    # Do not list the folder, so that neither it nor other subfolders have to be readable. Ignore hidden folders, and
    # names with a separator, which could point outside the folder.
    names = [name for name in classes if PurePath(name).name == name and not name.startswith(".")]
    return [root / name for name in names if (root / name).is_dir()]


def image_files(folder: Path) -> list[str]:
    """Return the sorted names of the images in a folder."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_image(PurePath(entry.name)) and entry.is_file())


def report_classes(root: Path, present: Collection[str], empty: Collection[str], classes: Sequence[str] | None) -> None:
    """Raise an error if there are no images or a requested class has none; warn of other empty class folders."""
    missing = set(classes or ()) - set(present)
    require(not missing, "classes", f"subfolders of {root} with images", min(missing, default=None))
    if not present:
        raise MissingData(f"no images in {root}; expected CLASS/FILE with a suffix of {', '.join(IMAGE_SUFFIXES)}")
    if empty and classes is None:
        shown = ", ".join(printable(name) for name in sorted(empty)[:10])
        rest = f", … ({len(empty)} in total)" if len(empty) > 10 else ""
        warn_user(f"{root}: class folders without images are ignored: {shown}{rest}")


class CenterCropped:
    """The central windows of the images of a source, `margin` pixels smaller in height and width."""

    def __init__(self, source: Source, margin: int) -> None:
        self.source, self.labels, self.classes = source, source.labels, source.classes
        self.name, self.fingerprint = source.name, source.fingerprint
        self.margin = margin

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Tensor:
        image = self.source[index]
        height, width = (side - self.margin for side in image.shape[-2:])
        start = self.margin // 2
        return image[..., start : start + height, start : start + width]


class Mirrored:
    """The images of a source, mirrored horizontally."""

    def __init__(self, source: Source) -> None:
        self.source, self.labels, self.classes = source, source.labels, source.classes
        self.name, self.fingerprint = source.name, source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Tensor:
        return self.source[index].flip(-1)
