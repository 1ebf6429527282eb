"""Read settings from a YAML or JSON file."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypersphere._validation import require

__all__ = ["read_settings"]


def read_settings(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, chosen by its suffix. The `config.json` of a run is accepted too.

    With `whole`, the content of a `config.json` is returned as it is.

    Raises:
        ValueError: if the file cannot be read or does not contain settings.
        ImportError: if it is YAML and PyYAML is not installed.
    """
    kinds: dict[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
    require(path.suffix in kinds, "--config", f"a file with suffix {', '.join(kinds)}", str(path))
    try:
        content = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"--config {path} cannot be read: {reason}") from None
    require(isinstance(content, dict), "--config", "a mapping of settings", content)
    require(all(isinstance(key, str) for key in content), "--config", "a mapping with text keys", list(content))
    return content["config"] if {"format", "config"} <= content.keys() and not whole else content


def _yaml(text: str) -> Any:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ImportError("a YAML file needs PyYAML (pip install pyyaml); or write the settings as JSON") from None

    class Loader(yaml.SafeLoader):
        """Reads 1e-3 as a number; YAML 1.1 would read it as text."""

    number = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
