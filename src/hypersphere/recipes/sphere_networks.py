"""SphereNets and decoupled networks: convergence, operators with and without ReLU, and the role of weight norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hypersphere import training
from hypersphere.layers import DecoupledLayer
from hypersphere.recipes.classification import ERROR, IMAGES, SECONDS, assemble, classify, run, settings_of
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row, Trial

__all__ = ["CONVERGENCE", "LEARNED", "NORMS", "OPERATORS"]

_CNN = {"name": "spherenet_cnn9", "widths": [16, 32, 64], "feature_dim": 64}
_NO_NORM = {**_CNN, "norm": "none"}
_SIZE = "CNN-9 with 16, 32 and 64 filters on 10,000 images of 16×16 pixels"


def _sphere(angular: Any = "cosine") -> dict[str, Any]:
    return {"operator": {"name": "sphere", "angular": angular}}


_SIGMOID = {"name": "sigmoid", "k": 0.3}
_SMALL_BATCH = {
    "batch_size": 4,
    "epochs": 1,
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
}


def _with_early(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    outcome = run(settings, trial)
    errors = outcome.curves["error"]  # the first entry is the error before training
    return Outcome({**outcome.metrics, "early": errors[min(2, len(errors) - 1)]}, outcome.curves)


CONVERGENCE = Recipe(
    name="spherenet-convergence",
    title="Convergence of SphereNets and CNNs, with and without BatchNorm, and at batch 4",
    reference="figures 3.3 and 3.5 of the thesis, which are curves on CIFAR-10",
    settings=settings_of(**IMAGES, model=_CNN),
    rows=(
        Row("CNN", {"model": _CNN}),
        Row("SphereNet, cosine", {"model": _CNN, **_sphere()}),
        Row("SphereNet, linear", {"model": _CNN, **_sphere("linear")}),
        Row("SphereNet, sigmoid (0.3)", {"model": _CNN, **_sphere(_SIGMOID)}),
        Row("CNN without BatchNorm", {"model": _NO_NORM}),
        Row("SphereNet, cosine, without BatchNorm", {"model": _NO_NORM, **_sphere()}),
        Row("SphereNet, linear, without BatchNorm", {"model": _NO_NORM, **_sphere("linear")}),
        Row("CNN, batch 4", {"model": _CNN, **_SMALL_BATCH}),
        Row("SphereNet, cosine, batch 4", {"model": _CNN, **_sphere(), **_SMALL_BATCH}),
        Row("CNN without BatchNorm, batch 4", {"model": _NO_NORM, **_SMALL_BATCH}),
        Row("SphereNet, cosine, without BatchNorm, batch 4", {"model": _NO_NORM, **_sphere(), **_SMALL_BATCH}),
    ),
    seeds=(0, 1),
    metrics=(Metric("early", "error % after 2 epochs", ".2f", False), ERROR, SECONDS),
    run=_with_early,
    figures=("error",),
    note=f"{_SIZE}; 6 epochs with batches of 128, or one epoch with batches of 4; one-cycle learning rate with a "
    "maximum of 0.1, or 0.01 for batches of 4.",
)

# By title: magnitude, and the errors of table 4.3 with cosine and square cosine (no ReLU), and with cosine and ReLU.
_OPERATORS = {
    "SphereConv": ("sphere", 33.31, 25.90, 26.00),
    "BallConv": ("ball", 31.81, 25.43, 25.18),
    "TanhConv": ("tanh", 32.27, 25.27, 25.15),
    "LinearConv": ("linear", 36.49, 24.36, 24.81),
    "SegConv": ("seg", 33.57, 24.29, 24.96),
    "LogConv": ("log", 33.62, 24.91, 25.17),
    "MixConv": ("mix", 33.46, 24.93, 25.27),
}
_NO_RELU = {**_CNN, "activation": "none"}


def _decoupled(name: str, angular: str = "cosine", **options: Any) -> dict[str, Any]:
    # The other magnitudes have no radius.
    radius = {"learn_radius": "layer"} if name in ("ball", "tanh", "seg") else {}
    return {"operator": {"name": name, "angular": angular, "project_every": 1, **radius, **options}}


def _operator_rows() -> list[Row]:
    rows = [
        Row("Conv, no ReLU", {"model": _NO_RELU}, {"error": 58.24}),
        Row("Conv, ReLU", {"model": _CNN}, {"error": 26.01}),
    ]
    for title, (name, cosine, square, with_relu) in _OPERATORS.items():
        rows += [
            Row(f"{title}, no ReLU", {"model": _NO_RELU, **_decoupled(name)}, {"error": cosine}),
            Row(
                f"{title}, square cosine, no ReLU",
                {"model": _NO_RELU, **_decoupled(name, "square_cosine")},
                {"error": square},
            ),
            Row(f"{title}, ReLU", {"model": _CNN, **_decoupled(name)}, {"error": with_relu}),
        ]
    return rows


OPERATORS = Recipe(
    name="decoupled-operators",
    title="Decoupled operators with and without ReLU, on a fifth of CIFAR-100",
    reference="table 4.3 of the thesis, CNN-9 with four times the width on all of CIFAR-100",
    settings=settings_of(**{**IMAGES, "epochs": 4}, model=_CNN),
    rows=tuple(_operator_rows()),
    seeds=(0, 1),
    metrics=(ERROR, SECONDS),
    run=run,
    figures=("error",),
    note=f"{_SIZE}; 4 epochs; BatchNorm in every row; weights are projected to the unit sphere after every step, as "
    "in the source; one learned radius per layer. Errors are far above those of the source, so only "
    "differences between rows can be compared.",
)

_TANH = {"name": "tanh", "angular": "cosine", "learn_radius": "layer"}
NORMS = Recipe(
    name="decoupled-norms",
    title="Weight projection, weighted gradients and weighted operators (TanhConv)",
    reference="table 4.1 of the thesis, ResNet-32 on CIFAR-100",
    settings=settings_of(**IMAGES, model=_CNN),
    rows=(
        Row("linearly weighted", {"operator": {**_TANH, "weighting": "linear"}}, {"error": 22.95}),
        Row("weighted, tanh of the product", {"operator": {**_TANH, "weighting": "joint"}}, {"error": 23.03}),
        Row("weighted, product of tanhs", {"operator": {"name": "tanh", "weighting": "separate"}}, {"error": 23.38}),
        Row("standard gradients", {"operator": _TANH}, {"error": 23.09}),
        Row("weight projection", {"operator": {**_TANH, "project_every": 1}}, {"error": 21.17}),
        Row("weighted gradients", {"operator": {**_TANH, "weighted_gradients": True}}, {"error": 21.45}),
    ),
    seeds=(0, 1),
    metrics=(ERROR, SECONDS),
    run=run,
    figures=("error",),
    note=f"{_SIZE}; 6 epochs; cosine TanhConv with one learned radius per layer, except for the product of tanhs, "
    "where ρ = 1: if learned, its radii grow without bound (to 50 times the mean patch norm in 40 steps) and "
    "the outputs vanish.",
)


def _learn(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train, and store the learned k and the learned factors of ρ."""
    assembly = assemble(settings, trial)

    def tensors() -> dict[str, Tensor]:
        k, factor = learned_parameters(assembly)
        return {name: value for name, value in (("k", k), ("radius_factor", factor)) if len(value)}

    def more() -> dict[str, float]:
        return {
            f"{name}_{what}": float(value)
            for name, values in tensors().items()
            for what, value in (("mean", values.mean()), ("least", values.min()), ("most", values.max()))
        }

    return classify(assembly, trial, more=more, tensors=tensors)


