"""Open-set recognition: train on some classes, verify and identify others (section 2.3 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere import evaluation
from hypersphere.recipes.face_protocol import SOURCE_ANNEALING
from hypersphere.recipes.protocols import compare_unseen, separation, sgd, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.training import Experiment, Run

__all__ = ["OMNIGLOT"]

_ANNEALED = {"annealing": SOURCE_ANNEALING}
# Four trials for each row: learning rates, or two of them and two values of another setting.
_RATES = {"optimizer.lr": [0.05, 0.1, 0.2, 0.4]}
_RATES_AND_ENDS = {"optimizer.lr": [0.1, 0.2], "head.annealing.end": [5, 15]}
_HEADS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Softmax": ({"name": "softmax"}, None),
    "Modified softmax": ({"name": "modified_softmax"}, None),
    "L-Softmax (m=2)": ({"name": "l_softmax", "m": 2, **_ANNEALED}, _RATES_AND_ENDS),
    "A-Softmax (m=2)": ({"name": "a_softmax", "m": 2, **_ANNEALED}, _RATES_AND_ENDS),
    "A-Softmax (m=4)": ({"name": "a_softmax", "m": 4, **_ANNEALED}, _RATES_AND_ENDS),
    "SphereFace+ (m=4)": (
        {"name": "sphereface_plus", "m": 4, "energy_weight": 1.0, **_ANNEALED},
        {"optimizer.lr": [0.1, 0.2], "head.energy_weight": [0.1, 1.0]},
    ),
    "AM-Softmax (s=30, m=0.35)": (
        {"name": "am_softmax", "s": 30.0, "m": 0.35},
        {"optimizer.lr": [0.1, 0.2], "head.m": [0.35, 0.2]},
    ),
    "ArcFace (s=30, m=0.5)": (
        {"name": "arcface", "s": 30.0, "m": 0.5},
        {"optimizer.lr": [0.1, 0.2], "head.m": [0.5, 0.3]},
    ),
}


def measure_unseen(experiment: Experiment, run: Run, *, folds: int, per_fold: int) -> Outcome:
    """Verify random pairs of unseen classes, and identify their items by the first item of each class."""
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
    reference="the open-set protocol of section 2.3 of the thesis (tables 2.8 and 2.9), on other data",
    base={
        "model": {"name": "embedding_cnn"},
        "optimizer": sgd(0.1, decay_everything=True),
        "normalize": "none",
        "augment": [{"name": "roll", "pixels": 2}],
        "batch_size": 128,
        "measure": {"folds": 10, "per_fold": 300},
    },
    scales={
        "paper": {
            "data": {"name": "omniglot", "split": "class"},
            "model": {"widths": [64, 128, 256], "feature_dim": 512},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "omniglot", "split": "class", "size": 28},
            "model": {"widths": [16, 32, 64], "feature_dim": 64},
            "epochs": 8,
            "validation": {"every": 5, "energy": False},
        },
        "smoke": {
            "data": {"name": "generated", "classes": 40, "per_class": 8, "open_set": True},
            "model": {"widths": [4, 4], "feature_dim": 8},
            "epochs": 1,
            "measure": {"folds": 2, "per_fold": 10},
        },
    },
    rows=tuple(Row(name, {"head": head}, grid=grid) for name, (head, grid) in _HEADS.items()),
    default_rows={"cpu": [name for name in _HEADS if name != "L-Softmax (m=2)"]},
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        Metric("accuracy", "verification %", ".2f", True),
        Metric("eer", "EER %", ".2f", False),
        Metric("tar", "TAR % at FAR 0.1 %", ".2f", True),
        Metric("rank1", "rank-1 %", ".2f", True),
        Metric("fisher", "Fisher score", ".3f", False),
        Metric("separation", "min angle °", ".1f", True),
    ),
    cost={"paper": 100, "cpu": 1.5, "smoke": 0.01},
    measure=measure_unseen,
    baseline="Softmax",
    tuning=Tuning(_RATES, metric="accuracy"),
    claims=(
        Claim("A-Softmax (m = 4) verifies unseen characters better than softmax.", "A-Softmax (m=4)", source="T2.8"),
        Claim(
            "A-Softmax (m = 4) identifies unseen characters better than softmax.",
            "A-Softmax (m=4)",
            metric="rank1",
            source="T2.10",
        ),
        Claim("A larger m lowers the Fisher score.", "A-Softmax (m=4)", "A-Softmax (m=2)", "fisher", "T-A.1"),
        Claim(
            "SphereFace+ (m = 4) verifies better than A-Softmax (m = 4).",
            "SphereFace+ (m=4)",
            "A-Softmax (m=4)",
            source="T5.8",
        ),
    ),
    note="Omniglot has many classes and few drawings of each, like a set of faces, and a network for it trains in a "
    "minute. Trained on 964 characters with 20 drawings each; each batch is shifted cyclically by up to two pixels. "
    "Verification: 6,000 pairs of 659 unseen characters in ten folds; the threshold is chosen on the other nine folds. "
    "Identification: 659 drawings are the gallery, the other 12,521 the probes. The Fisher score is that of the "
    "features of unseen characters; the smallest angle is that of the class vectors. Trials hold out a tenth of the "
    "training characters. Multiplicative margins use the annealing of the released SphereFace code; λ falls to 6.9 in "
    "the 1,210 steps, or to 15 if that is better in the trials.",
)
