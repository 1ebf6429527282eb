"""What commands write: lines on the terminal, and files that replace only what a command wrote before."""

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

SEARCHED = 1 << 16  # bytes at the beginning and at the end of a file in which the mark is looked for


def print_line(*lines: object) -> None:
    """Print lines that may contain names of files, classes or tensors."""
    for line in lines:
        print("\n".join(map(printable, str(line).split("\n"))), flush=True)


def warn(message: object) -> None:
    """Print a message on stderr."""
    print(f"hypersphere: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr, flush=True)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error says that memory could not be allocated, on the processor or on an accelerator."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|can't allocate memory", str(error), re.I))


def check_target(
    option: str, path: Path | None, suffixes: Sequence[str], companion: Path | None = None, *, mark: str = MARK
) -> None:
    """Raise a `ValueError` that names the option if a file cannot be written, or exists and is not ours.

    Args:
        option: the option that names the file.
        path: the file, or None.
        suffixes: accepted suffixes.
        companion: a file that is written next to it. It carries the mark for formats that have no place for it.
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
        ours = marked or not target.exists()
        if not ours:
            raise ValueError(
                f"{option}: {target} exists and was not written by this command; remove it or choose another name"
            )


def _contains(path: Path, mark: str) -> bool:
    if not path.is_file():
        return False
    forms = [form.encode() for form in (mark, html.escape(mark, quote=False))]
    with path.open("rb") as file:
        start = file.read(SEARCHED)
        file.seek(max(0, path.stat().st_size - SEARCHED))
        end = file.read(SEARCHED)
    return any(form in start or form in end for form in forms)


def mark_png(path: Path) -> None:
    """Add the mark to a PNG file, as text after its header."""
    content, text = path.read_bytes(), b"tEXtSoftware\0" + MARK.encode()
    header = 8 + 25  # the signature, and the header chunk
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    path.write_bytes(content[:header] + chunk + content[header:])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON with the mark; non-finite numbers become null."""
    with replacing(path) as draft:
        draft.write_text(strict_json({"note": MARK, **content}, indent=1) + "\n", encoding="utf-8")
