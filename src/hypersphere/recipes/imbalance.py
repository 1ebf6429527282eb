"""Class imbalance: energy reserves space on the sphere for a class with few examples (section 5.5 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.energy_networks import FULL, HALF, penalty
from hypersphere.recipes.parts import CIFAR, ERROR, SMOKE, sgd, stepwise
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run, predict

__all__ = ["MANY", "TOY"]

_NUM_PICTURED = 2000  # enough for a picture


def measure(experiment: Experiment, run: Run) -> Outcome:
    """Measure the error of the rare class, and store 2-d features."""
    features, labels = experiment.embed()
    rare = labels == 0  # the class whose training examples are removed
    head: Any = experiment.head
    hits = predict(head, features[rare].to(experiment.device)).cpu() == labels[rare]
    metrics = {"rare_error": 100 * float((~hits).double().mean())}
    if experiment.network.feature_dim != 2:
        return Outcome(metrics)
    pictured = {"features": features[:_NUM_PICTURED], "labels": labels[:_NUM_PICTURED]}
    return Outcome(metrics, tensors={**pictured, "class_vectors": head.weight.detach()})


_RARE = Metric("rare_error", "error % of digit 0", ".2f", False)

TOY = Recipe(
    name="imbalance-picture",
    title="Digit 0 with 2 % of its examples, and a 2-d feature",
    reference="figure 5.4 of the thesis",
    base={
        "model": {"name": "mnist_cnn6", "norm": "batch"},
        "head": "modified_softmax",
        "optimizer": sgd(0.1),
        "clip": 5.0,
        "batch_size": 128,
    },
    scales={
        # The schedule of the 2-d features of chapter 2; that of this figure is not printed.
        "paper": {"data": {"name": "mnist", "keep": {"0": 0.02}}, **stepwise(18_000, [12_000, 15_000])},
        "cpu": {
            "data": {"name": "mnist", "keep": {"0": 0.02}, "pool": 2},
            "model": {"widths": [8, 16, 32]},
            "epochs": 4,
        },
        "smoke": {**SMOKE, "model": {"widths": [4, 4, 4]}},
    },
    rows=(
        Row("no energy"),
        Row(
            "MHE on the output", {"regularizers": [{"name": "mhe", "hidden": 0.0, "half_space": False, "output": 1.0}]}
        ),
        Row("half-space MHE, and on the output", HALF),
    ),
    seeds=(0, 1, 2),
    metrics=(ERROR, _RARE),
    covers=("F5.4", "F-D.4"),
    cost={"paper": 100, "cpu": 0.25, "smoke": 0.005},
    measure=measure,
    note="All digits of MNIST at 14×14 pixels except for 98 % of the zeros; CNN-6 with 8, 16 and 32 filters of 5×5 and "
    "a 2-d feature, unit class vectors, 4 epochs. Gradients are clipped to norm 5, because class vectors that start "
    "close together repel each other strongly. Settings were chosen on 10,000 held-out training digits: with a plain "
    "softmax, which learns the norms of the class vectors, digit 0 was never recognised in 3 epochs, with energy or "
    "without. The pictures show the first 2,000 test digits.",
)


def _rows(title: str, few: dict[str, Any], in_source: dict[str, Any], *errors: float) -> list[Row]:
    variants: dict[str, dict[str, Any]] = {
        "no energy": {},
        "orthonormal": penalty("orthonormal", 1e-3),
        "MHE": {"patch": FULL},
        "half-space MHE": {"patch": HALF},
    }
    return [
        Row(
            f"{title}, {name}",
            {"data": few, **patches.get("patch", {})},
            {"error": error},
            {"paper": {"data": in_source, **patches.get("at", {}).get("paper", {})}},
        )
        for (name, patches), error in zip(variants.items(), errors, strict=True)
    ]


MANY = Recipe(
    name="imbalance",
    title="A rare class, and classes of linearly rising size",
    reference="table 5.7 of the thesis, on CIFAR-10",
    base={},
    scales={
        "paper": {**CIFAR["base"], **CIFAR["paper"], "data": "cifar10", "model": "mhe_cnn9"}
        | {"optimizer": sgd(0.1, weight_decay=1e-4)},
        "cpu": {
            "data": {"name": "mnist", "limit": 5000},
            "model": {"name": "opt_cnn6", "widths": [8, 16, 32], "feature_dim": 64},
            "optimizer": sgd(0.02),
            "clip": 5.0,
            "batch_size": 64,
            "epochs": 4,
        },
        "smoke": {
            **SMOKE,
            "model": {"name": "opt_cnn6", "widths": [4, 4, 4], "feature_dim": 8},
            "optimizer": sgd(0.02),
        },
    },
    rows=(
        *_rows("single", {"keep": {"0": 0.02}}, {"keep": {"0": 0.1}}, 9.80, 8.34, 7.98, 7.90),
        *_rows("rising", {"rising": True}, {}, 12.00, 10.80, 10.25, 9.59),
    ),
    seeds=(0, 1),
    metrics=(ERROR, _RARE),
    covers=("T5.7",),
    cost={"paper": 1600, "cpu": 0.2, "smoke": 0.01},
    measure=measure,
    note="5,000 digits: 2 % of the zeros (single), or a fraction (i+1)/10 of digit i (rising); CNN-6 with 8, 16 and 32 "
    "filters, 4 epochs. The numbers of the source are for CIFAR-10 with 10 % of one class, so only the order of rows "
    "can be compared.",
)
