"""A byte-level language model, trained by five methods that treat directions and norms differently."""

from __future__ import annotations

import importlib.resources
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, optim, rotation
from hypersphere._validation import require
from hypersphere.models import SphereTransformer
from hypersphere.recipes.recipe import Axis, Claim, Metric, Outcome, Recipe, Row
from hypersphere.training import minimize
from hypersphere.training.text import NextToken, TextWindows

__all__ = ["LANGUAGE", "read_text", "train_language_model"]

_PARTS = (0.9, 0.95)  # where the validation text and the test text begin
_POINTS = 20  # points of the curve
_CURVE_BYTES = 2**15  # bytes of the validation text per point of the curve


def train_language_model(
    seed: int,
    *,
    method: str,
    text: str,
    steps: int,
    trial_steps: int,
    rates: Sequence[float],
    rotation_rates: Sequence[float],
    seconds: float,
    dim: int,
    depth: int,
    context: int,
    batch: int,
    block_size: int,
    every: int,
    data_root: Path | None,
) -> Outcome:
    """Choose the learning rates on validation text, then train and measure bits per byte of the test text.

    Args:
        seed: seed for the initial weights and the order of the text.
        method: "plain", "one-sided", "equivalence", "normalized" or "hyperball".
        text: see `read_text`.
        steps: optimiser steps.
        trial_steps: steps of each trial that chooses the learning rates, on a schedule of this length.
        rates, rotation_rates: learning rates of the parameters and of the rotations; each pair of them is one trial.
        seconds: processor time of training after which the test text is measured for the comparison at equal time.
        dim, depth: size of the network.
        context, batch: tokens per window, and windows per step.
        block_size, every: arguments of `hypersphere.rotation.Equivalence`.
        data_root: folder of the data sets.
    """
    tokens = read_text(text, data_root)
    train, valid, test = tokens.tensor_split([int(share * len(tokens)) for share in _PARTS])

    def trained(steps: int, rate: float, rotation_rate: float, on_step: Callable[[NextToken, int], None]) -> NextToken:
        torch.manual_seed(seed)
        kind = "normalized" if method == "normalized" else "plain"
        model = SphereTransformer(dim, depth, vocabulary=256, context=context, kind=kind)
        equivalence: rotation.Equivalence | None = None
        if method in ("one-sided", "equivalence"):
            sides = "input" if method == "one-sided" else "both"
            equivalence = rotation.Equivalence(model, block_size, every, sides)
        optimizer = _optimizer(model, method, rate, rotation_rate)
        warm_up = max(1, steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (1 + math.cos(math.pi * step / steps)) / 2)
        )
        objective = NextToken(model)

        def after_step(progress: Any) -> None:
            if equivalence is not None:
                equivalence.step(optimizer)
            model.normalize_weights_()  # does nothing in the plain form
            on_step(objective, progress.step)

        windows = TextWindows(train, context, batch, torch.Generator().manual_seed(seed))
        minimize(objective, windows, optimizer=optimizer, scheduler=schedule, steps=steps, clip=1.0, on_step=after_step)
        return objective

    def bits(objective: NextToken, part: Tensor) -> float:
        return objective.mean_loss(part, context, 8 * batch) / math.log(2)

    def trial(pair: tuple[float, float]) -> float:
        try:
            return bits(trained(trial_steps, *pair, lambda *_: None), valid)
        except FloatingPointError:  # training diverged
            return math.inf

    best = min(product(rates, rotation_rates), key=trial)
    curve: list[float] = []
    clock = _Clock()
    at_equal_time: list[float] = []

    def measure(objective: NextToken, step: int) -> None:
        if not at_equal_time and clock.seconds() >= seconds:
            with clock.paused():
                at_equal_time.append(bits(objective, test))
        if step * _POINTS // steps > len(curve):
            with clock.paused():
                curve.append(bits(objective, valid[:_CURVE_BYTES]))

    objective = trained(steps, *best, measure)
    final = bits(objective, test)
    return Outcome(
        {
            "bits": final,
            "bits_at_equal_time": at_equal_time[0] if at_equal_time else final,
            "step_seconds": clock.seconds() / steps,
            "parameters": float(sum(p.numel() for p in objective.parameters() if p.requires_grad)),
            "rate": best[0],
            "rotation_rate": best[1],
        },
        {"bits": curve},
    )


