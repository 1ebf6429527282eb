"""Images in one subfolder per class, read from a folder or directly from a tar archive, which is not unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import torch
from torch import Tensor

from hypersphere._validation import require
from hypersphere.data._files import DamagedData, MissingData
from hypersphere.data.containers import LabelledImages, require_different_names
from hypersphere.data.images import MAX_IMAGE_BYTES, Size, decode_image, height_and_width, is_image, read_image_file
from hypersphere.data.sources import (
    FileSource,
    ImageFolderSource,
    Names,
    TensorSource,
    class_folders,
    image_files,
    report_classes,
)

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2")

# The name "class/file" of an image, and a function that reads its file.
_Entry = tuple[str, Callable[[], bytes]]


def image_folder(
    root: str | Path,
    *,
    size: Size = None,
    grey: bool | None = None,
    classes: Sequence[str] | None = None,
) -> LabelledImages:
    """Your own images, one subfolder per class, in a folder or a tar archive.

    Images are ordered by their names, "class/file"; classes alphabetically or as given. Files and folders whose name
    begins with a dot are skipped. A class folder without images gives a warning.

    Args:
        root: the folder, or a .tar, .tar.gz, .tgz or .tar.bz2 archive.
        size: resize every image to (height, width), or to a square; without it all images must have the same size.
        grey: True for one channel, False for three; None keeps one channel if every image is grey.
        classes: read only these classes. No other subfolder is opened.

    Raises:
        MissingData: if there is no such folder, or no image in it.
        DamagedData: if a file is not a readable image or has more than 64 MiB.
    """
    shape = height_and_width(size)
    # Decode in the order of the source and sort afterwards, so that an archive is read in one pass.
    images: dict[str, Tensor] = {}
    for name, read in _entries(Path(root).expanduser(), classes):
        images[name] = decode_image(read(), name, size=shape, grey=grey)
    names = _sorted_names(images)
    all_classes = tuple(classes) if classes is not None else tuple(sorted({_class_of(name) for name in names}))
    label_of = {class_name: label for label, class_name in enumerate(all_classes)}
    labels = torch.tensor([label_of[_class_of(name)] for name in names], dtype=torch.int64)
    return LabelledImages(_stack([images[name] for name in names], names), labels, all_classes, names)


def image_names(root: str | Path, *, classes: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names that image_folder would give, in the same order, without decoding an image."""
    return _sorted_names(name for name, _ in _entries(Path(root).expanduser(), classes))


def _class_of(name: str) -> str:
    return name.split("/")[0]


