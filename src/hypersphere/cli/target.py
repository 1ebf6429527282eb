"""Output files of commands: checked before the work starts, and written atomically."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypersphere._files import replacing
from hypersphere._validation import require

__all__ = ["check_target", "write_json"]


def check_target(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Raise a `ValueError` that names the option if a file has the wrong suffix or cannot be written."""
    if path is None:
        return
    require(path.suffix in suffixes, option, f"a file with suffix {' or '.join(suffixes)}", str(path))
    require(not path.is_dir(), option, "a file", f"the folder {path}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    require(writable, option, "a file in a writable folder", str(path))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON; non-finite numbers become null."""
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
