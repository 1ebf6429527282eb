"""Read settings from a YAML or JSON file, without running code, and with a limit on what YAML aliases expand to."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypersphere._validation import require

__all__ = ["is_config_of_run", "read_settings"]

MAX_NODES = 100_000  # largest number of values in a YAML file with aliases expanded


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
    parsers: dict[str, Callable[[str], Any]] = {".json": _parse_json, ".yaml": _parse_yaml, ".yml": _parse_yaml}
    require(path.suffix in parsers, "a settings file", f"a file with suffix {', '.join(parsers)}", str(path))
    try:
        content = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}") from None
    _require_mapping(content, path)
    return content


def _require_mapping(content: Any, path: str | Path) -> None:
    is_mapping = isinstance(content, dict) and all(isinstance(key, str) for key in content)
    require(is_mapping, str(path), "a mapping of settings", content)


def _parse_json(text: str) -> Any:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _require_unique([key for key, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=mapping)


def _require_unique(keys: Sequence[str]) -> None:
    seen: set[str] = set()
    for key in keys:
        require(key not in seen, "keys", "different within a mapping", key)
        seen.add(key)


def _parse_yaml(text: str) -> Any:
    yaml: Any = importlib.import_module("yaml")

    class Loader(yaml.SafeLoader):
        """Read 1e-3 as a number, which is text in YAML 1.1, and check the nodes before aliases are expanded."""

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
    """Return the number of nodes in a tree with aliases expanded. An alias to a node that contains it counts once."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = 1  # for aliases to this node among its children
    children = node.value
    if children and isinstance(children[0], tuple):  # the keys and values of a mapping
        _require_unique([key.value for key, _ in children if isinstance(key.value, str)])
        children = [child for pair in children for child in pair]
    total = 1 + sum(_count_nodes(child, counted) for child in children)
    require(total <= MAX_NODES, "the number of values", f"at most {MAX_NODES} with aliases expanded", total)
    counted[id(node)] = total
    return total
