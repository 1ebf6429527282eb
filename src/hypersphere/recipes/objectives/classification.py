"""L-Softmax for classification: its target function, MNIST, CIFAR-10 and CIFAR-100 (section 2.2.7, figure 2.3)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from hypersphere import evaluation, sphere
from hypersphere.functions.margin import Multiplicative
from hypersphere.recipes.protocols import ERROR, SMOKE, sgd, stepwise
from hypersphere.recipes.recipe import Axis, Claim, Method, Metric, Outcome, Recipe, Row, Tuning, cells, table_rows
from hypersphere.training import Experiment, Run

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "TARGET"]

# --- the target function (figure 2.3)


def target_function(seed: int, *, m: int, points: int) -> Outcome:
    """Return ψ(θ) on [0, π], its value at π, and its largest excess over the cosine."""
    angles = torch.linspace(0, math.pi, points, dtype=torch.float64)
    cosines = angles.cos()
    psi = cosines if m == 1 else Multiplicative(m)(cosines)
    return Outcome({"at_pi": float(psi[-1]), "excess": float((psi - cosines).max())}, {"psi": psi.tolist()})


TARGET = Recipe(
    name="lsoftmax-function",
    title="The target function of L-Softmax",
    reference="figure 2.3 of the thesis",
    base={"measure": {"m": 1, "points": 181}},
    scales={"paper": {}, "cpu": {}, "smoke": {"measure": {"points": 13}}},
    rows=(Row("Softmax"), *(Row(f"L-Softmax (m={m})", {"measure": {"m": m}}) for m in (2, 3, 4))),
    metrics=(Metric("at_pi", "ψ(π)", ".2f", None), Metric("excess", "largest excess over cos θ", ".4f", None)),
    covers=("F2.3",),
    cost={"paper": 0.001, "cpu": 0.001, "smoke": 0.001},
    figures=("psi",),
    compute=target_function,
    axes={"psi": Axis("angle to the class vector", 0, math.pi)},
    note="ψ(θ) = (−1)^k cos(mθ) − 2k on [kπ/m, (k+1)π/m]. It falls from 1 to 1 − 2m and is never above the cosine. The "
    "thesis prints D(π/m) = cos(π/m) as the condition of continuity, which should be cos(π).",
)

# --- classification (tables 2.2 to 2.4)

PICTURED = 100  # features in a matrix of similarities

# The annealing of the released L-Softmax code, and the same curve within the steps of a small experiment.
_IN_SOURCE = {"start": 1000, "gamma": 2.5e-5, "power": 35, "end": 0}
_RATES: dict[str, list[Any]] = {"optimizer.lr": [0.02, 0.05, 0.1, 0.2]}
# The same number of trials: two rates, and annealing to the margin alone or to a sixth of it.
_RATES_AND_ENDS: dict[str, list[Any]] = {"optimizer.lr": [0.05, 0.1], "head.annealing.end": [0, 5]}


def _methods(steps: int) -> dict[str, Method]:
    """Return the methods, with the annealing of the source (λ = 0.4 after 10,000 of 18,000 steps) in `steps` steps."""
    annealing = {**_IN_SOURCE, "gamma": 2.5e-5 * 18_000 / steps}
    margins = {
        f"L-Softmax (m={m})": Method(
            {"head": {"name": "l_softmax", "m": m, "annealing": annealing}},
            _RATES_AND_ENDS,
            {"head": {"annealing": _IN_SOURCE}},
        )
        for m in (2, 3, 4)
    }
    return {"Hinge Loss": Method({"head": "hinge"}), "Softmax": Method({"head": "softmax"}), **margins}


def _scales(model: str, paper: str, cpu: dict[str, Any], epochs: int, every: int, **size: Any) -> dict[str, Any]:
    return {
        "paper": {"data": paper, "model": model, **stepwise(18_000, [12_000, 15_000])},
        "cpu": {
            "data": cpu,
            "model": {"name": model, "depth": [2, 1, 1], **size},
            "batch_size": 128,
            "epochs": epochs,
            "validation": {"every": every},
        },
        "smoke": {**SMOKE, "model": {"name": model, "depth": [1, 1, 1], "widths": [4, 4, 4], "feature_dim": 8}},
    }


_SOURCE_NOTE = (
    "The thesis anneals λ only where training is difficult and prints no schedule; that of the released code is used. "
    "The hinge loss is that of Caffe, one per class and not squared. Rows that cite other papers are not run. "
)


def measure_similarity(experiment: Experiment, run: Run) -> Outcome:
    """Measure cosines of test features within and between classes; store a matrix of them for the first seed."""
    features, labels = experiment.embed()
    directions = sphere.normalize(features)
    classes, counts = labels.unique(return_counts=True)
    sums = torch.stack([directions[labels == label].sum(0) for label in classes])
    # The sum of all cosines of a class is ‖Σx‖², of which n are those of features with themselves.
    within = float((sums.square().sum(1) - counts).sum() / (counts * (counts - 1)).sum())
    total, number = sums.sum(0).square().sum(), len(labels)
    between = float((total - sums.square().sum()) / (number**2 - (counts**2).sum()))
    metrics = {"within": within, "between": between, "fisher": evaluation.angular_fisher_score(features, labels)}
    if experiment.config.seed:
        return Outcome(metrics)
    per_class = max(PICTURED // len(classes), 1)
    chosen = torch.cat([(labels == label).nonzero().flatten()[:per_class] for label in classes])
    tensors = {"similarity": sphere.cosines(features[chosen], features[chosen]), "similarity_labels": labels[chosen]}
    return Outcome(metrics, tensors=tensors)


_classification_recipe = partial(
    Recipe,
    base={"optimizer": sgd(0.1), "normalize": "mean_image", "batch_size": 256},
    seeds=tuple(range(5)),
    metrics=(
        ERROR,
        Metric("within", "cosine within classes", ".3f", True),
        Metric("between", "cosine between classes", ".3f", False),
        Metric("fisher", "Fisher score", ".4f", False),
    ),
    figures=("error",),
    measure=measure_similarity,
    tuning=Tuning(_RATES),
)

MNIST = _classification_recipe(
    name="lsoftmax-mnist",
    title="L-Softmax on MNIST",
    reference="table 2.2 of the thesis",
    scales=_scales(
        "lsoftmax_cnn10",
        "mnist",
        {"name": "mnist", "limit": 10_000, "pool": 2},
        epochs=20,
        every=5,
        widths=[16, 16, 16],
        feature_dim=32,
    ),
    rows=table_rows("T2.2", _methods(1580)),  # 10,000 digits, 20 epochs in batches of 128
    seeds=tuple(range(10)),
    covers=("T2.2",),
    cost={"paper": 100, "cpu": 0.9, "smoke": 0.005},
    baseline="Softmax",
    tuning=Tuning(_RATES, held_out=0.2),
    claims=(
        Claim("L-Softmax (m = 4) has a lower error than softmax on MNIST.", "L-Softmax (m=4)"),
        Claim("L-Softmax (m = 2) has a lower error than softmax on MNIST.", "L-Softmax (m=2)"),
        Claim("Softmax has a lower error than hinge loss on MNIST.", "Softmax", "Hinge Loss"),
        Claim(
            "L-Softmax (m = 4) has a lower Fisher score than softmax.",
            "L-Softmax (m=4)",
            metric="fisher",
            source="F2.2",
        ),
    ),
    note=f"{_SOURCE_NOTE}At the cpu scale: 10,000 digits of 14×14 pixels, and the annealing of the source within fewer "
    "steps. Learning rates and the end of annealing are tuned on a fifth of the training digits.",
)

_COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "CIFAR10": {},
    "CIFAR10+": {
        "paper": {"augment": [{"name": "shift", "pixels": 4}, {"name": "mirror"}]},
        "cpu": {"augment": [{"name": "shift", "pixels": 2}, {"name": "mirror"}]},
        "smoke": {"augment": [{"name": "shift", "pixels": 1}, {"name": "mirror"}]},
    },
}


_CIFAR10_SMALL = cells(["Hinge Loss", "Softmax", "L-Softmax (m=2)", "L-Softmax (m=4)"], _COLUMNS)
CIFAR10 = _classification_recipe(
    name="lsoftmax-cifar10",
    title="L-Softmax on CIFAR-10, with and without augmentation",
    reference="table 2.3 and figure 2.5 of the thesis",
    scales=_scales(
        "lsoftmax_cnn13",
        "cifar10",
        {"name": "cifar10", "limit": 20_000, "pool": 2},
        epochs=10,
        every=2,
        widths=[16, 24, 32],
        feature_dim=64,
    ),
    # 20,000 images, 10 epochs in batches of 128
    rows=table_rows("T2.3", _methods(1570), {column: {} for column in _COLUMNS}, baseline="Softmax", at=_COLUMNS),
    default_rows={"cpu": _CIFAR10_SMALL, "smoke": _CIFAR10_SMALL},
    covers=("T2.3", "F2.5"),
    cost={"paper": 500, "cpu": 1.4, "smoke": 0.01},
    claims=tuple(
        claim
        for column in _COLUMNS
        for claim in (
            Claim(f"L-Softmax (m = 4) has a lower error than softmax on {column}.", f"L-Softmax (m=4), {column}"),
            Claim(
                f"Softmax has a lower error than hinge loss on {column}.", f"Softmax, {column}", f"Hinge Loss, {column}"
            ),
            Claim(
                f"L-Softmax (m = 4) has a lower cosine between classes than softmax on {column}.",
                f"L-Softmax (m=4), {column}",
                metric="between",
                source="F2.5",
            ),
        )
    ),
    note=f"{_SOURCE_NOTE}CIFAR10+ is CIFAR-10 with shifts of up to 4 pixels and mirror images. At the cpu scale: "
    "20,000 images of 16×16 pixels, shifts of up to 2 pixels; m = 3 is left out. Figure 2.5 does not state whether it "
    "shows samples or class means; here it is ten samples of each class, or one of each for 100 classes (recipe "
    "lsoftmax-cifar100 stores the matrices of its third pair).",
)

CIFAR100 = _classification_recipe(
    name="lsoftmax-cifar100",
    title="L-Softmax on CIFAR-100",
    reference="table 2.4 of the thesis",
    scales=_scales(
        "lsoftmax_cnn13_wide",
        "cifar100",
        {"name": "cifar100_fifth", "pool": 2},
        epochs=20,
        every=5,
        widths=[16, 32, 64],
        feature_dim=64,
    ),
    rows=table_rows("T2.4", _methods(1580)),  # 10,000 images, 20 epochs in batches of 128
    covers=("T2.4",),
    cost={"paper": 500, "cpu": 0.8, "smoke": 0.01},
    baseline="Softmax",
    claims=(
        Claim("L-Softmax (m = 4) has a lower error than softmax on CIFAR-100.", "L-Softmax (m=4)"),
        Claim("L-Softmax (m = 2) has a lower error than softmax on CIFAR-100.", "L-Softmax (m=2)"),
    ),
    note=f"{_SOURCE_NOTE}Augmentation is not stated for CIFAR-100; none is used. At the cpu scale: a fifth of "
    "CIFAR-100 (100 images per class) in 16×16 pixels.",
)
