"""Compare a cost model of `ShardedHead` with measured memory, traffic and time, and extrapolate it.

The model predicts the memory of each process, the bytes that it sends per step, and the seconds per step. All three are
measured with 2 to 4 gloo processes on one machine. docs/scaling.md explains the formulas.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.timing import RESULTS, environment
from hypersphere.heads import ShardedHead, arcface, fused_loss

FLOAT, INT = 4, 8  # bytes of a float32 and of an int64


# The model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerCost:
    """What an optimiser needs, in units of the class vectors of a process.

    Attributes:
        states: tensors as large as the class vectors.
        temporaries: tensors as large as the gradient that exist at the same time during a step.
        passes: how often a step reads or writes a tensor as large as the gradient.
    """

    states: int
    temporaries: int
    passes: int


OPTIMIZERS = {
    "sgd": OptimizerCost(0, 0, 3),
    "momentum": OptimizerCost(1, 0, 8),
    "adamw": OptimizerCost(2, 2, 21),  # the square root of the second moment, and its quotient
    "sparse_adam": OptimizerCost(2, 7, 30),  # old and new moments of the sampled rows
}
COLLECTIVES = 6  # sizes, features, labels, terms twice, gradient of the features
TERMS = 2  # numbers per sample that are reduced over processes: the sum over other classes, and the target's score
BLOCK_BUFFERS = 3  # block-sized matrices that exist at the same time in the loss
SCORE_PASSES = 22  # how often the loss reads or writes a score, apart from the matrix products
WEIGHT_PASSES = 6  # how often it reads or writes an entry of the class vectors or of their gradient


@dataclass(frozen=True)
class Machine:
    """Rates of one process: multiplications and additions, bytes of memory, bytes sent, seconds per collective."""

    flops: float
    memory_bandwidth: float
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Job:
    """A head with `classes` float32 class vectors of dimension `dim`, divided among `ranks` processes.

    Attributes:
        batch: samples per process.
        sample: fraction of the classes per step; None for all.
        optimizer: a name of OPTIMIZERS; with `sample`, "sgd" or "sparse_adam".
    """

    classes: int
    ranks: int
    dim: int = 128
    batch: int = 64
    sample: float | None = None
    optimizer: str = "sgd"

    @property
    def rows(self) -> float:
        """Class vectors of one process."""
        return self.classes / self.ranks

    @property
    def rows_in_use(self) -> float:
        """Class vectors of one process that take part in a step: the sampled ones, and the classes of the labels."""
        if self.sample is None:
            return self.rows
        return self.sample * self.rows + (1 - self.sample) * min(self.batch, self.rows)

    @property
    def global_batch(self) -> int:
        """Samples of all processes."""
        return self.batch * self.ranks

    @property
    def products(self) -> float:
        """Scores that one process computes per step."""
        return self.global_batch * self.rows_in_use

    @property
    def saves_products(self) -> bool:
        """Whether the forward pass saves the products for the backward pass, which computes them again otherwise."""
        return self.products <= fused_loss._SAVED_PRODUCTS

    @property
    def memory(self) -> dict[str, float]:
        """Bytes per process at the peak of a step; the backbone comes on top."""
        cost = OPTIMIZERS[self.optimizer]
        weight = FLOAT * self.dim * self.rows
        # A sampled gradient is sparse: the rows in use, and one int64 index per row.
        gradient = (FLOAT * self.dim + INT * (self.sample is not None)) * self.rows_in_use
        # The forward and backward pass: a copy of sampled rows, the products and blocks of the loss, and three matrices
        # of features of all processes: gathered, rescaled, and their gradient.
        copied = FLOAT * self.dim * self.rows_in_use if self.sample else 0.0
        saved = FLOAT * self.products if self.saves_products else 0.0
        features = 3 * FLOAT * self.dim * self.global_batch
        loss = copied + saved + BLOCK_BUFFERS * FLOAT * self._block_products() + features
        # They are freed before the optimiser needs its temporaries.
        return {
            "weight": weight,
            "optimizer": cost.states * weight,
            "gradient": gradient,
            "temporary": max(loss, cost.temporaries * gradient),
        }

    def _block_products(self) -> float:
        """Return the number of products in a block of classes."""
        return self.global_batch * fused_loss.classes_per_block(int(self.rows_in_use), self.dim, self.global_batch)

    @property
    def traffic(self) -> float:
        """Bytes that each process sends per step, with ring algorithms; the backbone comes on top."""
        others = self.ranks - 1
        sizes = 4 * INT * others
        features = FLOAT * self.dim * self.batch * others  # gathered
        labels = INT * self.batch * others
        # Each process reduces the terms of B samples: it sends the terms of all other samples, and gathers the results.
        terms = 2 * FLOAT * TERMS * self.batch * others
        gradient = 2 * FLOAT * self.dim * self.batch * others  # of the features, summed over processes
        return sizes + features + labels + terms + gradient

    @property
    def checkpoint(self) -> float:
        """Bytes that each process writes to a checkpoint."""
        return self.memory["weight"] + self.memory["optimizer"]

    def seconds(self, machine: Machine) -> float:
        """Return the time of a step. Computation and communication do not overlap."""
        # Scores, gradient of the class vectors, gradient of the features; and the scores again if they are not saved.
        flops = (6 if self.saves_products else 8) * self.dim * self.products
        passes = OPTIMIZERS[self.optimizer].passes + WEIGHT_PASSES
        touched = FLOAT * (SCORE_PASSES * self.products + passes * self.dim * self.rows_in_use)
        compute = flops / machine.flops + touched / machine.memory_bandwidth
        return compute + self.traffic / machine.bandwidth + COLLECTIVES * machine.latency


# The measurement -----------------------------------------------------------------------------------------------------

WARMUP, STEPS = 2, 6  # of the measured steps, the least disturbed one counts
MAKE_OPTIMIZER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters)),
}


def sent_bytes() -> int:
    """Return the bytes that the loopback interface has transmitted, for all processes of the machine."""
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
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def return_freed_memory() -> None:
    """Let the allocator return every freed tensor of at least 1 MB to the system, as no tensor is in use any more.

    By default, glibc keeps some of this memory, so that the resident set is larger than what is in use.
    """
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def worker(rank: int, job: Job, port: int, folder: str) -> None:
    """Train a head for a few steps and write what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.ranks)
    run_steps(Job(4 * job.ranks, job.ranks), steps=0)  # buffers of gloo and of the matrix products
    machine = calibrate(job)
    before = reset_peak()
    seconds, sent = run_steps(job, STEPS)
    result = {"resident": peak_memory() - before, "seconds": seconds, "sent": sent, "predicted": job.seconds(machine)}
    return_freed_memory()
    before = reset_peak()
    run_steps(job, steps=0)
    result["memory"] = peak_memory() - before
    Path(folder, f"{rank}.json").write_text(json.dumps(result | asdict(machine)))
    time.sleep(0.2)  # for the threads of gloo to release tensors, see `hypersphere.training.process_group`
    dist.destroy_process_group()


