"""Few-shot classification with features trained by rotation (table 8 of the OPT paper)."""

from __future__ import annotations

from typing import Any

import torch

from hypersphere import evaluation
from hypersphere.recipes.protocols import ENERGY
from hypersphere.recipes.recipe import Claim, Grid, Metric, Outcome, Place, Recipe, Row, Tuning
from hypersphere.training import Experiment, Run

__all__ = ["FEW_SHOT", "measure_episodes"]


def measure_episodes(
    experiment: Experiment, run: Run, *, scale: float | None, episodes: int, queries: int, epochs: int
) -> Outcome:
    """Fine-tune classifiers of new classes in 5-way 5-shot episodes, and in 1-shot ones.

    Args:
        experiment, run: the trained network.
        scale: scale of the cosine classifier, or None for a linear one.
        episodes: number of episodes.
        queries: number of examples per class to classify.
        epochs: number of epochs of fine-tuning.
    """
    # The classes of the held-out data are not trained on. In a trial, they are a part of the training classes.
    features, labels = experiment.embed()
    metrics = {}
    for shots in (5, 1):
        # The seed alone determines the episodes, so they are the same for every row.
        generator = torch.Generator().manual_seed(experiment.config.seed)
        result = evaluation.few_shot(
            features,
            labels,
            shots=shots,
            queries=queries,
            episodes=episodes,
            scale=scale,
            epochs=epochs,
            generator=generator,
        )
        metrics[f"{shots}_shot"] = 100 * result.accuracy
        metrics[f"{shots}_shot_interval"] = 100 * result.interval
    return Outcome(metrics)


_COSINE: dict[str, Any] = {"head": {"name": "s_softmax", "s": 2.0}, "measure": {"scale": 2.0}}
_ROTATION: dict[str, Any] = {"rotation": {"name": "cayley"}}
_ROWS: dict[str, dict[str, Any]] = {
    "Baseline": {},
    "Baseline w/ OPT": _ROTATION,
    "Baseline++": _COSINE,
    "Baseline++ w/ OPT": {**_COSINE, **_ROTATION},
}
_PLAIN_RATES: Grid = {"optimizer.lr": (1e-3, 3e-3, 1e-2, 3e-2)}
_ROTATION_RATES: Grid = {"optimizer.lr": (1e-3, 1e-2), "optimizer.rotation_lr": (1e-3, 1e-2)}


def _row(name: str, patch: dict[str, Any]) -> Row:
    printed: dict[str, Place | float] = {
        "5_shot": ("O-T8", name, "accuracy"),
        "5_shot_interval": ("O-T8", name, "plus/minus"),
    }
    is_rotated = "OPT" in name
    return Row(
        name,
        patch,
        printed,
        {"paper": {"rotation": {"spread": 1.0}}} if is_rotated else {},
        grid=_ROTATION_RATES if is_rotated else _PLAIN_RATES,
        baseline=name.removesuffix(" w/ OPT") if is_rotated else None,
    )


FEW_SHOT = Recipe(
    name="opt-few-shot",
    title="Few-shot classification with features trained by rotation",
    reference="table 8 of the OPT paper (table 7.10 of the thesis), CNN-4 on mini-ImageNet",
    base={
        "model": "few_shot_cnn4",
        "optimizer": {"name": "adam", "lr": 1e-3, "weight_decay": 5e-4},
        "measure": {"scale": None, "episodes": 600, "queries": 16, "epochs": 100},
    },
    scales={
        "paper": {
            "data": {"name": "mini_imagenet", "validation": "test"},
            "augment": [{"name": "shift", "pixels": 8}, {"name": "mirror"}],
            "schedule": "constant",
            "batch_size": 16,
            "epochs": 200,
            "validation": {"every": 10},
        },
        "cpu": {
            "data": {"name": "omniglot", "split": "class", "size": 28},
            "model": {"widths": [16, 16, 16, 16]},
            "augment": [{"name": "shift", "pixels": 2}],
            "optimizer": {"weight_decay": 0.0},
            "batch_size": 128,
            "epochs": 6,
            "validation": {"every": 6},
            "measure": {"episodes": 200, "queries": 15, "epochs": 20},
        },
        "smoke": {
            "data": {"name": "generated", "classes": 32, "per_class": 12, "open_set": True, "size": 16},
            "model": {"widths": [4, 4, 4, 4]},
            "epochs": 1,
            "measure": {"episodes": 3, "queries": 2, "epochs": 2},
        },
    },
    rows=tuple(_row(name, patch) for name, patch in _ROWS.items()),
    default_rows={"smoke": ["Baseline", "Baseline++ w/ OPT"]},
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        Metric("5_shot", "5-way 5-shot accuracy %", ".2f", True),
        Metric("5_shot_interval", "± of five shots", ".2f", None),
        Metric("1_shot", "5-way 1-shot accuracy %", ".2f", True),
        Metric("1_shot_interval", "± of one shot", ".2f", None),
        ENERGY,
    ),
    covers=("O-T8",),
    cost={"paper": 400, "cpu": 1.0, "smoke": 0.005},
    measure=measure_episodes,
    tuning=Tuning({}, metric="1_shot", held_out=0.2),
    claims=(
        *(Claim(f"Rotation improves {name} with five shots.", f"{name} w/ OPT") for name in ("Baseline", "Baseline++")),
        *(
            Claim(f"Rotation improves {name} with one shot.", f"{name} w/ OPT", metric="1_shot")
            for name in ("Baseline", "Baseline++")
        ),
        Claim("Baseline++ is better than the baseline.", "Baseline++", "Baseline"),
    ),
    note="A network is trained on some classes; then only a classifier of five new classes is trained, from five "
    "examples of each, on fixed features: a linear one (baseline) or twice the cosine (baseline++), by SGD at 0.01 "
    "with momentum and dampening 0.9, weight decay 1e-3, batches of 4 and 100 epochs. ± is half the 95 % interval over "
    "600 episodes of 16 queries per class, as in the code that the source follows; the source states neither. The rows "
    "MAML, MatchingNet and ProtoNet of the table are quoted from another paper. At the scale paper: mini-ImageNet (64 "
    "classes for training, 20 for testing), Adam at 1e-3 with weight decay 5e-4, 200 epochs of batches of 16; images "
    "shifted by up to eight pixels and mirrored (neither is stated). Rotations by CP start from free parameters from "
    "N(0, 1). At the scale cpu: Omniglot at 28×28 pixels, 964 characters for training and 659 others for testing, "
    "fewer episodes and epochs; four trials per row on a fifth of the characters of training, selected by the 1-shot "
    "accuracy: four learning rates, or two of the rotation and two of all other parameters.",
)
