"""Regularisers with the weights to try, and CNNs on CIFAR at three scales, which the recipes of this part share.

Every row has four trials: two weight decays, each with two weights of the regulariser. Plain training, which has no
such weight, tries two learning rates instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE
from hypersphere.recipes.recipe import Grid, Method, Recipe, Tuning

SMALL: dict[str, Any] = {
    # A fifth of CIFAR-10 at half its resolution, mirrored but not shifted. A network with 16, 32 and 64 filters then
    # learns nearly all training images, its test error stops falling, and regularisers can make a difference.
    "data": {"name": "cifar10", "pool": 2, "limit": 10_000},
    "augment": [{"name": "mirror"}],
    "optimizer": {"weight_decay": 5e-4},
    "epochs": 15,
    "channels_last": True,  # a quarter faster on a CPU
    "validation": {"every": 3},
}
TUNED = (
    "Each row tries two weight decays, with two weights of its regulariser or, without one, with two learning rates; "
    "the best of these four on a fifth of the training images is used."
)
TUNING = Tuning({}, held_out=0.2)  # every row has a grid
FIFTH: dict[str, Any] = {"data": {"name": "cifar100_fifth", "pool": 2}}
_DECAYS: Grid = {"optimizer.weight_decay": (5e-4, 2e-3)}


def _energy(name: str, weights: Sequence[float], **options: Any) -> Method:
    return Method({"regularizers": [{"name": name, **options}]}, {**_DECAYS, "regularizers.0.hidden": weights})


def _penalty(name: str, weight: float, weights: Sequence[float]) -> Method:
    grid = {**_DECAYS, "regularizers.0.weight": weights}
    return Method({"regularizers": [{"name": name, "weight": weight}]}, grid)


def with_options(method: Method, **options: Any) -> Method:
    """Return a method whose only regulariser has these options in addition."""
    (regularizer,) = method.patch["regularizers"]
    return Method({"regularizers": [{**regularizer, **options}]}, method.grid)


def projected(name: str, **options: Any) -> Method:
    """Return CoMHE with a projection, by default of 30 dimensions, and weight 1 (appendix E.1)."""
    return _energy("comhe", (1.0, 10.0), hidden=1.0, projection={"name": name, **options})


BASELINE = Method(grid={**_DECAYS, "optimizer.lr": (0.1, 0.03)})
ORTHOGONAL = _penalty("orthogonal", 1e-5, (1e-3, 1e-2))
ORTHONORMAL = _penalty("orthonormal", 1e-5, (1e-3, 1e-2))
SRIP = _penalty("srip", 1e-3, (1e-2, 1e-1))
# Weights of section 5.5.1: 10 in full space, 1 in half space, and 1 for the classifier.
FULL = _energy("mhe", (10.0, 100.0), half_space=False, hidden=10.0)
HALF = _energy("mhe", (1.0, 10.0), hidden=1.0)
FULL_ANGULAR = _energy("mhe", (10.0, 100.0), half_space=False, hidden=10.0, distance="angular")
HALF_ANGULAR = _energy("mhe", (1.0, 10.0), hidden=1.0, distance="angular")
RANDOM = projected("random")
RANDOM_MAX = projected("random", aggregate="max")
UNROLLED = projected("angle_preserving")
ALTERNATING = projected("angle_preserving", method="alternating")
ADVERSARIAL = projected("adversarial")
GROUP = projected("group")


def cifar_scales(model: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the scales of a network: full width on CIFAR-100, a quarter of it on CIFAR-10, and tiny on digits."""
    return {
        "paper": {**CIFAR["paper"], "model": {"name": model, **options}},
        "cpu": {**SMALL, "model": {"name": model, "widths": [16, 32, 64], "feature_dim": 64, **options}},
        "smoke": {**SMOKE, "model": {"name": model, "widths": [4, 4, 4], "feature_dim": 8, **options}},
    }


# Arguments that most recipes of CNNs share.
energy_recipe = partial(
    Recipe,
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    figures=("error", "energy"),
    tuning=TUNING,
)
