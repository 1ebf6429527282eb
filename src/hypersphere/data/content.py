"""Bytes and arrays out of files, each checked before anyone uses them."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere.data.errors import DamagedData

LARGEST_FILE = 2**30
CHUNK = 2**20


def read_content(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file, or the first `most` of them, decompressed when its name ends in .gz.

    Never more is decompressed than is returned; without `most`, a file of over LARGEST_FILE bytes is refused.
    """
    limit = LARGEST_FILE + 1 if most is None else most
    content = bytearray()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(min(CHUNK, limit - len(content))):
                content += chunk
    except (OSError, EOFError, zlib.error) as error:
        kind = "complete gzip" if path.suffix == ".gz" else "readable"
        raise DamagedData(f"{path} is not a {kind} file: {error}") from error
    if most is None and len(content) == limit:
        raise DamagedData(f"{path} must hold at most {LARGEST_FILE} bytes (decompressed), not more")
    return bytes(content)


def check_sum(content: bytes, expected: str, path: Path) -> None:
    """Raise DamagedData unless the SHA-256 of the (decompressed) content is the expected one."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DamagedData(
            f"{path} must have SHA-256 {expected} (decompressed), not {found}; "
            "get a fresh copy, or pass verify=False to read it anyway"
        )


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The named arrays of an npz file; never unpickles."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DamagedData(f"{path} must be an npz file, not a single array")
        with archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                found = ", ".join(archive.files)
                raise DamagedData(f"{path} must hold the arrays {', '.join(names)}, not {found}")
            assert archive.zip is not None
            largest = max(info.file_size for info in archive.zip.infolist())
            if largest > LARGEST_FILE:
                raise DamagedData(f"{path} must hold arrays of at most {LARGEST_FILE} bytes, not {largest}")
            arrays = {name: archive[name] for name in names}
    except DamagedData:
        raise
    except Exception as error:  # a broken npz file can fail in any way
        raise DamagedData(f"{path} is not a readable npz file: {type(error).__name__}: {error}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DamagedData(f"{path}: {name} must be an array, not {type(array).__name__}")
    return arrays
