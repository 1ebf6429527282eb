"""Images in one subfolder a class, from a folder or straight from a tar archive (nothing is written to disk)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import IO

import numpy as np
import torch
from torch import Tensor

from hypersphere._validation import require
from hypersphere.data.errors import DamagedData, MissingData, require_package
from hypersphere.data.labelled import LabelledImages

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2")
LARGEST_IMAGE = 64 * 2**20


def image_folder(
    root: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    grey: bool | None = None,
    classes: Sequence[str] | None = None,
) -> LabelledImages:
    """Your own images, one subfolder a class, in a folder or a tar archive.

    Images come in the order of their names, "class/file"; classes in alphabetical order or as given. Names that begin
    with a dot are hidden, and skipped.

    Args:
        root: the folder or the .tar, .tar.gz, .tgz or .tar.bz2 archive.
        size: resize every image to (height, width), or to a square; without it all must have one size.
        grey: True for one channel, False for three; None keeps grey when every image is grey.
        classes: read only these classes.
    """
    shape, wanted = _height_width(size), _wanted(classes)
    found: dict[str, Tensor] = {}
    for name, read in _entries(Path(root).expanduser()):
        if wanted is not None and _class_of(name) not in wanted:
            continue
        if name in found:
            raise DamagedData(f"{root} must hold {name!r} once, not twice")
        found[name] = _decode(read(), name, shape, grey)
    names = _in_order(found, root, classes)
    kinds = tuple(classes) if classes is not None else tuple(sorted({_class_of(name) for name in names}))
    place = {kind: number for number, kind in enumerate(kinds)}
    labels = torch.tensor([place[_class_of(name)] for name in names], dtype=torch.int64)
    return LabelledImages(_stack([found[name] for name in names], names), labels, kinds, names)


def image_names(root: str | Path, *, classes: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names image_folder would give, in its order, without decoding an image."""
    wanted = _wanted(classes)
    names = [name for name, _ in _entries(Path(root).expanduser()) if wanted is None or _class_of(name) in wanted]
    return _in_order(names, root, classes)


def is_image(path: PurePath) -> bool:
    """Whether the name is that of an image, and not of a hidden file."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _class_of(name: str) -> str:
    return name.split("/")[0]


def _wanted(classes: Sequence[str] | None) -> frozenset[str] | None:
    if classes is None:
        return None
    require(len(set(classes)) == len(classes), "classes", "different names", list(classes))
    return frozenset(classes)


def _height_width(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    shape = (size, size) if isinstance(size, int) else size
    fits = shape is None or (len(shape) == 2 and min(shape) >= 1)
    require(fits, "size", "a positive int, (height, width) or None", size)
    return shape


def _in_order(
    names: Sequence[str] | dict[str, Tensor], root: str | Path, classes: Sequence[str] | None
) -> tuple[str, ...]:
    ordered = tuple(sorted(names, key=lambda name: name.split("/")))
    if not ordered and not classes:
        raise MissingData(f"no images in {root}; expected CLASS/FILE with a suffix of {', '.join(SUFFIXES)}")
    absent = set(classes or ()) - {_class_of(name) for name in ordered}
    require(not absent, "classes", f"subfolders of {root} with images", min(absent, default=None))
    return ordered


def _entries(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if source.is_dir():
        return _from_folder(source)
    if source.is_file() and source.name.lower().endswith(ARCHIVES):
        return _from_archive(source)
    if source.exists():
        raise ValueError(f"root must be a folder or an archive ({', '.join(ARCHIVES)}), not {str(source)!r}")
    raise MissingData(f"{source} not found. Give a folder or tar archive with one subfolder of images a class.")


def _from_folder(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for folder in sorted(entry for entry in source.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        for file in sorted(folder.iterdir()):
            if is_image(file) and file.is_file():
                yield f"{folder.name}/{file.name}", file.read_bytes


class _Header(tarfile.TarInfo):
    """A tar header that must be whole: tarfile takes a broken or missing one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # the true end
                raise
            raise tarfile.ReadError(str(error)) from error


def _from_archive(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    parent: tuple[str, ...] | None = None
    try:
        with tarfile.open(source, tarinfo=_Header) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise DamagedData(f"{source} must hold paths inside it, not {member.name!r}")
                if not is_image(path) or any(part.startswith(".") for part in path.parts):
                    continue
                if not member.isreg() or member.size > LARGEST_IMAGE:
                    raise DamagedData(
                        f"{source}: {member.name!r} must be a plain file of at most {LARGEST_IMAGE} bytes"
                    )
                if len(path.parts) < 2 or (parent is not None and path.parts[:-2] != parent):
                    raise DamagedData(f"{source}: {member.name!r} must lie in a class folder beside the other classes")
                parent = path.parts[:-2]
                file = archive.extractfile(member)
                if file is not None:
                    yield f"{path.parts[-2]}/{path.name}", partial(_read_member, file, source)
            _check_rest(archive)
    except DamagedData:
        raise
    except Exception as error:  # a broken archive can fail in any way
        raise DamagedData(f"{source} is not a complete tar archive: {error}") from error


def _check_rest(archive: tarfile.TarFile) -> None:
    """Read on to the end, past which compressed files keep their sum: after the last image come only zeros."""
    assert archive.fileobj is not None
    while chunk := archive.fileobj.read(2**16):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError("more data after its end")


def _read_member(file: IO[bytes], source: Path) -> bytes:
    try:
        return file.read()
    except Exception as error:  # as above
        raise DamagedData(f"{source} is not a complete tar archive: {error}") from error


def _decode(content: bytes, name: str, shape: tuple[int, int] | None, grey: bool | None) -> Tensor:
    """One image as uint8 (1 or 3, H, W)."""
    pillow = require_package("PIL.Image", "Pillow", "eval")
    try:
        with pillow.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"it must have 8 bits a channel, not mode {image.mode}")
            has_grey = image.mode in ("1", "L", "LA") if grey is None else grey
            picture = image.convert("L" if has_grey else "RGB")
            if shape is not None and picture.size != shape[::-1]:
                picture = picture.resize(shape[::-1], pillow.Resampling.BILINEAR)
            pixels = np.array(picture, dtype=np.uint8)
    except Exception as error:  # a broken image can fail in any way
        raise DamagedData(f"{name} is not a readable image: {error}") from error
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def _stack(images: list[Tensor], names: Sequence[str]) -> Tensor:
    """All images as (N, C, H, W); grey ones gain two channels when there are colour ones."""
    height, width = images[0].shape[1:]
    channels = max(len(image) for image in images)
    for image, name in zip(images, names, strict=True):
        if image.shape[1:] != (height, width):
            found = f"{height}x{width} ({names[0]}) and {image.shape[1]}x{image.shape[2]} ({name})"
            raise ValueError(f"images must have one size, not {found}; or pass size=(height, width)")
    return torch.stack([image.expand(channels, height, width) for image in images])
