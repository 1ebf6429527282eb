"""Time `Hyperball` as ratios to its base optimiser, and row optimisers as ratios to `torch.optim.SparseAdam`.

A training step is forward, backward and optimiser step of a convolutional network or a transformer. The optimiser step
is also timed alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.timing import compare, save
from hypersphere.optim import Hyperball, RowAdamW, RowSGD

TARGET = 1.05  # of a training step


def network() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolutional network of 4.7 million parameters, and a batch."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 512, 10)), torch.randn(32, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer of 7.1 million parameters, and a batch."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(16, 64, 384)


MODELS = {"CNN": network, "transformer": transformer}
OPTIMIZERS: dict[str, dict[str, Callable]] = {
    "AdamW": {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "Hyperball(AdamW)": lambda p: Hyperball(torch.optim.AdamW(p, lr=1e-3)),
        "Hyperball(AdamW), rows": lambda p: Hyperball(torch.optim.AdamW(p, lr=1e-3), per="row"),
        "Hyperball(AdamW, fused)": lambda p: Hyperball(torch.optim.AdamW(p, lr=1e-3, fused=True)),
    },
    "AdamW, fused": {
        "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "Hyperball(AdamW, fused)": lambda p: Hyperball(torch.optim.AdamW(p, lr=1e-3, fused=True)),
    },
    "SGD": {
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "Hyperball(SGD)": lambda p: Hyperball(torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
        "Hyperball(SGD), rows": lambda p: Hyperball(torch.optim.SGD(p, lr=1e-3, momentum=0.9), per="row"),
    },
}
ROWS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=1e-3),
    "RowAdamW": lambda p: RowAdamW(p, lr=1e-3),
    "RowSGD": lambda p: RowSGD(p, lr=1e-3, momentum=0.9),
}


def training_step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def go() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return go


def row_step(make: Callable, count: int, dim: int, rate: float) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(count, dim, generator=generator))
    rows = (torch.rand(count, generator=generator) < rate).nonzero().T
    values = torch.randn(rows.shape[1], dim, generator=generator)
    weight.grad = torch.sparse_coo_tensor(rows, values, weight.shape, is_coalesced=True, check_invariants=False)
    return make([weight]).step


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench optimizers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the parameter of row optimisers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    tables, targets = {}, {}
    for name in options.models:
        for base, makers in OPTIMIZERS.items():
            alone, training = {}, {}
            for contender, make in makers.items():
                torch.manual_seed(0)
                model, x = MODELS[name]()
                optimizer = make(model.parameters())
                training[contender] = training_step(model, x, optimizer)
                training[contender]()  # leaves gradients for the step alone
                alone[contender] = optimizer.step
            tables[f"{name}, {base}, optimiser step"] = compare(
                alone, baseline=base, rounds=2 * options.rounds, clock=clock
            )
            size = f"{name}, {base}, training step"
            tables[size] = compare(training, baseline=base, rounds=options.rounds, warmup=1, clock=clock)
            targets[size] = {contender: TARGET for contender in makers if contender != base}
    contenders = {name: row_step(make, options.rows, 128, 0.1) for name, make in ROWS.items()}
    size = f"{options.rows:,} × 128, 10 % of the rows drawn"
    tables[size] = compare(contenders, baseline="SparseAdam", rounds=options.rounds, clock=clock)
    notes = [
        "Besides the step of its base, Hyperball reads and writes the weights and the updates a few times. On the CPU "
        "this costs about as much as a fused AdamW step, so the optimiser step alone has no target.",
        "Ratios of optimiser steps to AdamW depend on the memory allocator: AdamW without `fused` allocates temporary "
        "tensors of the size of every parameter.",
    ]
    save("optimizers", "Optimisers", tables, targets, notes)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
