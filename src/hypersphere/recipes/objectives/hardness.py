"""Angular visual hardness against human selection frequency (figure 1.2 of the thesis)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, evaluation, sphere
from hypersphere.data.lists import read_rows
from hypersphere.recipes.protocols import ERROR, SMOKE, sgd
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["HARDNESS"]

NEIGHBOURS = 20
PICTURED = 2000


def measure(experiment: Experiment, run: Run, *, frequency: str, data_root: Path | None = None) -> Outcome:
    """Correlate hardness, confidence and feature norm of test images with how often their class is named.

    People name the class, or the nearest training images.

    Args:
        experiment: the trained experiment.
        run: its run.
        frequency: a CSV file in the folder of the data sets with the columns image (the name of a test image) and
            frequency; or "neighbours" for the fraction of the nearest training images that are of the class.
        data_root: folder of the data sets.
    """
    features, labels = experiment.embed()
    head: Any = experiment.head
    with torch.no_grad():
        scores = head.scores(features.to(experiment.device)).cpu().double()
    chosen, frequencies = _frequencies(experiment, frequency, data_root)
    features, labels, scores = features[chosen], labels[chosen], scores[chosen]
    values = {
        "hardness": evaluation.angular_visual_hardness(features, labels, head.weight.detach().cpu()).double(),
        "confidence": scores.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1),
        "norm": sphere.norm(features).double(),
    }
    metrics = {f"{key}_correlation": evaluation.rank_correlation(one, frequencies) for key, one in values.items()}
    # The text says that confidence is high for nearly all images.
    metrics["confident"] = 100 * float((values["confidence"] > 0.9).double().mean())
    if experiment.config.seed:
        return Outcome(metrics)
    tensors = {key: one[:PICTURED].float() for key, one in {**values, "frequency": frequencies}.items()}
    return Outcome(metrics, tensors=tensors)


def _frequencies(experiment: Experiment, frequency: str, data_root: Path | None) -> tuple[Tensor, Tensor]:
    """Return the test images that have a frequency, and their frequencies."""
    split = experiment.data
    assert split.validation is not None
    if frequency == "neighbours":
        return torch.arange(len(split.validation)), _neighbour_frequency(split.train, split.validation)
    listed = {
        image: float(value)
        for _, (image, value) in read_rows(data.data_root(data_root) / frequency, ["image", "frequency"])
    }
    # Names may be paths with the folder of the class, or names of files.
    names = [split.validation.name(index) for index in range(len(split.validation))]
    found = [(at, listed.get(name, listed.get(name.rpartition("/")[2]))) for at, name in enumerate(names)]
    pairs = [(at, value) for at, value in found if value is not None]
    if not pairs:
        raise data.DamagedData(f"{frequency} must name images of the test data, such as {names[0]!r}")
    return torch.tensor([at for at, _ in pairs]), torch.tensor([value for _, value in pairs], dtype=torch.float64)


def _neighbour_frequency(train: data.Source, test: data.Source) -> Tensor:
    """Return, for each test image, the fraction of the nearest training images (by pixels) with its label."""
    inputs, pixels = (torch.stack([source[at] for at in range(len(source))]).flatten(1) for source in (train, test))
    references = inputs.float() / 255
    shares = []
    for rows, labels in zip((pixels.float() / 255).split(500), test.labels.split(500), strict=True):
        nearest = torch.cdist(rows, references).topk(min(NEIGHBOURS, len(references)), largest=False).indices
        shares.append((train.labels[nearest] == labels.unsqueeze(1)).double().mean(1))
    return torch.cat(shares)


HARDNESS = Recipe(
    name="visual-hardness",
    title="Angular visual hardness, confidence and feature norm against selection frequency",
    reference="figure 1.2 of the thesis",
    base={"head": "softmax", "optimizer": sgd(0.1), "measure": {"frequency": "neighbours"}},
    scales={
        "paper": {
            "data": {"name": "imagenet", "size": 224},
            "model": "resnet50",
            "augment": [{"name": "crop", "scale": [0.08, 1.0]}, {"name": "mirror"}],
            "optimizer": {"weight_decay": 1e-4},
            "batch_size": 256,
            "epochs": 90,
            "schedule": {"name": "steps", "at": [30, 60], "unit": "epochs"},
            "measure": {"frequency": "human-frequency.csv"},
        },
        "cpu": {
            "data": {"name": "fashion_mnist", "limit": 20_000, "pool": 2},
            "model": {"name": "lsoftmax_cnn10", "depth": [2, 1, 1], "widths": [16, 16, 16], "feature_dim": 32},
            "batch_size": 128,
            "epochs": 10,
            "validation": {"every": 5},
        },
        "smoke": {
            **SMOKE,
            "model": {"name": "lsoftmax_cnn10", "depth": [1, 1, 1], "widths": [4, 4, 4], "feature_dim": 8},
        },
    },
    rows=(Row("softmax"),),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        ERROR,
        Metric("hardness_correlation", "rank correlation with hardness", ".3f", None),
        Metric("confidence_correlation", "rank correlation with confidence", ".3f", None),
        Metric("norm_correlation", "rank correlation with the norm", ".3f", None),
        Metric("confident", "images with confidence above 0.9 %", ".1f", None),
    ),
    covers=("F1.2",),
    cost={"paper": 3000, "cpu": 0.07, "smoke": 0.005},
    measure=measure,
    note="AVH is θ(w_y, x)/Σ θ(w_j, x); smaller is easier, so its correlation with the frequency should be negative. "
    "At the paper scale a ResNet-50 is trained on ImageNet by the usual schedule, because the thesis analyses a "
    "trained one, and human-frequency.csv in the folder of the data sets lists image and frequency, the fraction of "
    "people who named the class of a validation image. No such data are here: at the cpu scale, on Fashion-MNIST in "
    "14×14 pixels, the frequency is the fraction of the 20 nearest training images (by pixels) that have the class of "
    "the test image. It does not depend on the network, but it is not a human judgement. Nothing is tuned: there is "
    "one method.",
)
