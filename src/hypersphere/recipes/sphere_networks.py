"""SphereNets and decoupled networks: convergence, operators with and without ReLU, and the role of weight norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.layers import DecoupledLayer
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.parts import CIFAR, ERROR, SECONDS, SMOKE, sgd
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["CONVERGENCE", "LEARNED", "NORMS", "OPERATORS", "learned_parameters"]

_SIZE = "CNN-9 with 16, 32 and 64 filters on 10,000 images of 16×16 pixels"


def _scales(data: str, model: str, epochs: int) -> dict[str, dict[str, Any]]:
    """Return the scales on CIFAR; those of the source use Adam, as chapters 3 and 4 do."""
    return {
        "paper": {
            **CIFAR["paper"],
            "data": data,
            "model": model,
            "optimizer": {"name": "adam", "lr": 1e-3},
            "schedule": {"name": "steps", "at": [34_000, 54_000], "unit": "steps"},
            "steps": 64_000,
        },
        "cpu": {
            **CIFAR["cpu"],
            "model": {"name": "spherenet_cnn9", "widths": [16, 32, 64], "feature_dim": 64},
            "epochs": epochs,
        },
        "smoke": {**SMOKE, "model": {"name": "spherenet_cnn9", "widths": [4, 4, 4], "feature_dim": 8}},
    }


def _sphere(angular: Any = "cosine") -> dict[str, Any]:
    return {"operator": {"name": "sphere", "angular": angular}}


def _with_early(experiment: Experiment, run: Run) -> Outcome:
    errors = outcome_of_lines(run.metrics()).curves["error"]  # the first entry is the error before training
    return Outcome({"early": errors[min(2, len(errors) - 1)]})


_BARE = {"model": {"norm": "none"}}


def _small_batch_row(name: str, patch: dict[str, Any]) -> Row:
    return Row(f"{name}, batch 4", {**patch, "batch_size": 4}, at={"cpu": {"epochs": 1, "optimizer": sgd(0.01)}})


CONVERGENCE = Recipe(
    name="spherenet-convergence",
    title="Convergence of SphereNets and CNNs, with and without BatchNorm, and at batch 4",
    reference="figures 3.3 and 3.5 of the thesis, which are curves on CIFAR-10",
    base=CIFAR["base"],
    scales=_scales("cifar10", "spherenet_cnn9", 6),
    rows=(
        Row("CNN"),
        Row("SphereNet, cosine", _sphere()),
        Row("SphereNet, linear", _sphere("linear")),
        Row("SphereNet, sigmoid (0.3)", _sphere({"name": "sigmoid", "k": 0.3})),
        Row("CNN without BatchNorm", _BARE),
        Row("SphereNet, cosine, without BatchNorm", {**_BARE, **_sphere()}),
        Row("SphereNet, linear, without BatchNorm", {**_BARE, **_sphere("linear")}),
        _small_batch_row("CNN", {}),
        _small_batch_row("SphereNet, cosine", _sphere()),
        _small_batch_row("CNN without BatchNorm", _BARE),
        _small_batch_row("SphereNet, cosine, without BatchNorm", {**_BARE, **_sphere()}),
    ),
    seeds=(0, 1),
    metrics=(Metric("early", "error % after 2 epochs", ".2f", False), ERROR, SECONDS),
    covers=("F3.3b", "F3.5"),
    cost={"paper": 2000, "cpu": 0.5, "smoke": 0.02},
    measure=_with_early,
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
_NO_RELU = {"model": {"activation": "none"}}


def _decoupled(name: str, angular: str = "cosine") -> dict[str, Any]:
    # The other magnitudes have no radius.
    radius = {"learn_radius": "layer"} if name in ("ball", "tanh", "seg") else {}
    return {"operator": {"name": name, "angular": angular, "project_every": 1, **radius}}


def _operator_rows() -> list[Row]:
    rows = [Row("Conv, no ReLU", _NO_RELU, {"error": 58.24}), Row("Conv, ReLU", {}, {"error": 26.01})]
    for title, (name, cosine, square, with_relu) in _OPERATORS.items():
        squared = {**_NO_RELU, **_decoupled(name, "square_cosine")}
        rows += [
            Row(f"{title}, no ReLU", {**_NO_RELU, **_decoupled(name)}, {"error": cosine}),
            Row(f"{title}, square cosine, no ReLU", squared, {"error": square}),
            Row(f"{title}, ReLU", _decoupled(name), {"error": with_relu}),
        ]
    return rows


OPERATORS = Recipe(
    name="decoupled-operators",
    title="Decoupled operators with and without ReLU, on a fifth of CIFAR-100",
    reference="table 4.3 of the thesis, CNN-9 with four times the width on all of CIFAR-100",
    base=CIFAR["base"],
    scales=_scales("cifar100", "decoupled_cnn9", 4),
    rows=tuple(_operator_rows()),
    seeds=(0, 1),
    metrics=(ERROR, SECONDS),
    covers=("T4.3",),
    cost={"paper": 8000, "cpu": 0.6, "smoke": 0.03},
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
    base=CIFAR["base"],
    scales=_scales("cifar100", "wide_resnet32", 6),
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
    covers=("T4.1",),
    cost={"paper": 20000, "cpu": 0.35, "smoke": 0.01},
    figures=("error",),
    note=f"{_SIZE}; 6 epochs; cosine TanhConv with one learned radius per layer, except for the product of tanhs, "
    "where ρ = 1: if learned, its radii grow without bound (to 50 times the mean patch norm in 40 steps) and "
    "the outputs vanish.",
)


def _learned(experiment: Experiment, run: Run) -> Outcome:
    """Store the learned k and the learned factors of ρ."""
    k, factor = learned_parameters(experiment.network)
    tensors = {name: values for name, values in (("k", k), ("radius_factor", factor)) if len(values)}
    metrics = {
        f"{name}_{what}": float(value)
        for name, values in tensors.items()
        for what, value in (("mean", values.mean()), ("least", values.min()), ("most", values.max()))
    }
    return Outcome(metrics, tensors=tensors)


def learned_parameters(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Return all learned k and all learned factors of the radius."""
    layers = [module for module in network.modules() if isinstance(module, DecoupledLayer)]
    none = torch.zeros(0)  # `cat` rejects an empty list
    k = [layer.log_k.detach().exp().flatten().cpu() for layer in layers if layer.log_k is not None]
    factor = [layer.log_radius.detach().exp().flatten().cpu() for layer in layers if layer.log_radius is not None]
    return torch.cat([none, *k]), torch.cat([none, *factor])


