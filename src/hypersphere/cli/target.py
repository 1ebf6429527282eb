"""Files that a command writes: checked before it begins, whole or not there when it ends."""

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
    """Refuse, in the words of the command line, a file that cannot be written or whose name ends in something else."""
    if path is None:
        return
    require(path.suffix in suffixes, option, f"a file that ends in {' or '.join(suffixes)}", str(path))
    require(not path.is_dir(), option, "a file", f"the folder {path}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    require(writable, option, "a file in a folder that can be written", str(path))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON; what is not finite becomes null."""
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