def learned_parameters(assembly: training.Assembly) -> tuple[Tensor, Tensor]:
    """Return all learned k and all learned factors of the radius."""
    layers = [module for module in assembly.network.modules() if isinstance(module, DecoupledLayer)]
    none = torch.zeros(0)  # `cat` rejects an empty list
    k = [layer.log_k.detach().exp().flatten() for layer in layers if layer.log_k is not None]
    factor = [layer.log_radius.detach().exp().flatten() for layer in layers if layer.log_radius is not None]
    return torch.cat([none, *k]), torch.cat([none, *factor])


_K = {"name": "sphere", "angular": {"name": "sigmoid", "k": 0.5}}
LEARNED = Recipe(
    name="learned-parameters",
    title="Learned k of the sigmoid SphereConv and learned radii of the TanhConv",
    reference="figure 3.4 and section C.2 of the thesis",
    settings=settings_of(**IMAGES, model=_CNN),
    rows=(
        Row("sigmoid, k = 0.5", {"operator": _K}),
        Row("sigmoid, a k for each filter", {"operator": {**_K, "learn_k": "filter"}}),
        Row("TanhConv, ρ = 1", {"operator": {"name": "tanh"}}),
        Row("TanhConv, a ρ for each filter", {"operator": {"name": "tanh", "learn_radius": "filter"}}),
    ),
    seeds=(0,),
    metrics=(
        ERROR,
        Metric("k_mean", "mean k", ".3f", None),
        Metric("k_least", "least k", ".3f", None),
        Metric("k_most", "largest k", ".3f", None),
        Metric("radius_factor_mean", "mean factor of ρ", ".3f", None),
        Metric("radius_factor_least", "least factor of ρ", ".3f", None),
        Metric("radius_factor_most", "largest factor of ρ", ".3f", None),
    ),
    run=_learn,
    note=f"{_SIZE}; 6 epochs. ρ is a learned factor, which starts at 1, times the running mean of the patch norm.",
)
