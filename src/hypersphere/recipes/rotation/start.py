"""The energy that training starts from: shifted means and refined neurons (table 7.2 of the thesis, OPT table 2)."""

from __future__ import annotations

from typing import Any

import torch

from hypersphere import energy, models
from hypersphere._layer_selection import layers_of
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.protocols import ENERGY, ERROR
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.recipes.rotation.settings import (
    BASELINE,
    CAYLEY,
    CNN_BASE,
    GRAM_SCHMIDT,
    LARGE,
    LOWDIN,
    ON_CPU,
    PAPER,
    SCALES,
    STATED,
    Method,
    cnn_scales,
    method_row,
)
from hypersphere.rotation import refine_neurons
from hypersphere.training import Experiment, Run
from hypersphere.training.components import create
from hypersphere.training.config import Component, merge
from hypersphere.training.rotations import NeuronPreparation

__all__ = ["INITIAL_ENERGY", "measure_start", "source_energy"]


def measure_start(experiment: Experiment, run: Run, *, mean_factor: float) -> Outcome:
    """Return the energy before training, of the trained network and of CNN-6 at the size of the source.

    Args:
        experiment, run: the trained network.
        mean_factor: the factor by which the mean of the weights is larger than in the source.
    """
    config = experiment.config
    start = outcome_of_lines(run.metrics()).curves["energy"][0]
    if config.selection:  # a trial
        return Outcome({"start_energy": start})
    init = config.init
    if "mean" in init.options:
        init = Component(init.name, {**init.options, "mean": init.options["mean"] / mean_factor})
    options = config.rotation.options
    steps = options.get("refine_steps", NeuronPreparation.refine_steps)
    refined = source_energy(init, config.seed, options.get("refine"), steps)
    return Outcome({"source_energy": refined, "start_energy": start})


def source_energy(init: Component, seed: int, refine: str | None = None, steps: int = 1) -> float:
    """Return the half-space energy (s = 2) of CNN-6 before training: mean over pairs, sum over seven layers.

    Args:
        init: the initialisation.
        seed: of the initialisation.
        refine: an energy of `hypersphere.rotation.refine_neurons` that is lowered first, or None.
        steps: number of steps of the refinement.
    """
    # The printed energies are those of the full-size network, so it is built here without being trained.
    torch.manual_seed(seed)
    network = models.MODELS["opt_cnn6"]()
    create(init, "init", network)
    total = 0.0
    for layer in layers_of(network, output_layer=None).hidden:
        rows = layer.rows().detach()
        if refine is not None:
            rows = refine_neurons(rows, refine, steps=steps)
        total += float(energy.hyperspherical_energy(rows, half_space=True))
    return total


# The energy depends on mean/σ of the weights. Neurons have 144 dimensions at the scale cpu and 576 in the source, so
# the σ of He initialisation is twice as large, and so must be the mean.
_SMALLER = (576 / 144) ** 0.5
_MEANS = {"0": 0.0, "1e-3": 1e-3, "1e-2": 1e-2, "2e-2": 2e-2, "3e-2": 3e-2, "5e-2": 5e-2}
_UNIT_CAYLEY = Method(merge(CAYLEY.patch, {"rotation": {"normalize": True}}), CAYLEY.grid, CAYLEY.paper)
_RATES = {"optimizer.rotation_lr": (0.1, 0.5)}


def _mean_row(title: str, method: Method, name: str, scales: tuple[str, ...]) -> Row:
    mean = _MEANS[name]
    is_rotated = title == "OPT (CP)"
    line = f"mean {name}"
    printed: dict[str, Any] = {"source_energy": ("T7.2", line, "Energy"), "error": ("T7.2", line, "Error (%)")}
    return method_row(
        f"{title}, mean {name}",
        method,
        printed if is_rotated else {},
        patch={"init": {"mean": mean}},
        at={"cpu": {"init": {"mean": round(_SMALLER * mean, 5)}}},
        baseline=None if name == "0" else f"{title}, mean 0",
        grid=_RATES if is_rotated else {"optimizer.lr": (0.1, 0.03)},
        scales=scales,
    )


