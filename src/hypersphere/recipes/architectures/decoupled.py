"""Decoupled networks: without BatchNorm, with and without ReLU, and the role of weight norms (tables 4.1 to 4.3)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.recipe import Claim, Row
from hypersphere.training.config import merge

__all__ = ["NORMS", "NO_BATCH_NORM", "OPERATORS"]

_PENALTY = "the orthogonal penalty of decoupled filters has the weight 5e-6, and they are projected every 100 steps"
_SCALES: dict[str, Any] = {
    "paper": {**cifar.DECOUPLED, "model": {"name": "decoupled_cnn9"}},
    "cpu": {**cifar.CPU, "model": cifar.SMALL_CNN},
    "smoke": cifar.SMOKE_CNN,
}

# --- without BatchNorm (table 4.2)

_COLUMNS = ("Linear", "Cosine", "Square Cosine")
NO_BATCH_NORM = cifar.operator_recipe(
    name="decoupled-no-batch-norm",
    title="Decoupled networks without BatchNorm",
    reference="table 4.2 of the thesis, CNN-9 on CIFAR-100",
    scales={scale: merge(settings, {"model": {"norm": "none"}}) for scale, settings in _SCALES.items()},
    rows=(
        Row("CNN Baseline", {}, {"error": ("T4.2", "CNN Baseline", "Cosine")}),
        *(
            Row(f"{name}, {column}", cifar.decoupled(name, cifar.ANGULARS[column]), {"error": ("T4.2", name, column)})
            for name in ("LinearConv", "TanhConv", "SegConv")
            for column in _COLUMNS
        ),
    ),
    default_rows={
        "cpu": ["CNN Baseline", "LinearConv, Cosine", "TanhConv, Linear", "TanhConv, Cosine", "SegConv, Cosine"],
        "smoke": ["CNN Baseline", "TanhConv, Linear"],
    },
    covers=("T4.2",),
    cost={"paper": 2500, "cpu": 0.6, "smoke": 0.01},
    baseline="CNN Baseline",
    claims=(
        Claim("Without BatchNorm, TanhConv is better than convolution.", "TanhConv, Cosine"),
        Claim("Without BatchNorm, SegConv is better than convolution.", "SegConv, Cosine"),
    ),
    note=f"Whether there is a ReLU is not stated; there is one. {cifar.RELEASED}, {_PENALTY}. In the source, "
    f"LinearConv and SegConv with the square cosine did not converge. {cifar.SMALL_SIZE}.",
)

# --- with and without ReLU (table 4.3)

_NO_RELU = {"model": {"activation": "none"}}
_RELU_COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "Cosine w/o ReLU": ("cosine", _NO_RELU),
    "Square Cosine w/o ReLU": ("square_cosine", _NO_RELU),
    "Cosine w/ ReLU": ("cosine", {}),
    "Square Cosine w/ ReLU": ("square_cosine", {}),
}


def _operator_rows() -> list[Row]:
    rows = []
    for column, (angular, patch) in _RELU_COLUMNS.items():
        if angular == "cosine":  # an ordinary convolution has no square cosine
            rows.append(Row(f"Baseline, {column}", patch, {"error": ("T4.3", "Baseline", column)}))
        baseline = f"Baseline, {column.removeprefix('Square ')}"
        for name in cifar.MAGNITUDES:
            settings = {**patch, **cifar.decoupled(name, angular)}
            rows.append(Row(f"{name}, {column}", settings, {"error": ("T4.3", name, column)}, baseline=baseline))
    return rows


_COMPARED = ("SphereConv", "SegConv")
OPERATORS = cifar.operator_recipe(
    name="decoupled-operators",
    title="Decoupled operators with and without ReLU",
    reference="table 4.3 of the thesis, CNN-9 on CIFAR-100",
    scales=_SCALES,
    rows=tuple(_operator_rows()),
    default_rows={
        "cpu": ["Baseline, Cosine w/o ReLU", "Baseline, Cosine w/ ReLU"]
        + [f"{name}, {column}" for name in _COMPARED for column in list(_RELU_COLUMNS)[:3]],
        "smoke": ["Baseline, Cosine w/o ReLU", "SegConv, Square Cosine w/o ReLU", "MixConv, Cosine w/ ReLU"],
    },
    seeds=(0, 1, 2, 3, 4),
    covers=("T4.3",),
    cost={"paper": 8000, "cpu": 1.7, "smoke": 0.01},
    claims=(
        *(Claim(f"Without ReLU, {name} is better than convolution.", f"{name}, Cosine w/o ReLU") for name in _COMPARED),
        Claim(
            "Without ReLU, SegConv with the square cosine is better than convolution with ReLU.",
            "SegConv, Square Cosine w/o ReLU",
            "Baseline, Cosine w/ ReLU",
        ),
        Claim(
            "Without ReLU, the square cosine is better than the cosine.",
            "SegConv, Square Cosine w/o ReLU",
            "SegConv, Cosine w/o ReLU",
        ),
        Claim("With ReLU, SegConv is better than convolution.", "SegConv, Cosine w/ ReLU"),
    ),
    note=f"BatchNorm in every row. {cifar.RELEASED}, {_PENALTY}. {cifar.SMALL_SIZE}.",
)

# --- weight norms (table 4.1)

_TANH = {"name": "tanh", "angular": "cosine", "learn_radius": "layer"}
_NAMES = {  # shorter names for the rows of the source
    "linearly weighted": ("Linearly Weighted Decoupled Operator", {**_TANH, "weighting": "linear"}),
    "weighted, tanh of the product": (
        "Nonlinearly Weighted Decoupled Operator ((Equation 4.15))",
        {**_TANH, "weighting": "joint"},
    ),
    "weighted, product of tanhs": (
        "Nonlinearly Weighted Decoupled Operator ((Equation 4.16))",
        {"name": "tanh", "weighting": "separate"},
    ),
    "standard gradients": ("Decoupled Operator (Standard Gradients)", _TANH),
    "weight projection": ("Decoupled Operator (Weight Projection)", {**_TANH, "project_every": 100}),
    "weighted gradients": ("Decoupled Operator (Weighted Gradients)", {**_TANH, "weighted_gradients": True}),
}
NORMS = cifar.operator_recipe(
    name="decoupled-norms",
    title="Weight projection, weighted gradients and weighted operators (TanhConv)",
    reference="table 4.1 of the thesis, ResNet-32 on CIFAR-100",
    scales={**_SCALES, "paper": {**cifar.DECOUPLED, "model": {"name": "wide_resnet32", "shortcut": "projection"}}},
    rows=tuple(
        Row(
            name,
            {"operator": operator, **cifar.ORTHOGONAL},
            {"error": ("T4.1", printed)},
            {"paper": {"operator": {"layers": "spatial"}}},
        )
        for name, (printed, operator) in _NAMES.items()
    ),
    covers=("T4.1",),
    cost={"paper": 20000, "cpu": 0.9, "smoke": 0.01},
    baseline="standard gradients",
    claims=(
        Claim("Weight projection is better than standard gradients.", "weight projection"),
        Claim("Weighted gradients are better than standard gradients.", "weighted gradients"),
    ),
    note="Network and angular activation are not stated; those of table 4.4, which repeats a number, are used. "
    f"{cifar.RELEASED}, the orthogonal penalty has the weight 5e-6, the projection runs every 100 steps, and shortcuts "
    f"that change the width are ordinary 1×1 convolutions. {cifar.SMALL_SIZE}. Cosine TanhConv with one learned radius "
    "per layer, except for the product of tanhs, where ρ = 1: if learned, its radii grow without bound (to 50 times "
    "the mean patch norm in 40 steps) and the outputs vanish.",
)
