"""Records: one JSON file a row and seed, written at once or not at all, never run twice."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypersphere import __version__
from hypersphere.functions.menu import require
from hypersphere.recipes.recipe import Recipe, Row

__all__ = ["Record", "execute", "read_records", "read_tensors", "record_path"]


@dataclass(frozen=True)
class Record:
    """One run of one row: what was asked, where it ran, what came out."""

    recipe: str
    row: str
    seed: int
    settings: dict[str, Any]
    metrics: dict[str, float]
    seconds: float
    curves: dict[str, list[float]] = field(default_factory=dict)
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    threads: int = 0

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; a damaged one is a `ValueError` that names the file."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a record: {error}") from None


def execute(
    recipe: Recipe,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_progress: Callable[[Row, int, float], None] | None = None,
) -> list[Record]:
    """Run every row with every seed that has no record yet, and return all their records.

    Args:
        recipe: the table.
        out: folder of the records; `out/NAME/ROW/seed-K.json`, tensors beside it as safetensors.
        seeds: instead of the recipe's own.
        rows: names of the rows to run; all if None.
        overrides: settings instead of the recipe's, for a smaller or larger scale; they become part of the record.
        on_progress: told the row, the seed and the part of it that is done (1 when it is finished or was before).
    """
    unknown = set(overrides or {}) - set(recipe.settings)
    require(not unknown, "overrides", f"settings of {recipe.name}: {', '.join(recipe.settings)}", sorted(unknown))
    known = [row.name for row in recipe.rows]
    require(set(rows or known) <= set(known), "rows", f"names among {', '.join(known)}", rows)
    records = []
    for row in recipe.rows:
        if rows is not None and row.name not in rows:
            continue
        settings = {**recipe.settings, **row.settings, **(overrides or {})}
        for seed in recipe.seeds if seeds is None else seeds:
            path = record_path(out, recipe.name, row.name, seed)
            record = _finished(path, settings)
            if record is None:
                record = _run(recipe, row, settings, seed, path, on_progress)
            records.append(record)
            if on_progress is not None:
                on_progress(row, seed, 1.0)
    return records


def record_path(out: Path, recipe: str, row: str, seed: int) -> Path:
    """Where the record of a row and seed lies."""
    safe = "".join(letter if letter.isalnum() or letter in "-_=." else "_" for letter in row)
    return out / recipe / safe / f"seed-{seed}.json"


def read_records(out: Path, recipe: str) -> list[Record]:
    """Read all records of a recipe, in the order of their paths."""
    return [Record.read(path) for path in sorted((out / recipe).glob("*/seed-*.json"))]


def read_tensors(out: Path, record: Record) -> dict[str, Tensor]:
    """Read what a run kept for pictures; empty if it kept nothing."""
    path = record_path(out, record.recipe, record.row, record.seed).with_suffix(".safetensors")
    return load_file(path) if path.exists() else {}


def _finished(path: Path, settings: Mapping[str, Any]) -> Record | None:
    if not path.exists():
        return None
    record = Record.read(path)
    return record if record.settings == json.loads(json.dumps(dict(settings))) else None


def _run(
    recipe: Recipe,
    row: Row,
    settings: Mapping[str, Any],
    seed: int,
    path: Path,
    on_progress: Callable[[Row, int, float], None] | None,
) -> Record:
    def tell(part: float) -> None:
        if on_progress is not None and part < 1:
            on_progress(row, seed, part)

    tell(0.0)
    torch.manual_seed(seed)
    began = time.perf_counter()
    outcome = recipe.run(settings, seed, tell)
    record = Record(
        recipe=recipe.name,
        row=row.name,
        seed=seed,
        settings=dict(settings),
        metrics={key: float(value) for key, value in outcome.metrics.items()},
        seconds=round(time.perf_counter() - began, 3),
        curves={key: [float(f"{value:.6g}") for value in values] for key, values in outcome.curves.items()},
        commit=_commit(),
        versions={
            "hypersphere": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
        },
        machine=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if outcome.tensors:
        kept, temporary = path.with_suffix(".safetensors"), path.with_suffix(".safetensors.tmp")
        save_file({name: tensor.detach().contiguous() for name, tensor in outcome.tensors.items()}, temporary)
        os.replace(temporary, kept)
    record.write(path)  # last, so that a record means that all of it is there
    return record


def _commit() -> str | None:
    """The commit of the source tree, marked if it has changes; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+changes" if git("status", "--porcelain", "--", str(here)) else "")
