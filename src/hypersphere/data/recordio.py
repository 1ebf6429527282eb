"""Face recognition data in the formats of insightface: MXNet RecordIO and .bin verification sets. MXNet is not needed.

A RecordIO file is a sequence of records: the magic number, a word with the kind (3 bits) and the length (29 bits),
and the content, padded to four bytes. The content of an image record is a header (flag, label, two identifiers), then
`flag` further labels as float32, then the encoded image. The .idx file lists "key, tab, offset" for each record.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere.data._files import DamagedData, MissingData, read_content
from hypersphere.data._pickles import dense_array, load_pickle
from hypersphere.data.images import MAX_IMAGE_BYTES, BrokenSample, Size
from hypersphere.data.pairs import Pairs
from hypersphere.data.sources import ImageSource, common_fingerprint, digest

MAGIC = 0xCED7230A
HEADER = struct.Struct("<IfQQ")  # flag, label, id, id2
FRAME = struct.Struct("<II")  # magic, kind and length
MAX_LABELS = 64  # labels of one record
BIN_FOLDS = 10


class RecordSource(ImageSource):
    """Images in a RecordIO file, with random access.

    Args:
        path: the .rec file, or a folder that contains train.rec. The .idx file next to it is used if it exists.
        size, grey, fit: see ImageSource.
    """

    def __init__(self, path: str | Path, *, size: Size = None, grey: bool | None = None, fit: str = "stretch") -> None:
        location = Path(path).expanduser()
        self.file = location / "train.rec" if location.is_dir() else location
        if not self.file.is_file():
            raise MissingData(f"{self.file} not found. Give a .rec file, or a folder with train.rec and train.idx.")
        self.keys, self.offsets, identity_of = _index(self.file)
        # Identities may be any integers; labels number those that occur.
        identities, labels = np.unique(identity_of, return_inverse=True)
        classes = [str(identity) for identity in identities.tolist()]
        super().__init__(torch.from_numpy(labels.astype(np.int64)), classes, size=size, grey=grey, fit=fit)

    def name(self, index: int) -> str:
        """Return the file name and the key of a record."""
        return f"{self.file.name}/{int(self.keys[index])}"

    def read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        name = self.name(index)
        try:
            with self.file.open("rb") as file:
                file.seek(int(self.offsets[index]))
                return _image_of(_read_record(file, MAX_IMAGE_BYTES))
        except (OSError, ValueError, struct.error) as error:
            raise BrokenSample(name, str(error)) from error

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of the labels, the keys and the offsets of all records, and the size of the file."""
        return common_fingerprint(self.classes, self.labels) | {
            "names": digest(self.keys.tobytes()),
            "content": digest(self.offsets.tobytes(), str(self.file.stat().st_size).encode()),
        }


