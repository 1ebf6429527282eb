"""Evaluate one run for a report: metrics over time, features, class vectors and layers, each computed once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import energy, evaluation, sphere, training
from hypersphere.cli.figures import LEARNED
from hypersphere.cli.opening import Opened, open_run
from hypersphere.layers import DecoupledLayer
from hypersphere.recipes.sphere_networks import learned_parameters
from hypersphere.training.job_run import Run

__all__ = ["MOST_COMPARED", "Study", "study"]

MOST_COMPARED = 1500  # largest number of test examples of which all pairs are compared
LANDSCAPE_EXAMPLES, LANDSCAPE_POINTS = 500, 11


@dataclass(frozen=True, eq=False)
class Verified:
    """Verification and identification of test examples: angles of all pairs, ROC curve, and search in a gallery."""

    angles: evaluation.AngleHistograms
    roc: evaluation.Roc
    identified: evaluation.Identification

    @property
    def threshold(self) -> float:
        """The angle in degrees at which the false reject rate equals the false accept rate."""
        at = int((self.roc.far >= 1 - self.roc.tar).nonzero()[0])
        return math.degrees(float(sphere.angle(self.roc.thresholds[at])))


@dataclass(frozen=True, eq=False)
class Study:
    """A run, evaluated at its last checkpoint.

    Attributes:
        run: the folder and the job.
        task: the data.
        features: features (N, d) of the test data.
        labels: labels (N,) of the test data.
        class_vectors: class vectors (C, d).
        accuracy: test accuracy.
        layers: inspection of the layers of the network and the head.
        filters: filters (N, 1 or 3, H, W) of the first layer if they can be shown as images, else None.
        learned: all learned k and factors of ρ, under "k" and "radius_factor".
        starts: their initial values, where all layers share one.
        landscape: loss and error around the trained weights, if requested.
    """

    run: Run
    task: training.Task
    features: Tensor
    labels: Tensor
    class_vectors: Tensor
    accuracy: float
    layers: energy.Inspection
    filters: Tensor | None
    learned: Mapping[str, Tensor]
    starts: Mapping[str, float]
    landscape: evaluation.Landscape | None

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics that were logged during training."""
        return self.run.metrics()

    def over(self, kind: str, key: str) -> tuple[list[float], list[Any]]:
        """Return the steps or epochs, according to `kind`, and the values of a metric there."""
        lines = [line for line in self.lines if line.get("kind", "step") == kind and key in line and kind in line]
        return [line[kind] for line in lines], [line[key] for line in lines]

    @property
    def energies(self) -> tuple[list[float], dict[str, list[float | None]]]:
        """Epochs, and the energies after each epoch by layer."""
        epochs, values = self.over("epoch", "energy")
        names = dict.fromkeys(name for value in values if isinstance(value, Mapping) for name in value)
        return epochs, {
            name: [value.get(name) if isinstance(value, Mapping) else None for value in values] for name in names
        }

    @cached_property
    def sample(self) -> Tensor:
        """Indices of the test examples that are compared with each other."""
        count = len(self.labels)
        if count <= MOST_COMPARED:
            return torch.arange(count)
        return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:MOST_COMPARED].sort().values

    @cached_property
    def verified(self) -> Verified | None:
        """Verification on all pairs of the sample; None if there are not both kinds of pairs."""
        x, y = self.features[self.sample], self.labels[self.sample]
        counts = y.bincount()
        if len(counts.nonzero()) < 2 or int(counts.max()) < 2:
            return None
        first, second = torch.triu_indices(len(x), len(x), 1)
        roc = evaluation.roc(sphere.cosines(x.double(), x.double())[first, second], y[first] == y[second])
        first_of_class = evaluation.first_of_each(y)
        identified = evaluation.identify(x[~first_of_class], y[~first_of_class], x[first_of_class], y[first_of_class])
        return Verified(evaluation.class_angles(x, y, bins=90), roc, identified)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The numbers of the summary table by key; those that are not available are omitted."""
        numbers = {"accuracy": 100 * self.accuracy}
        losses = [value for value in self.over("epoch", "loss")[1] if value is not None]
        if losses:
            numbers["loss"] = losses[-1]
        if 1 < len(self.labels.unique()) < len(self.labels):
            numbers["fisher"] = evaluation.angular_fisher_score(self.features, self.labels)
        if self.verified is not None:
            numbers |= {"eer": 100 * self.verified.roc.eer, "rank1": 100 * self.verified.identified.accuracy_at(1)}
        if len(self.class_vectors) > 1:
            numbers["separation"] = math.degrees(evaluation.smallest_angle(self.class_vectors))
        hidden = [layer.energy(half_space=True).value for layer in self.layers.layers if layer.name != "head"]
        if hidden:
            numbers["energy"] = sum(hidden) / len(hidden)
        seconds = [value for value in self.over("epoch", "seconds")[1] if value is not None]
        if seconds:
            numbers["seconds"] = seconds[-1]
        return {key: value for key, value in numbers.items() if math.isfinite(value)}


@torch.no_grad()
def study(
    run: Run, data_root: Path | None = None, *, landscape: bool = False, device: torch.device | None = None
) -> Study:
    """Evaluate a run; raise a `ValueError` if its features or class vectors are not finite."""
    opened = open_run(run.folder, data_root, device=device)
    assembly, task = opened.assembly, opened.assembly.task
    features, vectors = opened.features(task.test_inputs), opened.class_vectors
    if not (bool(features.isfinite().all()) and bool(vectors.isfinite().all())):
        raise ValueError(f"{run.folder} has diverged: its features or class vectors are not finite")
    hits = opened.predict(features) == task.test_labels
    around = _landscape(opened) if landscape else None
    assembly.objective.cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers with one neuron, which have no pairs
        layers = energy.inspect(nn.ModuleDict({"network": assembly.network.body, "head": assembly.head}), probes=256)
    learned = dict(zip(LEARNED, learned_parameters(assembly), strict=True))
    return Study(
        run,
        task,
        features,
        task.test_labels,
        vectors,
        float(hits.double().mean()),
        layers,
        _filters(assembly.network.body),
        {key: values for key, values in learned.items() if len(values)},
        _starts(assembly.network.body),
        around,
    )


def _filters(body: nn.Module) -> Tensor | None:
    """Return the weights of the first layer if they can be shown as grey or colour images, else None."""
    for module in body.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2:
            is_image = weight.ndim == 4 and weight.shape[1] in (1, 3) and min(weight.shape[2:]) > 1
            return weight.detach() if is_image else None
    return None


def _starts(body: nn.Module) -> dict[str, float]:
    """Return the initial values of learned parameters, for those where all layers share one."""
    layers = [module for module in body.modules() if isinstance(module, DecoupledLayer)]
    k = {float(getattr(layer.angular, "k", 0.0)) for layer in layers if layer.log_k is not None}
    radius = {float(getattr(layer.magnitude, "radius", 1.0)) for layer in layers if layer.log_radius is not None}
    return {key: of.pop() for key, of in zip(LEARNED, (k, radius), strict=True) if len(of) == 1}


def _landscape(opened: Opened) -> evaluation.Landscape:
    """Return the loss and error of the first test examples on a small grid around the weights of the network."""
    assembly = opened.assembly
    inputs, labels = (part.to(opened.device) for part in next(assembly.test_batches(LANDSCAPE_EXAMPLES)))

    def measure() -> dict[str, Tensor]:
        features = assembly.objective.features(inputs)
        missed = training.predict(assembly.head, features) != labels
        return {"loss": assembly.head(features, labels), "error": 100 * missed.double().mean()}

    generator = torch.Generator().manual_seed(opened.run.job.seed)
    return evaluation.landscape(assembly.network.body, measure, points=LANDSCAPE_POINTS, generator=generator)
