"""Wrong training labels: sub-centres and the interclass filter compared with ArcFace, and detection of wrong labels."""

from __future__ import annotations

from math import nan
from typing import Any

import torch

from hypersphere import evaluation
from hypersphere.recipes.face_protocol import FACES, cpu_network, smoke_network
from hypersphere.recipes.protocols import compare_unseen, sgd, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.training import Experiment, Run, predict

__all__ = ["FACE_LABEL_NOISE", "LABEL_NOISE", "measure_noisy"]


def measure_noisy(experiment: Experiment, run: Run, *, folds: int, per_fold: int) -> Outcome:
    """Verify and identify unseen classes, and find wrong training labels by the angle to the centre of the label."""
    features, labels = experiment.embed()
    metrics = compare_unseen(features, labels, folds=folds, per_fold=per_fold)
    return Outcome({**metrics, **_training_labels(experiment)})


def _training_labels(experiment: Experiment) -> dict[str, float]:
    """Return the fraction of right labels that the head predicts, and the AUC of wrong labels by angle, in per cent.

    `wrong_auc` is the probability that a wrong label has a larger angle than a right one, NaN if no label is wrong.
    """
    features, labels = experiment.embed(experiment.data.train)
    true_labels = experiment.data.true_labels
    is_wrong = torch.zeros_like(labels, dtype=torch.bool) if true_labels is None else labels != true_labels
    features, labels = features.to(experiment.device), labels.to(experiment.device)
    head: Any = experiment.head
    is_fitted = (predict(head, features) == labels).cpu()
    angles = head.label_angles(features, labels).angles.cpu()
    auc = evaluation.roc(angles, is_wrong).auc if bool(is_wrong.any()) else nan
    return {"fitted": 100 * float(is_fitted[~is_wrong].double().mean()), "wrong_auc": 100 * auc}


_METHODS: dict[str, dict[str, Any]] = {
    "ArcFace": {},
    "Sub-centres": {"centers": 3},
    "Filter": {"interclass_filter": 0.4},
    "Sub-centres and filter": {"centers": 3, "interclass_filter": 0.4},
}
_CLEAN = "ArcFace, 0 %"


def _row(method: str, percent: int) -> Row:
    baseline = f"ArcFace, {percent} %" if method != "ArcFace" else _CLEAN if percent else None
    patch = {"head": _METHODS[method], "data": {"label_noise": percent / 100}}
    return Row(f"{method}, {percent} %", patch, baseline=baseline)


_ROWS = (_row("ArcFace", 0), *(_row(method, percent) for percent in (20, 40) for method in _METHODS))
_METRICS = (
    Metric("accuracy", "verification %", ".2f", True),
    Metric("eer", "EER %", ".2f", False),
    Metric("tar", "TAR % at FAR 0.1 %", ".2f", True),
    Metric("rank1", "rank-1 %", ".2f", True),
    Metric("fitted", "right labels fitted %", ".1f", True),
    Metric("wrong_auc", "AUC % of wrong labels", ".2f", True),
)
# Seed k also draws the wrong labels, which are the same in all rows of a level of noise.
_SEEDED = ("seed", "data.seed")


def _claim(text: str, method: str, metric: str, source: str) -> Claim:
    return Claim(text, f"{method}, 40 %", "ArcFace, 40 %", metric, source)


_CLAIMS = (
    _claim("Sub-centres raise the TAR at 40 % noise.", "Sub-centres", "tar", "Sub-center ArcFace"),
    _claim("Sub-centres verify better at 40 % noise.", "Sub-centres", "accuracy", "Sub-center ArcFace"),
    _claim("The interclass filter raises the TAR at 40 % noise.", "Filter", "tar", "insightface"),
    _claim("The interclass filter verifies better at 40 % noise.", "Filter", "accuracy", "insightface"),
    _claim(
        "Sub-centres and the filter together raise the TAR at 40 % noise.",
        "Sub-centres and filter",
        "tar",
        "insightface",
    ),
    _claim(
        "The angle to the dominant of several centres finds wrong labels better than the angle to a single one.",
        "Sub-centres",
        "wrong_auc",
        "Sub-center ArcFace",
    ),
)

