"""Three studies of training by rotation: rotated class vectors, initial energy, and the loss landscape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import data, energy, evaluation, models, rotation, training
from hypersphere.recipes.classification import ENERGY, ERROR, IMAGES, assemble, classify, settings_of
from hypersphere.recipes.open_set import compare_unseen
from hypersphere.recipes.opt_networks import CNN6, decaying_sgd
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row, Trial
from hypersphere.training.job_network import initialize_

__all__ = ["INITIAL_ENERGY", "LANDSCAPE", "OMNIGLOT"]

_SIZE = 28


def run_open_set(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train on the seen characters; then verify 6,000 pairs of unseen ones and identify each drawing."""
    assembly = assemble(settings, trial)
    degrees_of_freedom = rotation.degrees_of_freedom(assembly.head)

    def more() -> dict[str, float]:
        unseen = data.omniglot("evaluation", trial.data_root, size=_SIZE)
        return compare_unseen(*training.embed(assembly.network, training.Batches(unseen.images, unseen.labels, 500)))

    outcome = classify(assembly, trial, more=more)
    return Outcome({**outcome.metrics, "head_parameters": float(degrees_of_freedom)}, outcome.curves)


OMNIGLOT = Recipe(
    name="opt-omniglot",
    title="Random class vectors that only turn, on Omniglot's unseen characters",
    reference="table 13 of the OPT paper, on faces (CASIA and LFW)",
    settings=settings_of(
        data={"name": "omniglot", "size": _SIZE, "held_out": 1},
        model={"name": "embedding_cnn", "image_size": [_SIZE, _SIZE], "widths": [32, 64, 64], "feature_dim": 64},
        optimizer=decaying_sgd(0.3),
        augment={"shift": 2},
        batch_size=128,
        epochs=8,
    ),
    rows=(
        Row("learned class vectors", {}, {"accuracy": 95.7, "head_parameters": 5.41e6}),
        Row(
            "CLS-OPT (CP)",
            {
                "rotation": {"name": "cayley", "hidden": False, "output": True, "normalize": True},
                "optimizer": decaying_sgd(0.3, 1.0),
            },
            {"accuracy": 94.9, "head_parameters": 1.31e5},
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
    run=run_open_set,
    note="The network of the recipe omniglot with a softmax: 964 characters with 19 drawings each for training, 8 "
    "epochs, 64-d features; the error is that on the twentieth drawing of each character. CLS-OPT: the class "
    "vectors are random unit vectors, fixed, and rotated together by one rotation of the 64 dimensions; all "
    "other layers are trained plainly. Chosen on four held-out drawings of each character: the learning rate "
    "of plain training, from two values after 1 epoch (0.3), and that of the rotation, from two after 1 and 4 "
    "epochs (1; 0.1 is no better), with 0.3 for all other parameters. Verification and identification of 659 "
    "unseen characters as in omniglot. The numbers of the source are for 512-d features of faces.",
)


def run_from_energy(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train from weights with a given mean; also compute the initial energy of CNN-6 at the size of the source."""
    energy_at_source_size = source_energy(settings["model"]["init"], settings["model"]["init_mean"], trial.seed)
    outcome = classify(assemble(settings, trial), trial)
    start = {"source_energy": energy_at_source_size, "start_energy": outcome.curves["energy"][0]}
    return Outcome({**outcome.metrics, **start}, outcome.curves)


@torch.no_grad()
def source_energy(init: str, mean: float, seed: int) -> float:
    """Return the half-space energy (s = 2) of CNN-6 before training: mean over pairs, sum over seven layers."""
    # The printed energies are those of the full-size network, so it is built here without being trained.
    torch.manual_seed(seed)
    network = models.MODELS["opt_cnn6"]()
    initialize_(network, init, mean)
    weights = [m.weight.flatten(1) for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    return sum(float(energy.hyperspherical_energy(weight, half_space=True)) for weight in weights)


def _of_mean(mean: float) -> dict[str, Any]:
    return {"model": {**CNN6, "init": "he", "init_mean": mean}}


_PRINTED = {  # by mean: energy and error of table 7.2
    0.0: {"source_energy": 3.5109, "error": 32.49},
    1e-3: {"source_energy": 3.5117, "error": 33.11},
    1e-2: {"source_energy": 3.5160, "error": 39.51},
    2e-2: {"source_energy": 3.5531, "error": 53.89},
    3e-2: {"source_energy": 3.6761},
    5e-2: {"source_energy": 4.2776},
}
_ROTATED = {"rotation": {"name": "cayley", "normalize": True}, "optimizer": decaying_sgd(0.1, 0.3)}
INITIAL_ENERGY = Recipe(
    name="opt-initial-energy",
    title="The energy that training starts from, CNN-6 on a fifth of CIFAR-100",
    reference="table 7.2 of the thesis, table 4 of the OPT paper",
    settings=settings_of(**{**IMAGES, "epochs": 5}, **_of_mean(0.0)),
    rows=(
        *(
            Row(f"OPT (CP), mean {mean:g}", {**_of_mean(mean), **_ROTATED}, printed)
            for mean, printed in _PRINTED.items()
        ),
        *(Row(f"plain, mean {mean:g}", _of_mean(mean)) for mean in (0.0, 2e-2, 5e-2)),
    ),
    seeds=(0, 1),
    metrics=(
        Metric("source_energy", "initial energy of CNN-6", ".4f", False),
        Metric("start_energy", "initial hidden energy", ".4f", False),
        ENERGY,
        ERROR,
    ),
    run=run_from_energy,
    figures=("error", "energy"),
    note="The mean is added to weights drawn with He initialisation. The initial energy of CNN-6 is computed at "
    "the size of the source, 64 filters and images of 32×32: half space, s = 2, mean over pairs and sum over "
    "seven layers, which reproduces the numbers of the source. The trained network is that of the recipe "
    "opt-cnn with half the width; its neurons have fewer dimensions, so the mean changes them less; 5 epochs. "
    "The errors of the source are those of OPT (CP) with unit neurons (its error at mean 0 is that of table "
    "7.7), so they are printed next to these rows; the source reports no convergence at means of 0.03 and "
    "0.05.",
)


def run_landscape(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train; then measure loss and error on a plane through the trained hidden layers."""
    assembly = assemble(settings, trial)
    outcome = classify(assembly, trial)
    if outcome.metrics["diverged"]:  # there is no minimum to look at
        return outcome
    images, labels = next(assembly.test_batches(_IMAGES))

    @torch.no_grad()
    def measure() -> dict[str, Tensor]:
        features = assembly.network(images)
        missed = training.predict(assembly.head, features) != labels
        return {"loss": assembly.head(features, labels), "error": 100 * missed.double().mean()}

    assembly.objective.eval()
    generator = torch.Generator().manual_seed(trial.seed)
    around = evaluation.landscape(
        assembly.network.body, measure, span=_SPAN, points=settings["points"], generator=generator
    )
    # Losses of different networks are compared by how much they rise, not by their values.
    rings = {
        f"{name}_at_{radius}": on_ring(around, name, radius) - around.centre[name]
        for name in ("loss", "error")
        for radius in (0.5, 1.0)
    }
    centre = {f"{name}_at_centre": value for name, value in around.centre.items()}
    landscape = {f"landscape_{name}": values for name, values in around.values.items()}
    return Outcome({**outcome.metrics, **centre, **rings}, outcome.curves, {**landscape, "coordinates": around.a})


def on_ring(around: evaluation.Landscape, name: str, radius: float) -> float:
    """Return the mean over the grid points at this distance from the centre, within half a step of the grid."""
    distance = (around.a[:, None].square() + around.b.square()).sqrt()
    step = float(around.a[1] - around.a[0])  # the grid is uniform
    near = around.values[name][(distance - radius).abs() <= step / 2]
    return float(near.mean()) if len(near) else math.nan


_IMAGES, _SPAN = 500, 1.5  # test images per point of the grid; half the side of the grid
LANDSCAPE = Recipe(
    name="opt-landscape",
    title="The landscape around CNN-6, trained plainly and by rotation",
    reference="figures 4 and 5 of the OPT paper",
    settings={**settings_of(**{**IMAGES, "epochs": 5}, model=CNN6), "points": 15},
    rows=(
        Row("plain", {}),
        Row("OPT (CP)", {"rotation": {"name": "cayley"}, "optimizer": decaying_sgd(0.1, 0.3)}),
    ),
    seeds=(0,),
    metrics=(
        ERROR,
        Metric("loss_at_centre", "loss", ".3f", False),
        Metric("loss_at_0.5", "rise of the loss at 0.5", ".3f", False),
        Metric("loss_at_1.0", "rise of the loss at 1", ".3f", False),
        Metric("error_at_0.5", "rise of the error % at 0.5", ".2f", False),
        Metric("error_at_1.0", "rise of the error % at 1", ".2f", False),
    ),
    run=run_landscape,
    note="The network of the recipe opt-cnn after 5 epochs. The hidden layers are moved along two random "
    "directions up to ±1.5; each filter of a direction has the norm of the filter that it moves (for a "
    "rotation: the norm of R). The head is not moved. Loss and error of the first 500 test images at 15×15 "
    "points; a rise is the mean at that distance from the centre minus the value at the centre.",
)
