"""Columns, training protocols on CIFAR and on citation graphs, and measurements that several recipes share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hypersphere import data, evaluation
from hypersphere.recipes.recipe import Metric
from hypersphere.training import Experiment

SECONDS = Metric("seconds", "seconds of training", ".0f", None)
ERROR = Metric("error", "test error %", ".2f", False)
ENERGY = Metric("energy", "hidden energy", ".4f", False)


def sgd(rate: float, **options: Any) -> dict[str, Any]:
    """Return settings of SGD with momentum and weight decay 5e-4."""
    return {"name": "sgd", "lr": rate, "momentum": 0.9, "weight_decay": 5e-4, **options}


def stepwise(steps: int, at: list[int]) -> dict[str, Any]:
    """Return settings of training for a number of steps, with a learning rate divided by ten at some of them."""
    return {"steps": steps, "schedule": {"name": "steps", "at": at, "unit": "steps"}}


# All of CIFAR at the schedule of chapter 5 (appendix D.1), and a fifth of CIFAR-100 at half its resolution, for
# networks that two cores train in a minute.
CIFAR: dict[str, dict[str, Any]] = {
    "base": {"optimizer": sgd(0.1), "batch_size": 128},
    "paper": {
        "data": "cifar100",
        "augment": [{"name": "shift", "pixels": 4}, {"name": "mirror"}],
        "optimizer": {"weight_decay": 1e-4},
        **stepwise(42_500, [20_000, 30_000, 37_500]),
    },
    "cpu": {
        "data": {"name": "cifar100_fifth", "pool": 2},
        "augment": [{"name": "shift", "pixels": 2}, {"name": "mirror"}],
        "epochs": 6,
    },
}
# The digits of scikit-learn, for a test of a few steps.
SMOKE: dict[str, Any] = {"data": {"name": "digits", "limit": 60, "held_out": 100}, "epochs": 1, "batch_size": 30}


GRAPH_BASE = {
    "model": "gcn",
    "optimizer": {"name": "adam", "lr": 0.01, "weight_decay": 5e-4},
    "schedule": "constant",
    "validation": {"every": 50},  # an epoch is a single step, which is faster than a validation
}
# Citation graphs are small, so the protocol of the source runs on a CPU.
GRAPH_SCALES: dict[str, Any] = {"paper": {"epochs": 200}, "cpu": {"epochs": 200}, "smoke": {"epochs": 3}}
GRAPH_METRICS = (Metric("accuracy", "test accuracy %", ".2f", True), ENERGY)


def load_data(settings: Mapping[str, Any], data_root: Path | None) -> data.DataSplit:
    """Load the data of settings like those of `Config.data`, for recipes that train without a config."""
    options = {key: value for key, value in settings.items() if key != "name"}
    return data.DATA[settings["name"]](data_root, **options)


def picture(experiment: Experiment, features: Tensor, labels: Tensor, count: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of a picture: the first `count` features with their labels, and the class vectors."""
    head: Any = experiment.head
    return {"features": features[:count], "labels": labels[:count], "class_vectors": head.weight.detach()}


def compare_unseen(features: Tensor, labels: Tensor, *, folds: int = 10, per_fold: int = 300) -> dict[str, float]:
    """Verify pairs in folds and identify all items by the first one of each class; values in per cent."""
    # A fixed seed draws the same pairs for every row and seed of a recipe.
    pairs = data.draw_pairs(labels, folds=folds, per_fold=per_fold, seed=0)
    verified = evaluation.verify(features[pairs.first], features[pairs.second], pairs.same, folds=pairs.fold)
    identified = evaluation.identify_by_first(features, labels)
    return {
        "accuracy": 100 * verified.accuracy,
        "eer": 100 * verified.eer,
        "tar": 100 * verified.tar[1e-3],
        "rank1": 100 * identified.accuracy[1],
    }


def separation(experiment: Experiment) -> float:
    """Return the smallest angle between two class vectors in degrees."""
    head: Any = experiment.head
    return math.degrees(evaluation.smallest_angle(head.weight))