LABEL_NOISE = Recipe(
    name="label-noise",
    title="Heads for wrong training labels",
    reference="beyond the sources: Sub-center ArcFace (Deng et al., ECCV 2020) and the filter of insightface",
    base={
        "model": {"name": "embedding_cnn"},
        "head": {"name": "arcface", "s": 30.0, "m": 0.1},
        "optimizer": sgd(0.1, decay_everything=True),
        "normalize": "none",
        "augment": [{"name": "roll", "pixels": 2}],
        "batch_size": 128,
        "validation": {"energy": False},
        "measure": {"folds": 10, "per_fold": 300},
    },
    scales={
        "paper": {
            "data": {"name": "omniglot", "split": "class", "size": 56, "label_noise": 0.0, "seed": 0},
            "model": {"widths": [64, 128, 256], "feature_dim": 512},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {
                "name": "omniglot",
                "split": "class",
                "size": 16,
                "characters": 320,
                "label_noise": 0.0,
                "seed": 0,
            },
            "model": {"widths": [16, 32, 64], "feature_dim": 64},
            "epochs": 15,
            "validation": {"every": 15},
        },
        "smoke": {
            "data": {
                "name": "generated",
                "classes": 40,
                "per_class": 8,
                "open_set": True,
                "label_noise": 0.0,
                "seed": 0,
            },
            "model": {"widths": [4, 4], "feature_dim": 8},
            "epochs": 1,
            "measure": {"folds": 2, "per_fold": 10},
        },
    },
    rows=_ROWS,
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    cost={"paper": 150, "cpu": 0.6, "smoke": 0.01},
    measure=measure_noisy,
    seeded=_SEEDED,
    # Large margins are not in the grid: training then collapses for some seeds, which one trial seed does not show.
    tuning=Tuning({"head.m": [0.05, 0.1]}, metric="accuracy", held_out=0.2),
    claims=_CLAIMS,
    note="0, 20 or 40 % of the training drawings get the label of another character, drawn uniformly; seed k draws "
    "them, and they are the same in all rows of a level of noise. Test labels are right. Sub-centres: three "
    "class vectors per class, of which the nearest counts. Filter: wrong classes with a cosine above 0.4 are "
    "left out of the loss. At the scale cpu: 320 of Omniglot's 964 characters for training, 20 drawings each at "
    "16×16 pixels, three stages of 16, 32 and 64 channels, 64-d features, 15 epochs. Verification: 6,000 pairs "
    "of 659 unseen characters in ten folds. Identification: one drawing of each character is the gallery. AUC "
    "of wrong labels: the probability that a training drawing with a wrong label has a larger angle to the "
    "dominant centre of its label than one with a right label. A row that fits few of the right labels did not "
    "train, and its difference from another row says nothing about the method. Each row has two trials, m = "
    "0.05 and 0.1 at s = 30, chosen by verification on a fifth of the training characters, which keep their "
    "right labels there; the filter and the number of centres are not tuned. Length of training and grid were "
    "set by pilot runs at 40 % noise, with seed 100 on a tenth of the training characters and without test "
    "data. Earlier plans had m = 0.3 and 0.5, then 0.1 and 0.3. They were dropped because ArcFace with m = 0.3 "
    "did not train: it fitted 19 % of the right labels (verification 91.2 %, AUC 88 %), and with m = 0.1 77 % "
    "(94.0 %, 98 %), while sub-centres fitted 76 % and 81 % (94.7 % and 94.5 %, AUC 99 % with both). Against m "
    "= 0.3, sub-centres would have looked far better than they are against an ArcFace that trains. In recipe "
    "growing-head, m = 0.3 also failed for one of two seeds without wrong labels. m = 0.05 was not tried "
    "before. To measure the cost, one row (sub-centres and filter, 40 %) was run on the test data with seed 0. "
    "The scale paper has all 964 characters at 56×56 pixels and m = 0.1. Faces are not part of the recipe.",
)

FACE_LABEL_NOISE = Recipe(
    name="face-label-noise",
    title="Heads for wrong labels of faces",
    reference="beyond the sources: Sub-center ArcFace (Deng et al., ECCV 2020) and the filter of insightface",
    base={
        "head": {"name": "arcface", "s": 30.0, "m": 0.1},
        "optimizer": sgd(0.1, decay_everything=True),
        "normalize": "centered",
        "augment": [{"name": "shift", "pixels": 1}, {"name": "mirror"}],
        "batch_size": 64,
        "validation": {"energy": False},
        "measure": {"folds": 5, "per_fold": 300},
    },
    scales={
        "paper": {
            "data": {"name": "lfw", "split": "class", "at_least": 4, "held_out": 0.3, "label_noise": 0.0, "seed": 0},
            "model": "sphereface20",
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {
                "name": "lfw",
                "split": "class",
                "at_least": 4,
                "held_out": 0.3,
                "size": [28, 24],
                "grey": True,
                "label_noise": 0.0,
                "seed": 0,
            },
            "model": cpu_network([0, 0, 0, 0]),
            "channels_last": True,
            "epochs": 16,
            "validation": {"every": 16},
        },
        "smoke": {
            "data": {**FACES["smoke"]["data"], "label_noise": 0.0, "seed": 0},
            "model": smoke_network([0, 0, 0, 0]),
            "optimizer": sgd(0.02),
            "epochs": 1,
            "measure": {"folds": 2, "per_fold": 10},
        },
    },
    rows=_ROWS,
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    cost={"paper": 60, "cpu": 0.6, "smoke": 0.01},
    measure=measure_noisy,
    seeded=_SEEDED,
    tuning=Tuning({"head.m": [0.05, 0.1]}, metric="accuracy", held_out=0.2),
    claims=_CLAIMS,
    note="0, 20 or 40 % of the training photographs get the name of another person, drawn uniformly; seed k draws "
    "them, and they are the same in all rows of a level of noise. Seed k also draws the people: of the 610 "
    "people of LFW with at least four photographs, 427 are trained on and 183 are tested. Verification: 3,000 "
    "pairs of test people in five folds. Identification: the first photograph of each test person is the "
    "gallery. The methods are those of the recipe label-noise, with the same grid: each row has two trials, m "
    "= 0.05 and 0.1 at s = 30, chosen by verification on a fifth of the training people, whose labels are "
    "right there; the filter and the number of centres are not tuned. The length of training was set by two "
    "pilot runs of ArcFace at 40 % noise, with seed 100 on a fifth of the training people and without test "
    "data: it fitted 62 % of the right labels with m = 0.1 and 63 % with m = 0.05. Most people have fewer "
    "than ten photographs, so three centres per person have little to choose from.",
)
