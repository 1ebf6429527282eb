"""Hyperspherical energy and other regularisers, also in wider and deeper networks: tables of chapters 5 and 6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypersphere.recipes.parts import CIFAR, ENERGY, ERROR, SECONDS, SMOKE, sgd
from hypersphere.recipes.recipe import Recipe, Row

__all__ = ["CNN", "DEPTH", "FULL", "HALF", "MLP", "SPHERENET", "WIDTH", "penalty"]

FULL = {"regularizers": [{"name": "mhe", "half_space": False, "hidden": 10.0}]}
HALF = {"regularizers": [{"name": "mhe"}]}  # half space is the default


def _scales(model: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the scales of a network on CIFAR: at full width, at a quarter of it, and tiny."""
    return {
        "paper": {**CIFAR["paper"], "model": {"name": model, **options}},
        "cpu": {**CIFAR["cpu"], "model": {"name": model, "widths": [16, 32, 64], "feature_dim": 64, **options}},
        "smoke": {**SMOKE, "model": {"name": model, "widths": [4, 4, 4], "feature_dim": 8, **options}},
    }


def _projected(name: str) -> dict[str, Any]:
    return {"regularizers": [{"name": "comhe", "projection": {"name": name}}]}


def penalty(name: str, weight: float, paper: float = 1e-5) -> dict[str, Any]:
    """Return the patches of a row with a penalty, whose weight in the source differs from that in small networks."""
    return {
        "patch": {"regularizers": [{"name": name, "weight": weight}]},
        "at": {"paper": {"regularizers": [{"name": name, "weight": paper}]}},
    }


def _regularizers() -> tuple[Row, ...]:
    """Return one row per regulariser, with the error of table 6.1. All rows except "none" use weight decay."""
    return (
        Row("none", {"optimizer": {"weight_decay": 0.0}}),
        Row("weight decay", printed={"error": 28.03}),
        Row("orthogonal", printed={"error": 27.01}, **penalty("orthogonal", 1e-4)),
        Row("orthonormal", **penalty("orthonormal", 1e-4)),
        Row("SRIP", printed={"error": 25.80}, **penalty("srip", 1e-3, 1e-3)),
        Row("MHE", FULL, {"error": 26.75}),
        Row("half-space MHE", HALF, {"error": 25.96}),
        Row("half-space A-MHE", {"regularizers": [{"name": "mhe", "distance": "angular"}]}, {"error": 26.03}),
        Row("RP-CoMHE", _projected("random"), {"error": 24.39}),
        Row("AP-CoMHE", _projected("angle_preserving"), {"error": 24.33}),
        Row("adversarial CoMHE", _projected("adversarial"), {"error": 25.09}),
        Row("group CoMHE", _projected("group"), {"error": 25.08}),
    )


MLP = Recipe(
    name="energy-mlp",
    title="Regularisers of a multilayer perceptron on MNIST",
    reference="after table 6.1 of the thesis, which has a CNN on CIFAR-100",
    base={"model": "mlp", "optimizer": sgd(0.05), "batch_size": 128},
    scales={
        "paper": {"data": "mnist", "epochs": 100},
        "cpu": {"data": "mnist", "epochs": 3},
        "smoke": {**SMOKE, "model": {"widths": [16, 16]}},
    },
    rows=tuple(replace(row, printed={}) for row in _regularizers()),  # the source has another network
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    cost={"paper": 12, "cpu": 0.4, "smoke": 0.01},
    note="784-256-256-10 on all 60,000 digits, 3 epochs of SGD with a one-cycle learning rate. Hidden energy: half "
    "space, s = 2, mean over pairs and layers.",
)

CNN = Recipe(
    name="energy-cnn",
    title="Regularisers of CNN-9 on a fifth of CIFAR-100",
    reference="tables 5.1 and 6.1 of the thesis, CNN-9 with four times the width on all of CIFAR-100",
    base=CIFAR["base"],
    scales=_scales("mhe_cnn9"),
    rows=_regularizers(),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T5.1", "T6.1", "F6.2", "F-E.6"),
    cost={"paper": 3000, "cpu": 0.6, "smoke": 0.02},
    figures=("error", "energy"),
    note="CNN-9 with 16, 32 and 64 filters (the source: 64, 128 and 256) on 10,000 images of 16×16 pixels, 6 epochs. "
    "Errors are far above those of the source, so only differences between rows can be compared.",
)


def _width_rows(t: int, *errors: float) -> list[Row]:
    sizes = {"model": {"widths": [16 * t, 32 * t, 64 * t]}}
    variants: dict[str, dict[str, Any]] = {"": {}, ", half-space MHE": HALF, ", RP-CoMHE": _projected("random")}
    return [
        Row(f"t = {t}{name}", {**sizes, **patch}, {"error": error}, {"smoke": {"model": {"widths": [4 * t] * 3}}})
        for (name, patch), error in zip(variants.items(), errors, strict=True)
    ]


WIDTH = Recipe(
    name="energy-width",
    title="Energy and the width of CNN-9, on a fifth of CIFAR-100",
    reference="table 6.4 of the thesis",
    base=CIFAR["base"],
    scales=_scales("mhe_cnn9"),
    rows=(*_width_rows(1, 47.72, 35.16, 34.73), *_width_rows(2, 38.64, 29.33, 28.92)),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T6.4", "T5.2"),
    cost={"paper": 60, "cpu": 0.15, "smoke": 0.01},
    figures=("error", "energy"),
    note="16t, 32t and 64t filters; 10,000 images of 16×16 pixels; 6 epochs.",
)

_BARE = {"model": {"norm": "none"}}
DEPTH = Recipe(
    name="energy-depth",
    title="Energy and the depth of a plain CNN, on a fifth of CIFAR-100",
    reference="table 6.5 of the thesis, whose CNN-15 does not converge without energy (N/C)",
    base=CIFAR["base"],
    scales=_scales("mhe_cnn15"),
    rows=(
        Row("CNN-15"),
        Row("CNN-15, half-space MHE", HALF, {"error": 25.84}),
        Row("CNN-15 without BatchNorm", _BARE),
        Row("CNN-15 without BatchNorm, half-space MHE", {**_BARE, **HALF}),
    ),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T6.5", "T5.3"),
    cost={"paper": 200, "cpu": 0.1, "smoke": 0.01},
    figures=("error", "energy"),
    note="16, 32 and 64 filters, 10,000 images of 16×16 pixels, 6 epochs. An error of 99 % is chance.",
)

SPHERENET = Recipe(
    name="energy-spherenet",
    title="SphereNet-9 with energy, on a fifth of CIFAR-100",
    reference="table D.3 of the thesis",
    base={**CIFAR["base"], "operator": {"name": "sphere", "angular": "cosine"}},
    scales=_scales("mhe_cnn9"),
    rows=(
        Row("SphereNet", printed={"error": 28.10}),
        Row("orthonormal", printed={"error": 27.95}, **penalty("orthonormal", 1e-4)),
        Row("MHE", FULL, {"error": 27.28}),
        Row("half-space MHE", HALF, {"error": 27.17}),
    ),
    seeds=(0, 1),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T-D.3",),
    cost={"paper": 900, "cpu": 0.25, "smoke": 0.01},
    figures=("error", "energy"),
    note="CNN-9 of cosine SphereConv with 16, 32 and 64 filters, 10,000 images of 16×16 pixels, 6 epochs.",
)
