"""Hyperspherical energy and other regularisers, also in wider and deeper networks: tables of chapters 5 and 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypersphere.recipes.classification import ENERGY, ERROR, IMAGES, SECONDS, run, settings_of
from hypersphere.recipes.recipe import Recipe, Row

__all__ = ["CNN", "DEPTH", "MLP", "SPHERENET", "WIDTH"]

# A quarter of the width of the thesis, for networks that two cores train in a minute.
_NARROW = {"name": "mhe_cnn9", "widths": [16, 32, 64], "feature_dim": 64}
_HALF = {"name": "mhe"}  # half space is the default
_FULL = {"name": "mhe", "half_space": False, "hidden": 10.0}


def _projected(name: str, **options: Any) -> dict[str, Any]:
    return {"regularizer": {"name": "comhe", "projection": {"name": name, **options}}}


def regularizers(rate: float, printed: Mapping[str, float]) -> tuple[Row, ...]:
    """Return one row per regulariser, with its printed error. All rows except "none" use weight decay."""
    settings: dict[str, dict[str, Any]] = {
        "none": {"optimizer": {"name": "sgd", "lr": rate, "momentum": 0.9, "weight_decay": 0.0}},
        "weight decay": {},
        "orthogonal": {"regularizer": {"name": "orthogonal", "weight": 1e-4}},
        "orthonormal": {"regularizer": {"name": "orthonormal", "weight": 1e-4}},
        "SRIP": {"regularizer": {"name": "srip", "weight": 1e-3}},
        "MHE": {"regularizer": _FULL},
        "half-space MHE": {"regularizer": _HALF},
        "half-space A-MHE": {"regularizer": {"name": "mhe", "distance": "angular"}},
        "RP-CoMHE": _projected("random"),
        "AP-CoMHE": _projected("angle_preserving"),
        "adversarial CoMHE": _projected("adversarial"),
        "group CoMHE": _projected("group"),
    }
    return tuple(
        Row(name, changes, {"error": printed[name]} if name in printed else {}) for name, changes in settings.items()
    )


MLP = Recipe(
    name="energy-mlp",
    title="Regularisers of a multilayer perceptron on MNIST",
    reference="after table 6.1 of the thesis, which has a CNN on CIFAR-100",
    settings=settings_of(
        data={"name": "mnist"},
        model={"name": "mlp"},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        batch_size=128,
        epochs=3,
    ),
    rows=regularizers(0.05, {}),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    run=run,
    note="784-256-256-10 on all 60,000 digits, 3 epochs of SGD with a one-cycle learning rate. Hidden energy: half "
    "space, s = 2, mean over pairs and layers.",
)

CNN = Recipe(
    name="energy-cnn",
    title="Regularisers of CNN-9 on a fifth of CIFAR-100",
    reference="tables 5.1 and 6.1 of the thesis, CNN-9 with four times the width on all of CIFAR-100",
    settings=settings_of(**IMAGES, model=_NARROW),
    rows=regularizers(
        0.1,
        {
            "weight decay": 28.03,
            "orthogonal": 27.01,
            "SRIP": 25.80,
            "MHE": 26.75,
            "half-space MHE": 25.96,
            "half-space A-MHE": 26.03,
            "RP-CoMHE": 24.39,
            "AP-CoMHE": 24.33,
            "adversarial CoMHE": 25.09,
            "group CoMHE": 25.08,
        },
    ),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    run=run,
    figures=("error", "energy"),
    note="CNN-9 with 16, 32 and 64 filters (the source: 64, 128 and 256) on 10,000 images of 16×16 pixels, 6 "
    "epochs. Errors are far above those of the source, so only differences between rows can be compared.",
)

_WIDE = {"name": "mhe_cnn9", "widths": [32, 64, 128], "feature_dim": 64}
WIDTH = Recipe(
    name="energy-width",
    title="Energy and the width of CNN-9, on a fifth of CIFAR-100",
    reference="table 6.4 of the thesis",
    settings=settings_of(**IMAGES, model=_NARROW),
    rows=(
        Row("t = 1", {"model": _NARROW}, {"error": 47.72}),
        Row("t = 1, half-space MHE", {"model": _NARROW, "regularizer": _HALF}, {"error": 35.16}),
        Row("t = 1, RP-CoMHE", {"model": _NARROW, **_projected("random")}, {"error": 34.73}),
        Row("t = 2", {"model": _WIDE}, {"error": 38.64}),
        Row("t = 2, half-space MHE", {"model": _WIDE, "regularizer": _HALF}, {"error": 29.33}),
        Row("t = 2, RP-CoMHE", {"model": _WIDE, **_projected("random")}, {"error": 28.92}),
    ),
    seeds=(0,),
    metrics=(ERROR, ENERGY, SECONDS),
    run=run,
    figures=("error", "energy"),
    note="16t, 32t and 64t filters; 10,000 images of 16×16 pixels; 6 epochs.",
)

_DEEP = {"name": "mhe_cnn15", "widths": [16, 32, 64], "feature_dim": 64}
DEPTH = Recipe(
    name="energy-depth",
    title="Energy and the depth of a plain CNN, on a fifth of CIFAR-100",
    reference="table 6.5 of the thesis, whose CNN-15 does not converge without energy (N/C)",
    settings=settings_of(**IMAGES, model=_DEEP),
    rows=(
        Row("CNN-15", {"model": _DEEP}),
        Row("CNN-15, half-space MHE", {"model": _DEEP, "regularizer": _HALF}, {"error": 25.84}),
        Row("CNN-15 without BatchNorm", {"model": {**_DEEP, "norm": "none"}}),
        Row(
            "CNN-15 without BatchNorm, half-space MHE",
            {"model": {**_DEEP, "norm": "none"}, "regularizer": _HALF},
        ),
    ),
    seeds=(0,),
    metrics=(ERROR, ENERGY, SECONDS),
    run=run,
    figures=("error", "energy"),
    note="16, 32 and 64 filters, 10,000 images of 16×16 pixels, 6 epochs. An error of 99 % is chance.",
)

_SPHERE = {"name": "sphere", "angular": "cosine"}
SPHERENET = Recipe(
    name="energy-spherenet",
    title="SphereNet-9 with energy, on a fifth of CIFAR-100",
    reference="table D.3 of the thesis",
    settings=settings_of(**IMAGES, model=_NARROW, operator=_SPHERE),
    rows=(
        Row("SphereNet", {}, {"error": 28.10}),
        Row("orthonormal", {"regularizer": {"name": "orthonormal", "weight": 1e-4}}, {"error": 27.95}),
        Row("MHE", {"regularizer": _FULL}, {"error": 27.28}),
        Row("half-space MHE", {"regularizer": _HALF}, {"error": 27.17}),
    ),
    seeds=(0, 1),
    metrics=(ERROR, ENERGY, SECONDS),
    run=run,
    figures=("error", "energy"),
    note="CNN-9 of cosine SphereConv with 16, 32 and 64 filters, 10,000 images of 16×16 pixels, 6 epochs.",
)
