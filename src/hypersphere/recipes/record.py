"""Records: one JSON file a row and seed, written at once or not at all, never run twice."""

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
    """One run of one row: what was asked, where it ran, what came out; None for a number that was not finite."""

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
        """Write as JSON, atomically."""
        with replacing(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; what is none is `DamagedData` that names the file."""
        try:
            record = cls(**json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None))
            for name, kind in get_type_hints(cls).items():
                if not _fits(getattr(record, name), kind):
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
    """Run every row with every seed that has no record yet, and return all their records.

    Args:
        recipe: the table.
        out: folder of the records; `out/NAME/ROW/seed-K.json`, tensors beside it as safetensors.
        seeds: instead of the recipe's own.
        rows: names of the rows to run; all if None.
        overrides: settings instead of the recipe's, for a smaller or larger scale, but none that rows set themselves;
            they become part of the record, and their records lie apart, in `out/NAME@MARK/`.
        data_root: where data sets lie; None leaves it to the data room.
        on_progress: told the row, the seed and the part of it that is done (1 when it is finished or was before).
    """
    changes = dict(overrides or {})
    known = [row.name for row in recipe.rows]
    require(set(rows or known) <= set(known), "rows", f"names among {', '.join(known)}", rows)
    chosen = [row for row in recipe.rows if rows is None or row.name in rows]
    planned = [(row, recipe.settings_of(row, changes)) for row in chosen]  # all of them before any is run
    origin, records = made_with(), []
    for row, settings in planned:
        for seed in map(int, recipe.seeds if seeds is None else seeds):
            asked: dict[str, Any] = {"recipe": recipe.name, "row": row.name, "seed": seed, "settings": settings}
            asked["overrides"] = {key: settings[key] for key in changes}
            path = record_path(out, recipe.name, row.name, seed, asked["overrides"])
            record = _finished(path, asked)
            if record is None:
                trial = Trial(seed, partial(_tell, on_progress, row, seed), data_root)
                record = _run(recipe, asked, trial, path, origin)
            records.append(record)
            if on_progress is not None:
                on_progress(row, seed, 1.0)
    return records


def run_name(recipe: str, overrides: Mapping[str, Any]) -> str:
    """The folder of a run: the recipe's name, and a mark of their own for overrides.

    >>> run_name("digits", {}), run_name("digits", {"epochs": 1})
    ('digits', 'digits@f75a221d')
    """
    return _file_name(recipe) + (f"@{_mark(dict(overrides))}" if overrides else "")


def record_path(out: Path, recipe: str, row: str, seed: int, overrides: Mapping[str, Any] | None = None) -> Path:
    """Where the record of a row and seed lies."""
    return out / run_name(recipe, overrides or {}) / _file_name(row) / f"seed-{seed}.json"


def read_records(out: Path, run: str) -> list[Record]:
    """Read all records of a run, `NAME` or `NAME@MARK` (see `run_name`), by row and seed."""
    records = [Record.read(path) for path in (out / run).glob("*/seed-*.json")]
    return sorted(records, key=lambda record: (record.row, record.seed))


def read_tensors(out: Path, record: Record) -> dict[str, Tensor]:
    """Read what a run kept for pictures; empty if it kept nothing."""
    path = record_path(out, record.recipe, record.row, record.seed, record.overrides).with_suffix(".safetensors")
    try:
        return load_file(path) if path.exists() else {}
    except SafetensorError as error:
        raise DamagedData(f"{path} is not a file of tensors: {error}") from None


def _tell(on_progress: Callable[[Row, int, float], None] | None, row: Row, seed: int, part: float) -> None:
    if on_progress is not None and part < 1:  # that it is finished is said when its record is written
        on_progress(row, seed, part)


def _finished(path: Path, asked: Mapping[str, Any]) -> Record | None:
    if not path.exists():
        return None
    record = Record.read(path)
    # as text, because 1, 1.0 and True are equal to Python but not the same setting
    return record if _text({key: getattr(record, key) for key in asked}) == _text(asked) else None


def _run(recipe: Recipe, asked: Mapping[str, Any], trial: Trial, path: Path, origin: Mapping[str, Any]) -> Record:
    _require_writable(path.parent)
    kept = path.with_suffix(".safetensors")
    for old in (path, kept):  # of other settings; the record first: it promises that its tensors are there
        old.unlink(missing_ok=True)
    trial.tell(0.0)
    torch.manual_seed(trial.seed)
    began = time.perf_counter()
    try:
        outcome = recipe.run(asked["settings"], trial)
    except FloatingPointError:
        outcome = Outcome({"diverged": 1.0})
    record = Record(
        **asked,
        metrics={key: _finite(value) for key, value in outcome.metrics.items()},
        seconds=round(time.perf_counter() - began, 3),
        curves={key: [_finite(f"{value:.6g}") for value in values] for key, values in outcome.curves.items()},
        commit=origin["commit"],
        versions={name: origin[name] for name in ("hypersphere", "python", "torch", "numpy")},
        machine=origin["machine"],
        threads=origin["threads"],
    )
    if outcome.tensors:
        own = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in outcome.tensors.items()}
        with replacing(kept) as draft:
            save_file(own, draft)
    record.write(path)  # last, so that a record means that all of it is there
    return record


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"out must be a folder that can be written to, not {folder}: {error.strerror}") from None


def _finite(value: float | str) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def _file_name(name: str) -> str:
    """The name as a file may be called anywhere, marked if that changed it, so that no two names share a file."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_=.") else "_" for letter in name)
    return name if safe[:80] == name and name.strip(".") else f"{safe[:80]}-{_mark(name)}"


def _mark(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:8]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value that JSON gave has the annotated type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    return kind is Any or type(value) is kind or (kind is float and type(value) is int)
