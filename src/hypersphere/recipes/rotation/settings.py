"""Parametrisations of rotations with the learning rates to try, and plain CNNs on CIFAR, shared by these recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hypersphere import rotation
from hypersphere.recipes.energy.settings import BASELINE, HALF, ORTHOGONAL, SMALL, SRIP, TUNING
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Method, Metric, Outcome, Recipe
from hypersphere.training import Experiment, Run

TRAINABLE_PARAMETERS = Metric("parameters", "trainable parameters", ".0f", None)


def count_trainable_parameters(experiment: Experiment, run: Run) -> Outcome:
    """Count the trainable parameters, d(d−1)/2 for a rotation."""
    count = rotation.degrees_of_freedom(experiment.objective, on_group=experiment.rotation.orthogonal_parameters)
    return Outcome({"parameters": float(count)})


def rotated(name: str, rates: Sequence[float] = (0.03, 0.1, 0.3, 1.0), **options: Any) -> Method:
    """Return training by a rotation R, with the learning rates of R to try.

    At the scale of the source, free parameters are drawn from N(0, 1), and have the learning rate and the weight decay
    of all others (appendix F.3 of the thesis).
    """
    paper = {"rotation": {"spread": 1.0}, "optimizer": {"rotation_decay": 5e-4}}
    return Method({"rotation": {"name": name, **options}}, {"optimizer.rotation_lr": tuple(rates)}, paper)


def with_decay(method: Method) -> Method:
    """Return a method whose matrices R have weight decay: two decays are tried with two learning rates each."""
    (rates,) = (method.grid or {}).values()
    grid = {"optimizer.rotation_lr": (rates[0], rates[-1]), "optimizer.rotation_decay": (5e-4, 5e-3)}
    return Method(method.patch, grid, method.paper)


# Four trials for every row: see TUNED.
GRAM_SCHMIDT = rotated("gram_schmidt")
HOUSEHOLDER = rotated("householder")
LOWDIN = rotated("lowdin")
CAYLEY = rotated("cayley")
# Descent on the orthogonal group starts at the identity, at the rate of the released code and without decay.
DESCENT = Method(
    {"rotation": {"name": "descent"}},
    {"optimizer.rotation_lr": (0.01, 0.03, 0.1, 0.3)},
    {"optimizer": {"rotation_lr": 0.02}},
)
# The weight is that of the released code, which does not square the norm. Its start from N(0, 1) would diverge here.
PENALIZED = Method(
    {"rotation": {"name": "penalized", "weight": 0.1}},
    {"optimizer.rotation_lr": (0.03, 0.1), "rotation.weight": (0.1, 1.0)},
    {"optimizer": {"rotation_decay": 5e-4}},
)
# Methods by their names in the sources.
PLAIN = {"Baseline": BASELINE, "Orthogonal": ORTHOGONAL, "SRIP": SRIP, "HS-MHE": HALF}
METHODS: dict[str, Method] = {
    "OPT (GS)": GRAM_SCHMIDT,
    "OPT (HR)": HOUSEHOLDER,
    "OPT (LS)": LOWDIN,
    "OPT (CP)": CAYLEY,
    "OPT (OGD)": DESCENT,
    "OPT (OR)": PENALIZED,
}

TUNED = (
    "Each row has four trials on a fifth of the training images: four learning rates of the rotation, with 0.1 for all "
    "other parameters; for regularisers two weights and two weight decays; for plain training two learning rates and "
    "two weight decays."
)

CNN_BASE: dict[str, Any] = {**CIFAR["base"], "model": {"name": "opt_cnn6", "norm": "batch"}}
SMALL_CNN: dict[str, Any] = {"widths": [16, 16, 16], "feature_dim": 32}
TINY_CNN: dict[str, Any] = {"widths": [4, 4, 4], "feature_dim": 8}
# The schedule of appendices E.2 and F.2 of the OPT paper, and (x − 127.5)/128 and shifted and mirrored images as in the
# released code. Weight decay is 5e-4 on everything (appendix F.3).
_STATED: dict[str, Any] = {
    **CIFAR["paper"],
    "normalize": "centered",
    "init": "he",
    "optimizer": {"weight_decay": 5e-4, "decay_everything": True},
    **stepwise(75_000, [30_000, 50_000, 64_000]),
}
STATED = (
    "At the scale paper: CIFAR-100, 75,000 steps of 128 images at the rate 0.1, divided by ten after 30,000, 50,000 "
    "and 64,000 (the appendix of the OPT paper on landscapes, which trains the same networks; elsewhere the sources "
    "say when saturated); He initialisation, weight decay 5e-4 on everything. From the released code: pixels as "
    "(x − 127.5)/128, shifted by up to four and mirrored; OGD starts at the identity, at the rate 0.02 and without "
    "decay of R; the weight 0.1 of OR, whose norm is squared here as in the text."
)
ON_CPU = (
    "At the scale cpu: 10,000 images of CIFAR-10 at 16×16 pixels, 16 filters per layer (the source: 64), rotations "
    "that start at the identity."
)


def cnn_scales(**measure: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scales of CNN-6 and CNN-9: at full size on CIFAR-100, narrow on CIFAR-10, and tiny on digits.

    Args:
        **measure: options of the measurement by scale.
    """
    scales: dict[str, dict[str, Any]] = {
        "paper": _STATED,
        "cpu": {**SMALL, "model": SMALL_CNN},
        "smoke": {**SMOKE, "model": TINY_CNN},
    }
    return {
        scale: {**patch, **({"measure": measure[scale]} if scale in measure else {})} for scale, patch in scales.items()
    }


# Arguments that most recipes of this part share.
rotation_recipe = partial(
    Recipe,
    base=CNN_BASE,
    scales=cnn_scales(),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, TRAINABLE_PARAMETERS, SECONDS),
    measure=count_trainable_parameters,
    figures=("error", "energy"),
    tuning=TUNING,
)
