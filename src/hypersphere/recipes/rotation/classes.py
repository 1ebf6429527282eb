"""Random class vectors that are only rotated (CLS-OPT): tables 12 and 13 and figure 7 of the OPT paper."""

from __future__ import annotations

from typing import Any

from hypersphere import rotation
from hypersphere.recipes.architectures.imagenet import PROTOCOL, measure_top5
from hypersphere.recipes.protocols import ERROR, SMOKE, picture, separation, sgd, stepwise
from hypersphere.recipes.recipe import Claim, Grid, Method, Metric, Outcome, Recipe, Row, Tuning, table_rows
from hypersphere.training import Experiment, Run

__all__ = ["DIGITS", "FACES", "MANY_CLASSES", "measure_digits", "measure_head"]

_HEAD_NUMBERS = Metric("head_parameters", "trainable parameters of the classifier", ".0f", None)
# Class vectors are normalised, because a rotation cannot change their norms, which would favour some classes.
_CLASSES: dict[str, Any] = {"rotation": {"name": "cayley", "hidden": False, "output": True, "normalize": True}}
# Learning rates of all parameters, or of the rotation only.
_RATES: Grid = {"optimizer.lr": (0.1, 0.3)}
_ROTATION_RATES: Grid = {"optimizer.rotation_lr": (0.1, 1.0)}
_UNSTATED = (
    "The source does not state how the rotation is learned: by CP here. Class vectors are random unit vectors, fixed, "
    "and rotated together; all other layers are trained plainly. Trainable parameters: d(d−1)/2 for the rotation, and "
    "the numbers of classes times d otherwise."
)


def _head_numbers(experiment: Experiment) -> dict[str, float]:
    return {"head_parameters": float(rotation.degrees_of_freedom(experiment.head))}


def measure_head(experiment: Experiment, run: Run) -> Outcome:
    """Count the trainable parameters of the classifier."""
    return Outcome(_head_numbers(experiment))


def _measure_errors(experiment: Experiment, run: Run) -> Outcome:
    """Count the trainable parameters of the classifier, and add the curve of the top-5 error."""
    top5 = measure_top5(experiment, run)
    return Outcome({**top5.metrics, **_head_numbers(experiment)}, top5.curves)


# An oracle, whose class vectors are trained, and class vectors that are only rotated.
_LINES = {
    "Oracle": Method(grid=_RATES),
    "CLS-OPT": Method(_CLASSES, _ROTATION_RATES, {"rotation": {"spread": 1.0}, "optimizer": {"rotation_decay": 5e-4}}),
}


# --- a thousand classes (table 12)

MANY_CLASSES = Recipe(
    name="cls-opt",
    title="A thousand class vectors trained by rotation only",
    reference="table 12 of the OPT paper, ResNet-18A and ResNet-18B on ImageNet",
    base={"optimizer": sgd(0.1), "batch_size": 128},
    scales={
        "paper": {
            **{key: PROTOCOL[key] for key in ("data", "augment")},
            "model": {"name": "resnet18"},
            **stepwise(700_000, [280_000, 467_000, 597_000]),
        },
        "cpu": {
            "data": {"name": "omniglot", "size": 28, "held_out": 4},
            "model": {"name": "embedding_cnn", "widths": [16, 32, 32]},
            "augment": [{"name": "shift", "pixels": 2}],
            "epochs": 6,
            "validation": {"every": 2},
        },
        "smoke": {
            "data": {"name": "generated", "classes": 12},
            "model": {"name": "embedding_cnn", "widths": [4, 4]},
            "epochs": 1,
        },
    },
    rows=table_rows(
        "O-T12",
        _LINES,
        {"ResNet-18A": {}, "ResNet-18B": {}},
        metric="top5_error",
        baseline="Oracle",
        at={
            "ResNet-18A": {
                "paper": {"model": {"widths": [64, 128, 128, 128]}},
                "cpu": {"model": {"feature_dim": 32}},
                "smoke": {"model": {"feature_dim": 4}},
            },
            "ResNet-18B": {"cpu": {"model": {"feature_dim": 128}}, "smoke": {"model": {"feature_dim": 8}}},
        },
        in_source={"ResNet-18A": "ResNet-18A Error", "ResNet-18B": "ResNet-18B Error"},
    ),
    seeds=(0, 1, 2),
    metrics=(Metric("top5_error", "top-5 error %", ".2f", False), ERROR, _HEAD_NUMBERS),
    covers=("O-T12",),
    cost={"paper": 80_000, "cpu": 0.8, "smoke": 0.005},
    measure=_measure_errors,
    figures=("error", "top5_error"),
    tuning=Tuning({}, metric="top5_error", held_out=0.2),
    claims=(
        Claim(
            "With few dimensions, trained class vectors are better than rotated ones.",
            "Oracle, ResNet-18A",
            "CLS-OPT, ResNet-18A",
        ),
        Claim("With many dimensions, rotated class vectors are better than trained ones.", "CLS-OPT, ResNet-18B"),
    ),
    note=f"{_UNSTATED} At the scale paper the learning rate is divided by ten after 40, 67 and 85 % of them (the "
    "source: when saturated). The source prints 64.0K trainable parameters for the oracle of ResNet-18A; 128 "
    "dimensions and 1,000 classes are 128K. At the scale cpu: 964 characters of Omniglot, 16 drawings of each for "
    "training and 4 for testing; ResNet-18A stands for 32-d features and ResNet-18B for 128-d ones. Two learning rates "
    "of all parameters, or of the rotation only, are tried on a fifth of the training drawings.",
)

# --- faces (table 13)

