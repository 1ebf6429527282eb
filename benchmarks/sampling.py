"""Time a head with sampled classes as a ratio to the head with all classes, and measure the memory of ten million.

A step is forward and backward pass of ArcFace, alone and with the step of the optimiser: SGD with momentum for all
classes, `RowSGD` with the same momentum for sampled ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.timing import compare, save
from hypersphere.heads import AngularHead, ShardedHead, arcface
from hypersphere.optim import RowSGD

TARGETS = {0.1: 0.17}  # of a step with all classes, by the fraction of the classes
MEMORY_TARGET = 24  # GiB


def training_step(
    head: AngularHead | ShardedHead, batch: int, optimizer: torch.optim.Optimizer | None
) -> Callable[[], None]:
    """Return a step on random features and labels; without an optimiser, only the gradients are computed."""
    x = torch.randn(batch, head.in_features, requires_grad=True)
    y = torch.randint(head.num_classes, (batch,))

    def step() -> None:
        x.grad = None
        for parameter in head.parameters():
            parameter.grad = None
        head(x, y).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def sampled_head(classes: int, dim: int, fraction: float) -> tuple[ShardedHead, RowSGD]:
    """Return a head with sampled classes and its optimiser. The head never exists twice, because it starts on meta."""
    with torch.device("meta"):
        plan = arcface(dim, classes)
    head = ShardedHead(plan, sample=fraction)
    return head, RowSGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


def measure_memory(classes: int, dim: int, batch: int, fraction: float, steps: int) -> None:
    """Train for some steps and print the median seconds per step and the peak memory of this process as JSON."""
    head, optimizer = sampled_head(classes, dim, fraction)
    step = training_step(head, batch, optimizer)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": statistics.median(seconds), "gib": peak}))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench sampling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--classes", type=int, default=200_000)
    parser.add_argument("--fractions", type=float, nargs="*", default=[0.1, 0.05])
    parser.add_argument("--many", type=int, default=10_000_000, help="classes of the measurement of memory")
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.measure_memory:
        measure_memory(options.many, 128, 128, 0.05, steps=5)
        return
    tables, targets = {}, {}
    for dim in (128, 512):
        for with_optimizer in (False, True):
            full = arcface(dim, options.classes)
            sgd = torch.optim.SGD(full.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
            contenders = {"all classes": training_step(full, 128, sgd if with_optimizer else None)}
            for fraction in options.fractions:
                head, optimizer = sampled_head(options.classes, dim, fraction)
                contenders[f"{fraction:g} of the classes"] = training_step(
                    head, 128, optimizer if with_optimizer else None
                )
            size = f"{options.classes:,} classes × {dim}, batch 128, " + (
                "forward, backward and optimiser" if with_optimizer else "forward and backward"
            )
            tables[size] = compare(contenders, baseline="all classes", rounds=options.rounds)
            targets[size] = {f"{fraction:g} of the classes": target for fraction, target in TARGETS.items()}
    child = [sys.executable, "-m", "benchmarks", "sampling", "--measure-memory", "--many", str(options.many)]
    output = subprocess.run([*child, "--threads", str(options.threads)], check=True, capture_output=True, text=True)
    measured = json.loads(output.stdout.splitlines()[-1])
    notes = [
        f"{options.many:,} classes × 128, 0.05 of them sampled, batch 128, RowSGD with momentum, one process: peak of "
        f"{measured['gib']:.1f} GiB (target: at most {MEMORY_TARGET}), {measured['seconds']:.1f} s per step. The class "
        f"vectors and their momentum are {2 * options.many * 512 / 2**30:.1f} GiB of it.",
    ]
    save("sampling", "Sampled classes against all classes", tables, targets, notes)


if __name__ == "__main__":
    main(sys.argv[1:])
