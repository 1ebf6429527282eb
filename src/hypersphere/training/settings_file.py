"""Read settings from a YAML or JSON file, without running code and without expanding a small file to a huge one."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypersphere._validation import require

__all__ = ["is_config_of_run", "read_settings"]

MOST_NODES = 100_000  # values of a YAML file, counted as often as aliases repeat them


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, chosen by its suffix. The `config.json` of a run is accepted too.

    Raises:
        ValueError: if the file cannot be read or does not contain settings.
    """
    content = _read_mapping(Path(path))
    if not {"format", "config"} <= content.keys():
        return content
    _require_mapping(content["config"], path)
    return content["config"]


def is_config_of_run(path: str | Path) -> bool:
    """Return True if a settings file is the `config.json` of a run."""
    return "format" in _read_mapping(Path(path))


def _read_mapping(path: Path) -> dict[str, Any]:
    kinds: dict[str, Callable[[str], Any]] = {".json": _json, ".yaml": _yaml, ".yml": _yaml}
    require(path.suffix in kinds, "a settings file", f"a file with suffix {', '.join(kinds)}", str(path))
    try:
        content = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}") from None
    _require_mapping(content, path)
    return content


def _require_mapping(content: Any, path: str | Path) -> None:
    is_mapping = isinstance(content, dict) and all(isinstance(key, str) for key in content)
    require(is_mapping, str(path), "a mapping of settings", content)


def _json(text: str) -> Any:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _require_different([key for key, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=mapping)


def _require_different(keys: Sequence[str]) -> None:
    seen: set[str] = set()
    for key in keys:
        require(key not in seen, "keys", "different within a mapping", key)
        seen.add(key)


def _yaml(text: str) -> Any:
    yaml: Any = importlib.import_module("yaml")

    class Loader(yaml.SafeLoader):
        """Reads 1e-3 as a number; YAML 1.1 would read it as text. Checks the nodes before aliases are expanded."""

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            _count_nodes(node, {})
            return node

    number = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _count_nodes(node: Any, counted: dict[int, int]) -> int:
    """Return the number of nodes below and including a node, with aliases expanded; a loop is not followed."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = 1  # while the nodes below are counted
    inner = node.value
    if inner and isinstance(inner[0], tuple):
        _require_different([key.value for key, _ in inner if isinstance(key.value, str)])
        inner = [part for pair in inner for part in pair]
    total = 1 + sum(_count_nodes(part, counted) for part in inner)
    require(total <= MOST_NODES, "the number of values", f"at most {MOST_NODES} with aliases expanded", total)
    counted[id(node)] = total
    return total
