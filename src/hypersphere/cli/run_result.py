"""Evaluate a run for its report: features, class vectors, layers and landscape, each computed once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import energy, evaluation, report
from hypersphere.cli.opening import Opened, open_run
from hypersphere.layers import DecoupledLayer

__all__ = ["run_result"]

LANDSCAPE_EXAMPLES, LANDSCAPE_POINTS = 500, 11


@torch.no_grad()
def run_result(
    folder: Path, data_root: Path | None, *, landscape: bool, device: str | None, trust_code: bool
) -> report.RunResult:
    """Evaluate a run; raise a `ValueError` if its features or class vectors are not finite."""
    opened = open_run(folder, data_root, device=device, trust_code=trust_code)
    experiment, run, split = opened.experiment, opened.run, opened.experiment.data
    (features, labels), vectors = opened.embed(opened.held_out), opened.class_vectors
    if not (bool(features.isfinite().all()) and bool(vectors.isfinite().all())):
        raise ValueError(f"{folder} has diverged: its features or class vectors are not finite")
    accuracy = None if split.open_set else float((opened.predict(features) == labels).double().mean())
    around = _landscape(opened) if landscape else None
    body = experiment.objective.cpu() and experiment.network.body
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers with one neuron, which have no pairs
        layers = energy.inspect(nn.ModuleDict({"network": body, "head": experiment.head}), probes=256)
    return report.RunResult(
        folder.resolve().name,
        run.config.settings(),
        run.metrics(),
        opened.held_out.classes,
        features,
        labels,
        len(split.train),
        accuracy=accuracy,
        class_vectors=None if split.open_set else vectors,
        layers=layers,
        facts=run.made_with,
        filters=_filters(body),
        landscape=around,
        **_learned_parameters(body),
    )


def _filters(body: nn.Module) -> Tensor | None:
    """Return the weights of the first layer if they can be shown as grey or colour images, else None."""
    for module in body.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2:
            is_image = weight.ndim == 4 and weight.shape[1] in (1, 3) and min(weight.shape[2:]) > 1
            return weight.detach() if is_image else None
    return None


def _learned_parameters(body: nn.Module) -> dict[str, Any]:
    """Return all learned k and factors of ρ, and the initial values that all layers share."""
    layers = [module for module in body.modules() if isinstance(module, DecoupledLayer)]
    learned: dict[str, list[Tensor]] = {"k": [], "radius_factor": []}
    initial: dict[str, set[float]] = {"k": set(), "radius_factor": set()}
    for layer in layers:
        if layer.log_k is not None:
            learned["k"].append(layer.log_k.exp().flatten())
            initial["k"].add(float(getattr(layer.angular, "k", 0.0)))
        if layer.log_radius is not None:
            learned["radius_factor"].append(layer.log_radius.exp().flatten())
            initial["radius_factor"].add(float(getattr(layer.magnitude, "radius", 1.0)))
    return {
        "learned": {key: torch.cat(values) for key, values in learned.items() if values},
        "starts": {key: values.pop() for key, values in initial.items() if len(values) == 1},
    }


def _landscape(opened: Opened) -> evaluation.Landscape:
    """Return the loss and error of the first test examples on a small grid around the weights of the network."""
    experiment, source = opened.experiment, opened.held_out
    count, head = min(len(source), LANDSCAPE_EXAMPLES), experiment.head
    inputs = torch.stack([source[index] for index in range(count)]).to(experiment.device)
    labels = source.labels[:count].to(experiment.device)

    def measure() -> dict[str, Tensor]:
        features = experiment.objective.features(inputs)
        missed = head.scores(features).argmax(1) != labels  # type: ignore[operator]
        return {"loss": head(features, labels), "error": 100 * missed.double().mean()}

    generator = torch.Generator().manual_seed(opened.run.config.seed)
    return evaluation.landscape(experiment.network.body, measure, points=LANDSCAPE_POINTS, generator=generator)