def _sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names sorted by class and file."""
    return tuple(sorted(names, key=lambda name: name.split("/")))


def _entries(source: Path, classes: Sequence[str] | None) -> Iterator[_Entry]:
    """Return an iterator over the images of a folder or archive. At its end, missing and empty classes are reported."""
    require_different_names(classes or ())
    if source.is_dir():
        return _folder_entries(source, classes)
    if source.is_file() and source.name.lower().endswith(ARCHIVE_SUFFIXES):
        return _archive_entries(source, classes)
    if source.exists():
        raise ValueError(f"root must be a folder or an archive ({', '.join(ARCHIVE_SUFFIXES)}), not {str(source)!r}")
    raise MissingData(f"{source} not found. Give a folder or tar archive with one subfolder of images per class.")


def _folder_entries(source: Path, classes: Sequence[str] | None) -> Iterator[_Entry]:
    present: list[str] = []
    empty: list[str] = []
    for folder in class_folders(source, classes):
        files = image_files(folder)
        (present if files else empty).append(folder.name)
        for file in files:
            yield f"{folder.name}/{file}", partial(read_image_file, folder / file)
    report_classes(source, present, empty, classes)


MAX_HEADER_BYTES = 2**20  # of an entry that holds a long name or the attributes of a file


class StrictHeader(tarfile.TarInfo):
    """A tar header that raises an error if it is damaged; `tarfile` alone would treat it as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> StrictHeader:
        """Return the header; raise a ReadError if it is damaged."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # a block of zeros ends an archive
                raise
            raise tarfile.ReadError(str(error)) from error
        # `tarfile` reads the long names and attributes that such entries hold into memory.
        holds_text = header.type in (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if holds_text and header.type != tarfile.GNUTYPE_SPARSE and header.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a name must have at most {MAX_HEADER_BYTES} bytes, not {header.size}")
        return header


def _archive_entries(source: Path, classes: Sequence[str] | None) -> Iterator[_Entry]:
    """Yield the images of an archive. Each must be read before the next one is requested."""
    parent: tuple[str, ...] | None = None  # the path above the class folders
    folders: list[PurePosixPath] = []
    names: set[str] = set()
    try:
        with tarfile.open(source, tarinfo=StrictHeader) as archive:
            # One pass in the order of the archive, because compressed archives do not allow random access.
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise DamagedData(f"{source} must contain paths inside it, not {member.name!r}")
                # Hidden files and folders, such as "._a.png" in archives made on macOS.
                if any(part.startswith(".") for part in path.parts):
                    continue
                if member.isdir():
                    folders.append(path)
                    continue
                if not is_image(path):
                    continue
                # A link could point anywhere in the file system.
                if not member.isreg() or member.size > MAX_IMAGE_BYTES:
                    raise DamagedData(
                        f"{source}: {member.name!r} must be a regular file of at most {MAX_IMAGE_BYTES} bytes"
                    )
                if len(path.parts) < 2 or (parent is not None and path.parts[:-2] != parent):
                    raise DamagedData(f"{source}: {member.name!r} must be in a class folder next to the other classes")
                parent, class_name = path.parts[:-2], path.parts[-2]
                name = f"{class_name}/{path.name}"
                if name in names:  # a tar archive may contain a path several times
                    raise DamagedData(f"{source} must contain {name!r} once, not twice")
                names.add(name)
                file = archive.extractfile(member)
                if file is not None and (classes is None or class_name in classes):
                    yield name, partial(_read_member, file, source)
            _read_to_end(archive)
    except DamagedData:
        raise
    except Exception as error:  # a damaged archive can raise almost any exception
        raise DamagedData(f"{source} is not a complete tar archive: {error}") from error
    present = set(map(_class_of, names))
    empty = {folder.name for folder in folders if folder.name and folder.parts[:-1] == parent} - present
    report_classes(source, present if classes is None else present.intersection(classes), empty, classes)


def _read_to_end(archive: tarfile.TarFile) -> None:
    """Read the rest of an archive, so that the checksum of a compressed file is verified. Only zeros may follow."""
    assert archive.fileobj is not None
    while chunk := archive.fileobj.read(2**16):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError("data after the end of the archive")


def _read_member(file: IO[bytes], source: Path) -> bytes:
    try:
        return file.read()
    except Exception as error:  # a damaged archive can raise almost any exception
        raise DamagedData(f"{source} is not a complete tar archive: {error}") from error


def _stack(images: list[Tensor], names: Sequence[str]) -> Tensor:
    """Return all images as (N, C, H, W). If one is coloured, grey images get three equal channels."""
    height, width = images[0].shape[1:]
    channels = max(len(image) for image in images)
    for image, name in zip(images, names, strict=True):
        if image.shape[1:] != (height, width):
            sizes = f"{height}x{width} ({names[0]}) and {image.shape[1]}x{image.shape[2]} ({name})"
            raise ValueError(f"images must have the same size, not {sizes}; pass size=(height, width) to resize them")
    return torch.stack([image.expand(channels, height, width) for image in images])


def open_images(
    paths: Sequence[str | Path], *, size: Size = None, grey: bool | None = None, fit: str = "stretch"
) -> tuple[FileSource | TensorSource, bool]:
    """Return a source of images, and True if their folders are classes.

    Args:
        paths: image files; or one folder of images; or one folder or archive with one folder per class.
        size, grey: see `image_folder`.
        fit: "stretch" changes the aspect ratio; "crop" keeps it and cuts off what is outside the centre. An archive
            accepts "stretch" only.
    """
    locations = [Path(path).expanduser() for path in paths]
    missing = next((location for location in locations if not location.exists()), None)
    if missing is not None:
        raise MissingData(f"{missing} not found")
    if all(location.is_file() and is_image(location) for location in locations):
        return _unlabelled(Path(), list(map(str, locations)), size, grey, fit), False
    require(len(locations) == 1, "images", "image files, or a single folder", list(map(str, paths)))
    (folder,) = locations
    if not folder.is_dir():
        is_archive = folder.name.lower().endswith(ARCHIVE_SUFFIXES)
        accepted = f"image files, a folder or an archive ({', '.join(ARCHIVE_SUFFIXES)})"
        require(is_archive, "images", accepted, str(folder))
        require(fit == "stretch", "fit", "stretch for an archive", fit)
        return TensorSource.of(image_folder(folder, size=size, grey=grey)), True
    if folder.resolve().name.startswith("."):
        raise MissingData(f"{folder} is a hidden folder; hidden folders are not read")
    children = sorted(folder.iterdir())
    files = [path.name for path in children if path.is_file() and is_image(path)]
    if not files:
        return ImageFolderSource(folder, size=size, grey=grey, fit=fit), True
    folders = [path for path in children if path.is_dir() and not path.name.startswith(".")]
    image_subfolder = next((path.name for path in folders if any(map(is_image, path.iterdir()))), None)
    if image_subfolder is not None:
        raise ValueError(
            f"{folder} must contain either images or folders of images, but has {files[0]} and {image_subfolder}/"
        )
    return _unlabelled(folder, files, size, grey, fit), False


def _unlabelled(folder: Path, names: Sequence[str], size: Size, grey: bool | None, fit: str) -> FileSource:
    labels = torch.zeros(len(names), dtype=torch.int64)
    return FileSource(folder, Names(names), labels, ("",), size=size, grey=grey, fit=fit)