_K = {"name": "sphere", "angular": {"name": "sigmoid", "k": 0.5}}
LEARNED = Recipe(
    name="learned-parameters",
    title="Learned k of the sigmoid SphereConv and learned radii of the TanhConv",
    reference="figure 3.4 and section C.2 of the thesis",
    base=CIFAR["base"],
    scales=_scales("cifar10", "spherenet_cnn9", 6),
    rows=(
        Row("sigmoid, k = 0.5", {"operator": _K}),
        Row("sigmoid, a k for each filter", {"operator": {**_K, "learn_k": "filter"}}),
        Row("TanhConv, ρ = 1", {"operator": {"name": "tanh"}}),
        Row("TanhConv, a ρ for each filter", {"operator": {"name": "tanh", "learn_radius": "filter"}}),
    ),
    metrics=(
        ERROR,
        Metric("k_mean", "mean k", ".3f", None),
        Metric("k_least", "least k", ".3f", None),
        Metric("k_most", "largest k", ".3f", None),
        Metric("radius_factor_mean", "mean factor of ρ", ".3f", None),
        Metric("radius_factor_least", "least factor of ρ", ".3f", None),
        Metric("radius_factor_most", "largest factor of ρ", ".3f", None),
    ),
    covers=("F3.4",),
    cost={"paper": 700, "cpu": 0.1, "smoke": 0.01},
    measure=_learned,
    note=f"{_SIZE}; 6 epochs. ρ is a learned factor, which starts at 1, times the running mean of the patch norm.",
)
