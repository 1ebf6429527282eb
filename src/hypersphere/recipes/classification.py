"""Shared by the recipes that train a classifier: a job built from the settings and measured after every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import training
from hypersphere.recipes.recipe import Metric, Outcome, Trial
from hypersphere.training.measure import accuracy, layer_energies, mean_energy

__all__ = ["ENERGY", "ERROR", "IMAGES", "SECONDS", "assemble", "classify", "hidden_energy", "run", "settings_of"]

SECONDS = Metric("seconds", "seconds of training", ".0f", None)
ERROR = Metric("error", "test error %", ".2f", False)
ENERGY = Metric("energy", "hidden energy", ".4f", False)
_JOB_SETTINGS = [field.name for field in fields(training.Job) if field.name != "seed"]

# A fifth of CIFAR-100 at half its resolution, for networks that two cores train in a minute.
IMAGES: dict[str, Any] = {
    "data": {"name": "cifar100_fifth", "pool": 2},
    "augment": {"shift": 2, "mirror": True},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "batch_size": 128,
    "epochs": 6,
}


def settings_of(**changes: Any) -> dict[str, Any]:
    """Return all settings of a job except the seed, with these changes."""
    return {key: value for key, value in training.Job.of(changes).settings().items() if key != "seed"}


def run(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train the job that the settings describe; measure test error and hidden energy after every epoch."""
    return classify(assemble(settings, trial), trial)


def assemble(settings: Mapping[str, Any], trial: Trial) -> training.Assembly:
    """Return the objects of the job that the settings describe."""
    job = training.Job.of({**{key: settings[key] for key in _JOB_SETTINGS}, "seed": trial.seed})
    return job.build(trial.data_root)


def classify(
    assembly: training.Assembly,
    trial: Trial,
    *,
    more: Callable[[], Mapping[str, float]] = dict,
    tensors: Callable[[], Mapping[str, Tensor]] = dict,
    objective: nn.Module | None = None,
    measure_every: int = 1,
) -> Outcome:
    """Train, and measure after every epoch. A run that diverges stops; its error is NaN.

    Args:
        assembly: the objects of the job.
        trial: receives the progress.
        more: computes further metrics after training.
        tensors: computes the tensors to store for pictures after training.
        objective: trained instead of the objective of the assembly.
        measure_every: number of epochs between measurements of error and energy; the last epoch is always measured.
    """
    curves: dict[str, list[float]] = {"loss": [], "error": [test_error(assembly)], "energy": [hidden_energy(assembly)]}
    seconds = []

    def measure(epoch: training.Epoch) -> None:
        seconds.append(epoch.seconds)
        # Measuring takes longer than an epoch of a small task, hence `measure_every`.
        if epoch.number % measure_every == 0 or epoch.number == assembly.job.epochs:
            curves["loss"].append(epoch.loss)
            curves["error"].append(test_error(assembly))
            curves["energy"].append(hidden_energy(assembly))
            trial.tell(epoch.number / assembly.job.epochs)

    assembly.objective.train()
    diverged = False
    try:
        training.minimize(
            assembly.objective if objective is None else objective,
            assembly.batches,
            epochs=assembly.job.epochs,
            optimizer=assembly.optimizer,
            scheduler=assembly.scheduler,
            on_step=lambda progress: assembly.after_step(progress.step),
            on_epoch=measure,
        )
    except FloatingPointError:  # raised by the loop if the loss is not finite
        diverged = True
    metrics = {
        "error": math.nan if diverged else curves["error"][-1],
        "energy": hidden_energy(assembly),
        "seconds": sum(seconds),
        "diverged": float(diverged),
    }
    # Further metrics and pictures of a diverged network would be NaN or raise errors.
    if diverged:
        return Outcome(metrics, curves)
    return Outcome({**metrics, **more()}, curves, tensors())


def test_error(assembly: training.Assembly) -> float:
    """Return the error on the test data in per cent, or NaN if the features are not finite."""
    try:
        return 100 * (1 - accuracy(assembly.objective, assembly.test_batches()))
    except FloatingPointError:
        return math.nan


def hidden_energy(assembly: training.Assembly) -> float:
    """Return the half-space energy (s = 2) of the hidden neurons, averaged over layers with at least two neurons.

    It is NaN if a weight is not finite.
    """
    network, head = assembly.network.body, assembly.head
    if not all(bool(torch.isfinite(p).all()) for p in (*network.parameters(), *head.parameters())):
        return math.nan
    return mean_energy(layer_energies(network, head.weight))
