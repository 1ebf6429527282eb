"""Training with energy: energy and error over time, and the duration of steps (figure 6.1, appendix E.2, table E.5)."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hypersphere._layer_selection import layers_of
from hypersphere.energy import hyperspherical_energy
from hypersphere.recipes.energy import settings
from hypersphere.recipes.energy.settings import FIFTH, HALF, RANDOM, SMALL, UNROLLED, with_options
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning, cells
from hypersphere.recipes.sources import printed_number
from hypersphere.training import Experiment, Run, build_experiment, minimize
from hypersphere.training.config import merge

__all__ = ["DYNAMICS", "TIMES", "measure_energy", "measure_time", "summed_energy"]


@torch.no_grad()
def summed_energy(network: torch.nn.Module) -> float:
    """Return the energy of equation E.2 in half space with s = 1, the mean over pairs, summed over hidden layers.

    >>> summed_energy(torch.nn.Linear(3, 2)) > 0.638  # the minimum, for two lines at a right angle
    True
    """
    neurons = [layer.rows() for layer in layers_of(network, output_layer=None).hidden if layer.shape[1] > 1]
    return sum(float(hyperspherical_energy(rows, power=1, half_space=True)) for rows in neurons)


def measure_energy(experiment: Experiment, run: Run) -> Outcome:
    """Measure the energy of equation E.2 after training."""
    return Outcome({"summed_energy": summed_energy(experiment.network)})


_METHODS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "rotation": {"rotation": {"name": "gram_schmidt"}, "optimizer": {"weight_decay": 0.0}},
    "HS-MHE": dict(with_options(HALF, power=1).patch),
    "RP-CoMHE": dict(with_options(RANDOM, power=1).patch),
    "AP-CoMHE": dict(with_options(UNROLLED, power=1).patch),
}
# For each figure, the network and the data at one scale. CNN-3 on CIFAR-10 is added for a comparison at the cpu scale.
_CIFAR10: dict[str, Any] = {"paper": {"data": "cifar10"}}
_FIGURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CNN-9": ({"name": "small_cnn9"}, {"cpu": FIFTH}),
    "CNN-3": ({"name": "small_cnn3"}, {"cpu": FIFTH}),
    "CNN-9 without BatchNorm": ({"name": "small_cnn9", "norm": "none"}, {"cpu": FIFTH}),
    "CNN-9, CIFAR-10": ({"name": "small_cnn9"}, _CIFAR10),
    "CNN-3, CIFAR-10": ({"name": "small_cnn3"}, _CIFAR10),
}
_SIZES = {"cpu": {"model": {"widths": [8, 16, 16], "feature_dim": 32}}, "smoke": {"model": {"widths": [4, 4, 4]}}}

DYNAMICS = Recipe(
    name="energy-dynamics",
    title="Energy and error during training: plain, by rotation, and with energy",
    reference="figures 6.1 and E.1 to E.5 of the thesis, small CNNs on CIFAR-100 and CIFAR-10",
    base=CIFAR["base"],
    scales={
        "paper": {**CIFAR["paper"], "model": {"name": "small_cnn9"}},
        "cpu": {**SMALL, "model": {"name": "small_cnn9"}},
        "smoke": {**SMOKE, "model": {"name": "small_cnn9", "feature_dim": 8}},
    },
    rows=tuple(
        Row(
            f"{name}, {title}",
            merge({"model": network}, method),
            at=merge(_SIZES, data),
            baseline=None if name == "baseline" else f"baseline, {title}",
        )
        for title, (network, data) in _FIGURES.items()
        for name, method in _METHODS.items()
    ),
    default_rows={
        "paper": cells(_METHODS, [title for title in _FIGURES if title != "CNN-3, CIFAR-10"]),
        "cpu": cells(_METHODS, ["CNN-9, CIFAR-10", "CNN-3, CIFAR-10"]),
        "smoke": cells(["baseline", "rotation"], ["CNN-9, CIFAR-10"]),
    },
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, Metric("summed_energy", "energy of E.2", ".4f", False), SECONDS),
    covers=("F6.1", "F-E.1", "F-E.2", "F-E.3", "F-E.4", "F-E.5"),
    cost={"paper": 8000, "cpu": 0.7, "smoke": 0.01},
    figures=("error", "energy"),
    measure=measure_energy,
    tuning=Tuning({"optimizer.lr": (0.1, 0.03)}, held_out=0.2),
    claims=(
        Claim("Training by rotation is better than plain training.", "rotation, CNN-9, CIFAR-10", source="F-E.5"),
        Claim(
            "CoMHE is slightly better than training by rotation.",
            "RP-CoMHE, CNN-9, CIFAR-10",
            "rotation, CNN-9, CIFAR-10",
            source="F-E.5",
        ),
        Claim(
            "Training by rotation ends with a lower energy than plain training.",
            "rotation, CNN-9, CIFAR-10",
            metric="summed_energy",
            source="F-E.5",
        ),
        Claim(
            "In a network of three layers, training by rotation is better than plain training.",
            "rotation, CNN-3, CIFAR-10",
            source="F-E.3",
        ),
    ),
    note="Networks of table E.3: 32, 64 and 64 filters and a 64-d feature. Rotation training: hidden neurons stay at "
    "their initial values, one orthogonal matrix per layer is learned through Gram-Schmidt (figure E.1), without "
    "weight decay; the classifier is trained as usual. Regularisers have s = 1, as the energy that is drawn (appendix "
    "E.1 says s = 2). The curves show the energy in half space with s = 2, the mean over layers; the column shows "
    "equation E.2 (s = 1, summed over layers) after training. At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels, "
    "and the better of two learning rates on a fifth of it. The rows CNN-3 on CIFAR-10 stand for figure E.3.",
)

# --- duration of steps (table E.5)


def measure_time(experiment: Experiment, run: Run, *, rounds: int, steps: int, data_root: Path | None) -> Outcome:
    """Measure the time of training steps, relative to the same network without regularisers.

    The two alternate after every `steps` steps on the same batches, so that other work on the machine delays both.
    """
    plain = build_experiment(replace(experiment.config, regularizers=()), data_root=data_root, device=experiment.device)
    inputs, labels = next(iter(plain.loader))
    batches = [plain.prepare(inputs, labels)] * steps
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds + 1):
        for name, timed in (("with", experiment), ("without", plain)):
            timed.train_mode()
            start = time.perf_counter()
            minimize(timed.objective, batches, optimizer=timed.optimizer, steps=steps)
            seconds[name].append(time.perf_counter() - start)
    # The first round warms up. The median of ratios is less sensitive to pauses than the ratio of sums.
    ratios = [a / b for a, b in zip(seconds["with"][1:], seconds["without"][1:], strict=True)]
    return Outcome({"ratio": median(ratios), "per_hundred": 100 / steps * median(seconds["with"][1:])})


_TIMED = {
    "Baseline": settings.BASELINE,
    "HS-MHE": settings.HALF,
    "RP-CoMHE": settings.RANDOM,
    "AP-CoMHE": settings.UNROLLED,
    "Adv-CoMHE": settings.ADVERSARIAL,
    "Group CoMHE": settings.GROUP,
}
_SECONDS = {line: printed_number("T-E.5", line) or math.nan for line in _TIMED}
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
        for line, method in _TIMED.items()
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
