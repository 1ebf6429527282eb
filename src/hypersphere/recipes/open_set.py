"""Shared by the open-set recipes: rows of objectives, and an embedding network trained with one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, evaluation, heads, training
from hypersphere._validation import require
from hypersphere.models import EmbeddingCNN
from hypersphere.recipes.recipe import Metric, Row

__all__ = ["FAST", "OPEN_SET_METRICS", "SLOW", "TRAINING", "compare_unseen", "objectives", "train_embedding"]

SLOW = {"start": 1000, "gamma": 0.12, "power": 1, "end": 5}  # the schedule of SphereFace
# Reaches its end, λ = 5, within the few hundred steps of a small experiment.
FAST = {"start": 100, "gamma": 0.1, "power": 1, "end": 5}


def objectives(annealing: Mapping[str, float]) -> tuple[Row, ...]:
    """Return one row per objective. Objectives with a multiplicative margin are annealed from the plain softmax."""
    annealed = {"annealing": dict(annealing)}
    return (
        Row("Softmax", {"head": "softmax"}),
        Row("Modified softmax", {"head": "modified_softmax"}),
        Row("L-Softmax (m=2)", {"head": "l_softmax", "options": {"m": 2, **annealed}}),
        Row("A-Softmax (m=2)", {"head": "a_softmax", "options": {"m": 2, **annealed}}),
        Row("A-Softmax (m=4)", {"head": "a_softmax", "options": {"m": 4, **annealed}}),
        Row("SphereFace+ (m=4)", {"head": "sphereface_plus", "options": {"m": 4, "energy_weight": 1.0, **annealed}}),
        Row("AM-Softmax (s=30, m=0.35)", {"head": "am_softmax", "options": {"s": 30.0, "m": 0.35}}),
        Row("ArcFace (s=30, m=0.5)", {"head": "arcface", "options": {"s": 30.0, "m": 0.5}}),
    )


OPEN_SET_METRICS = (
    Metric("accuracy", "verification %", ".2f", True),
    Metric("eer", "EER %", ".2f", False),
    Metric("fisher", "Fisher score", ".3f", False),
    Metric("separation", "min angle °", ".1f", True),
)

TRAINING = {
    "head": "softmax",
    "options": {},
    "feature_dim": 64,
    "widths": [32, 64, 64],
    "first_stride": 1,
    "batch_size": 128,
    "learning_rate": 0.1,
    "weight_decay": 5e-4,
    "shift": 2,
}


def train_embedding(
    settings: Mapping[str, Any], images: Tensor, labels: Tensor, seed: int, tell: Callable[[float], None]
) -> tuple[EmbeddingCNN, heads.AngularHead, list[float]]:
    """Train a network and a head by SGD with a one-cycle learning rate; return both and the loss of each epoch."""
    dim, classes = settings["feature_dim"], int(labels.max()) + 1
    size = (images.shape[2], images.shape[3])
    model = EmbeddingCNN(images.shape[1], size, dim, tuple(settings["widths"]), first_stride=settings["first_stride"])
    head = make_head(settings, dim, classes)
    generator = torch.Generator().manual_seed(seed)
    batches = training.Batches(images, labels, settings["batch_size"], generator)
    epochs, rate = settings["epochs"], settings["learning_rate"]
    optimizer = torch.optim.SGD(
        [*model.parameters(), *head.parameters()], lr=rate, momentum=0.9, weight_decay=settings["weight_decay"]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * len(batches))
    history = training.fit(
        model,
        head,
        ShiftedBatches(batches, settings["shift"], generator),
        epochs=epochs,
        optimizer=optimizer,
        scheduler=schedule,
        on_epoch=lambda epoch: tell(epoch.number / epochs),
    )
    return model, head, [epoch.loss for epoch in history]


def compare_unseen(features: Tensor, labels: Tensor) -> dict[str, float]:
    """Verify 6,000 pairs in ten folds and identify all items by the first one of each class; values in per cent."""
    # The same pairs for every row and seed of a recipe.
    pairs = data.draw_pairs(labels, folds=10, per_fold=300, seed=0)
    verified = evaluation.verify(features[pairs.first], features[pairs.second], pairs.same, folds=pairs.fold)
    # The gallery has one drawing of each character; all other drawings are probes.
    gallery = evaluation.first_of_each(labels)
    identified = evaluation.identify(features[~gallery], labels[~gallery], features[gallery], labels[gallery])
    return {
        "accuracy": 100 * verified.accuracy,
        "eer": 100 * verified.eer,
        "tar": 100 * verified.tar[1e-3],
        "rank1": 100 * identified.accuracy[1],
    }


def make_head(settings: Mapping[str, Any], dim: int, classes: int) -> heads.AngularHead:
    """Return the head that the settings name, with its options."""
    name, options = settings["head"], dict(settings["options"])
    require(name in heads.PRESETS, "head", f"one of {', '.join(heads.PRESETS)}", name)
    if "annealing" in options:
        options["annealing"] = heads.Annealing(**options["annealing"])
    return heads.PRESETS[name](dim, classes, **options)


class ShiftedBatches:
    """Batches shifted cyclically by up to `max_shift` pixels; all images of a batch by the same amount."""

    def __init__(self, batches: training.Batches, max_shift: int, generator: torch.Generator) -> None:
        self.batches, self.max_shift, self.generator = batches, max_shift, generator

    def __iter__(self) -> Any:
        for x, y in self.batches:
            # One shift per batch, because `roll` then is a single copy.
            down, right = torch.randint(-self.max_shift, self.max_shift + 1, (2,), generator=self.generator).tolist()
            yield torch.roll(x, (down, right), (2, 3)), y
