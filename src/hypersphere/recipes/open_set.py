"""Open-set recognition: train on some classes, verify and identify others (section 2.3 of the thesis)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hypersphere import data, evaluation
from hypersphere.recipes.parts import compare_unseen, separation, sgd, stepwise
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["LFW", "OMNIGLOT"]

_METRICS = (
    Metric("accuracy", "verification %", ".2f", True),
    Metric("eer", "EER %", ".2f", False),
    Metric("fisher", "Fisher score", ".3f", False),
    Metric("separation", "min angle °", ".1f", True),
)
_BASE = {
    "model": {"name": "embedding_cnn"},
    "optimizer": sgd(0.1, decay_everything=True),
    "normalize": "none",
    "augment": [{"name": "roll", "pixels": 2}],
    "batch_size": 128,
}
_SMOKE = {
    "data": {"name": "generated", "classes": 40, "per_class": 8, "open_set": True},
    "model": {"widths": [4, 4], "feature_dim": 8},
    "epochs": 1,
}


def _objectives(annealing: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return one row per objective. Objectives with a multiplicative margin are annealed from the plain softmax."""
    annealed = {"annealing": dict(annealing)}
    heads: dict[str, dict[str, Any]] = {
        "Softmax": {"name": "softmax"},
        "Modified softmax": {"name": "modified_softmax"},
        "L-Softmax (m=2)": {"name": "l_softmax", "m": 2, **annealed},
        "A-Softmax (m=2)": {"name": "a_softmax", "m": 2, **annealed},
        "A-Softmax (m=4)": {"name": "a_softmax", "m": 4, **annealed},
        "SphereFace+ (m=4)": {"name": "sphereface_plus", "m": 4, "energy_weight": 1.0, **annealed},
        "AM-Softmax (s=30, m=0.35)": {"name": "am_softmax", "s": 30.0, "m": 0.35},
        "ArcFace (s=30, m=0.5)": {"name": "arcface", "s": 30.0, "m": 0.5},
    }
    # The schedule of SphereFace, which the source uses.
    in_source = {"head": {"annealing": {"start": 1000, "gamma": 0.12, "power": 1, "end": 5}}}
    return tuple(
        Row(name, {"head": head}, at={"paper": in_source} if "annealing" in head else {})
        for name, head in heads.items()
    )


def measure_unseen(experiment: Experiment, run: Run, *, folds: int, per_fold: int) -> Outcome:
    """Verify drawn pairs of unseen classes, and identify each of their items among the others."""
    features, labels = experiment.embed()
    return Outcome(
        {
            **compare_unseen(features, labels, folds=folds, per_fold=per_fold),
            "fisher": evaluation.angular_fisher_score(features, labels),
            "separation": separation(experiment),
        }
    )


OMNIGLOT = Recipe(
    name="omniglot",
    title="Open-set recognition of Omniglot's unseen characters",
    reference="the open-set protocol of section 2.3 of the thesis, on other data",
    base={**_BASE, "measure": {"folds": 10, "per_fold": 300}},
    scales={
        "paper": {
            "data": {"name": "omniglot", "split": "class"},
            "model": {"widths": [64, 128, 256], "feature_dim": 512},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "omniglot", "split": "class", "size": 28},
            "model": {"widths": [32, 64, 64], "feature_dim": 64},
            "epochs": 5,
        },
        "smoke": {**_SMOKE, "measure": {"folds": 2, "per_fold": 10}},
    },
    rows=_objectives({"start": 1000, "gamma": 0.12, "power": 1, "end": 5}),
    seeds=(0, 1, 2),
    metrics=(
        *_METRICS[:2],
        Metric("tar", "TAR % at FAR 0.1 %", ".2f", True),
        Metric("rank1", "rank-1 %", ".2f", True),
        *_METRICS[2:],
    ),
    cost={"paper": 100, "cpu": 0.8, "smoke": 0.01},
    measure=measure_unseen,
    note="Trained on 964 characters with 20 drawings each for 5 epochs; three stages of 32, 64 and 64 channels, 64-d "
    "features; each batch is shifted cyclically by up to two pixels. Verification: 6,000 pairs of 659 unseen "
    "characters in ten folds; the threshold is chosen on the other nine folds. Identification: 659 drawings are the "
    "gallery, the other 12,521 the probes. The Fisher score is that of the features of unseen characters; the smallest "
    "angle is that of the class vectors. Multiplicative margins use the annealing schedule of SphereFace; after the "
    "755 steps here λ is 11, so the margin has a weight of one twelfth in the target's score.",
)