_REFINEMENTS = {"Original": None, "MHE": "mhe", "HS-MHE": "half_space_mhe", "CoMHE": "comhe"}
_REFINED_METHODS = {"OPT (GS)": GRAM_SCHMIDT, "OPT (LS)": LOWDIN, "OPT (CP)": CAYLEY}


def _refined_rows(name: str, method: Method) -> list[Row]:
    rows = []
    for column, refine in _REFINEMENTS.items():
        printed: dict[str, Any] = {"error": ("O-T2", name, column)}
        if name == "OPT (GS)":
            printed["source_energy"] = ("O-T2", "Energy", column)
        options = {} if refine is None else {"refine": refine}
        scales = LARGE if name == "OPT (GS)" else PAPER
        rows.append(
            method_row(
                f"{name}, {column}",
                method,
                printed,
                patch={"rotation": {**method.patch["rotation"], **options}},
                at={
                    "cpu": {"rotation": {"refine_steps": 1000}},
                    "smoke": {"rotation": {"refine_steps": 5}},
                },
                baseline=None if refine is None else f"{name}, Original",
                grid=_RATES,
                scales=(*scales, "smoke") if (name, column) == ("OPT (GS)", "HS-MHE") else scales,
            )
        )
    return rows


INITIAL_ENERGY = Recipe(
    name="opt-initial-energy",
    title="The energy that training starts from: shifted means and refined neurons",
    reference="table 7.2 of the thesis, table 2 of the OPT paper (tables 4 and 7.6)",
    base={**CNN_BASE, "init": "he"},
    scales=cnn_scales(paper={"mean_factor": 1.0}, cpu={"mean_factor": _SMALLER}, smoke={"mean_factor": 1.0}),
    rows=(
        *(
            _mean_row(
                "OPT (CP)",
                _UNIT_CAYLEY,
                name,
                SCALES if name == "5e-2" else LARGE if name in ("0", "1e-2", "2e-2") else PAPER,
            )
            for name in _MEANS
        ),
        *(_mean_row("plain", BASELINE, name, ("cpu",)) for name in ("0", "5e-2")),
        *(row for name, method in _REFINED_METHODS.items() for row in _refined_rows(name, method)),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        ERROR,
        Metric("source_energy", "initial energy of CNN-6", ".4f", False),
        Metric("start_energy", "initial hidden energy", ".4f", False),
        ENERGY,
    ),
    covers=("T7.2", "O-T2"),
    cost={"paper": 5000, "cpu": 1.2, "smoke": 0.01},
    measure=measure_start,
    figures=("error", "energy"),
    tuning=Tuning({}, held_out=0.2),
    claims=(
        *(
            Claim(
                f"A mean of 0 has a lower error than one of {name}, which raises the initial energy.",
                "OPT (CP), mean 0",
                f"OPT (CP), mean {name}",
                source="T7.2",
            )
            for name in ("1e-2", "2e-2", "5e-2")
        ),
        *(
            Claim(
                f"Refinement by {name} before training lowers the error.",
                f"OPT (GS), {name}",
                "OPT (GS), Original",
                source="O-T2",
            )
            for name in ("MHE", "HS-MHE", "CoMHE")
        ),
    ),
    note=f"{ON_CPU} Means are multiplied there by 2, so that they have the same ratio to the deviation of the "
    "weights as in the source. Each row has two trials on a fifth of the training images, two learning rates of the "
    "rotation (plain rows: of all parameters). Refinement takes 1,000 steps on the energy (the source: 5,000), the "
    f"first of 0.1 radians; the step size of the source is not stated. {STATED} The mean is added to all weights, also "
    "those of the classifier. The initial energy of CNN-6 is that of the network of the source at its full size: half "
    "space, s = 2, mean over pairs and sum over seven layers, which reproduces the printed numbers (the printed "
    "formula does not). The source does not say which rotation table 7.2 uses; its error at mean 0 is that of OPT (CP) "
    "with unit neurons in table 7.7, which is used here. It reports no convergence at means of 0.03 and 0.05. The "
    "plain rows are an addition.",
)
