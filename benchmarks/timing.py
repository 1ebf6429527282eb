"""Time contenders in turns, and report each time as a ratio to the baseline of the same round.

The speed of a shared machine drifts; ratios within one round do not. The order of the contenders rotates.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Median over rounds of t(contender)/t(baseline), ratio of the fastest rounds, and median time in milliseconds."""

    ratio: float
    fastest_ratio: float
    milliseconds: float


def compare(
    contenders: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    rounds: int = 15,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each contender once per round; on a busy machine, `clock=time.process_time` with one thread varies less."""
    for step in contenders.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = clock()
            contenders[name]()
            times[name].append(clock() - began)
        gc.collect()
    base = times[baseline]
    return {
        name: Timing(
            statistics.median(mine / other for mine, other in zip(of, base, strict=True)),
            min(of) / min(base),
            1e3 * statistics.median(of),
        )
        for name, of in times.items()
    }


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
    }


def save(
    name: str,
    title: str,
    tables: Mapping[str, Mapping[str, Timing]],
    targets: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write `results/NAME.json` and `results/NAME.md`; `targets` are given by contender, or by table and contender."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "environment": environment(),
        "tables": {size: {n: asdict(t) for n, t in table.items()} for size, table in tables.items()},
        "targets": dict(targets or {}),
        "notes": list(notes),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = [f"# {title}", "", ", ".join(f"{key} {value}" for key, value in environment().items()), ""]
    for size, table in tables.items():
        lines += [f"## {size}", "", "| contender | ratio | fastest | ms | target |", "|---|---|---|---|---|"]
        for contender, t in table.items():
            target = (targets or {}).get(size, targets or {}).get(contender)
            lines.append(
                f"| {contender} | {t.ratio:.2f} | {t.fastest_ratio:.2f} | {t.milliseconds:.1f} | "
                f"{'' if target is None else f'≤ {target:g}'} |"
            )
        lines.append("")
    lines += [f"- {note}" for note in notes] + [""] * bool(notes)
    (RESULTS / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
