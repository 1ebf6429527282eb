"""Atomic file writing (after a kill or a power cut, a file is either complete or absent), locks and checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

__all__ = ["MARK", "creating", "file_summary", "flush", "locking", "make_folder", "replacing", "strict_json"]

MARK = "written by hypersphere"  # commands replace an existing file only if it contains this mark
NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # raised by file systems without locks


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` at the end, and is deleted if anything fails.

    Several processes may replace the same path concurrently; a reader sees the old file or one of the new ones.

    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> with replacing(Path(folder.name) / "new" / "words.txt") as draft:
    ...     _ = draft.write_text("complete")
    >>> (Path(folder.name) / "new" / "words.txt").read_text()
    'complete'
    >>> folder.cleanup()
    """
    with _draft(path) as draft:
        yield draft
        flush(draft)
        os.replace(draft, path)
        flush(path.parent)


@contextmanager
def locking(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a file against other processes within the context; the system releases the lock of a killed process.

    The file is created if needed, and stays. On Windows and on file systems without locks, this has no effect.

    Args:
        path: a file that is never replaced, because the lock would be lost with the old file.
        wait: wait until the lock is free.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    with path.open("ab") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                if error.errno not in NO_LOCK_ERRORS:
                    raise
        yield


@contextmanager
def creating(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end it is renamed to `path`, which must still not exist.

    Raises:
        FileExistsError: `path` exists. It is not changed.
    """
    with _draft(path) as draft:
        yield draft
        flush(draft)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: reserve the name, then replace the empty file
            path.open("x").close()
            os.replace(draft, path)
        flush(path.parent)


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist, and flush the new names to the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the directory entries of a folder, are on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # some systems cannot open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON that every reader accepts: numbers that are not finite become null.

    >>> strict_json({"loss": [0.5, math.nan]})
    '{"loss": [0.5, null]}'
    """

    def finite(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(key): finite(part) for key, part in item.items()}
        if isinstance(item, (list, tuple)):
            return [finite(part) for part in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def file_summary(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 checksum of a file, which is read in parts."""
    checksum, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            checksum.update(part)
            size += len(part)
    return {"bytes": size, "sha256": checksum.hexdigest()}