FACES = Recipe(
    name="cls-opt-faces",
    title="Class vectors of people trained by rotation only",
    reference="table 13 of the OPT paper, SphereFace-20 trained on CASIA-WebFace and tested on LFW",
    base={"optimizer": sgd(0.1), "normalize": "centered", "batch_size": 128},
    scales={
        "paper": {
            "data": {"name": "casia_webface", "validation": "lfw"},
            "model": {"name": "sphereface20"},
            "augment": [{"name": "mirror"}],
            "validation": {"every": 5},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "lfw", "split": "fold", "fold": 0, "at_least": 3, "size": [56, 48]},
            "model": {"name": "embedding_cnn", "widths": [16, 32, 64], "first_stride": 2},
            "augment": [{"name": "shift", "pixels": 2}, {"name": "mirror"}],
            "validation": {"every": 10},
            "epochs": 10,
        },
        "smoke": {
            "data": {"name": "generated", "classes": 40, "per_class": 8, "open_set": True},
            "model": {"name": "embedding_cnn", "widths": [4, 4]},
            "epochs": 1,
        },
    },
    rows=table_rows(
        "O-T13",
        _LINES,
        {"512 dimensions": {}, "1024 dimensions": {}},
        metric="verification.accuracy",
        baseline="Oracle",
        at={
            f"{paper} dimensions": {
                "paper": {"model": {"feature_dim": paper}},
                "cpu": {"model": {"feature_dim": cpu}},
                "smoke": {"model": {"feature_dim": smoke}},
            }
            for paper, cpu, smoke in ((512, 64, 4), (1024, 128, 8))
        },
        in_source={"512 dimensions": "512 Dim. Acc.", "1024 dimensions": "1024 Dim. Acc."},
    ),
    seeds=(1, 2, 3, 4, 5),
    metrics=(
        Metric("verification.accuracy", "verification %", ".2f", True),
        Metric("verification.eer", "EER %", ".2f", False),
        _HEAD_NUMBERS,
    ),
    covers=("O-T13",),
    cost={"paper": 3000, "cpu": 0.8, "smoke": 0.005},
    measure=measure_head,
    seeded=("seed", "data.fold"),
    tuning=Tuning({}, metric="verification.accuracy", held_out=0.1, seeds=(0,)),  # on fold 0, which is not tested
    claims=tuple(
        Claim(
            f"With {title}, trained class vectors verify faces better than rotated ones.",
            f"Oracle, {title}",
            f"CLS-OPT, {title}",
        )
        for title in ("512 dimensions", "1024 dimensions")
    ),
    note=f"{_UNSTATED} At the scale paper: the protocol of SphereFace with softmax; 112×96 pixels, weight decay 5e-4 "
    "and PReLU as in the released code of SphereFace. At the scale cpu: View 2 of LFW, trained on the people of nine "
    "folds, 64-d and 128-d features, tested on the 600 pairs of the remaining fold; seed k leaves out fold k. A rate "
    "is the better of two on a tenth of the training people of fold 0, which is not tested; these people also occur in "
    "the folds that are tested.",
)

# --- digits (figure 7)


def measure_digits(experiment: Experiment, run: Run, *, pictured: int) -> Outcome:
    """Measure the angle between class vectors, and store 3-d features of test digits for the first seed."""
    metrics = {"separation": separation(experiment), **_head_numbers(experiment)}
    if experiment.config.seed:
        return Outcome(metrics)
    return Outcome(metrics, tensors=picture(experiment, *experiment.embed(), pictured))


DIGITS = Recipe(
    name="cls-opt-digits",
    title="Three-dimensional features of digits with class vectors trained by rotation only",
    reference="figure 7 of the OPT paper",
    base={
        "model": {"name": "mnist_cnn6", "kernel_size": 3, "feature_dim": 3, "norm": "batch", "activation": "relu"},
        "optimizer": sgd(0.1),
        "batch_size": 128,
        "measure": {"pictured": 2000},
    },
    scales={
        "paper": {"data": "mnist", **stepwise(20_000, [12_000, 15_000])},
        "cpu": {
            "data": {"name": "mnist", "limit": 10_000},
            "model": {"widths": [8, 16, 32]},
            "epochs": 8,
            "validation": {"every": 2},
        },
        "smoke": {**SMOKE, "model": {"widths": [4, 4, 4]}},
    },
    rows=(
        Row("Oracle", grid=_RATES),
        Row("CLS-OPT", _CLASSES, {}, {"paper": {"rotation": {"spread": 1.0}}}, _ROTATION_RATES, "Oracle"),
        Row("Fixed class vectors", {**_CLASSES, "freeze": ["head.*"]}, grid=_RATES, baseline="Oracle"),
    ),
    default_rows={"smoke": ["Oracle", "CLS-OPT"]},
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, Metric("separation", "min angle °", ".1f", True), _HEAD_NUMBERS),
    covers=("O-F7",),
    cost={"paper": 30, "cpu": 0.5, "smoke": 0.005},
    measure=measure_digits,
    figures=("error",),
    tuning=Tuning({}, held_out=0.2),
    claims=(Claim("Trained class vectors have a lower error than rotated ones.", "Oracle", "CLS-OPT"),),
    note=f"{_UNSTATED} Three stages of two 3×3 convolutions with 32, 64 and 128 filters, each followed by a 2×2 "
    "max-pool (the source: 3×3), with BatchNorm and ReLU, and a 3-d feature. The source states no settings of "
    "training; those of the MNIST experiments of L-Softmax, which it follows for the picture, are used with batches of "
    "128. Pictures show test digits. The row with fixed class vectors is an addition. At the scale cpu: 10,000 digits, "
    "and the better of two learning rates on a fifth of them.",
)
