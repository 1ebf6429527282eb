"""Tar shards in the layout of WebDataset, with random access through an index of offsets; `pack` writes them.

A sample consists of consecutive members with the same key, the path up to the first dot of the file name: an image
(`KEY.jpg`) and a label (`KEY.cls`, an integer or the name of a class, or `KEY.json` with a field `label`).
"""

from __future__ import annotations

import io
import json
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere._files import make_folder, replacing
from hypersphere._validation import is_integer, require
from hypersphere.data._files import DamagedData, MissingData, read_arrays, read_text
from hypersphere.data.folder import StrictHeader
from hypersphere.data.images import IMAGE_SUFFIXES, MAX_IMAGE_BYTES, BrokenSample, Size
from hypersphere.data.lists import LabelCodes
from hypersphere.data.sources import ImageFolderSource, ImageSource, Names, common_fingerprint, digest

CLASSES_FILE = "classes.txt"  # one name per line, for shards whose labels are integers
INDEX_FILE = "index.npz"  # written by pack; without it, all headers of the shards are read
MAX_LABEL_BYTES = 2**16


class Spans:
    """Parts of files that are read on demand.

    Each read opens its file, because forked processes would share the position of an open file.

    Args:
        files: the files.
        file_numbers, offsets, lengths: for each part, its file, its first byte and its number of bytes.
    """

    def __init__(self, files: Sequence[Path], file_numbers: Any, offsets: Any, lengths: Any) -> None:
        self.files = tuple(files)
        self.file_numbers = np.asarray(file_numbers, dtype=np.int32)
        self.offsets, self.lengths = np.asarray(offsets, dtype=np.int64), np.asarray(lengths, dtype=np.int64)

    def read(self, index: int, name: str) -> bytes:
        """Return the bytes of a part; raise BrokenSample if the file is shorter or the part is too large."""
        length = int(self.lengths[index])
        if not 0 <= length <= MAX_IMAGE_BYTES:
            raise BrokenSample(name, f"it must have at most {MAX_IMAGE_BYTES} bytes, not {length}")
        try:
            with self.files[int(self.file_numbers[index])].open("rb") as file:
                file.seek(int(self.offsets[index]))
                content = file.read(length)
        except (OSError, ValueError) as error:
            raise BrokenSample(name, str(error)) from error
        if len(content) < length:
            raise BrokenSample(name, f"its file ends after {len(content)} of {length} bytes")
        return content

    def digest(self) -> str:
        """Return a checksum of the lengths of all parts."""
        return digest(self.lengths.tobytes())


