"""Two-dimensional features of decoupled networks, trained naturally and adversarially (figures C.2 and C.3)."""

from __future__ import annotations

from typing import Any

from hypersphere import evaluation
from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.protocols import SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.training import Experiment, Run

__all__ = ["RECIPE"]


def _measure(experiment: Experiment, run: Run) -> Outcome:
    """Store the features of the test images, and measure how well their directions separate the classes."""
    features, labels = experiment.embed()
    head: Any = experiment.head
    return Outcome(
        {"fisher": evaluation.angular_fisher_score(features, labels)},
        tensors={"features": features, "labels": labels, "class_vectors": head.weight.detach()},
    )


_OPERATORS: dict[str, dict[str, Any]] = {
    "CNN": {},
    **{name: cifar.decoupled(name, project=False) for name in ("SphereConv", "BallConv", "TanhConv")},
}
_ATTACK = {"adversarial": {"name": "fgsm", "epsilon": 0.1}}


_TRAINED: dict[str, dict[str, Any]] = {"": {}, ", adversarially trained": _ATTACK}

RECIPE = Recipe(
    name="decoupled-features",
    title="Two-dimensional features of decoupled networks",
    reference="figures C.2 and C.3 of the thesis, on MNIST",
    base={
        "model": {
            "name": "mnist_cnn6",
            "kernel_size": 3,
            "feature_dim": 256,
            "activation": "relu",
            "feature_activation": "relu",
        },
        "embedding": {"dim": 2, "neck": "linear"},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "batch_size": 128,
    },
    scales={
        "paper": {"data": "mnist", **stepwise(20_000, [10_000, 15_000])},
        "cpu": {
            "data": {"name": "mnist", "pool": 2, "limit": 12_000},
            "model": {"widths": [8, 16, 32], "feature_dim": 64},
            "epochs": 15,
            "validation": {"every": 5, "energy": False, "batch_size": 500},
        },
        "smoke": {**SMOKE, "model": {"widths": [4, 4, 4], "feature_dim": 8}},
    },
    rows=tuple(
        Row(f"{name}{trained}", {**operator, **patch}, baseline=None if name == "CNN" else f"CNN{trained}")
        for trained, patch in _TRAINED.items()
        for name, operator in _OPERATORS.items()
    ),
    default_rows={
        # BallConv differs from TanhConv by the smoothness of one corner.
        "cpu": [f"{name}{trained}" for name in ("CNN", "SphereConv", "TanhConv") for trained in _TRAINED],
        "smoke": ["CNN", "TanhConv, adversarially trained"],
    },
    seeds=(0, 1, 2),
    metrics=(Metric("accuracy", "accuracy %", ".2f", True), Metric("fisher", "Fisher score", ".4f", False), SECONDS),
    covers=("F-C.2", "F-C.3"),
    cost={"paper": 60, "cpu": 0.5, "smoke": 0.01},
    measure=_measure,
    tuning=Tuning({"optimizer.lr": [1e-3, 3e-3]}, metric="accuracy"),
    claims=(
        *(
            Claim(f"Features of {name} are more compact than those of a CNN.", name, metric="fisher")
            for name in ("SphereConv", "TanhConv")
        ),
        Claim(
            "Trained adversarially, features of TanhConv are more compact than those of a CNN.",
            "TanhConv, adversarially trained",
            metric="fisher",
            source="F-C.3",
        ),
    ),
    note="The source shows pictures; the angular Fisher score of the test features is added here, lower is more "
    "compact. Six convolutions, FC 256, FC 2 and the classifier; max-pooling after every second convolution, ReLU, "
    "BatchNorm, the number of steps and ε = 0.1 of the attack are not stated in the source. Convolutions are "
    "decoupled, fully connected layers are ordinary.",
)
