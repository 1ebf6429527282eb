"""Records: one JSON file per row and seed, written atomically. A row that has a record is not run again."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypersphere._files import replacing
from hypersphere._validation import require
from hypersphere.data import DamagedData
from hypersphere.recipes.recipe import Outcome, Recipe, Row, Trial
from hypersphere.training.origin import made_with

__all__ = ["Record", "execute", "read_records", "read_tensors", "record_path", "run_name"]


@dataclass(frozen=True)
class Record:
    """One run of one row: its settings, environment and results. None stands for a number that is not finite."""

    recipe: str
    row: str
    seed: int
    settings: dict[str, Any]
    metrics: dict[str, float | None]
    seconds: float
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    threads: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        with replacing(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; raise `DamagedData` if the file is not one."""
        try:
            record = cls(**json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None))
            # JSON knows the fields but not their types, so these are compared with the annotations.
            for name, kind in get_type_hints(cls).items():
                if not _has_type(getattr(record, name), kind):
                    raise ValueError(f"{name} must be {kind}, not {reprlib.repr(getattr(record, name))}")
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedData(f"{path} is not a record: {error}") from None
        return record


def execute(
    recipe: Recipe,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    data_root: Path | None = None,
    on_progress: Callable[[Row, int, float], None] | None = None,
) -> list[Record]:
    """Run every row with every seed for which there is no record yet; return the records of all rows and seeds.

    Args:
        recipe: the table.
        out: folder of the records, `out/NAME/ROW/seed-K.json`, with tensors next to them as safetensors.
        seeds: seeds to run; by default those of the recipe.
        rows: names of the rows to run; all if None.
        overrides: settings that replace those of the recipe, for a smaller or larger scale, but none that rows set.
            They become part of the record, and the records are stored separately, in `out/NAME@HASH/`.
        data_root: folder of the data sets; None uses the environment variable HYPERSPHERE_DATA.
        on_progress: called with the row, the seed and the fraction done, which is 1 at the end and for old records.
    """
    changes = dict(overrides or {})
    names = [row.name for row in recipe.rows]
    require(set(rows or names) <= set(names), "rows", f"names among {', '.join(names)}", rows)
    chosen = [row for row in recipe.rows if rows is None or row.name in rows]
    # All settings are checked before the first run, which may take hours.
    planned = [(row, recipe.settings_of(row, changes)) for row in chosen]
    environment, records = made_with(), []
    for row, settings in planned:
        for seed in map(int, recipe.seeds if seeds is None else seeds):
            request: dict[str, Any] = {"recipe": recipe.name, "row": row.name, "seed": seed, "settings": settings}
            request["overrides"] = {key: settings[key] for key in changes}
            path = record_path(out, recipe.name, row.name, seed, request["overrides"])
            record = _read_finished(path, request)
            if record is None:
                trial = Trial(seed, partial(_report_progress, on_progress, row, seed), data_root)
                record = _run(recipe, request, trial, path, environment)
            records.append(record)
            if on_progress is not None:
                on_progress(row, seed, 1.0)
    return records


def run_name(recipe: str, overrides: Mapping[str, Any]) -> str:
    """Return the folder of a run: the name of the recipe, and a hash of the overrides if there are any.

    >>> run_name("digits", {}), run_name("digits", {"epochs": 1})
    ('digits', 'digits@f75a221d')
    """
    return _file_name(recipe) + (f"@{_short_hash(dict(overrides))}" if overrides else "")


def record_path(out: Path, recipe: str, row: str, seed: int, overrides: Mapping[str, Any] | None = None) -> Path:
    """Return the path of the record of a row and seed."""
    return out / run_name(recipe, overrides or {}) / _file_name(row) / f"seed-{seed}.json"


def read_records(out: Path, run: str) -> list[Record]:
    """Read all records of a run, `NAME` or `NAME@HASH` (see `run_name`), by row and seed."""
    records = [Record.read(path) for path in (out / run).glob("*/seed-*.json")]
    return sorted(records, key=lambda record: (record.row, record.seed))


def read_tensors(out: Path, record: Record) -> dict[str, Tensor]:
    """Read the tensors that a run stored for pictures; empty if it stored none."""
    path = record_path(out, record.recipe, record.row, record.seed, record.overrides).with_suffix(".safetensors")
    try:
        return load_file(path) if path.exists() else {}
    except SafetensorError as error:
        raise DamagedData(f"{path} is not a file of tensors: {error}") from None


def _report_progress(
    on_progress: Callable[[Row, int, float], None] | None, row: Row, seed: int, fraction: float
) -> None:
    if on_progress is not None and fraction < 1:  # the end is reported when the record has been written
        on_progress(row, seed, fraction)


def _read_finished(path: Path, request: Mapping[str, Any]) -> Record | None:
    """Return the record at a path, or None if there is none or it belongs to other settings."""
    if not path.exists():
        return None
    record = Record.read(path)
    # Compared as text, because 1, 1.0 and True are equal in Python but different settings.
    recorded = {key: getattr(record, key) for key in request}
    return record if _canonical_json(recorded) == _canonical_json(request) else None


def _run(
    recipe: Recipe, request: Mapping[str, Any], trial: Trial, path: Path, environment: Mapping[str, Any]
) -> Record:
    _require_writable(path.parent)  # before training, not after it
    tensor_path = path.with_suffix(".safetensors")
    # Files of other settings are removed, the record first: a record without its tensors must not exist.
    for old in (path, tensor_path):
        old.unlink(missing_ok=True)
    trial.tell(0.0)
    torch.manual_seed(trial.seed)
    began = time.perf_counter()
    try:
        outcome = recipe.run(request["settings"], trial)
    except FloatingPointError:
        outcome = Outcome({"diverged": 1.0})
    record = Record(
        **request,
        metrics={key: _finite_or_none(value) for key, value in outcome.metrics.items()},
        seconds=round(time.perf_counter() - began, 3),
        # Six digits are enough for figures and keep records small.
        curves={key: [_finite_or_none(f"{value:.6g}") for value in values] for key, values in outcome.curves.items()},
        commit=environment["commit"],
        versions={name: environment[name] for name in ("hypersphere", "python", "torch", "numpy")},
        machine=environment["machine"],
        threads=environment["threads"],
    )
    if outcome.tensors:
        # safetensors rejects tensors that share memory or are not contiguous.
        tensors = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in outcome.tensors.items()}
        with replacing(tensor_path) as draft:
            save_file(tensors, draft)
    record.write(path)  # last, so that a record implies that its tensors exist
    return record


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"out must be a writable folder, not {folder}: {error.strerror}") from None


def _finite_or_none(value: float | str) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def _file_name(name: str) -> str:
    """Return a file name that is valid on every system; a hash keeps names distinct that become equal."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_=.") else "_" for letter in name)
    return name if safe[:80] == name and name.strip(".") else f"{safe[:80]}-{_short_hash(name)}"


def _short_hash(value: Any) -> str:
    return hashlib.sha256(_canonical_json(value).encode()).hexdigest()[:8]


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


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
