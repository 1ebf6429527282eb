"""Compare a cost model of `ShardedHead` with measured memory and traffic, and extrapolate it.

The model predicts, per process, the memory for class vectors, their gradient and the optimiser, and the bytes sent per
step. Both are measured with 2 to 4 gloo processes on one machine: memory as the growth of the peak resident set, traffic
as the bytes that the loopback interface counted. The formulas are explained in docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.timing import RESULTS
from hypersphere.heads import ShardedHead, arcface

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adamw": 2}
SAVED = 256e6  # largest size of normalised class vectors that a head saves for the backward pass
TERMS = 2  # numbers per sample that the processes exchange: the reduction over other classes, and the target's score
WARMUP, STEPS = 2, 4


@dataclass(frozen=True)
class Job:
    """A head with `classes` class vectors of dimension `dim`, divided among `ranks` processes.

    Attributes:
        batch: samples per process.
        sample: fraction of the classes per step; None for all.
        optimizer: a name of OPTIMIZER_STATES.
    """

    classes: int
    ranks: int
    dim: int = 128
    batch: int = 64
    sample: float | None = None
    optimizer: str = "sgd"

    @property
    def memory(self) -> dict[str, float]:
        """Bytes per process: float32 class vectors, optimiser state, gradient, and what the forward pass saves."""
        weight = 4 * self.dim * self.classes / self.ranks
        used = weight * (self.sample or 1.0)
        # A sampled gradient is sparse: the rows and one int64 index per row. The rows are copied to be computed with.
        gradient = used * (1 + 2 / self.dim) if self.sample else weight
        copied = used if self.sample else 0.0
        saved = used if used <= SAVED else 0.0
        return {
            "weight": weight,
            "optimizer": OPTIMIZER_STATES[self.optimizer] * weight,
            "gradient": gradient,
            "saved": copied + saved,
        }

    @property
    def traffic(self) -> float:
        """Bytes that each process sends per step, with ring algorithms; the backbone comes on top."""
        total, others = self.batch * self.ranks, self.ranks - 1
        features = 4 * self.dim * self.batch * others  # gathered from all processes
        labels = 8 * self.batch * others
        terms = 4 * TERMS * total * others
        gradient = 2 * others / self.ranks * 4 * self.dim * total  # of the features, summed over processes
        return features + labels + terms + gradient + 32 * others


def sent_bytes() -> int:
    """Return the bytes that the loopback interface has transmitted."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("there is no loopback interface")


def peak_memory() -> int:
    """Return the largest resident set since the last call of `reset_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def reset_peak() -> int:
    """Reset the peak and return the current resident set in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def worker(rank: int, job: Job, port: int, folder: str) -> None:
    """Train a head for a few steps and write what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.ranks)
    step_on(ShardedHead(arcface(job.dim, 4 * job.ranks)), job, torch.optim.SGD)  # buffers of gloo and of the blocks
    before = reset_peak()
    with torch.device("meta"):
        whole = arcface(job.dim, job.classes)
    head = ShardedHead(whole, sample=job.sample)
    choose = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    }[job.optimizer]
    seconds, sent = step_on(head, job, choose)
    result = {"memory": peak_memory() - before, "sent": sent / job.ranks / STEPS, "seconds": seconds / STEPS}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def step_on(head: ShardedHead, job: Job, choose: Any) -> tuple[float, int]:
    """Run some steps; return the seconds and the bytes that all processes sent in the last ones."""
    optimizer = choose(head.parameters()) if choose is not torch.optim.SGD else choose(head.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            dist.barrier()
            began, counted = time.perf_counter(), sent_bytes()
        x = torch.randn(job.batch, job.dim, generator=generator).requires_grad_()
        y = torch.randint(head.num_classes, (job.batch,), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        head(x, y).backward()
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - began, sent_bytes() - counted


def measure(job: Job) -> dict[str, float]:
    """Run a job in processes and return the measured bytes and seconds, averaged over processes."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.start_processes(worker, (job, port, folder), nprocs=job.ranks, start_method="spawn")
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: sum(result[key] for result in results) / len(results) for key in results[0]}


def table(jobs: list[Job]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the lines of a Markdown table, and the records behind it."""
    lines = [
        "| classes | processes | sampled | optimiser | memory MB: model | measured | sent KB: model | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    records = []
    for job in jobs:
        measured = measure(job)
        predicted = {"memory": sum(job.memory.values()), "sent": job.traffic}
        records.append({"job": asdict(job), "predicted": predicted, "measured": measured})
        lines.append(
            f"| {job.classes:,} | {job.ranks} | {job.sample or 'all'} | {job.optimizer} "
            f"| {predicted['memory'] / 1e6:.1f} | {measured['memory'] / 1e6:.1f} "
            f"| {predicted['sent'] / 1e3:.0f} | {measured['sent'] / 1e3:.0f} |"
        )
        print(lines[-1], flush=True)
    return lines, records


def main(arguments: list[str]) -> None:
    """Measure, print the table, and write it with --record."""
    parser = argparse.ArgumentParser(prog="./run bench scaling", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args(arguments)
    jobs = [Job(200_000, ranks, optimizer=name) for ranks in (2, 3, 4) for name in ("sgd", "momentum", "adamw")]
    jobs += [Job(200_000, ranks, sample=0.1) for ranks in (2, 3, 4)]
    lines, records = table(jobs)
    large = Job(10**8, 1024, dim=512, batch=64, sample=0.1, optimizer="sgd")
    text = "\n".join(lines)
    print(f"\n10⁸ classes on 1,024 processes: {large.memory}, {large.traffic / 1e6:.0f} MB sent per step")
    if options.record:
        (RESULTS / "scaling.md").write_text(f"{text}\n", encoding="utf-8")
        (RESULTS / "scaling.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([])
