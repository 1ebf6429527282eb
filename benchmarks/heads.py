"""Forward and backward pass of every head, as ratios to plain softmax (`F.linear` + `cross_entropy`) in the same run.

A step computes the loss and the gradients of features and class vectors. Memory is the increase of the peak resident
set during one step, measured in a new process per head (Linux only). Weight and gradient are allocated beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import hypersphere as hs
from benchmarks.timing import compare, save

BATCH, DIM = 128, 512
COSINE = [
    "w_softmax",
    "adaface",
    "sphereface_r",
    "softmax",
    "modified_softmax",
    "l_softmax",
    "a_softmax",
    "s_softmax",
    "am_softmax",
    "arcface",
    "combined_margin",
]
OTHER = {
    "w_softmax linear": lambda d, c: hs.heads.w_softmax(d, c, "linear"),
    "w_softmax sigmoid": lambda d, c: hs.heads.w_softmax(d, c, "sigmoid"),
    "ga_softmax linear": lambda d, c: hs.heads.ga_softmax(d, c, "linear"),
    "sphereface_r v2": lambda d, c: hs.heads.sphereface_r(d, c, version=2),
    "sphereface2": hs.heads.sphereface2,
    "sphereface_plus": hs.heads.sphereface_plus,
}
PEERS = {
    "metric-learning ArcFace": ("ArcFaceLoss", {"margin": 28.6, "scale": 64}),
    "metric-learning CosFace": ("CosFaceLoss", {"margin": 0.35, "scale": 64}),
    "metric-learning SphereFace": ("SphereFaceLoss", {"margin": 4, "scale": 1}),
    "metric-learning L-Softmax": ("LargeMarginSoftmaxLoss", {"margin": 4, "scale": 1}),
}
TARGETS = {1_000: 1.35, 10_000: 1.2, 100_000: 1.2}
ENERGY_TARGET = 2.1


def losses(dim: int, classes: int) -> dict[str, tuple[Callable, torch.Tensor]]:
    """Return every contender: a loss of features and labels, and the weight that it trains.

    All contenders but the peers train the same weight. With weights of their own they would need 9 GB at 100,000
    classes, and each would find the cache filled by another one.
    """
    weight = torch.nn.Parameter(torch.randn(classes, dim, generator=torch.Generator().manual_seed(1)) / dim**0.5)
    contenders = {"plain softmax": (lambda x, y: F.cross_entropy(F.linear(x, weight), y), weight)}
    for name in COSINE:
        contenders[name] = _with_weight(hs.heads.PRESETS[name](dim, classes), weight)
    for name, make in OTHER.items():
        contenders[name] = _with_weight(make(dim, classes), weight)
    try:
        from pytorch_metric_learning import losses as peers
    except ImportError:
        return contenders
    for name, (loss, options) in PEERS.items():
        peer = getattr(peers, loss)(num_classes=classes, embedding_size=dim, **options)
        contenders[name] = (peer, peer.W)
    return contenders


def _with_weight(head: hs.heads.AngularHead, weight: torch.nn.Parameter) -> tuple[Callable, torch.Tensor]:
    head.weight = weight
    return head, weight


def batch(batch: int, dim: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, dim, generator=generator).requires_grad_()
    return x, torch.randint(classes, (batch,), generator=generator)


def step(loss: Callable, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    def go() -> None:
        x.grad = weight.grad = None
        loss(x, y).backward()

    return go


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def peak_of(name: str, size: tuple[int, int, int]) -> None:
    """Print the increase of the peak resident set during one step, and the peak, in MB. Runs in a new process."""
    small = losses(size[1], 8)[name]
    step(*small, *batch(4, size[1], 8))()
    del small
    x, y = batch(*size)
    if name in hs.heads.PRESETS:
        head = hs.heads.PRESETS[name](size[1], size[2])
        loss, weight = head, head.weight
    else:
        loss, weight = losses(size[1], size[2])[name]
    weight.grad, x.grad = torch.zeros_like(weight), torch.zeros_like(x)
    weight.grad.add_(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = resident("VmRSS")
    loss(x, y).backward()
    print(json.dumps([(resident("VmHWM") - before) / 2**20, resident("VmHWM") / 2**20]))


def measure_memory(size: tuple[int, int, int], names: list[str]) -> dict[str, list[float]]:
    tight = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    megabytes = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks", "heads", "--peak", name, "--size", ",".join(map(str, size))]
        done = subprocess.run(command, capture_output=True, text=True, env=tight, check=True)
        megabytes[name] = json.loads(done.stdout.splitlines()[-1])
    return megabytes


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench heads", description=__doc__)
    parser.add_argument("--classes", type=int, nargs="*", default=list(TARGETS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-clock", action="store_true", help="use process time, for a busy machine")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.peak:
        peak_of(options.peak, tuple(map(int, options.size.split(","))))
        return
    tables, targets = {}, {}
    for classes in options.classes:
        x, y = batch(BATCH, DIM, classes)
        contenders = {name: step(loss, weight, x, y) for name, (loss, weight) in losses(DIM, classes).items()}
        rounds = 40 if classes <= 1_000 else 15 if classes <= 10_000 else 7
        clock = time.process_time if options.cpu_clock else time.perf_counter
        size = f"{classes:,} classes, batch {BATCH}, dim {DIM}"
        tables[size] = compare(contenders, baseline="plain softmax", rounds=rounds, clock=clock)
        targets[size] = dict.fromkeys(COSINE, TARGETS.get(classes, 1.2)) | dict.fromkeys(list(OTHER)[:3], 2.0)
        targets[size]["sphereface_plus"] = ENERGY_TARGET
    notes = []
    if not options.no_memory:
        names = ["plain softmax", "a_softmax", "arcface", "am_softmax", "metric-learning ArcFace"]
        for name, (delta, _) in measure_memory((BATCH, DIM, 100_000), names).items():
            notes.append(
                f"Peak memory of one step besides weight and gradient, 100,000 classes: {name} {delta:.0f} MB."
            )
        for name, (delta, peak) in measure_memory((256, 128, 1_000_000), ["a_softmax", "sphereface_plus"]).items():
            notes.append(
                f"1,000,000 classes × 128, batch 256, {name}: {delta:.0f} MB besides weight and gradient, "
                f"{peak:.0f} MB resident in total (target: under 3,000)."
            )
    save("heads", "Heads against plain softmax", tables, targets, notes)
