"""Energy and error during training, also of rotations, which keep the energy (figure 6.1, appendix E.2)."""

from __future__ import annotations

from typing import Any

import torch

from hypersphere._layer_selection import layers_of
from hypersphere.energy import hyperspherical_energy
from hypersphere.recipes.energy.settings import FIFTH, HALF, LARGE, PAPER, RANDOM, SCALES, SMALL, UNROLLED, Method
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["DYNAMICS", "measure_energy", "summed_energy"]


@torch.no_grad()
def summed_energy(network: torch.nn.Module) -> float:
    """Return the energy of equation E.2 in half space with s = 1, the mean over pairs, summed over hidden layers.

    >>> summed_energy(torch.nn.Linear(3, 2)) > 0.638  # that of two lines at a right angle, the smallest one
    True
    """
    neurons = [layer.rows() for layer in layers_of(network, output_layer=None).hidden if layer.shape[1] > 1]
    return sum(float(hyperspherical_energy(rows, power=1, half_space=True)) for rows in neurons)


def measure_energy(experiment: Experiment, run: Run) -> Outcome:
    """Measure the energy of the source after training."""
    return Outcome({"summed_energy": summed_energy(experiment.network)})


def _with_power_one(method: Method) -> dict[str, Any]:
    (regularizer,) = method.patch["regularizers"]
    return {"regularizers": [{**regularizer, "power": 1}]}


_METHODS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "rotation": {"rotation": {"name": "gram_schmidt"}, "optimizer": {"weight_decay": 0.0}},
    "HS-MHE": _with_power_one(HALF),
    "RP-CoMHE": _with_power_one(RANDOM),
    "AP-CoMHE": _with_power_one(UNROLLED),
}
# By figure: the network, the data at the scale cpu, and whether it runs there.
_FIGURES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "CNN-9": ({"model": {"name": "small_cnn9"}}, {"cpu": FIFTH}, False),
    "CNN-3": ({"model": {"name": "small_cnn3"}}, {"cpu": FIFTH}, False),
    "CNN-9 without BatchNorm": ({"model": {"name": "small_cnn9", "norm": "none"}}, {"cpu": FIFTH}, False),
    "CNN-9, CIFAR-10": ({"model": {"name": "small_cnn9"}}, {"paper": {"data": "cifar10"}}, True),
    "CNN-3, CIFAR-10": ({"model": {"name": "small_cnn3"}}, {"paper": {"data": "cifar10"}}, True),
}
_SIZES = {"cpu": {"model": {"widths": [8, 16, 16], "feature_dim": 32}}, "smoke": {"model": {"widths": [4, 4, 4]}}}
_RATES = {"optimizer.lr": (0.1, 0.03)}


def _rows() -> tuple[Row, ...]:
    rows = []
    for title, (network, data, is_small) in _FIGURES.items():
        at = merge(_SIZES, data)
        for name, method in _METHODS.items():
            scales: tuple[str, ...] = LARGE if is_small else PAPER
            if title == "CNN-9, CIFAR-10" and name in ("baseline", "rotation"):
                scales = SCALES
            if title == "CNN-3, CIFAR-10":  # an addition to the source, for the comparison at the scale cpu
                scales = ("cpu",)
            baseline = None if name == "baseline" else f"baseline, {title}"
            rows.append(Row(f"{name}, {title}", merge(network, method), at=at, baseline=baseline, scales=scales))
    return tuple(rows)


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
    rows=_rows(),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, Metric("summed_energy", "energy of E.2", ".4f", False), SECONDS),
    covers=("F6.1", "F-E.1", "F-E.2", "F-E.3", "F-E.4", "F-E.5"),
    cost={"paper": 8000, "cpu": 0.7, "smoke": 0.01},
    figures=("error", "energy"),
    measure=measure_energy,
    tuning=Tuning(_RATES, held_out=0.2),
    claims=(
        Claim(
            "Training by rotation is better than plain training.",
            "rotation, CNN-9, CIFAR-10",
            "baseline, CNN-9, CIFAR-10",
            source="F-E.5",
        ),
        Claim(
            "CoMHE is slightly better than training by rotation.",
            "RP-CoMHE, CNN-9, CIFAR-10",
            "rotation, CNN-9, CIFAR-10",
            source="F-E.5",
        ),
        Claim(
            "Training by rotation ends with a lower energy than plain training.",
            "rotation, CNN-9, CIFAR-10",
            "baseline, CNN-9, CIFAR-10",
            "summed_energy",
            "F-E.5",
        ),
        Claim(
            "In a network of three layers, training by rotation is better than plain training.",
            "rotation, CNN-3, CIFAR-10",
            "baseline, CNN-3, CIFAR-10",
            source="F-E.3",
        ),
    ),
    note="Networks of table E.3: 32, 64 and 64 filters and a 64-d feature. Rotation training: hidden neurons stay at "
    "their initial values, one orthogonal matrix per layer is learned through Gram-Schmidt (figure E.1), without "
    "weight decay; the classifier is trained as usual. Regularisers have s = 1, as the energy that is drawn (appendix "
    "E.1 says s = 2). The curves show the energy in half space with s = 2, the mean over layers; the column shows "
    "equation E.2 (s = 1, summed over layers) after training. At the scale cpu: 8, 16 and 16 filters on a fifth of "
    "CIFAR-10 at 16×16 pixels, 15 epochs, and the better of two learning rates on a fifth of the training images. The "
    "rows CNN-3 on CIFAR-10 stand for figure E.3.",
)
