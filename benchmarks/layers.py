"""Time decoupled convolutions, forward and backward, as ratios to `torch.nn.Conv2d`; `--compile` compiles both.

The notes give the bytes kept for backward as multiples of those of the convolution.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.timing import compare, save
from hypersphere.layers import DecoupledConv2d

SHAPES = {
    "64 × (64→64) @ 32": (64, 64, 64, 32),
    "64 × (128→128) @ 16": (64, 128, 128, 16),
    "64 × (256→256) @ 8": (64, 256, 256, 8),
    "64 × (3→64) @ 32": (64, 3, 64, 32),
}
OPERATORS = {
    "sphere": {},
    "ball": {"magnitude": "ball"},
    "tanh": {"magnitude": "tanh"},
    "linear magnitude": {"magnitude": "linear"},
    "seg": {"magnitude": "seg"},
    "log": {"magnitude": "log"},
    "mix": {"magnitude": "mix"},
    "tanh, learned radius": {"magnitude": "tanh", "learn_radius": "layer"},
    "tanh, radius per filter": {"magnitude": "tanh", "learn_radius": "filter"},
    "ball, radius per filter": {"magnitude": "ball", "learn_radius": "filter"},
    "tanh, joint weighting": {"magnitude": "tanh", "weighting": "joint"},
    "tanh, separate weighting": {"magnitude": "tanh", "weighting": "separate"},
    "sphere, half storage": {"storage": "half"},
    "square cosine": {"angular": "square_cosine"},
    "linear angular": {"angular": "linear"},
    "sigmoid angular": {"angular": "sigmoid"},
    "sigmoid, k per filter": {"angular": "sigmoid", "learn_k": "filter"},
}
PER_FILTER = ("tanh, radius per filter", "ball, radius per filter", "sigmoid, k per filter")
TARGETS: dict[str, Any] = dict.fromkeys(("ball", "tanh", "linear magnitude", "seg", "log", "mix"), 1.2)
TARGETS |= {"sphere": 1.12, "tanh, learned radius": 1.2}
TARGETS |= dict.fromkeys(PER_FILTER, 1.25)
TARGETS |= dict.fromkeys(("linear angular", "sigmoid angular"), 1.35)
TARGETS["64 × (3→64) @ 32"] = dict.fromkeys(OPERATORS, 1.5) | dict.fromkeys(PER_FILTER, 1.6)


def step(layer: nn.Module, x: torch.Tensor, pull: torch.Tensor) -> Callable[[], object]:
    inputs = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), inputs, pull)


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that autograd keeps for backward, counting each storage once."""
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    del y
    return sum(sizes.values())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench layers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="names of operators, separated by semicolons")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    names = [name for name in options.only.split(";") if name] or list(OPERATORS)
    tables, notes = {}, []
    for size, (batch, channels, filters, side) in SHAPES.items():
        x = torch.randn(batch, channels, side, side, requires_grad=True)
        pull = torch.randn(batch, filters, side, side)
        plain = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
        layers: dict[str, nn.Module] = {"Conv2d": plain}
        for name in names:
            layers[name] = DecoupledConv2d(channels, filters, 3, padding=1, bias=False, **OPERATORS[name])
        if options.compile:
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = 2 * len(layers)  # they share the code of their forward
            layers = {name: torch.compile(layer) for name, layer in layers.items()}  # type: ignore[misc]
        shares = {name: saved_bytes(layer, x) / saved_bytes(plain, x) for name, layer in layers.items()}
        notes.append(f"{size}, kept for backward: " + ", ".join(f"{n} {share:.2f}" for n, share in shares.items()))
        contenders = {name: step(layer, x, pull) for name, layer in layers.items()}
        clock = time.process_time if options.threads == 1 else time.perf_counter
        tables[size] = compare(contenders, baseline="Conv2d", rounds=options.rounds, clock=clock)
    kind = "compiled" if options.compile else "eager"
    title = f"Decoupled convolutions ({kind}), forward + backward, against `nn.Conv2d`"
    save("layers_compiled" if options.compile else "layers", title, tables, TARGETS, notes)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