def run_steps(job: Job, steps: int) -> tuple[float, float]:
    """Train a new head; return the seconds and the bytes sent per process of the least disturbed step."""
    with torch.device("meta"):
        plan = arcface(job.dim, job.classes)
    head = ShardedHead(plan, sample=job.sample)
    optimizer = MAKE_OPTIMIZER[job.optimizer](head.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        x = torch.randn(job.batch, job.dim, generator=generator).requires_grad_()
        y = torch.randint(job.classes, (job.batch,), generator=generator)
        optimizer.zero_grad(set_to_none=True)  # the old gradient is freed before the new one is allocated
        head(x, y).backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    seconds, sent = [], []
    for _ in range(steps):
        dist.barrier()
        began, counted = time.perf_counter(), sent_bytes()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        sent.append((sent_bytes() - counted) / job.ranks)
    return min(seconds, default=0.0), min(sent, default=0.0)


def calibrate(job: Job) -> Machine:
    """Measure the rates of this process while all others do the same: they share cores and memory."""
    features = torch.randn(job.global_batch, job.dim)
    vectors = torch.randn(max(1, fused_loss._WEIGHT_ENTRIES_PER_BLOCK // job.dim), job.dim)
    source, target = torch.ones(2**23), torch.ones(2**23)  # 32 MB do not fit into the cache
    part = torch.ones(2**18)
    parts = [torch.empty_like(part) for _ in range(job.ranks)]
    number = torch.ones(1)
    return Machine(
        flops=2 * features.numel() * len(vectors) / shortest(lambda: features @ vectors.mT),
        memory_bandwidth=2 * FLOAT * source.numel() / shortest(lambda: target.copy_(source)),
        bandwidth=FLOAT * part.numel() * (job.ranks - 1) / shortest(lambda: dist.all_gather(parts, part)),
        latency=shortest(lambda: dist.all_reduce(number)),
    )


def shortest(work: Callable[[], object], windows: int = 5, calls: int = 4) -> float:
    """Return the seconds per call in the fastest of several windows that start in all processes at the same time."""
    seconds = []
    for _ in range(windows):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds)


def measure(job: Job) -> dict[str, float]:
    """Run a job in processes and return the measurements, averaged over processes."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.start_processes(worker, (job, port, folder), nprocs=job.ranks, start_method="spawn")
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: sum(result[key] for result in results) / len(results) for key in results[0]}


# The table -----------------------------------------------------------------------------------------------------------

HEADER = (
    "| ranks | classes × dim, batch | sample | optimiser | MB: model, measured, glibc | KB sent: model, measured "
    "| ms: model, measured | ratio |\n|---|---|---|---|---|---|---|---|"
)


def table_row(job: Job, measured: dict[str, float]) -> str:
    """Return one row of the Markdown table."""
    seconds, predicted = measured["seconds"], measured["predicted"]
    return (
        f"| {job.ranks} | {job.classes:,} × {job.dim}, {job.batch} | {job.sample or 'all'} "
        f"| {job.optimizer.replace('_', ' ')} "
        f"| {sum(job.memory.values()) / 1e6:.0f}, {measured['memory'] / 1e6:.0f}, {measured['resident'] / 1e6:.0f} "
        f"| {job.traffic / 1e3:.0f}, {measured['sent'] / 1e3:.0f} "
        f"| {1e3 * predicted:.0f}, {1e3 * seconds:.0f} | {seconds / predicted:.2f} |"
    )


def main(arguments: list[str]) -> None:
    """Measure, print the table, and write it with --record."""
    parser = argparse.ArgumentParser(prog="./run bench scaling", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="measure three jobs only")
    options = parser.parse_args(arguments)
    names = ("sgd", "momentum", "adamw")
    jobs = [Job(200_000, ranks, optimizer=name) for ranks in (2, 3, 4) for name in names]
    jobs += [Job(200_000, ranks, sample=0.1) for ranks in (2, 3, 4)]
    jobs += [Job(200_000, 2, sample=0.1, optimizer="sparse_adam"), Job(140_000, 2, dim=32, batch=512)]
    jobs = jobs[::5] if options.quick else jobs
    rows, records = [], []
    print(HEADER)
    for job in jobs:
        measured = measure(job)
        rows.append(table_row(job, measured))
        print(rows[-1], flush=True)
        predicted = {"memory": job.memory, "sent": job.traffic, "seconds": measured.pop("predicted")}
        records.append({"job": asdict(job), "predicted": predicted, "measured": measured})
    if options.record:
        note = ", ".join(f"{key} {value}" for key, value in (environment() | {"threads": "1 per process"}).items())
        (RESULTS / "scaling.md").write_text("\n".join([note, "", HEADER, *rows, ""]), encoding="utf-8")
        record = {"environment": environment(), "jobs": records}
        (RESULTS / "scaling.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([])
