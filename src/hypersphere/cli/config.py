"""Read settings from a YAML or JSON file and from command-line arguments such as `--head.m=4`."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hypersphere._validation import require
from hypersphere.training import Job
from hypersphere.training.parts import nearest

__all__ = ["dotted_words", "json_or_text", "read_config", "resolve"]

Word = tuple[list[str], Any]
_SHORT = {  # common names for options of components
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "margin": "head.m",
    "m": "head.m",
    "scale": "head.s",
    "s": "head.s",
    "feature_dim": "model.feature_dim",
    "embedding_size": "model.feature_dim",
}


def resolve(
    base: Mapping[str, Any], file: Mapping[str, Any], options: Mapping[str, Any], words: Sequence[Word]
) -> dict[str, Any]:
    """Return the settings of a job: `base`, updated by a file, by options and by dotted arguments, in this order.

    A component without a name in the file updates the options of the component in `base`. Naming a component on the
    command line drops the options of a component with a different name, because they do not apply to the new one.

    Args:
        base: complete settings, from `Job.settings`.
        file: the result of `read_config`.
        options: settings by name; None means not given.
        words: the result of `dotted_words`.

    Example:
        >>> words = [(["head", "m"], 4)]
        >>> settings = resolve(Job().settings(), {"optimizer": {"lr": 0.1}}, {"head": "a_softmax"}, words)
        >>> settings["optimizer"]["name"], settings["optimizer"]["lr"], settings["head"]
        ('adamw', 0.1, {'name': 'a_softmax', 'm': 4})
    """
    settings = copy.deepcopy(dict(base))
    for key, value in file.items():
        part = settings.get(key)
        changes = isinstance(value, Mapping) and isinstance(part, Mapping) and "name" not in value
        settings[key] = {**part, **value} if changes and part is not None else value
    for key, value in options.items():
        if value is not None:
            _set(settings, [key], value)
    for path, value in sorted(
        words, key=lambda word: len(word[0]) > 1
    ):  # names first, because naming a component drops its options
        _set(settings, path, value)
    return Job.of(settings).settings()


def _set(settings: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    place = settings
    for key in above:
        inner = place.get(key)
        place[key] = {"name": inner} if isinstance(inner, str) else dict(inner) if isinstance(inner, Mapping) else {}
        place = place[key]
    part = place.get(last)
    if not above and isinstance(part, Mapping) and isinstance(value, str):
        value = dict(part) if part.get("name") == value else {"name": value}
    place[last] = value


def dotted_words(arguments: Sequence[str], options: Iterable[str]) -> list[Word]:
    """Return the paths and values of `--a.b=value` and `--a.b value`; `--a.b` without a value means true.

    Values are parsed as JSON; anything else is text.

    Args:
        arguments: the arguments that are not declared options of the command.
        options: the names of the declared options, used to suggest a correction.

    Example:
        >>> dotted_words(["--head.m=4", "--model.widths", "[8, 8]", "--head.sharded"], [])
        [(['head', 'm'], 4), (['model', 'widths'], [8, 8]), (['head', 'sharded'], True)]
        >>> dotted_words(["--epoch", "3"], ["--epochs"])
        Traceback (most recent call last):
        ValueError: --epoch is not an option; did you mean --epochs?
    """
    parts = [one.name for one in fields(Job)]
    words: list[Word] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        path = key.removeprefix("--").split(".")
        is_dotted = key.startswith("--") and path[0] in parts and len(path) > 1
        if not is_dotted or not all(path):
            rest = key.partition(".")[2]
            short = _SHORT.get(path[0].replace("-", "_")) if len(path) == 1 else None
            near = nearest(key, [f"--{name}.{rest}" for name in parts] if rest else options)
            near = f"; did you mean --{short}?" if short else near
            raise ValueError(f"{key} is not an option{near}".removesuffix("."))
        if equals:
            words.append((path, json_or_text(value)))
        elif left and not left[0].startswith("--"):
            words.append((path, json_or_text(left.pop(0))))
        else:
            words.append((path, True))
    return words


def json_or_text(text: str) -> Any:
    """Parse a command-line argument as JSON, or return the text itself if it is not JSON."""
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, chosen by its suffix. The `config.json` of a run is accepted too.

    Raises:
        ValueError: if the file cannot be read or does not contain settings.
        ImportError: if it is YAML and PyYAML is not installed.
    """
    kinds = {".json": _json, ".yaml": _yaml, ".yml": _yaml}
    require(path.suffix in kinds, "--config", f"a file with suffix {', '.join(kinds)}", str(path))
    try:
        content = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"--config {path} cannot be read: {reason}") from None
    require(isinstance(content, dict), "--config", "a mapping of settings", content)
    has_text_keys = all(isinstance(key, str) for key in content)
    require(has_text_keys, "--config", "a mapping with text keys", list(content))
    return content["settings"] if {"format", "settings"} <= content.keys() else content


def _json(text: str) -> Any:
    return json.loads(text)


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
