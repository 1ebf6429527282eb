"""Loss and error around networks trained plainly and by rotation (figures 9 to 14 and 16 to 21 of the OPT paper)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, evaluation
from hypersphere.recipes.protocols import ERROR
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Patch, Recipe, Row, cells
from hypersphere.recipes.rotation.settings import CAYLEY, CNN_BASE, ON_CPU, SMALL_CNN, STATED, TINY_CNN, cnn_scales
from hypersphere.training import Experiment, Run, predict
from hypersphere.training.config import merge

__all__ = ["LANDSCAPE", "measure_landscape", "on_ring"]

BATCH = 500  # images per forward pass
RADII = (0.25, 0.5, 1.0)


def measure_landscape(
    experiment: Experiment,
    run: Run,
    *,
    points: int,
    images: int,
    directions: str,
    span: float,
    normalize: str | None,
    train_statistics: bool,
) -> Outcome:
    """Measure the loss of training images and the error of test images on a plane through the trained hidden layers.

    Args:
        experiment, run: the trained network.
        points: number of points per axis of the grid.
        images: number of training images, and of test images, per point.
        directions: distribution of the directions, "normal" or "uniform".
        span: half the side of the grid.
        normalize: how directions are scaled, see `hypersphere.evaluation.landscape`.
        train_statistics: normalise by the statistics of each batch instead of the running ones of training.
    """
    loss_of, error_of = _loss(experiment, images), _error(experiment, images)

    @torch.no_grad()
    def measure() -> dict[str, float]:
        return {"loss": loss_of(), "error": error_of()}

    generator = torch.Generator().manual_seed(experiment.config.seed)
    experiment.network.train(train_statistics)
    surface = evaluation.landscape(
        experiment.network.body,
        measure,
        span=span,
        points=points,
        directions=directions,
        normalize=normalize,
        generator=generator,
    )
    experiment.network.eval()
    # Networks have different losses at the centre, so compare how much the loss rises.
    rings = {
        f"{name}_at_{radius}": on_ring(surface, name, radius) - surface.centre[name]
        for name in ("loss", "error")
        for radius in RADII
    }
    centre = {f"{name}_at_centre": value for name, value in surface.centre.items()}
    grids = {f"landscape_{name}": values for name, values in surface.values.items()}
    return Outcome({**centre, **rings}, tensors={**grids, "coordinates": surface.a})


def _batches(experiment: Experiment, source: data.Source, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` images of a source, drawn with a fixed seed, on the device."""
    # Some sources are sorted by class, so draw a random sample. The fixed seed makes it the same for every row.
    sample = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:count].sort().values
    part = data.subset(source, sample)
    loader = data.Loader(part, batch_size=BATCH, sampler=data.SAMPLERS["sequential"](part.labels, 0))
    return [(inputs.to(experiment.device), labels.to(experiment.device)) for inputs, labels in loader]


def _loss(experiment: Experiment, count: int) -> Callable[[], float]:
    """Return a function that computes the mean loss of training images, without augmentation."""
    head: Any = experiment.head
    batches = _batches(experiment, experiment.data.train, count)

    def loss() -> float:
        sums = [len(labels) * head(experiment.network(inputs), labels).double() for inputs, labels in batches]
        return float(torch.stack(sums).sum()) / sum(len(labels) for _, labels in batches)

    return loss


def _error(experiment: Experiment, count: int) -> Callable[[], float]:
    """Return a function that computes the error of test images in per cent."""
    head: Any = experiment.head
    validation = experiment.data.validation
    assert validation is not None
    batches = _batches(experiment, validation, count)

    def error() -> float:
        is_wrong = [(predict(head, experiment.network(inputs)) != labels).double() for inputs, labels in batches]
        return 100 * float(torch.cat(is_wrong).mean())

    return error


def on_ring(around: evaluation.Landscape, name: str, radius: float) -> float:
    """Return the mean over the grid points whose distance from the centre is `radius` ± half a step of the grid."""
    distance = (around.a[:, None].square() + around.b.square()).sqrt()
    step = float(around.a[1] - around.a[0])  # the grid is uniform
    near = around.values[name][(distance - radius).abs() <= step / 2]
    return float(near.mean()) if len(near) else math.nan


