"""Settings from a file and from the command line: one YAML or JSON file, then words such as `--head.m=4`."""

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
_SHORT = {  # what options of parts are often called
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
    """Return the settings of a job: `base`, changed by a file, by options and by dotted words, in this order.

    A part in a file that has no name changes the options of the one in `base`. An option that names a part keeps its
    options if that is its name already, and drops them if not, since they belong to another.

    Args:
        base: complete settings, of `Job.settings`.
        file: what `read_config` returned.
        options: settings by name; None is left alone.
        words: what `dotted_words` returned.

    Example:
        >>> found = resolve(Job().settings(), {"optimizer": {"lr": 0.1}}, {"head": "a_softmax"}, [(["head", "m"], 4)])
        >>> found["optimizer"]["name"], found["optimizer"]["lr"], found["head"]
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
    for path, value in sorted(words, key=lambda word: len(word[0]) > 1):  # names first: options belong to them
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
    """Return paths and values of `--a.b=value` and `--a.b value`; a last word without a value is true.

    Values are JSON, or text where they are none.

    Args:
        arguments: what the command's typed options left over.
        options: the names of those, for the message about a wrong one.

    Example:
        >>> dotted_words(["--head.m=4", "--model.widths", "[8, 8]", "--head.sharded"], [])
        [(['head', 'm'], 4), (['model', 'widths'], [8, 8]), (['head', 'sharded'], True)]
        >>> dotted_words(["--epoch", "3"], ["--epochs"])
        Traceback (most recent call last):
        ValueError: --epoch is no option; did you mean --epochs?
    """
    parts = [one.name for one in fields(Job)]
    words: list[Word] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        path = key.removeprefix("--").split(".")
        known = key.startswith("--") and path[0] in parts and len(path) > 1
        if not known or not all(path):
            rest = key.partition(".")[2]
            short = _SHORT.get(path[0].replace("-", "_")) if len(path) == 1 else None
            near = nearest(key, [f"--{name}.{rest}" for name in parts] if rest else options)
            near = f"; did you mean --{short}?" if short else near
            raise ValueError(f"{key} is no option{near}".removesuffix("."))
        if equals:
            words.append((path, json_or_text(value)))
        elif left and not left[0].startswith("--"):
            words.append((path, json_or_text(left.pop(0))))
        else:
            words.append((path, True))
    return words


def json_or_text(text: str) -> Any:
    """Return what a word of the command line stands for: JSON, or the text itself where it is none."""
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, by its ending; a run's own `config.json` serves too.

    Raises:
        ValueError: the file is not there, or holds no settings.
        ImportError: it is YAML, and PyYAML is not installed.
    """
    kinds = {".json": _json, ".yaml": _yaml, ".yml": _yaml}
    require(path.suffix in kinds, "--config", f"a file that ends in {', '.join(kinds)}", str(path))
    try:
        found = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"--config {path} cannot be read: {reason}") from None
    require(isinstance(found, dict), "--config", "a mapping of settings", found)
    known = all(isinstance(key, str) for key in found)
    require(known, "--config", "a mapping with words as keys", list(found))
    return found["settings"] if {"format", "settings"} <= found.keys() else found


def _json(text: str) -> Any:
    return json.loads(text)


def _yaml(text: str) -> Any:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ImportError("a YAML file needs PyYAML: pip install pyyaml, or write the settings as JSON") from None

    class Loader(yaml.SafeLoader):
        """Reads 1e-3 as a number, which YAML 1.1 calls text."""

    number = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
