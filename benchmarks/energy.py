"""Measure the cost of energies: a training step with and without them, half space against its definition."""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import compare, save
from hypersphere.energy import MHE, CoMHE, hyperspherical_energy
from hypersphere.functions.projection import AnglePreserving, Random

TARGETS = {
    "half-space MHE": 1.02,
    "RP-CoMHE, 30 dims, 5 views": 1.04,
    "AP-CoMHE, unrolled": 1.06,
    "half space by f(c) + f(-c)": 0.5,
}


def cnn9() -> nn.Sequential:
    """Return the plain CNN-9 of the sources with 64, 128 and 256 filters."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 128, 256):
        for _ in range(3):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 256), nn.ReLU(), nn.Linear(256, 100))


def training_step(regulariser: Callable[[nn.Module], nn.Module] | None, batch: int) -> Callable[[], None]:
    """Return a function that runs one training step of CNN-9."""
    torch.manual_seed(0)
    net = cnn9()
    penalty = None if regulariser is None else regulariser(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        if penalty is not None:
            loss = loss + penalty()
        loss.backward()
        optimizer.step()

    return step


def alone(regulariser: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Return a function that runs forward and backward of the regulariser only."""
    torch.manual_seed(0)
    penalty = regulariser(cnn9())
    return lambda: penalty().backward()


REGULARISERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half-space MHE": lambda net: MHE(net),
    "RP-CoMHE, 30 dims, 5 views": lambda net: CoMHE(net, projection=Random(dim=30, views=5)),
    "AP-CoMHE, unrolled": lambda net: CoMHE(net, projection=AnglePreserving(dim=30)),
}


def by_definition(w: Tensor) -> Tensor:
    """Return the half-space energy by its definition, from 2N vectors."""
    both = F.normalize(torch.cat([w, -w]), dim=1)
    squared = 2 - 2 * both @ both.mT
    squared = squared + torch.diag(torch.full((len(both),), torch.inf))
    return squared.reciprocal().sum() / (len(both) * (len(both) - 1))


def gradient_of(energy: Callable[[Tensor], Tensor], w: Tensor) -> Callable[[], None]:
    """Return a function that computes an energy and its gradient."""
    w = w.clone().requires_grad_()
    return lambda: torch.autograd.grad(energy(w), w) and None


def peak_megabytes(work: Callable[[], object]) -> float:
    """Return the growth of the peak memory of a child process that runs `work`."""
    import multiprocessing

    def child(pipe) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    receive, send = multiprocessing.Pipe(False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(send,))
    process.start()
    grown = receive.recv()
    process.join()
    return grown


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench energy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--cpu-time", action="store_true", help="use process time, on a busy machine")
    parser.add_argument("--large", action="store_true", help="also 100,000 x 128, once (a minute or two)")
    parser.add_argument("--only", choices=("step", "half", "alone"))
    chosen = parser.parse_args(arguments)
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    # One thread: `peak_megabytes` forks, and a child hangs in OpenMP if its parent has started threads.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables = {}
    w = torch.randn(4096, 1152)
    contenders = {
        "2N vectors": gradient_of(by_definition, w),
        "half space by f(c) + f(-c)": gradient_of(lambda w: hyperspherical_energy(w, half_space=True), w),
    }
    if chosen.only in (None, "half"):
        for name, work in contenders.items():
            print(f"{name}: grows by {peak_megabytes(work):.0f} MB")
        tables["half-space energy and gradient, N=4096, d=1152"] = compare(
            contenders, baseline="2N vectors", rounds=max(3, chosen.rounds // 3), warmup=1, clock=clock
        )
    steps = {"no regulariser": training_step(None, chosen.batch)}
    if chosen.only in (None, "step"):
        steps |= {name: training_step(make, chosen.batch) for name, make in REGULARISERS.items()}
        title = f"a training step of plain CNN-9 (64/128/256), batch {chosen.batch}, 32x32"
        tables[title] = compare(steps, baseline="no regulariser", rounds=chosen.rounds, clock=clock)
    if chosen.only == "alone":
        steps |= {name: alone(make) for name, make in REGULARISERS.items()}
        tables["regularisers alone"] = compare(steps, baseline="no regulariser", rounds=chosen.rounds, clock=clock)
    save("energy", "Hyperspherical energy", tables, TARGETS)
    if chosen.large:
        w = torch.randn(100_000, 128)
        began = time.perf_counter()
        grown = peak_megabytes(gradient_of(lambda w: hyperspherical_energy(w, half_space=True), w))
        print(f"100,000 x 128, half space, with gradient: grows by {grown:.0f} MB, {time.perf_counter() - began:.0f} s")