def read_text(name: str, data_root: Path | None = None) -> Tensor:
    """Return the bytes of a text: the file text/NAME.txt of the data sets, or "source" for the code of this library."""
    if name == "source":
        folder = importlib.resources.files("hypersphere") / "functions"
        files = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
        content = b"".join(file.read_bytes() for file in files)
    else:
        path = data.data_root(data_root) / "text" / f"{name}.txt"
        require(path.is_file(), "text", "'source' or the name of a file text/NAME.txt in the data folder", name)
        content = path.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def _optimizer(model: SphereTransformer, method: str, rate: float, rotation_rate: float) -> Any:
    """Return AdamW with a separate rate for rotations. Only the matrices of the plain method have weight decay."""
    rotations = rotation.rotation_parameters(model)
    rotation_ids = {id(parameter) for parameter in rotations}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in rotation_ids]
    decay = 0.1 if method == "plain" else 0.0
    groups = [
        {"params": [p for p in others if p.dim() > 1], "lr": rate, "weight_decay": decay},
        {"params": [p for p in others if p.dim() <= 1], "lr": rate, "weight_decay": 0.0},
        {"params": rotations, "lr": rotation_rate, "weight_decay": 0.0},
    ]
    base = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))
    return optim.Hyperball(base) if method == "hyperball" else base


class _Clock:
    """Measures the processor time of this process since its creation, without pauses."""

    def __init__(self) -> None:
        self.start = time.process_time()

    def seconds(self) -> float:
        """Return the processor time in seconds."""
        return time.process_time() - self.start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context."""
        pause = time.process_time()
        yield
        self.start += time.process_time() - pause


_RATES = {"rates": [4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128], "rotation_rates": [0.0]}
_ROTATION_RATES = {"rates": [8e-3, 1.6e-2], "rotation_rates": [4e-3, 1.6e-2, 6.4e-2]}
_ROWS = {
    "AdamW": {"method": "plain", **_RATES},
    "one-sided rotation": {"method": "one-sided", **_ROTATION_RATES},
    "POET": {"method": "equivalence", **_ROTATION_RATES},
    "nGPT": {"method": "normalized", **_RATES},
    "Hyperball": {
        "method": "hyperball",
        "rates": [1.2e-2, 2.4e-2, 4.8e-2, 9.6e-2, 0.192, 0.384],
        "rotation_rates": [0.0],
    },
}

LANGUAGE = Recipe(
    name="language",
    title="A language model of bytes with weights or hidden states on spheres",
    reference="beyond the sources: POET, nGPT and Hyperball on a small text",
    base={
        "measure": {
            "method": "plain",
            "text": "kjv",
            "rates": [1e-3],
            "rotation_rates": [0.0],
            "block_size": 32,
            "every": 100,
        }
    },
    scales={
        "paper": {
            "measure": {"steps": 20000, "trial_steps": 2000, "seconds": 7200.0}
            | {"dim": 384, "depth": 6, "context": 256, "batch": 64}
        },
        "cpu": {
            "measure": {"steps": 1000, "trial_steps": 150, "seconds": 150.0}
            | {"dim": 64, "depth": 3, "context": 64, "batch": 32}
        },
        "smoke": {
            "measure": {"text": "source", "steps": 20, "trial_steps": 1, "seconds": 0.05, "every": 8, "block_size": 8}
            | {"dim": 16, "depth": 1, "context": 64, "batch": 4}
        },
    },
    rows=tuple(Row(name, {"measure": options}) for name, options in _ROWS.items()),
    seeds=(0, 1, 2),
    metrics=(
        Metric("bits", "bits per byte", ".3f", False),
        Metric("bits_at_equal_time", "bits per byte at equal time", ".3f", False),
        Metric("parameters", "trainable parameters", ",.0f"),
        Metric("rate", "chosen rate", ".4f"),
        Metric("rotation_rate", "chosen rate of rotations", ".4f"),
    ),
    cost={"paper": 900.0, "cpu": 1.7, "smoke": 0.01},
    figures=("bits",),
    axes={"bits": Axis("share of the steps in %", 100 / _POINTS, 100)},
    compute=train_language_model,
    baseline="AdamW",
    claims=(
        Claim("POET reaches a lower loss than AdamW.", "POET", "AdamW", "bits", "POET paper"),
        Claim("Rotating both sides is better than one.", "POET", "one-sided rotation", "bits", "POET paper"),
        Claim("The normalised transformer reaches a lower loss than AdamW.", "nGPT", "AdamW", "bits", "nGPT paper"),
        Claim("Hyperball reaches a lower loss than AdamW.", "Hyperball", "AdamW", "bits", "Hyperball paper"),
    ),
    note="The text is the King James Bible, 4.4 MB: the file text/kjv.txt in the folder of the data sets, which "
    "`bible -f gen1:1-rev22:21` prints on Debian (package bible-kjv). The last 5 % are the test text and the 5 % "
    "before them the validation text. At the cpu scale every row gets six trials of 150 of its 1,000 steps, which "
    "choose its learning rates on the validation text. In a first run with four trials, every row chose the largest "
    "rate of its grid. So the grids were moved to larger rates and all rows run again, which measured the test text a "
    "second time. All rows have the same schedule: 5 % warm-up, then a cosine. "
    "POET and the one-sided rotation train embeddings, norms and the output layer by AdamW. Equal time is 150 s of "
    "processor time on one thread.",
)