# For each title, the network and the data at the scale of the source. Figures of loss and error come in pairs.
_NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CNN-6": ("opt_cnn6", {}),  # figures 9 and 10, 16 and 17
    "CNN-9": ("opt_cnn9", {}),  # figures 11 and 12, 18 and 19
    "CNN-6, CIFAR-10": ("opt_cnn6", {"data": "cifar10"}),  # figures 13 and 14, 20 and 21
}
_DIRECTIONS = {"normal": {"directions": "normal", "span": 1.5}, "uniform": {"directions": "uniform", "span": 1.0}}
_METHODS: dict[str, tuple[Patch, dict[str, Patch]]] = {
    "Standard training": ({}, {}),
    "OPT (CP)": (CAYLEY.patch, {"paper": CAYLEY.paper, "cpu": {"optimizer": {"rotation_lr": 0.3}}}),
}
_SIZES = {"cpu": {"model": SMALL_CNN}, "smoke": {"model": TINY_CNN}}

LANDSCAPE = Recipe(
    name="opt-landscape",
    title="The landscape around CNN-6 and CNN-9, trained plainly and by rotation",
    reference="figures 9 to 14 and 16 to 21 of the OPT paper (figures 4 and 5)",
    base={
        **CNN_BASE,
        "measure": {
            "points": 15,
            "images": 500,
            "directions": "normal",
            "span": 1.5,
            "normalize": "filter",
            "train_statistics": False,
        },
    },
    scales=cnn_scales(paper={"points": 51, "images": 10_000}, smoke={"points": 5, "images": 20}),
    rows=tuple(
        Row(
            f"{name}, {title}, {kind}",
            {"model": {"name": model, "norm": "batch"}, "measure": options, **patch},
            at=merge(_SIZES, {"paper": source}, at),
            baseline=None if name == "Standard training" else f"Standard training, {title}, {kind}",
        )
        for title, (model, source) in _NETWORKS.items()
        for kind, options in _DIRECTIONS.items()
        for name, (patch, at) in _METHODS.items()
    ),
    default_rows={
        "cpu": cells(_METHODS, ["CNN-9, normal", "CNN-6, CIFAR-10, normal", "CNN-6, CIFAR-10, uniform"]),
        "smoke": cells(_METHODS, ["CNN-6, CIFAR-10, uniform"]),
    },
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        ERROR,
        Metric("loss_at_centre", "training loss", ".3f", False),
        Metric("loss_at_0.25", "rise of the loss at 0.25", ".3f", False),
        Metric("loss_at_0.5", "rise of the loss at 0.5", ".3f", False),
        Metric("loss_at_1.0", "rise of the loss at 1", ".3f", False),
        Metric("error_at_0.25", "rise of the test error % at 0.25", ".2f", False),
        Metric("error_at_0.5", "rise of the test error % at 0.5", ".2f", False),
        Metric("error_at_1.0", "rise of the test error % at 1", ".2f", False),
    ),
    covers=tuple(f"O-F{number}" for number in (9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21)),
    cost={"paper": 3000, "cpu": 0.9, "smoke": 0.01},
    measure=measure_landscape,
    claims=tuple(
        Claim(
            f"With {kind} directions, the {text} around {title} rises less at {radius} after training by rotation.",
            f"OPT (CP), {title}, {kind}",
            metric=f"{name}_at_{radius}",
            source=source,
        )
        for title, kind, name, text, radius, source in (
            ("CNN-6, CIFAR-10", "normal", "loss", "training loss", 0.5, "O-F13"),
            ("CNN-6, CIFAR-10", "normal", "error", "test error", 0.5, "O-F14"),
            ("CNN-6, CIFAR-10", "uniform", "loss", "training loss", 0.5, "O-F20"),
            ("CNN-6, CIFAR-10", "uniform", "error", "test error", 0.5, "O-F21"),
            ("CNN-9", "normal", "loss", "training loss", 0.5, "O-F11"),
            ("CNN-9", "normal", "error", "test error", 0.5, "O-F12"),
        )
    ),
    note="The hidden layers are moved along two random directions, up to ±1.5 (normal) or ±1 (uniform on [0, 1]). Each "
    "filter of a direction has the norm of the filter that it moves; for a rotation the free parameters move, with the "
    "norm of R. The source does not say whether its directions are scaled for rotations, nor how it treats the "
    "classifier (not moved here), parameters of BatchNorm (not moved) and its statistics (those of training; "
    "measure.train_statistics uses those of the images). The loss is that of training images without augmentation, the "
    "error that of test images. A rise is the mean at a distance from the centre minus the value at the centre. Rows "
    "with normal and uniform directions train the same networks. No setting is tuned: recipe opt-cnn tunes the same "
    f"networks. {ON_CPU} There CIFAR-10 also in the rows of CNN-9. {STATED}",
)
