"""A first example: a small CNN with a 3-d feature on real digits, trained with three objectives."""

from __future__ import annotations

from typing import Any

from hypersphere import energy, evaluation
from hypersphere.recipes.parts import separation
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["RECIPE"]


def measure(experiment: Experiment, run: Run) -> Outcome:
    """Measure the features of the test images and the class vectors."""
    features, labels = experiment.embed()
    head: Any = experiment.head
    vectors = head.weight.detach()
    return Outcome(
        {
            "fisher": evaluation.angular_fisher_score(features, labels),
            "separation": separation(experiment),
            "energy": float(energy.hyperspherical_energy(vectors)),
        },
        tensors={"features": features, "labels": labels, "class_vectors": vectors},
    )


# A margin of m = 4 is hard to train from the first step, so it is annealed (thesis, A.7).
_A_SOFTMAX = {"name": "a_softmax", "m": 4.0, "annealing": {"gamma": 0.5, "end": 1.0}}
# The energy of the class vectors only: they repel each other on the sphere.
_REPULSION = {"name": "mhe", "hidden": 0.0, "output": 1.0, "half_space": False}

RECIPE = Recipe(
    name="digits",
    title="Digits on the unit sphere",
    reference="after figure 2.10 of the thesis (3-d features of faces)",
    base={
        "model": {"name": "toy_cnn", "feature_dim": 3, "widths": [32, 64]},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4, "decay_everything": True},
        "normalize": "none",
        "batch_size": 64,
    },
    scales={
        # The six people with most photographs in LFW, because the identities of the source are not printed.
        "paper": {
            "data": {"name": "lfw", "at_least": 77, "held_out": 0.2},
            "model": {"name": "sphereface20", "feature_dim": 3},
            "normalize": "centered",
            "epochs": 100,
        },
        "cpu": {"data": "digits", "epochs": 30},
        "smoke": {"data": {"name": "digits", "limit": 100}, "model": {"widths": [4, 4]}, "epochs": 1},
    },
    rows=(
        Row("Softmax"),
        Row("A-Softmax (m=4)", {"head": _A_SOFTMAX}),
        Row("A-Softmax + energy", {"head": _A_SOFTMAX, "regularizers": [_REPULSION]}),
    ),
    metrics=(
        Metric("accuracy", "accuracy %", ".2f", True),
        Metric("fisher", "Fisher score", ".4f", False),
        Metric("separation", "min angle °", ".1f", True),
        Metric("energy", "energy", ".4f", False),
        Metric("seconds", "seconds", ".1f", None),
    ),
    covers=("F2.10",),
    cost={"paper": 10, "cpu": 0.02, "smoke": 0.001},
    measure=measure,
    note="Trained on 1,297 digits of 8×8 pixels, tested on 500. The Fisher score is the angular Fisher score of the "
    "test features; lower is better. The smallest angle and the energy (s = 2, mean over pairs) are those of the ten "
    "class vectors. The training loss of the last row includes the energy. The default is one seed; --seeds 5 gives "
    "mean ± s.d.",
)
