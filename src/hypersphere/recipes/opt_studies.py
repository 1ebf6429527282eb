"""Three studies of training by rotation: rotated class vectors, initial energy, and the loss landscape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import data, energy, evaluation, models, rotation
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.opt_networks import CNN6_BASE, CNN6_SCALES, rotated
from hypersphere.recipes.parts import ENERGY, ERROR, compare_unseen, sgd, stepwise
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run, predict
from hypersphere.training.components import create
from hypersphere.training.config import Component

__all__ = ["INITIAL_ENERGY", "LANDSCAPE", "OMNIGLOT"]


def measure_unseen(
    experiment: Experiment, run: Run, *, unseen: Mapping[str, Any], folds: int, per_fold: int, data_root: Path | None
) -> Outcome:
    """Verify pairs of the characters of another, open-set split (`unseen`), and identify each of their drawings."""
    options = {key: value for key, value in unseen.items() if key != "name"}
    split: data.DataSplit = create(Component(unseen["name"], options), "data", data_root)
    metrics = compare_unseen(*experiment.embed(split.validation), folds=folds, per_fold=per_fold)
    return Outcome({**metrics, "head_parameters": float(rotation.degrees_of_freedom(experiment.head))})


_CLASSES = {"rotation": {"name": "cayley", "hidden": False, "output": True, "normalize": True}}
OMNIGLOT = Recipe(
    name="opt-omniglot",
    title="Random class vectors that only turn, on Omniglot's unseen characters",
    reference="table 13 of the OPT paper, on faces (CASIA and LFW)",
    base={
        "model": "embedding_cnn",
        "optimizer": sgd(0.3),
        "augment": [{"name": "shift", "pixels": 2}],
        "batch_size": 128,
        "measure": {"unseen": {"name": "omniglot", "split": "class"}, "folds": 10, "per_fold": 300},
    },
    scales={
        "paper": {
            "data": {"name": "omniglot", "held_out": 1},
            "model": {"widths": [64, 128, 256], "feature_dim": 512},
            "optimizer": {"lr": 0.1},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "omniglot", "size": 28, "held_out": 1},
            "model": {"widths": [32, 64, 64], "feature_dim": 64},
            "epochs": 8,
        },
        "smoke": {
            "data": {"name": "generated", "classes": 20},
            "model": {"widths": [4, 4], "feature_dim": 8},
            "epochs": 1,
            "measure": {
                "unseen": {"name": "generated", "classes": 40, "open_set": True, "seed": 1},
                "folds": 2,
                "per_fold": 10,
            },
        },
    },
    rows=(
        Row("learned class vectors", printed={"accuracy": 95.7, "head_parameters": 5.41e6}),
        Row(
            "CLS-OPT (CP)", printed={"accuracy": 94.9, "head_parameters": 1.31e5}, **rotated(_CLASSES["rotation"], 1.0)
        ),
    ),
    seeds=(0, 1),
    metrics=(
        Metric("accuracy", "verification %", ".2f", True),
        Metric("eer", "EER %", ".2f", False),
        Metric("rank1", "rank-1 %", ".2f", True),
        Metric("error", "error % of seen characters", ".2f", False),
        Metric("head_parameters", "trained numbers of the head", ".0f", None),
    ),
    covers=("O-T13",),
    cost={"paper": 100, "cpu": 0.4, "smoke": 0.005},
    measure=measure_unseen,
    note="The network of the recipe omniglot with a softmax: 964 characters with 19 drawings each for training, 8 "
    "epochs, 64-d features; the error is that on the twentieth drawing of each character. CLS-OPT: the class vectors "
    "are random unit vectors, fixed, and rotated together by one rotation of the 64 dimensions; all other layers are "
    "trained plainly. Chosen on four held-out drawings of each character: the learning rate of plain training, from "
    "two values after 1 epoch (0.3), and that of the rotation, from two after 1 and 4 epochs (1; 0.1 is no better), "
    "with 0.3 for all other parameters. Verification and identification of 659 unseen characters as in omniglot. The "
    "numbers of the source are for 512-d features of faces.",
)


def measure_start(experiment: Experiment, run: Run) -> Outcome:
    """Return the energy before training, of the trained network and of CNN-6 at the size of the source."""
    config = experiment.config
    start = outcome_of_lines(run.metrics()).curves["energy"][0]
    return Outcome({"source_energy": source_energy(config.init, config.seed), "start_energy": start})


@torch.no_grad()
def source_energy(init: Component, seed: int) -> float:
    """Return the half-space energy (s = 2) of CNN-6 before training: mean over pairs, sum over seven layers."""
    # The printed energies are those of the full-size network, so it is built here without being trained.
    torch.manual_seed(seed)
    network = models.MODELS["opt_cnn6"]()
    create(init, "init", network)
    weights = [m.weight.flatten(1) for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    return sum(float(energy.hyperspherical_energy(weight, half_space=True)) for weight in weights)


_PRINTED = {  # by mean: energy and error of table 7.2
    0.0: {"source_energy": 3.5109, "error": 32.49},
    1e-3: {"source_energy": 3.5117, "error": 33.11},
    1e-2: {"source_energy": 3.5160, "error": 39.51},
    2e-2: {"source_energy": 3.5531, "error": 53.89},
    3e-2: {"source_energy": 3.6761},
    5e-2: {"source_energy": 4.2776},
}


def _rotated_row(mean: float) -> Row:
    patches = rotated({"name": "cayley", "normalize": True}, 0.3)
    return Row(f"OPT (CP), mean {mean:g}", {**patches["patch"], "init": {"mean": mean}}, _PRINTED[mean], patches["at"])


_SHORTER = {**CNN6_SCALES, "cpu": {**CNN6_SCALES["cpu"], "epochs": 5}}
INITIAL_ENERGY = Recipe(
    name="opt-initial-energy",
    title="The energy that training starts from, CNN-6 on a fifth of CIFAR-100",
    reference="table 7.2 of the thesis, table 4 of the OPT paper",
    base={**CNN6_BASE, "init": "he"},
    scales=_SHORTER,
    rows=(
        *map(_rotated_row, _PRINTED),
        *(Row(f"plain, mean {mean:g}", {"init": {"mean": mean}}) for mean in (0.0, 2e-2, 5e-2)),
    ),
    seeds=(0, 1),
    metrics=(
        Metric("source_energy", "initial energy of CNN-6", ".4f", False),
        Metric("start_energy", "initial hidden energy", ".4f", False),
        ENERGY,
        ERROR,
    ),
    covers=("T7.2",),
    cost={"paper": 900, "cpu": 0.4, "smoke": 0.01},
    measure=measure_start,
    figures=("error", "energy"),
    note="The mean is added to weights drawn with He initialisation. The initial energy of CNN-6 is computed at the "
    "size of the source, 64 filters and images of 32×32: half space, s = 2, mean over pairs and sum over seven layers, "
    "which reproduces the numbers of the source. The trained network is that of the recipe opt-cnn with half the "
    "width; its neurons have fewer dimensions, so the mean changes them less; 5 epochs. The errors of the source are "
    "those of OPT (CP) with unit neurons (its error at mean 0 is that of table 7.7), so they are printed next to these "
    "rows; the source reports no convergence at means of 0.03 and 0.05.",
)


def measure_landscape(experiment: Experiment, run: Run, *, points: int, images: int, span: float) -> Outcome:
    """Measure loss and error on a plane through the trained hidden layers.

    Args:
        experiment, run: the trained network.
        points: number of points per axis of the grid.
        images: number of test images per point.
        span: half the side of the grid.
    """
    tested = experiment.data.validation
    assert tested is not None
    part = data.subset(tested, range(min(images, len(tested))))
    loader = data.make_loader(part, batch_size=len(part), sampler=data.SAMPLERS["sequential"](part.labels, 0))
    inputs, labels = (one.to(experiment.device) for one in next(iter(loader)))
    head: Any = experiment.head

    @torch.no_grad()
    def measure() -> dict[str, Tensor]:
        features = experiment.network(inputs)
        missed = predict(head, features) != labels
        return {"loss": head(features, labels), "error": 100 * missed.double().mean()}

    generator = torch.Generator().manual_seed(experiment.config.seed)
    around = evaluation.landscape(experiment.network.body, measure, span=span, points=points, generator=generator)
    # Losses of different networks are compared by how much they rise, not by their values.
    rings = {
        f"{name}_at_{radius}": on_ring(around, name, radius) - around.centre[name]
        for name in ("loss", "error")
        for radius in (0.5, 1.0)
    }
    centre = {f"{name}_at_centre": value for name, value in around.centre.items()}
    landscape = {f"landscape_{name}": values for name, values in around.values.items()}
    return Outcome({**centre, **rings}, tensors={**landscape, "coordinates": around.a})


def on_ring(around: evaluation.Landscape, name: str, radius: float) -> float:
    """Return the mean over the grid points at this distance from the centre, within half a step of the grid."""
    distance = (around.a[:, None].square() + around.b.square()).sqrt()
    step = float(around.a[1] - around.a[0])  # the grid is uniform
    near = around.values[name][(distance - radius).abs() <= step / 2]
    return float(near.mean()) if len(near) else math.nan


LANDSCAPE = Recipe(
    name="opt-landscape",
    title="The landscape around CNN-6, trained plainly and by rotation",
    reference="figures 4 and 5 of the OPT paper",
    base={**CNN6_BASE, "measure": {"points": 15, "images": 500, "span": 1.5}},
    scales={
        "paper": {**_SHORTER["paper"], "measure": {"points": 51, "images": 10_000}},
        "cpu": _SHORTER["cpu"],
        "smoke": {**_SHORTER["smoke"], "measure": {"points": 7, "images": 20}},
    },
    rows=(Row("plain"), Row("OPT (CP)", **rotated({"name": "cayley"}, 0.3))),
    metrics=(
        ERROR,
        Metric("loss_at_centre", "loss", ".3f", False),
        Metric("loss_at_0.5", "rise of the loss at 0.5", ".3f", False),
        Metric("loss_at_1.0", "rise of the loss at 1", ".3f", False),
        Metric("error_at_0.5", "rise of the error % at 0.5", ".2f", False),
        Metric("error_at_1.0", "rise of the error % at 1", ".2f", False),
    ),
    covers=("O-F9", "O-F10"),
    cost={"paper": 300, "cpu": 0.06, "smoke": 0.005},
    measure=measure_landscape,
    note="The network of the recipe opt-cnn after 5 epochs. The hidden layers are moved along two random directions up "
    "to ±1.5; each filter of a direction has the norm of the filter that it moves (for a rotation: the norm of R). The "
    "head is not moved. Loss and error of the first 500 test images at 15×15 points; a rise is the mean at that "
    "distance from the centre minus the value at the centre.",
)
