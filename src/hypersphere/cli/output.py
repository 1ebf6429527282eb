"""Print lines and write files. A command replaces only files that this program wrote, which carry a mark."""

from __future__ import annotations

import html
import os
import re
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypersphere._files import MARK, replacing, strict_json
from hypersphere._validation import printable, require

__all__ = ["check_target", "is_out_of_memory", "mark_png", "print_line", "printable", "warn", "write_json"]

SEARCHED_BYTES = 1 << 16  # at the beginning and at the end of a file, for the mark


def print_line(*lines: object) -> None:
    """Print lines with control characters escaped, because names of files, classes or tensors may contain some."""
    for line in lines:
        print("\n".join(map(printable, str(line).split("\n"))), flush=True)


def warn(message: object) -> None:
    """Print a message as one line on stderr."""
    print(f"hypersphere: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr, flush=True)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error says that memory could not be allocated, on the processor or on an accelerator."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|can't allocate memory", str(error), re.I))


def check_target(
    option: str, path: Path | None, suffixes: Sequence[str], companion: Path | None = None, *, mark: str = MARK
) -> None:
    """Raise a `ValueError` that names the option if a file cannot be written, or exists without the mark.

    Args:
        option: the option that names the file.
        path: the file, or None.
        suffixes: accepted suffixes.
        companion: a file that is written next to it. It has the mark if the format of the file has no place for it.
        mark: a text by which files of this command are known.
    """
    if path is None:
        return
    require(path.suffix in suffixes, option, f"a file with suffix {' or '.join(suffixes)}", str(path))
    require(not path.is_dir(), option, "a file", f"the folder {path}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    require(writable, option, "a file in a writable folder", str(path))
    for target in (path,) if companion is None else (path, companion):
        marked = _contains(target, mark) or (companion is not None and _contains(companion, mark))
        if target.exists() and not marked:
            raise ValueError(
                f"{option}: {target} exists and was not written by this command; remove it or choose another name"
            )


def _contains(path: Path, mark: str) -> bool:
    if not path.is_file():
        return False
    forms = [form.encode() for form in (mark, html.escape(mark, quote=False))]
    with path.open("rb") as file:
        start = file.read(SEARCHED_BYTES)
        file.seek(max(0, path.stat().st_size - SEARCHED_BYTES))
        end = file.read(SEARCHED_BYTES)
    return any(form in start or form in end for form in forms)


def mark_png(path: Path) -> None:
    """Add the mark to a PNG file, as a text chunk after the header."""
    content, text = path.read_bytes(), b"tEXtSoftware\0" + MARK.encode()
    header = 8 + 25  # bytes of the signature and of the header chunk
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    path.write_bytes(content[:header] + chunk + content[header:])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON with the mark; non-finite numbers become null."""
    with replacing(path) as draft:
        draft.write_text(strict_json({"note": MARK, **content}, indent=1) + "\n", encoding="utf-8")
