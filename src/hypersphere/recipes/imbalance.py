"""Class imbalance: energy reserves space on the sphere for a class with few examples (section 5.5 of the thesis)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypersphere import training
from hypersphere.recipes.classification import ERROR, assemble, classify, settings_of
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row, Trial

__all__ = ["MANY", "TOY"]

_NUM_PICTURED = 2000  # enough for a picture


def run(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train on imbalanced digits; measure the error on all test digits and on the zeros, and store 2-d features."""
    assembly = assemble(settings, trial)

    def embed_test_images() -> tuple[torch.Tensor, torch.Tensor]:
        return training.embed(assembly.network, assembly.test_batches())

    def more() -> dict[str, float]:
        features, labels = embed_test_images()
        rare = labels == 0  # the class whose training examples are removed
        hits = training.predict(assembly.head, features)[rare] == labels[rare]
        return {"rare_error": 100 * float((~hits).double().mean())}

    def tensors() -> dict[str, torch.Tensor]:
        if assembly.network.feature_dim != 2:
            return {}
        features, labels = embed_test_images()
        vectors = assembly.head.weight.detach()
        return {"features": features[:_NUM_PICTURED], "labels": labels[:_NUM_PICTURED], "class_vectors": vectors}

    return classify(assembly, trial, more=more, tensors=tensors)


_RARE = Metric("rare_error", "error % of digit 0", ".2f", False)
_OPTIMIZER = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4, "clip": 5.0}

TOY = Recipe(
    name="imbalance-picture",
    title="Digit 0 with 2 % of its examples, and a 2-d feature",
    reference="figure 5.4 of the thesis",
    settings=settings_of(
        data={"name": "mnist", "keep": {"0": 0.02}, "pool": 2},
        model={"name": "mnist_cnn6", "widths": [8, 16, 32], "norm": "batch"},
        head={"name": "modified_softmax"},
        optimizer={**_OPTIMIZER, "lr": 0.1},
        batch_size=128,
        epochs=4,
    ),
    rows=(
        Row("no energy", {}),
        Row("MHE on the output", {"regularizer": {"name": "mhe", "hidden": 0.0, "half_space": False, "output": 1.0}}),
        Row("half-space MHE, and on the output", {"regularizer": {"name": "mhe"}}),
    ),
    seeds=(0, 1, 2),
    metrics=(ERROR, _RARE),
    run=run,
    note="All digits of MNIST at 14×14 pixels except for 98 % of the zeros; CNN-6 with 8, 16 and 32 filters of 5×5 "
    "and a 2-d feature, unit class vectors, 4 epochs. Gradients are clipped to norm 5, because class vectors "
    "that start close together repel each other strongly. Settings were chosen on 10,000 held-out training "
    "digits: with a plain softmax, which learns the norms of the class vectors, digit 0 was never recognised "
    "in 3 epochs, with energy or without. The pictures show the first 2,000 test digits.",
)

_ONE = {"data": {"name": "mnist", "keep": {"0": 0.02}, "limit": 5000}}
_RISING = {"data": {"name": "mnist", "rising": True, "limit": 5000}}
MANY = Recipe(
    name="imbalance",
    title="A rare class, and classes of linearly rising size",
    reference="table 5.7 of the thesis, on CIFAR-10",
    settings=settings_of(
        data={"name": "mnist"},
        model={"name": "opt_cnn6", "widths": [8, 16, 32], "feature_dim": 64},
        optimizer=_OPTIMIZER,
        batch_size=64,
        epochs=4,
    ),
    rows=tuple(
        Row(f"{title}, {name}", {**data, "regularizer": regularizer}, {"error": printed[column]})
        for column, (title, data) in enumerate((("single", _ONE), ("rising", _RISING)))
        for name, regularizer, printed in (
            ("no energy", {"name": "none"}, (9.80, 12.00)),
            ("orthonormal", {"name": "orthonormal", "weight": 1e-3}, (8.34, 10.80)),
            ("MHE", {"name": "mhe", "half_space": False, "hidden": 10.0}, (7.98, 10.25)),
            ("half-space MHE", {"name": "mhe"}, (7.90, 9.59)),
        )
    ),
    seeds=(0, 1),
    metrics=(ERROR, _RARE),
    run=run,
    note="5,000 digits: 2 % of the zeros (single), or a fraction (i+1)/10 of digit i (rising); CNN-6 with 8, 16 "
    "and 32 filters, 4 epochs. The numbers of the source are for CIFAR-10 with 10 % of one class, so only the "
    "order of rows can be compared.",
)
