"""Time training steps of a layer trained by orthogonal equivalence relative to those of a linear layer."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.timing import compare, save
from hypersphere.rotation import Equivalence

SIZES = (512, 1024, 2048)
TARGETS = {"both": 1.4}


def steps(tokens: int, d: int, block_size: int, every: int) -> dict[str, Callable[[], object]]:
    """Return forward pass, backward pass and step of Adam: of a linear layer, and of one rotated on several sides.

    Equivalence layers also count the step, and merge after every `every` steps.
    """
    torch.manual_seed(0)
    x, grad = torch.randn(tokens, d, requires_grad=True), torch.randn(tokens, d)
    start = nn.Linear(d, d)

    def contender(convert: Callable[[nn.Module], Equivalence | None]) -> Callable[[], object]:
        layer = copy.deepcopy(start)
        equivalence = convert(layer)
        optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            x.grad = None
            layer(x).backward(grad)
            optimizer.step()
            if equivalence is not None:
                equivalence.step(optimizer)

        return step

    def by_equivalence(sides: str) -> Callable[[nn.Module], Equivalence]:
        return lambda layer: Equivalence(layer, block_size, every, sides, output=True)

    return {"linear": contender(lambda layer: None)} | {
        sides: contender(by_equivalence(sides)) for sides in ("both", "input", "output")
    }


def merges(d: int, block_size: int) -> dict[str, Callable[[], object]]:
    """Return a step of a linear layer with 1,024 tokens, and a merge in float64 with new permutations."""
    layer = nn.Linear(d, d)
    equivalence = Equivalence(layer, block_size, every=1, output=True)
    return {"linear": steps(1024, d, block_size, 1)["linear"], "merge": equivalence.step}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench equivalence", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    tables, targets = {}, {}
    for d in options.sizes:
        title = f"step, d = {d}, {options.tokens} tokens"
        contenders = steps(options.tokens, d, options.block_size, options.every)
        tables[title] = compare(contenders, baseline="linear", rounds=options.rounds, clock=clock)
        targets[title] = TARGETS if d == 1024 else {}
        merge = merges(d, options.block_size)
        tables[f"one merge, d = {d}"] = compare(merge, baseline="linear", rounds=3, warmup=1, clock=clock)
        targets[f"one merge, d = {d}"] = {}
    title = f"A training step by orthogonal equivalence, blocks of {options.block_size}, float32"
    save("equivalence", title, tables, targets, [f"Merges are made every {options.every} steps."])
