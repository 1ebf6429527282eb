"""Bytes and arrays out of files, each checked before anyone uses them."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere.data.errors import DamagedData

BROKEN = (
    ValueError,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_content(path: Path) -> bytes:
    """The bytes of a file, decompressed when its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedData(f"{path} is not a complete gzip file: {error}") from error


def check_sum(content: bytes, expected: str, path: Path) -> None:
    """Raise DamagedData unless the SHA-256 of the (decompressed) content is the expected one."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DamagedData(
            f"{path} has SHA-256 {found} (decompressed), expected {expected}; "
            "get a fresh copy, or pass verify=False to read it anyway"
        )


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The named arrays of an npz file; never unpickles."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DamagedData(f"{path} is a single array, not an npz file")
        with archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DamagedData(f"{path} has no array {', '.join(missing)}; it holds {', '.join(archive.files)}")
            return {name: archive[name] for name in names}
    except DamagedData:
        raise
    except BROKEN as error:
        raise DamagedData(f"{path} is not a readable npz file: {error}") from error