def measure_faces(experiment: Experiment, run: Run, *, threshold_pairs: int) -> Outcome:
    """Verify the pairs of the data with the threshold that is best on `threshold_pairs` pairs of training people."""
    split = experiment.data
    assert split.validation is not None
    drawn = data.draw_pairs(split.train.labels, folds=1, per_fold=threshold_pairs, seed=0)
    threshold = evaluation.roc(_mirrored_scores(experiment, split.train, drawn), drawn.same).best_threshold
    pairs = split.pairs
    if pairs is None:
        pairs = data.draw_pairs(split.validation.labels, folds=1, per_fold=threshold_pairs, seed=0)
    scores = _mirrored_scores(experiment, split.validation, pairs)
    roc = evaluation.roc(scores, pairs.same)
    used, _ = _positions(pairs, len(split.validation))
    features, labels = experiment.embed(data.subset(split.validation, used))
    return Outcome(
        {
            "accuracy": 100 * float(((scores >= threshold) == pairs.same).double().mean()),
            "best": 100 * roc.best_accuracy,
            "eer": 100 * roc.eer,
            "fisher": evaluation.angular_fisher_score(features, labels),
            "separation": separation(experiment),
        }
    )


def _positions(pairs: data.Pairs, count: int) -> tuple[Tensor, Tensor]:
    """Return the images that occur in a pair, and for each image its position among them."""
    used = torch.cat([pairs.first, pairs.second]).unique()
    position = torch.zeros(count, dtype=torch.int64)
    position[used] = torch.arange(len(used))
    return used, position


def _mirrored_scores(experiment: Experiment, source: data.Source, pairs: data.Pairs) -> Tensor:
    """Return cosines of pairs of images, each with the features of the image and of its mirror image."""
    used, position = _positions(pairs, len(source))
    part = data.subset(source, used)
    loader = data.make_loader(part, batch_size=500, sampler=data.SAMPLERS["sequential"](part.labels, 0))
    features = torch.cat(
        [
            evaluation.mirrored_features(
                experiment.network, images.to(experiment.device).float() / 255, batch=500
            ).cpu()
            for images, _ in loader
        ]
    )
    return evaluation.cosine_scores(features[position[pairs.first]], features[position[pairs.second]])


LFW = Recipe(
    name="lfw",
    title="Open-set verification of LFW faces",
    reference="table 2.8 of the thesis, trained on LFW itself instead of CASIA-WebFace",
    base={**_BASE, "measure": {"threshold_pairs": 1000}},
    scales={
        "paper": {
            "data": {"name": "casia_webface", "validation": "lfw"},
            "model": "sphereface64",
            "normalize": "centered",
            "augment": [{"name": "mirror"}],
            "validation": {"every": 5},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "lfw", "split": "fold", "fold": 0, "at_least": 3, "size": [56, 48]},
            "model": {"widths": [32, 64, 128], "first_stride": 2, "feature_dim": 128},
            "epochs": 10,
        },
        "smoke": {**_SMOKE, "measure": {"threshold_pairs": 20}},
    },
    # Reaches its end, λ = 5, within the few hundred steps of a small experiment.
    rows=_objectives({"start": 100, "gamma": 0.1, "power": 1, "end": 5}),
    seeds=(0, 1, 2),
    metrics=(_METRICS[0], Metric("best", "best-threshold %", ".2f", True), *_METRICS[1:]),
    covers=("T2.8",),
    cost={"paper": 20000, "cpu": 1.2, "smoke": 0.01},
    measure=measure_faces,
    seeded=("seed", "data.fold"),
    note="View 2: trained for 10 epochs on the people of nine folds with at least 3 images (about 800 people and 6,800 "
    "grey faces of 56×48 pixels; each batch is shifted cyclically by up to two pixels), tested on the 600 pairs of the "
    "remaining fold. Seed k leaves out fold k, so most of the deviation is between folds. Features of the image and "
    "its mirror image are concatenated; scores are cosines. The threshold is chosen on pairs of the training people, "
    "which makes it pessimistic; the best threshold is chosen on the test pairs themselves. The Fisher score is that "
    "of the images of the test pairs. The thesis trains on 0.49 million faces, so only the order of methods can be "
    "compared. Multiplicative margins are annealed faster than in SphereFace: λ reaches 5, a weight of one sixth for "
    "the margin, at step 190 of 540.",
)
