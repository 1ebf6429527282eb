"""Files that are there whole or not at all, also after a kill or a power cut."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["creating", "flush", "make_folder", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path of one's own to write to; it replaces `path` at the end, or goes away if anything fails.

    Two processes may do so for one path at once: a reader sees the old file or one of the new ones, never a part.

    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> with replacing(Path(folder.name) / "new" / "words.txt") as draft:
    ...     _ = draft.write_text("whole")
    >>> (Path(folder.name) / "new" / "words.txt").read_text()
    'whole'
    >>> folder.cleanup()
    """
    with _draft(path) as draft:
        yield draft
        flush(draft)
        os.replace(draft, path)
        flush(path.parent)


@contextmanager
def creating(path: Path) -> Iterator[Path]:
    """Yield a path of one's own to write to; it becomes `path` at the end if nobody else has made that meanwhile.

    Raises:
        FileExistsError: somebody has; what they wrote is untouched.
    """
    with _draft(path) as draft:
        yield draft
        flush(draft)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: take the name, then give it its content
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
    """Make a folder, and those above it, so that they are on the disk; what is there already is left alone."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # a system that cannot open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
