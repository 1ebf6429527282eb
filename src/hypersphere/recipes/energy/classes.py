"""Energy of class vectors: class imbalance (section 5.5 of the thesis) and AM-Softmax (appendix D.6)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.recipes.energy import settings
from hypersphere.recipes.energy.settings import BASELINE, FIFTH, TUNED, TUNING, cifar_scales
from hypersphere.recipes.protocols import CIFAR, ERROR, SMOKE, picture, sgd, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Place, Recipe, Row, cells, table_rows
from hypersphere.training import Experiment, Run, predict
from hypersphere.training.config import merge

__all__ = ["AM_SOFTMAX", "HUNDRED", "TEN", "TOY", "largest_gap", "measure_rare"]

_NUM_PICTURED = 2000  # enough for a picture


def measure_rare(experiment: Experiment, run: Run, *, rare: int) -> Outcome:
    """Measure the test error of the first `rare` classes, which have fewer training examples."""
    features, labels = experiment.embed()
    return Outcome({"rare_error": _error(experiment, features, labels, rare)})


def _error(experiment: Experiment, features: Tensor, labels: Tensor, rare: int) -> float:
    """Return the error on the first `rare` classes in per cent."""
    is_rare = labels < rare
    head: Any = experiment.head
    is_wrong = predict(head, features[is_rare].to(experiment.device)).cpu() != labels[is_rare]
    return 100 * float(is_wrong.double().mean())


# --- figures 5.4 and D.4


def largest_gap(vectors: Tensor) -> float:
    """Return the largest angle in degrees between neighbouring directions in the plane.

    >>> round(largest_gap(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])))
    180
    """
    angles = torch.atan2(vectors[:, 1], vectors[:, 0]).double().sort().values
    next_angles = torch.cat([angles[1:], angles[:1] + 2 * math.pi])  # the first direction follows the last one
    return math.degrees(float((next_angles - angles).max()))


def measure_plane(experiment: Experiment, run: Run) -> Outcome:
    """Measure the error and the direction of digit 0, and store 2-d features of test and training digits."""
    features, labels = experiment.embed()
    train_features, train_labels = experiment.embed(experiment.data.train)
    head: Any = experiment.head
    vectors = head.weight.detach().cpu()
    nearest = float(sphere.cosines(vectors[:1], vectors[1:]).max())
    metrics = {
        "rare_error": _error(experiment, features, labels, 1),
        "rare_angle": math.degrees(float(sphere.angle(torch.tensor(nearest)))),
        "gap": largest_gap(vectors),
    }
    # None of the data sets used here is ordered by class, so the first examples are a random sample.
    training = {"train_features": train_features[:_NUM_PICTURED], "train_labels": train_labels[:_NUM_PICTURED]}
    return Outcome(metrics, tensors={**picture(experiment, features, labels, _NUM_PICTURED), **training})


_OUTPUT = {"regularizers": [{"name": "mhe", "hidden": 0.0, "half_space": False, "output": 1.0}]}
_FEW_ZEROS = {"keep": {"0": 0.02}}
_UNIT_HEAD = {"head": "modified_softmax"}

TOY = Recipe(
    name="imbalance-picture",
    title="Digit 0 with 2 % of its examples, and a 2-d feature",
    reference="figures 5.4 and D.4 of the thesis",
    base={
        "model": {"name": "mnist_cnn6", "norm": "batch"},
        "head": "softmax",
        "optimizer": sgd(0.1),
        "clip": 5.0,
        "batch_size": 128,
    },
    scales={
        # The schedule of the 2-d features of chapter 2; that of this figure is not printed.
        "paper": {
            "data": {"name": "mnist", **_FEW_ZEROS},
            "optimizer": {"weight_decay": 1e-4},
            **stepwise(18_000, [12_000, 15_000]),
        },
        "cpu": {"data": {"name": "mnist", **_FEW_ZEROS, "pool": 2}, "model": {"widths": [8, 16, 32]}, "epochs": 5},
        "smoke": {**SMOKE, "model": {"widths": [4, 4, 4]}},
    },
    rows=(
        Row("CNN without MHE", printed={"accuracy": ("F5.4", "CNN without MHE")}),
        Row("CNN with MHE", _OUTPUT, {"accuracy": ("F5.4", "CNN with MHE")}),
        Row("CNN with MHE in all layers", settings.HALF.patch),
        Row("unit class vectors, without MHE", _UNIT_HEAD),
        Row("unit class vectors, with MHE", {**_UNIT_HEAD, **_OUTPUT}, baseline="unit class vectors, without MHE"),
    ),
    default_rows={"smoke": ["CNN without MHE", "CNN with MHE"]},
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        Metric("accuracy", "test accuracy %", ".2f", True),
        Metric("rare_error", "error % of digit 0", ".2f", False),
        Metric("rare_angle", "angle of digit 0 °", ".1f", True),
        Metric("gap", "largest gap °", ".1f", False),
    ),
    covers=("F5.4", "F-D.4"),
    cost={"paper": 100, "cpu": 0.5, "smoke": 0.005},
    measure=measure_plane,
    baseline="CNN without MHE",
    claims=(
        Claim("MHE on the classifier raises the accuracy.", "CNN with MHE"),
        Claim("MHE on the classifier teaches the rare digit.", "CNN with MHE", metric="rare_error"),
        Claim("MHE on unit class vectors raises the accuracy.", "unit class vectors, with MHE"),
        Claim("MHE spreads the class vectors evenly.", "CNN with MHE", metric="gap", source="F-D.4"),
    ),
    note="MNIST without 98 % of the training zeros; CNN-6 of table 2.1 with batch normalisation and a 2-d feature. "
    "Network, learning rate and schedule are not printed for this figure. At the scale cpu: 14×14 pixels, 8, 16 and 32 "
    "filters of 5×5, 5 epochs. Gradients are clipped to norm 5, because class vectors that start close together repel "
    "each other strongly. The weight is that of the source, and nothing is tuned: held-out training digits would have "
    "too few zeros to choose by. Ten class vectors in the plane are 36° apart at best. The rows with unit class "
    "vectors are not in the source: a plain softmax can answer a rare class by the norms of class vectors, on which "
    "the energy does not act.",
)


# --- tables 5.7 and D.6

_METHODS = {
    "Baseline": BASELINE,
    "Orthonormal": settings.ORTHONORMAL,
    "MHE": settings.FULL,
    "Half-space MHE": settings.HALF,
    "A-MHE": settings.FULL_ANGULAR,
    "Half-space A-MHE": settings.HALF_ANGULAR,
}
_COLUMNS = ("Single", "Multiple")
_ON_CPU = cells(["Baseline", "MHE", "Half-space MHE"], _COLUMNS)
_ON_DIGITS = cells(["Baseline"], _COLUMNS)


def _rows(source: str, rare: int) -> tuple[Row, ...]:
    """Return the rows of a table: `rare` classes keep a tenth of their images, or the sizes of classes rise."""
    data: dict[str, Any] = {
        "Single": {"keep": {str(label): 0.1 for label in range(rare)}},
        "Multiple": {"rising": True},
    }
    at: dict[str, Any] = {
        column: {"paper": {"data": options}, "cpu": {"data": options}, "smoke": {"data": {"keep": {"0": 0.5}}}}
        for column, options in data.items()
    }
    return table_rows(source, _METHODS, {column: {} for column in _COLUMNS}, baseline="Baseline", at=at)


def _with_rare_error(row: Row) -> Row:
    """Add the error of the rare class, which table 5.7 prints for the column "Single"."""
    line, _, column = row.name.partition(", ")
    extra: dict[str, Place | float] = {"rare_error": ("T5.7", line, "Err. (S)")} if column == "Single" else {}
    return replace(row, printed={**row.printed, **extra})


_RARE = "error % of rare classes"
_TUNED = f"{TUNED} The held-out images have the same imbalance."

TEN = Recipe(
    name="imbalance",
    title="CIFAR-10 with one rare class, and with classes of linearly rising size",
    reference="table 5.7 of the thesis, CNN-9 on CIFAR-10",
    base={**CIFAR["base"], "measure": {"rare": 1}},
    scales=merge(cifar_scales("mhe_cnn9"), {"paper": {"data": "cifar10"}}),
    rows=tuple(map(_with_rare_error, _rows("T5.7", 1))),
    default_rows={"cpu": ["Orthonormal, Single", *_ON_CPU], "smoke": _ON_DIGITS},
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, Metric("rare_error", _RARE, ".2f", False)),
    covers=("T5.7",),
    cost={"paper": 15_000, "cpu": 1.6, "smoke": 0.01},
    measure=measure_rare,
    tuning=TUNING,
    claims=(
        Claim("With one rare class, MHE has a lower error.", "MHE, Single"),
        Claim("With one rare class, half-space MHE has a lower error.", "Half-space MHE, Single"),
        Claim("Half-space MHE is better than orthonormality.", "Half-space MHE, Single", "Orthonormal, Single"),
        Claim("MHE lowers the error of the rare class.", "MHE, Single", metric="rare_error"),
        Claim("With classes of rising size, MHE has a lower error.", "MHE, Multiple"),
        Claim("With classes of rising size, half-space MHE has a lower error.", "Half-space MHE, Multiple"),
    ),
    note="Single: class 0 keeps 10 % of its training images. Multiple: class i keeps a fraction (i+1)/10. The test "
    "data are complete. The schedule of appendix D.1 in steps, although there are fewer images (not stated). At the "
    "scale cpu: 10,000 of the remaining images at 16×16 pixels. " + _TUNED,
)

HUNDRED = Recipe(
    name="imbalance-hundred",
    title="CIFAR-100 with ten rare classes, and with classes of linearly rising size",
    reference="table D.6 of the thesis, CNN-9 on CIFAR-100",
    base={**CIFAR["base"], "measure": {"rare": 10}},
    scales=merge(cifar_scales("mhe_cnn9"), {"cpu": FIFTH}),
    rows=_rows("T-D.6", 10),
    default_rows={"cpu": _ON_CPU, "smoke": _ON_DIGITS},
    seeds=(0, 1, 2),
    metrics=(ERROR, Metric("rare_error", _RARE, ".2f", False)),
    covers=("T-D.6",),
    cost={"paper": 15_000, "cpu": 1.1, "smoke": 0.01},
    measure=measure_rare,
    tuning=TUNING,
    claims=(
        Claim("With ten rare classes, MHE has a lower error.", "MHE, Single"),
        Claim("With classes of rising size, MHE has a lower error.", "MHE, Multiple"),
    ),
    note="Single: classes 0 to 9 keep 10 % of their training images. Multiple: class i keeps a fraction (i+1)/100. At "
    "the scale cpu: a fifth of CIFAR-100 (100 images per class before any are removed) at 16×16 pixels. The error of "
    "classes 0 to 9 is not in the source. " + _TUNED,
)

# --- faces (appendix D.6)

AM_SOFTMAX = Recipe(
    name="energy-am-softmax",
    title="Face verification by AM-Softmax, with and without energy of the class vectors",
    reference="appendix D.6 of the thesis (in the text), SphereFace-20 trained on CASIA-WebFace",
    base={"head": {"name": "am_softmax", "s": 30.0, "m": 0.35}, "optimizer": sgd(0.1), "batch_size": 128},
    scales={
        "paper": {
            "data": {"name": "casia_webface", "validation": "lfw"},
            "model": "sphereface20",
            "normalize": "centered",
            "augment": [{"name": "mirror"}],
            "validation": {"every": 5},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "lfw", "split": "fold", "fold": 0, "at_least": 3, "size": [56, 48]},
            "model": {"name": "embedding_cnn", "widths": [32, 64, 128], "first_stride": 2, "feature_dim": 128},
            "normalize": "none",
            "augment": [{"name": "roll", "pixels": 2}],
            "validation": {"every": 10},
            "epochs": 10,
        },
        "smoke": {
            "data": {"name": "generated", "classes": 40, "per_class": 8, "open_set": True},
            "model": {"name": "embedding_cnn", "widths": [4, 4], "feature_dim": 8},
            "epochs": 1,
        },
    },
    rows=(
        Row("AM-Softmax", printed={"verification.accuracy": ("X-D.6", "AM-Softmax")}),
        Row("AM-Softmax + MHE", _OUTPUT, {"verification.accuracy": ("X-D.6", "AM-Softmax + MHE")}),
    ),
    seeds=tuple(range(10)),
    metrics=(
        Metric("verification.accuracy", "verification %", ".2f", True),
        Metric("verification.eer", "EER %", ".2f", False),
    ),
    covers=("X-D.6",),
    cost={"paper": 1500, "cpu": 0.5, "smoke": 0.005},
    seeded=("seed", "data.fold"),
    baseline="AM-Softmax",
    claims=(Claim("Energy of the class vectors raises the accuracy of AM-Softmax.", "AM-Softmax + MHE"),),
    note="s = 30 and m = 0.35, the settings of the paper of AM-Softmax; they and the weight of the energy, 1 here, are "
    "not printed in the thesis, and the same settings are used for both rows. At the scale cpu: View 2 of LFW, trained "
    "on the people of nine folds and tested on the 600 pairs of the remaining fold; seed k leaves out fold k. The "
    "accuracy is that of ten-fold cross-validation within these pairs.",
)
