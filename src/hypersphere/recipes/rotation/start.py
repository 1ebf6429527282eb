"""The energy that training starts from: shifted means and refined neurons (table 7.2 of the thesis, OPT table 2)."""

from __future__ import annotations

import torch

from hypersphere import energy, models
from hypersphere._layer_selection import layers_of
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.protocols import ENERGY, ERROR
from hypersphere.recipes.recipe import Claim, Method, Metric, Outcome, Place, Row, cells
from hypersphere.recipes.rotation.settings import (
    CAYLEY,
    CNN_BASE,
    GRAM_SCHMIDT,
    LOWDIN,
    ON_CPU,
    STATED,
    cnn_scales,
    rotation_recipe,
)
from hypersphere.rotation import refine_neurons
from hypersphere.training import Experiment, Run
from hypersphere.training.components import create
from hypersphere.training.config import Component
from hypersphere.training.rotations import NeuronPreparation

__all__ = ["INITIAL_ENERGY", "measure_start", "source_energy"]


def measure_start(experiment: Experiment, run: Run, *, mean_factor: float) -> Outcome:
    """Return the energy before training, of the trained network and of CNN-6 at the size of the source.

    Args:
        experiment, run: the trained network.
        mean_factor: mean of the weights divided by that in the source.
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
        seed: seed of the initialisation.
        refine: energy that `hypersphere.rotation.refine_neurons` lowers first, or None.
        steps: number of steps of the refinement.
    """
    # The printed energies are those of the full-size network, so build it, but do not train it.
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
_CPU_MEAN_FACTOR = (576 / 144) ** 0.5
_MEANS = {"0": 0.0, "1e-3": 1e-3, "1e-2": 1e-2, "2e-2": 2e-2, "3e-2": 3e-2, "5e-2": 5e-2}
_RATES = {"optimizer.rotation_lr": (0.1, 0.5)}
_PLAIN_RATES = {"optimizer.lr": (0.1, 0.03)}


def _mean_row(title: str, name: str) -> Row:
    mean = _MEANS[name]
    is_rotated = title == "OPT (CP)"
    printed: dict[str, Place | float] = {
        "source_energy": ("T7.2", f"mean {name}", "Energy"),
        "error": ("T7.2", f"mean {name}", "Error (%)"),
    }
    rotated = {"rotation": {**CAYLEY.patch["rotation"], "normalize": True}} if is_rotated else {}
    return Row(
        f"{title}, mean {name}",
        {"init": {"mean": mean}, **rotated},
        printed if is_rotated else {},
        {"cpu": {"init": {"mean": round(_CPU_MEAN_FACTOR * mean, 5)}}, "paper": CAYLEY.paper if is_rotated else {}},
        _RATES if is_rotated else _PLAIN_RATES,
        None if name == "0" else f"{title}, mean 0",
    )


_REFINEMENTS = {"Original": None, "MHE": "mhe", "HS-MHE": "half_space_mhe", "CoMHE": "comhe"}
_REFINED_METHODS = {"OPT (GS)": GRAM_SCHMIDT, "OPT (LS)": LOWDIN, "OPT (CP)": CAYLEY}


def _refined_row(name: str, method: Method, column: str) -> Row:
    printed: dict[str, Place | float] = {"error": ("O-T2", name, column)}
    if name == "OPT (GS)":
        printed["source_energy"] = ("O-T2", "Energy", column)
    options = {} if column == "Original" else {"refine": _REFINEMENTS[column]}
    steps = {"cpu": {"rotation": {"refine_steps": 1000}}, "smoke": {"rotation": {"refine_steps": 5}}}
    patch = {"rotation": {**method.patch["rotation"], **options}}
    baseline = None if column == "Original" else f"{name}, Original"
    return Row(f"{name}, {column}", patch, printed, {**steps, "paper": method.paper}, _RATES, baseline)


INITIAL_ENERGY = rotation_recipe(
    name="opt-initial-energy",
    title="The energy that training starts from: shifted means and refined neurons",
    reference="table 7.2 of the thesis, table 2 of the OPT paper (tables 4 and 7.6)",
    base={**CNN_BASE, "init": "he"},
    scales=cnn_scales(paper={"mean_factor": 1.0}, cpu={"mean_factor": _CPU_MEAN_FACTOR}, smoke={"mean_factor": 1.0}),
    rows=(
        *(_mean_row("OPT (CP)", name) for name in _MEANS),
        *(_mean_row("plain", name) for name in ("0", "5e-2")),
        *(_refined_row(name, method, column) for name, method in _REFINED_METHODS.items() for column in _REFINEMENTS),
    ),
    default_rows={
        "paper": [*(f"OPT (CP), mean {name}" for name in _MEANS), *cells(_REFINED_METHODS, _REFINEMENTS)],
        "cpu": [
            *cells(["OPT (CP)"], ["mean 0", "mean 1e-2", "mean 2e-2", "mean 5e-2"]),
            *cells(["plain"], ["mean 0", "mean 5e-2"]),
            *cells(["OPT (GS)"], _REFINEMENTS),
        ],
        "smoke": ["OPT (CP), mean 5e-2", "OPT (GS), HS-MHE"],
    },
    metrics=(
        ERROR,
        Metric("source_energy", "initial energy of CNN-6", ".4f", False),
        Metric("start_energy", "initial hidden energy", ".4f", False),
        ENERGY,
    ),
    covers=("T7.2", "O-T2"),
    cost={"paper": 5000, "cpu": 1.2, "smoke": 0.01},
    measure=measure_start,
    claims=(
        *(
            Claim(
                f"A mean of 0 has a lower error than one of {name}, which raises the initial energy.",
                "OPT (CP), mean 0",
                f"OPT (CP), mean {name}",
            )
            for name in ("1e-2", "2e-2", "5e-2")
        ),
        *(
            Claim(f"Refinement by {name} before training lowers the error.", f"OPT (GS), {name}", source="O-T2")
            for name in ("MHE", "HS-MHE", "CoMHE")
        ),
    ),
    note=f"{ON_CPU} Means are multiplied there by 2, so that they have the same ratio to the deviation of the weights "
    "as in the source. Each row has two trials on a fifth of the training images, two learning rates of the rotation "
    "(plain rows: of all parameters). Refinement takes 1,000 steps on the energy (the source: 5,000), the first of 0.1 "
    f"radians; the step size of the source is not stated. {STATED} The mean is added to all weights, also those of the "
    "classifier. The initial energy of CNN-6 is that of the network of the source at its full size: half space, s = 2, "
    "mean over pairs and sum over seven layers, which reproduces the printed numbers (the printed formula does not). "
    "The source does not say which rotation table 7.2 uses; its error at mean 0 is that of OPT (CP) with unit neurons "
    "in table 7.7, which is used here. It reports no convergence at means of 0.03 and 0.05. The plain rows are an "
    "addition.",
)
