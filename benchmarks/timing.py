"""Time contenders in turns, and report each time as a ratio to a run of the baseline right before or after it.

The speed of a shared machine drifts within seconds, and a step is slower or faster depending on what ran before it. So
every run of a contender has a run of the baseline next to it, before it in even rounds and after it in odd ones. The
order of the contenders rotates.
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
    """Time each contender and the baseline once per round; `clock=time.process_time` suits a busy machine."""
    for step in contenders.values():
        for _ in range(warmup):
            step()

    def seconds(name: str) -> float:
        began = clock()
        contenders[name]()
        return clock() - began

    # For each contender, pairs of its time and that of the baseline next to it.
    names = [name for name in contenders if name != baseline]
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if turn % 2 == 0:
                base = seconds(baseline)
                pairs[name].append((seconds(name), base))
            else:
                mine = seconds(name)
                pairs[name].append((mine, seconds(baseline)))
        gc.collect()
    base_times = [base for of in pairs.values() for _, base in of]
    timings = {baseline: Timing(1.0, 1.0, 1e3 * statistics.median(base_times))}
    for name, of in pairs.items():
        times = [mine for mine, _ in of]
        ratio = statistics.median(mine / base for mine, base in of)
        timings[name] = Timing(ratio, min(times) / min(base for _, base in of), 1e3 * statistics.median(times))
    return timings


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
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
