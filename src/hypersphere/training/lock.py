"""A file lock that the system releases when the process ends for any reason."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["locked"]

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of an existing file within the context; without effect on systems or disks without locks.

    Raises:
        BlockingIOError: if another process holds the lock.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file, locked(Path(file.name)), locked(Path(file.name)):
        ...     pass
        Traceback (most recent call last):
        BlockingIOError: ...
    """
    with path.open("r+b") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
        yield
