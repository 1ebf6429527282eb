"""Records: one JSON file per row and seed with settings, environment and results, written atomically."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypersphere._files import replacing
from hypersphere.data import DamagedData
from hypersphere.recipes.recipe import Recipe
from hypersphere.training.config import Config

__all__ = ["Record", "read_records", "read_tensors", "record_path", "run_name", "short_hash", "write_tensors"]


@dataclass(frozen=True)
class Record:
    """One run of one row: its settings, environment and results. Numbers that are not finite are None.

    Attributes:
        recipe, row, seed, scale: what was run.
        config: all settings, with the options of the measurement as "measure"; None in records of version 0.1.
        metrics, curves: the results.
        seconds: duration of training and measurement, since the last interruption.
        commit, versions, machine, threads: the environment of the run.
        overrides: settings that the user changed.
        chosen: settings that were chosen on held-out training data, by dotted path.
        trials: the settings of all trials they were chosen from, with the values of the metric.
    """

    recipe: str
    row: str
    seed: int
    scale: str
    config: dict[str, Any] | None
    metrics: dict[str, float | None]
    seconds: float
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    threads: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Any] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        with replacing(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def is_current(self, recipe: Recipe) -> bool:
        """Return True if the record has the settings that the recipe has now, and was chosen from its trials.

        Settings of version 0.1 cannot be compared, so such a record is current as long as the recipe has its row.
        """
        changes = {} if self.config is None else {**self.chosen, **self.overrides}
        try:
            settings = recipe.settings(self.row, self.scale, changes, self.seed)
        except ValueError:
            return False
        trials = [] if self.config is None else recipe.trials(recipe.row(self.row), self.scale)
        return self.has_settings(settings) and [trial["settings"] for trial in self.trials] == trials

    def has_settings(self, settings: Mapping[str, Any]) -> bool:
        """Return True if the record has these settings, or if they cannot be compared (version 0.1)."""
        if self.config is None:
            return True
        # A record lacks settings that were added to `Config` later. Their defaults are what it was made with.
        complete = {**Config().settings(), **self.config} if "model" in self.config else self.config
        # Compare as text, because 1, 1.0 and True are equal in Python but different settings.
        return json.dumps(settings, sort_keys=True) == json.dumps(complete, sort_keys=True)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record of this version or of 0.1; raise `DamagedData` if the file is not a record."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
            if isinstance(content, dict) and isinstance(content.get("settings"), dict):
                # Version 0.1 had one scale, and settings in another form.
                del content["settings"]
                content |= {"scale": "cpu", "config": None}
            record = cls(**content)
            # JSON does not guarantee types, so compare the values with the annotations.
            for name, kind in get_type_hints(cls).items():
                if not _has_type(getattr(record, name), kind):
                    raise ValueError(f"{name} must be {kind}, not {reprlib.repr(getattr(record, name))}")
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedData(f"{path} is not a record: {error}") from None
        return record


def run_name(recipe: str, overrides: Mapping[str, Any] | None = None, scale: str = "cpu") -> str:
    """Return the folder name of a recipe, with the scale unless it is "cpu", and a hash of the overrides, if any.

    >>> run_name("digits"), run_name("digits", {"epochs": 1}), run_name("digits", {"epochs": 1}, "paper")
    ('digits', 'digits@f75a221d', 'digits@paper-f75a221d')
    """
    parts = [*([] if scale == "cpu" else [scale]), *([short_hash(dict(overrides))] if overrides else [])]
    return _file_name(recipe) + ("@" + "-".join(parts) if parts else "")


def record_path(
    out: Path, recipe: str, row: str, seed: int, overrides: Mapping[str, Any] | None = None, scale: str = "cpu"
) -> Path:
    """Return the path of the record of a row and seed."""
    return out / run_name(recipe, overrides, scale) / _file_name(row) / f"seed-{seed}.json"


def read_records(out: Path, run: str) -> list[Record]:
    """Read all records of a run, such as `NAME` or `NAME@HASH` (see `run_name`), by row and seed."""
    records = [Record.read(path) for path in (out / run).glob("*/seed-*.json")]
    return sorted(records, key=lambda record: (record.row, record.seed))


def read_tensors(out: Path, record: Record) -> dict[str, Tensor]:
    """Read the tensors that a run stored for pictures; empty if it stored none."""
    path = record_path(out, record.recipe, record.row, record.seed, record.overrides, record.scale)
    path = path.with_suffix(".safetensors")
    try:
        return load_file(path) if path.exists() else {}
    except SafetensorError as error:
        raise DamagedData(f"{path} is not a file of tensors: {error}") from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors atomically."""
    # safetensors rejects tensors that share memory or are not contiguous.
    copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with replacing(path) as draft:
        save_file(copies, draft)


def finite_or_none(value: float | str) -> float | None:
    """Return a number, or None if it is not finite, which JSON cannot store."""
    return float(value) if math.isfinite(float(value)) else None


def short_hash(value: Any) -> str:
    """Return eight hexadecimal digits that identify plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _file_name(name: str) -> str:
    """Return a file name that is valid on every system. A changed name gets a hash, so that names stay distinct."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_=.") else "_" for letter in name)
    return name if safe[:80] == name and name.strip(".") else f"{safe[:80]}-{short_hash(name)}"


def _has_type(value: Any, kind: Any) -> bool:
    """Return True if a value read from JSON has the annotated type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_has_type(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(item, parts[1]) for item in value.values())
    # JSON may store a float without a fraction as an int.
    return kind is Any or type(value) is kind or (kind is float and type(value) is int)