def _index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return keys, offsets and identities of the image records."""
    index_file = path.with_suffix(".idx")
    keys, offsets = _read_idx(index_file) if index_file.is_file() else _scan_offsets(path)
    keys_out, offsets_out, labels = array("q"), array("q"), array("q")
    # Unbuffered, because a buffered read at each of millions of offsets would fetch 8 KiB.
    with path.open("rb", buffering=0) as file:
        image_end = None  # first key that is not an image
        for key, offset in zip(keys.tolist(), offsets.tolist(), strict=True):
            file.seek(offset)
            try:
                flag, label = _read_label(file)
            except (ValueError, struct.error) as error:
                raise DamagedData(f"{path}: record {key} at offset {offset} is damaged: {error}") from error
            # In the files of insightface, record 0 has two labels: the first key after those of the images, and the
            # first key after those of the identities. The records in between describe identities, not images.
            if key == 0 and flag == 2:
                image_end = int(label)
                continue
            if image_end is None or key < image_end:
                keys_out.append(key)
                offsets_out.append(offset)
                labels.append(int(label))
    if not labels:
        raise MissingData(f"no image records in {path}")
    return tuple(np.array(column, dtype=np.int64) for column in (keys_out, offsets_out, labels))  # type: ignore[return-value]


def _read_idx(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the keys and offsets that an .idx file lists."""
    keys, offsets = array("q"), array("q")
    with path.open(encoding="ascii", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            fields = line.split()
            if not fields:
                continue
            if len(fields) != 2 or not all(field.isdecimal() and len(field) < 19 for field in fields):
                raise DamagedData(f"{path} line {number} must be a key and an offset, not {line[:80]!r}")
            keys.append(int(fields[0]))
            offsets.append(int(fields[1]))
    return np.array(keys, dtype=np.int64), np.array(offsets, dtype=np.int64)


def _scan_offsets(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers 0, 1, … of all records as keys, and their offsets."""
    offsets, size = array("q"), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        while (offset := file.tell()) < size:
            try:
                for _, length in _frames(file):
                    file.seek(length + -length % 4, 1)
            except (ValueError, struct.error) as error:
                raise DamagedData(f"{path}: the record at offset {offset} is damaged: {error}") from error
            offsets.append(offset)
    return np.arange(len(offsets), dtype=np.int64), np.array(offsets, dtype=np.int64)


def _frames(file: Any) -> Iterator[tuple[int, int]]:
    """Yield kind and length of each part of the record at the current position. The caller reads or skips the part.

    Kind 0 is a complete record. A record whose content includes the magic number is divided at it into a first part
    (1), middle parts (2) and a last part (3).
    """
    while True:
        magic, word = FRAME.unpack(file.read(FRAME.size))
        if magic != MAGIC:
            raise ValueError(f"it must begin with the magic number {MAGIC:#x}, not {magic:#x}")
        kind, length = word >> 29, word & (2**29 - 1)
        yield kind, length
        if kind in (0, 3):
            return


def _read_record(file: Any, limit: int) -> bytes:
    """Return the content of the record at the current position."""
    parts: list[bytes] = []
    for _, length in _frames(file):
        if length + sum(map(len, parts)) > limit:
            raise ValueError(f"it must have at most {limit} bytes, not {length}")
        part = file.read(length)
        if len(part) < length:
            raise ValueError(f"the file ends after {len(part)} of {length} bytes")
        file.seek(-length % 4, 1)
        parts.append(part)
    return struct.pack("<I", MAGIC).join(parts)  # the parts were split at the magic number


def _read_label(file: Any) -> tuple[int, float]:
    """Return flag and first label of the record at the current position; its image is not read."""
    _, length = next(_frames(file))
    head = file.read(min(length, HEADER.size + 4))
    flag, label = HEADER.unpack_from(head)[:2]
    if flag > MAX_LABELS:
        raise ValueError(f"it must have at most {MAX_LABELS} labels, not {flag}")
    first = struct.unpack_from("<f", head, HEADER.size)[0] if flag else label
    if not (abs(first) < 2**31 and first == int(first)):
        raise ValueError(f"its label must be an integer, not {first}")
    return flag, first


def _image_of(record: bytes) -> bytes:
    """Return the encoded image of a record, without the header and the labels."""
    flag = HEADER.unpack_from(record)[0]
    return record[HEADER.size + 4 * min(flag, MAX_LABELS) :]


class BinSource(ImageSource):
    """A verification set of insightface (lfw.bin, cfp_fp.bin, agedb_30.bin), kept in memory as encoded images.

    The file is a pickle of encoded images and booleans. Reading it runs no code of the pickle. The two
    images of a pair have the same label if they show the same person; labels of different pairs are different.

    Args:
        path: the .bin file.
        size, grey, fit: see ImageSource.

    Attributes:
        pairs: the pairs, in ten folds of consecutive pairs.
    """

    def __init__(self, path: str | Path, *, size: Size = None, grey: bool | None = None, fit: str = "stretch") -> None:
        self.file = Path(path).expanduser()
        if not self.file.is_file():
            raise MissingData(f"{self.file} not found. Give a .bin verification set.")
        images, same = _read_bin(self.file)
        ends = np.cumsum([0, *map(len, images)], dtype=np.int64)
        self._content: NDArray[np.uint8] = np.frombuffer(b"".join(images), dtype=np.uint8)
        self._ends = ends
        pair_numbers = torch.arange(len(same))
        # Like sklearn's KFold, `tensor_split` gives the first folds one pair more if the sizes differ.
        fold = torch.cat(
            [torch.full_like(part, number) for number, part in enumerate(pair_numbers.tensor_split(BIN_FOLDS))]
        )
        self.pairs = Pairs(2 * pair_numbers, 2 * pair_numbers + 1, same, fold)
        labels = torch.stack([2 * pair_numbers, torch.where(same, 2 * pair_numbers, 2 * pair_numbers + 1)], 1).flatten()
        present, labels = torch.unique(labels, return_inverse=True)
        classes = [str(number) for number in range(len(present))]
        super().__init__(labels, classes, size=size, grey=grey, fit=fit)

    def name(self, index: int) -> str:
        """Return the file name and the position of an image."""
        return f"{self.file.name}/{index}"

    def read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        return self._content[self._ends[index] : self._ends[index + 1]].tobytes()

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of the pairs and of the encoded images."""
        content = {"names": digest(self._ends.tobytes()), "content": digest(self._content.tobytes())}
        return common_fingerprint(self.classes, self.labels) | content


def _read_bin(path: Path) -> tuple[list[bytes], torch.Tensor]:
    """Return the encoded images of a .bin file, and a mask that is True for pairs of the same person."""
    loaded = load_pickle(read_content(path), path)
    if not isinstance(loaded, (tuple, list)) or len(loaded) != 2:
        raise DamagedData(f"{path} must contain images and booleans, not {type(loaded).__name__}")
    images = [_encoded(value, path) for value in loaded[0]] if isinstance(loaded[0], (list, tuple)) else []
    try:
        flags = loaded[1] if isinstance(loaded[1], (list, tuple)) else dense_array(loaded[1]).tolist()
    except DamagedData as error:
        raise DamagedData(f"{path}: {error}") from error
    if any(flag not in (0, 1) for flag in flags) or len(images) != 2 * len(flags) or not flags:
        raise DamagedData(f"{path} must contain two images per boolean, not {len(images)} for {len(flags)}")
    return images, torch.tensor([bool(flag) for flag in flags])


def _encoded(value: object, path: Path) -> bytes:
    """Return an encoded image that was pickled as a string, as bytes or as an array."""
    try:
        if isinstance(value, str):  # a string of Python 2, decoded as latin1
            return value.encode("latin1")
        if isinstance(value, bytes):
            return value
        values = dense_array(value)
    except (UnicodeEncodeError, DamagedData) as error:
        raise DamagedData(f"{path} must contain encoded images as bytes: {error}") from error
    if values.dtype != np.uint8:
        raise DamagedData(f"{path} must contain encoded images as bytes, not {values.dtype}")
    return values.tobytes()
