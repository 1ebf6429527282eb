"""Duration of training steps with energy (table E.5 of the thesis)."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from hypersphere.recipes.energy import settings
from hypersphere.recipes.protocols import CIFAR
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.recipes.sources import printed_number
from hypersphere.training import Experiment, Run, build_experiment, minimize

__all__ = ["TIMES", "measure_time"]


def measure_time(experiment: Experiment, run: Run, *, rounds: int, steps: int, data_root: Path | None) -> Outcome:
    """Measure the time of training steps, relative to the same network without regularisers.

    Both take turns of `steps` steps on the same batches, so that other work on the machine delays both.
    """
    plain = build_experiment(replace(experiment.config, regularizers=()), data_root=data_root, device=experiment.device)
    inputs, labels = next(iter(plain.loader))
    batches = [plain.prepare(inputs, labels)] * steps
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds + 1):
        for name, one in (("with", experiment), ("without", plain)):
            one.train_mode()
            began = time.perf_counter()
            minimize(one.objective, batches, optimizer=one.optimizer, steps=steps)
            seconds[name].append(time.perf_counter() - began)
    # The first round warms up. The median of ratios is less sensitive to pauses than the ratio of sums.
    ratios = [a / b for a, b in zip(seconds["with"][1:], seconds["without"][1:], strict=True)]
    return Outcome({"ratio": median(ratios), "per_hundred": 100 / steps * median(seconds["with"][1:])})


_METHODS = {
    "Baseline": settings.BASELINE,
    "HS-MHE": settings.HALF,
    "RP-CoMHE": settings.RANDOM,
    "AP-CoMHE": settings.UNROLLED,
    "Adv-CoMHE": settings.ADVERSARIAL,
    "Group CoMHE": settings.GROUP,
}
_SECONDS = {line: printed_number("T-E.5", line) or math.nan for line in _METHODS}
_NETWORK = settings.cifar_scales("mhe_cnn9")

TIMES = Recipe(
    name="energy-times",
    title="Duration of training steps with energy, relative to plain training",
    reference="table E.5 of the thesis, CNN-9 on CIFAR-100",
    base={**CIFAR["base"], "measure": {"rounds": 5, "steps": 20}},
    scales={
        # The network and the batches of the source; a few steps of training come before the measurement.
        "paper": {**_NETWORK["paper"], "steps": 100, "schedule": "constant"},
        "cpu": {
            "data": {"name": "cifar100_fifth", "limit": 1000, "held_out": 200},  # few images: errors are not read
            "model": "mhe_cnn9",
            "steps": 2,
            "schedule": "constant",
            "validation": {"every": 1000, "energy": False},
            "measure": {"rounds": 3, "steps": 2},
        },
        "smoke": {**_NETWORK["smoke"], "measure": {"rounds": 1, "steps": 1}},
    },
    rows=tuple(
        Row(line, method.patch, {"ratio": _SECONDS[line] / _SECONDS["Baseline"], "per_hundred": ("T-E.5", line)})
        for line, method in _METHODS.items()
    ),
    default_rows={"smoke": ["Baseline", "Group CoMHE"]},
    seeds=(0, 1, 2),
    metrics=(
        Metric("ratio", "time relative to plain training", ".2f", False),
        Metric("per_hundred", "seconds per 100 steps", ".2f", False),
    ),
    covers=("T-E.5",),
    cost={"paper": 3, "cpu": 0.25, "smoke": 0.002},
    measure=measure_time,
    baseline="Baseline",
    note="CNN-9 of full width and batches of 128 images of 32×32 pixels, at the scale cpu as well, where two steps "
    "take turns with two steps without regulariser. Times depend on the machine, so only ratios can be compared with "
    "the source, whose ratios follow from its seconds. The row Baseline shows the noise of the measurement. Test time "
    "is unaffected.",
)