class ShardSource(ImageSource):
    """Images in tar shards, with random access.

    Args:
        path: a folder of .tar files, one .tar file, or a pattern such as `train-*.tar`.
        size, grey, fit: see ImageSource.
    """

    def __init__(self, path: str | Path, *, size: Size = None, grey: bool | None = None, fit: str = "stretch") -> None:
        files = find_shards(Path(path).expanduser())
        classes_file = files[0].parent / CLASSES_FILE
        # Only line feeds separate names. `splitlines` would also split at other characters, which names may contain.
        listed_classes = (
            [line.removesuffix("\r") for line in read_text(classes_file).removesuffix("\n").split("\n")]
            if classes_file.is_file()
            else None
        )
        self.names, self.spans, codes = _stored_index(files) or _scan(files)
        try:
            labels, classes = codes.labels(listed_classes, prefer_positions=True)
        except DamagedData as error:
            raise DamagedData(f"{files[0].parent}: {error}") from error
        super().__init__(labels, classes, size=size, grey=grey, fit=fit)

    def name(self, index: int) -> str:
        """Return the path of an image in its shard."""
        return self.names[index]

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        return self.spans.read(index, self.names[index])

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of the classes, the names and the sizes of all images."""
        parts = {"names": self.names.digest(), "content": self.spans.digest()}
        return common_fingerprint(self.classes, self.labels) | parts


def find_shards(path: Path) -> list[Path]:
    """Return the .tar files of a folder or pattern, sorted by name."""
    if path.is_dir():
        files = sorted(path.glob("*.tar"))
    elif path.is_file():
        files = [path]
    else:
        files = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
    if not files:
        raise MissingData(f"no shards at {path}. Give a folder of .tar files, a .tar file or a pattern of names.")
    compressed = [file.name for file in files if file.suffix != ".tar"]
    require(not compressed, "path", "uncompressed .tar files, which allow random access", compressed[:1])
    return files


Index = tuple[Names, Spans, LabelCodes]


def _scan(files: Sequence[Path]) -> Index:
    """Read all headers and labels; return names, positions and labels of the samples."""
    numbers, offsets, lengths = array("i"), array("q"), array("q")
    codes = LabelCodes()

    def scan() -> Iterator[str]:
        for number, file in enumerate(files):
            for name, offset, length, text in _samples(file):
                numbers.append(number)
                offsets.append(offset)
                lengths.append(length)
                codes.append(text)
                yield name

    names = Names(scan())
    if not len(names):
        raise MissingData(f"no images in the {len(files)} shards at {files[0].parent}")
    return names, Spans(files, numbers, offsets, lengths), codes


def _samples(file: Path) -> Iterator[tuple[str, int, int, str]]:
    """Yield name, offset and length of each image of a shard, and the text of its label."""
    key, image, text = None, None, None
    try:
        with tarfile.open(file, "r:", tarinfo=StrictHeader) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                stem, _, extension = path.name.partition(".")
                if not member.isreg() or not stem or not extension:
                    continue
                if (member_key := str(path.parent / stem)) != key:
                    if image is not None:
                        yield (*image, _require_label(text, key, file))
                    key, image, text = member_key, None, None
                if f".{extension.lower()}" in IMAGE_SUFFIXES and image is None:
                    image = (member.name, member.offset_data, member.size)
                elif extension in ("cls", "json") and text is None:
                    text = _read_label(archive, member, extension, file)
            if image is not None:
                yield (*image, _require_label(text, key, file))
    except DamagedData:
        raise
    except Exception as error:  # a damaged archive can raise almost any exception
        raise DamagedData(f"{file} is not a complete tar archive: {error}") from error


def _read_label(archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str, file: Path) -> str | None:
    """Return the text of a label; None for JSON without the field `label`."""
    if member.size > MAX_LABEL_BYTES:
        raise DamagedData(f"{file}: {member.name!r} must have at most {MAX_LABEL_BYTES} bytes, not {member.size}")
    content = archive.extractfile(member)
    assert content is not None  # a regular file
    text = content.read().decode("utf-8")
    if extension == "cls":
        return text.strip()
    fields = json.loads(text)
    label = fields.get("label") if isinstance(fields, dict) else None
    return None if label is None else str(label)


def _require_label(text: str | None, key: str | None, file: Path) -> str:
    if not text:
        raise DamagedData(f"{file}: {key!r} must have a label in .cls, or in the field `label` of .json")
    return text


def _stored_index(files: Sequence[Path]) -> Index | None:
    """Return the index that `pack` wrote, if it describes these files."""
    path = files[0].parent / INDEX_FILE
    if not path.is_file():
        return None
    columns = read_arrays(path, ("files", "bytes", "names", "numbers", "offsets", "lengths", "labels"))
    stored = list(zip(map(str, columns["files"]), map(int, columns["bytes"]), strict=True))
    if stored != [(file.name, file.stat().st_size) for file in files]:
        return None
    names = Names(columns["names"].tobytes().decode("utf-8", "surrogateescape").split("\0"))
    spans = Spans(files, columns["numbers"], columns["offsets"], columns["lengths"])
    counts = {len(column) for column in (names, spans.file_numbers, spans.offsets, spans.lengths, columns["labels"])}
    if len(counts) != 1:
        raise DamagedData(f"{path} must have columns of the same length; delete it to read the shards instead")
    if len(names) and not 0 <= spans.file_numbers.min() <= spans.file_numbers.max() < len(files):
        raise DamagedData(f"{path} must refer to the {len(files)} shards; delete it to read the shards instead")
    codes = LabelCodes()
    for label in columns["labels"].tolist():
        codes.append(str(label))
    return names, spans, codes


def pack(folder: str | Path, out: str | Path, *, shard_bytes: int = 2**28, seed: int | None = None) -> list[Path]:
    """Write the images of a folder, one subfolder per class, as tar shards.

    Files are copied unchanged. `classes.txt` and an index of the shards are written next to them.

    Args:
        folder: contains one subfolder of images per class.
        out: folder for the shards; must be empty or not exist.
        shard_bytes: size after which a new shard begins, at least 1 MiB.
        seed: shuffle the images with this seed, for readers that read shards from beginning to end.

    Returns:
        the paths of the shards.
    """
    require(is_integer(shard_bytes, 2**20), "shard_bytes", f"an integer >= {2**20}", shard_bytes)
    source, target = ImageFolderSource(folder, grey=False), Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"out must be a new or empty folder, not {str(target)!r}")
    for name in source.classes:  # check before anything is written
        is_line = not {"\n", "\r"} & set(name) and name.encode("utf-8", "replace").decode() == name
        require(is_line, "folder", "one whose class names are lines of UTF-8 text", name)
    make_folder(target)
    count = len(source)
    order = range(count) if seed is None else torch.randperm(count, generator=_seeded(seed)).tolist()
    shards: list[Path] = []
    members: list[tuple[str, int, int, int, int]] = []  # name, shard, offset, length, label
    keys: set[str] = set()
    remaining = iter(order)
    index = next(remaining, None)
    while index is not None:
        shards.append(target / f"shard-{len(shards):06d}.tar")
        with replacing(shards[-1]) as draft, tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as archive:
            while index is not None and archive.offset < shard_bytes:
                label = int(source.labels[index])
                name, content = _unique_name(source.name(index), keys), source.read(index)
                offset = _add(archive, name, content)
                _add(archive, f"{_key(name)}.cls", str(label).encode())
                members.append((name, len(shards) - 1, offset, len(content), label))
                index = next(remaining, None)
    _write_text(target / CLASSES_FILE, "".join(f"{name}\n" for name in source.classes))
    _write_index(target / INDEX_FILE, shards, members)
    return shards


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _key(name: str) -> str:
    """Return the key of a sample: its path up to the first dot of the file name."""
    path = PurePosixPath(name)
    return str(path.parent / path.name.partition(".")[0])


def _unique_name(name: str, keys: set[str]) -> str:
    """Return the name of an image with its suffix as the only dot, and a number if another image has the same key."""
    path = PurePosixPath(name)
    stem, suffix = path.stem.replace(".", "_"), path.suffix.lower()
    key, number = str(path.parent / stem), 1
    while key in keys:
        number += 1
        key = str(path.parent / f"{stem}_{number}")
    keys.add(key)
    return key + suffix


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> int:
    """Append a file to an archive; return the offset of its content. Dates and owners are not stored."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
    blocks = -(-len(content) // tarfile.BLOCKSIZE)  # the content is padded to a multiple of the block size
    return archive.offset - blocks * tarfile.BLOCKSIZE


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _write_index(path: Path, shards: Sequence[Path], members: Sequence[tuple[str, int, int, int, int]]) -> None:
    names, numbers, offsets, lengths, labels = zip(*members, strict=True)
    arrays: dict[str, NDArray[Any]] = {
        "files": np.array([shard.name for shard in shards]),
        "bytes": np.array([shard.stat().st_size for shard in shards], dtype=np.int64),
        "names": np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), dtype=np.uint8),
        "numbers": np.array(numbers, dtype=np.int32),
        "offsets": np.array(offsets, dtype=np.int64),
        "lengths": np.array(lengths, dtype=np.int64),
        "labels": np.array(labels, dtype=np.int64),
    }
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
