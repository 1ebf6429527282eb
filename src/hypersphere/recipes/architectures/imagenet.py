"""ImageNet: SphereResNet-18, decoupled ResNet-18, and the filters of first layers (figures 3.6 and C.4, table 4.6)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from hypersphere import sphere as geometry
from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.protocols import ERROR, SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Row, table_rows
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["DECOUPLED", "FILTERS", "PROTOCOL", "SPHERE", "filter_statistics", "measure_top5"]

# Images are resized to 256×256; training uses random windows of 224×224, validation the central one (section 3.4.1).
PROTOCOL: dict[str, Any] = {
    "data": {"name": "imagenet", "size": 256, "fit": "stretch", "margin": 32},
    "augment": [{"name": "window", "margin": 32}, {"name": "mirror"}],
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "batch_size": 40,
}
_ABOUT = (
    "Reads ImageNet from train and val with one folder per class. Top-1 and top-5 errors are those of the central "
    "window of 224×224 pixels of images that are resized to 256×256. The weight decay is that of the released code, "
    "1e-4"
)
_TOP5 = Metric("top5_error", "top-5 error %", ".2f", False)


def measure_top5(experiment: Experiment, run: Run) -> Outcome:
    """Add the curve of the top-5 error and its last value."""
    errors = [100 * (1 - line["top5"]) for line in run.metrics() if line.get("top5") is not None]
    return Outcome({"top5_error": errors[-1]}, {"top5_error": errors})


# --- SphereResNet-18 (figure 3.6)

_SMALL_RESNET: dict[str, Any] = {"name": "resnet18", "widths": [8, 12, 16, 24], "large_stem": False}
_SIZE = "On a CPU: a narrow network on 20,000 images of CIFAR-10 at 16×16 pixels"
SPHERE = cifar.operator_recipe(
    name="spherenet-imagenet",
    title="SphereResNet-18 on ImageNet",
    reference="figure 3.6 of the thesis, curves of the validation error",
    scales={
        "paper": {**PROTOCOL, "model": "wide_resnet18", **stepwise(550_000, [200_000, 375_000])},
        "cpu": {**cifar.CPU, "model": _SMALL_RESNET, "validation": {**cifar.CPU["validation"], "every": 1}},
        "smoke": {**SMOKE, "model": {**_SMALL_RESNET, "widths": [4, 4, 4, 4]}},
    },
    rows=(
        Row("ResNet-18"),
        Row("SphereResNet-18-v1", {**cifar.sphere(), "head": {"name": "w_softmax", "angular": "cosine"}}),
        Row("SphereResNet-18-v2", merge(cifar.sphere(), {"operator": {"layers": "spatial"}})),
    ),
    metrics=(ERROR, _TOP5, SECONDS),
    covers=("F3.6",),
    cost={"paper": 60000, "cpu": 0.5, "smoke": 0.01},
    measure=measure_top5,
    figures=("error", "top5_error"),
    baseline="ResNet-18",
    claims=(Claim("SphereResNet-18-v2 ends better than ResNet-18.", "SphereResNet-18-v2"),),
    note=f"{_ABOUT}. Version 1 has operators in its 1×1 shortcuts too and is trained with the cosine W-Softmax; "
    f"version 2 has ordinary shortcuts and softmax. {_SIZE}.",
)

# --- decoupled ResNet-18 (table 4.6)

_LINES: dict[str, dict[str, Any]] = {
    "Baseline": {},
    "SphereConv": cifar.decoupled("SphereConv"),
    "LinearConv": cifar.decoupled("LinearConv"),
    "TanhConv": cifar.decoupled("TanhConv"),
}
_SMALL_MODIFIED: dict[str, Any] = {"widths": [8, 16, 24, 32], "large_stem": False}
_TINY: dict[str, Any] = {"widths": [4, 4, 4, 4], "large_stem": False}
_MODIFIED: dict[str, Any] = {"name": "modified_resnet18", "activation": "prelu"}
_COLUMNS: dict[str, dict[str, Any]] = {
    "Standard ResNet-18 w/ BN": {"model": "resnet18"},
    "Modified ResNet-18 w/ BN": {"model": _MODIFIED},
    "Modified ResNet-18 w/o BN": {"model": {**_MODIFIED, "norm": "none"}},
}


_SIZES = {
    column: {"cpu": {"model": _SMALL_MODIFIED if "Modified" in column else _SMALL_RESNET}, "smoke": {"model": _TINY}}
    for column in _COLUMNS
}

DECOUPLED = cifar.operator_recipe(
    name="decoupled-imagenet",
    title="Decoupled ResNet-18 on ImageNet, with and without BatchNorm",
    reference="table 4.6 of the thesis",
    scales={"paper": {**PROTOCOL, **stepwise(700_000, [200_000, 375_000, 550_000])}, "cpu": cifar.CPU, "smoke": SMOKE},
    rows=table_rows("T4.6", _LINES, _COLUMNS, metric="top5_error", baseline="Baseline", at=_SIZES),
    default_rows={
        "cpu": [
            "Baseline, Modified ResNet-18 w/ BN",
            "TanhConv, Modified ResNet-18 w/ BN",
            *(f"{line}, Modified ResNet-18 w/o BN" for line in _LINES),
        ],
        "smoke": ["TanhConv, Modified ResNet-18 w/o BN", "SphereConv, Standard ResNet-18 w/ BN"],
    },
    metrics=(_TOP5, ERROR, SECONDS),
    covers=("T4.6",),
    cost={"paper": 200000, "cpu": 0.6, "smoke": 0.01},
    measure=measure_top5,
    claims=(
        Claim(
            "Without BatchNorm, TanhConv trains and convolution does not.",
            "TanhConv, Modified ResNet-18 w/o BN",
            metric="error",
        ),
        Claim(
            "With BatchNorm, TanhConv is better than convolution.", "TanhConv, Modified ResNet-18 w/ BN", metric="error"
        ),
    ),
    note=f"{_ABOUT}; so are the number of steps, PReLU in the modified network, one projection per 100 steps and the "
    "weight of the orthogonal penalty, 5e-6. The source starts the decoupled standard networks from a trained CNN, "
    "which had more training than the baseline; here all rows start from random weights. In the source, convolution "
    f"and LinearConv did not converge without BatchNorm. {_SIZE}.",
)

# --- filters of the first layer (figure C.4)


def filter_statistics(filters: Tensor) -> dict[str, float]:
    """Return the sparsity of filters and the correlation between them.

    The sparsity is Hoyer's, (√d − ‖w‖₁/‖w‖₂)/(√d − 1), averaged over filters: 0 if all entries have the same size, 1 if
    only one is not zero. The correlation is the mean |cos| between two filters.

    >>> import torch
    >>> filter_statistics(torch.eye(3).view(3, 1, 1, 3))
    {'sparsity': 1.0, 'correlation': 0.0}
    """
    rows = filters.flatten(1).double()
    root = math.sqrt(rows.shape[1])
    hoyer = (root - rows.abs().sum(1) / geometry.norm(rows)) / (root - 1)
    cosines = geometry.cosines(rows, rows).abs()
    count = len(rows)
    return {
        "sparsity": float(hoyer.mean()),
        "correlation": float((cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1))),
    }


def _measure_filters(experiment: Experiment, run: Run) -> Outcome:
    """Store the filters of the first convolution and their statistics."""
    first = next(module for module in experiment.network.modules() if isinstance(module, nn.Conv2d))
    filters = first.weight.detach().cpu()
    return Outcome(filter_statistics(filters), tensors={"filters": filters})


_FILTER_ROWS: dict[str, dict[str, Any]] = {
    "CNN": {},
    **{name: cifar.decoupled(name, project=False) for name in ("SphereConv", "BallConv", "TanhConv")},
}
FILTERS = cifar.operator_recipe(
    name="decoupled-filters",
    title="Filters of the first layer",
    reference="figure C.4 of the thesis, 256 filters of 7×7 pixels learned on ImageNet",
    scales={
        "paper": {**PROTOCOL, "model": "wide_resnet18", **stepwise(550_000, [200_000, 375_000])},
        "cpu": {
            **cifar.CPU,
            "data": {"name": "cifar10", "limit": 20_000},
            "augment": [{"name": "shift", "pixels": 4}, {"name": "mirror"}],
            "model": {"name": "resnet18", "widths": [32, 32, 48, 64]},
        },
        "smoke": {**SMOKE, "model": {"name": "resnet18", "widths": [4, 4, 4, 4]}},
    },
    rows=tuple(Row(name, patch) for name, patch in _FILTER_ROWS.items()),
    default_rows={"smoke": ["CNN", "TanhConv"]},
    metrics=(
        ERROR,
        Metric("sparsity", "sparsity", ".3f", None),
        Metric("correlation", "correlation", ".3f", False),
        SECONDS,
    ),
    covers=("F-C.4",),
    cost={"paper": 80000, "cpu": 0.7, "smoke": 0.01},
    measure=_measure_filters,
    baseline="CNN",
    claims=(Claim("Filters of TanhConv are less correlated than those of a CNN.", "TanhConv", metric="correlation"),),
    tuning=None,
    note=f"{_ABOUT}. The source shows pictures; sparsity (Hoyer's) and correlation (the mean |cos| between two "
    "filters) are added here. The network is not stated beyond its 256 filters; the wide ResNet-18 of figure 3.6 has "
    "them. Gradients are plain, without weight projection. On a CPU: CIFAR-10 at 32×32 pixels and one learning rate "
    "for all rows: the filters are looked at, not the errors.",
)
