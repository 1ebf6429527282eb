"""Find data files, read them within size limits and verify what they contain."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hypersphere._validation import require

ROOT_VARIABLE = "HYPERSPHERE_DATA"
MAX_FILE_BYTES = 2**30  # several times the largest file of the supported data sets
CHUNK_BYTES = 2**20  # `read(n)` allocates n bytes at once, so files are read in chunks

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class MissingData(FileNotFoundError):
    """A file or folder does not exist. The message says which folders were searched and how to get the file."""


class DamagedData(ValueError):
    """A file exists but does not contain what it should."""


class ForbiddenGlobal(DamagedData):
    """A pickle names a function or class that no data file needs."""


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of all data sets: `root`, or else the value of the environment variable HYPERSPHERE_DATA.

    Raises:
        MissingData: if neither is given or the folder does not exist.
    """
    # An empty environment variable counts as unset.
    path = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    if path is None:
        raise MissingData(f"no data folder: pass root= or set the environment variable {ROOT_VARIABLE}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        origin = "root" if root is not None else ROOT_VARIABLE
        raise MissingData(f"{origin} must be an existing folder, not {str(folder)!r}")
    return folder


def find_file(folders: Sequence[Path], names: Sequence[str], advice: str) -> Path:
    """Return the path of the first name that exists, searching folder by folder.

    Raises:
        MissingData: if there is none. The message ends with the advice, which says how to get the file.
    """
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
    searched = ", ".join(str(folder) for folder in folders)
    raise MissingData(f"{' or '.join(names)} not found in {searched}. {advice}")


def require_choice(argument: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    choices = tuple(choices)
    require(value in choices, argument, f"one of {', '.join(map(repr, choices))}", value)


def accept_root_first(
    *splits: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Let a loader with the arguments (split, root) also accept (root, split), the order of version 0.1.

    The old order gives a DeprecationWarning. The first argument is the root if it is None or a path, or if it is a
    string other than the splits and either a split is given too or a folder of that name exists.
    """

    # A misspelt split must not be mistaken for a root: the loader then lists the splits in its error message.
    def is_root(first: object, has_second: bool) -> bool:
        if first is None or isinstance(first, os.PathLike):
            return True
        return isinstance(first, str) and first not in splits and (has_second or Path(first).expanduser().is_dir())

    def decorate(loader: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Result:
            has_second = "split" in kwargs or (len(args) > 1 and args[1] in splits)
            if not args or not is_root(args[0], has_second):
                return loader(*args, **kwargs)
            name = loader.__name__
            message = f"{name}(root, split) is deprecated, use {name}(split, root) or {name}(split, root=root) instead"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            root, *split = args
            return cast(Callable[..., Result], loader)(*split, root=root, **kwargs)

        return load

    return decorate


def read_content(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a file, or the first `limit` of them. Files whose name ends in .gz are decompressed.

    Decompression stops at the limit, so a small file cannot fill the memory.

    Raises:
        DamagedData: if the file cannot be read or, without `limit`, has more than MAX_FILE_BYTES bytes.
    """
    read_limit = MAX_FILE_BYTES + 1 if limit is None else limit  # one byte more shows that the file is too large
    content = bytearray()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(min(CHUNK_BYTES, read_limit - len(content))):
                content += chunk
    except (OSError, EOFError, zlib.error) as error:
        kind = "complete gzip" if path.suffix == ".gz" else "readable"
        raise DamagedData(f"{path} is not a {kind} file: {error}") from error
    if limit is None and len(content) > MAX_FILE_BYTES:
        raise DamagedData(f"{path} must have at most {MAX_FILE_BYTES} bytes (decompressed), not more")
    return bytes(content)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    try:
        return read_content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise DamagedData(
            f"{path} line {number} must be UTF-8 text, not {error.object[error.start : error.end]!r}"
        ) from error


def verify_sha256(content: bytes, expected: str | None, path: Path) -> None:
    """Raise DamagedData unless the (decompressed) content has the expected SHA-256. None accepts any content."""
    if expected is not None and (actual := hashlib.sha256(content).hexdigest()) != expected:
        raise DamagedData(
            f"{path} must have SHA-256 {expected} (decompressed), not {actual}; "
            "get a new copy, or pass verify=False to read it anyway"
        )


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the named arrays of an npz file. Nothing is unpickled.

    Raises:
        DamagedData: if the file is not a complete npz file, lacks an array or contains a larger one than allowed.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DamagedData(f"{path} must be an npz file, not a single array")
        with archive:
            if any(name not in archive.files for name in names):
                present = ", ".join(archive.files)
                raise DamagedData(f"{path} must contain the arrays {', '.join(names)}, not {present}")
            # The directory of the archive states the decompressed sizes, so nothing has to be read for this check.
            assert archive.zip is not None
            largest = max(info.file_size for info in archive.zip.infolist())
            if largest > MAX_FILE_BYTES:
                raise DamagedData(f"{path} must contain arrays of at most {MAX_FILE_BYTES} bytes, not {largest}")
            arrays = {name: archive[name] for name in names}
    except DamagedData:
        raise
    except Exception as error:  # a damaged npz file can raise almost any exception
        raise DamagedData(f"{path} is not a readable npz file: {type(error).__name__}: {error}") from error
    for name, array in arrays.items():
        # For a member without the array header, NumPy returns its bytes.
        if not isinstance(array, np.ndarray):
            raise DamagedData(f"{path}: {name} must be an array, not {type(array).__name__}")
    return arrays


def check_columns(
    arrays: Mapping[str, NDArray[Any]], path: Path, *, rows: int, integers: Sequence[str], label: str, names: str
) -> None:
    """Raise DamagedData unless `integers` have one entry per row and `label` are positions in the 1-d array `names`."""
    for name in integers:
        array = arrays[name]
        if array.shape != (rows,) or array.dtype.kind not in "iub":  # signed, unsigned or Boolean
            raise DamagedData(f"{path}: {name} must be integers ({rows},), not {array.dtype} {array.shape}")
    if arrays[names].ndim != 1:
        raise DamagedData(f"{path}: {names} must be a 1-d array of names, not of shape {arrays[names].shape}")
    labels, count = arrays[label], len(arrays[names])
    if len(labels) and not 0 <= labels.min() <= labels.max() < count:
        raise DamagedData(f"{path}: {label} must be in 0..{count - 1}, not {labels.min()}..{labels.max()}")


def is_count(text: str, digits: int = 9) -> bool:
    """Return True if text is an integer >= 0 of at most `digits` digits.

    The number of digits is bounded because `int` rejects more than 4,300 with an error that does not name the file.
    """
    return text.isdecimal() and len(text) <= digits
