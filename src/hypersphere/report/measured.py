"""Measure a trained run for its page: features, class vectors, layers and landscape."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import energy, evaluation, heads
from hypersphere.data import BrokenSample
from hypersphere.layers import DecoupledLayer
from hypersphere.report.runs import RunResult

__all__ = ["run_result"]

LANDSCAPE_EXAMPLES, LANDSCAPE_POINTS = 500, 11
# Learned parameters of a decoupled layer: key, attribute with the logarithm, component and attribute with the initial
# value, and the initial value if the component has no such attribute.
LEARNED = (("k", "log_k", "angular", "k", 0.0), ("radius_factor", "log_radius", "magnitude", "radius", 1.0))


@torch.no_grad()
def run_result(run: Any, experiment: Any, *, landscape: bool = False, step: int | None = None) -> RunResult:
    """Measure a run on its held-out data.

    Args:
        run: a `hypersphere.training.Run`.
        experiment: `run.experiment()`, with the weights of a checkpoint; it is moved to the CPU.
        landscape: also compute the loss and error around the trained weights. The run must be tested on the classes
            that it was trained on.
        step: the step of the checkpoint, if it is not the last one.

    Raises:
        ValueError: if features or class vectors are not finite, or there are no held-out data.
    """
    split = experiment.data
    if landscape and split.open_set:  # the head has no scores for the test classes
        raise ValueError(f"a landscape needs a run that is tested on its training classes, not {run.folder}")
    (features, labels), weight = experiment.embed(), experiment.head.weight.detach().cpu()
    if not (bool(features.isfinite().all()) and bool(weight.isfinite().all())):
        raise ValueError(f"{run.folder} has diverged: its features or class vectors are not finite")
    predicted = experiment.head.scores(features.to(experiment.device)).argmax(1).cpu()
    measured_landscape = _landscape(experiment) if landscape else None
    experiment.objective.cpu()
    body = experiment.network.body
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers with one neuron, which have no pairs, give warnings
        layers = energy.inspect(nn.ModuleDict({"network": body, "head": experiment.head}), probes=256)
    return RunResult(
        run.folder.resolve().name,
        run.config.settings(),
        run.metrics(),
        split.validation.classes,
        features,
        labels,
        len(split.train),
        accuracy=None if split.open_set else float((predicted == labels).double().mean()),
        class_vectors=None if split.open_set else heads.class_vectors(experiment.head, features, labels),
        layers=layers,
        facts=run.made_with,
        filters=_filters(body),
        landscape=measured_landscape,
        training_classes=len(split.classes),
        step=step,
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
    layers = [layer for layer in body.modules() if isinstance(layer, DecoupledLayer)]
    learned, starts = {}, {}
    for key, log, component, name, default in LEARNED:
        learning = [layer for layer in layers if getattr(layer, log) is not None]
        initial = {float(getattr(getattr(layer, component), name, default)) for layer in learning}
        if learning:
            learned[key] = torch.cat([getattr(layer, log).exp().flatten() for layer in learning])
        if len(initial) == 1:
            starts[key] = initial.pop()
    return {"learned": learned, "starts": starts}


def _landscape(experiment: Any) -> evaluation.Landscape:
    """Return the loss and error of the first test examples on a small grid around the weights of the network."""
    source, head = experiment.data.validation, experiment.head
    rows, examples = [], []
    for index in range(min(len(source), LANDSCAPE_EXAMPLES)):
        try:
            examples.append(source[index])
            rows.append(index)
        except BrokenSample:
            if experiment.config.broken_files != "skip":
                raise
    if not examples:
        raise ValueError("a landscape needs at least one readable test example, but none can be read")
    inputs, labels = torch.stack(examples).to(experiment.device), source.labels[rows].to(experiment.device)

    def measure() -> dict[str, Tensor]:
        features = experiment.objective.features(inputs)
        is_wrong = head.scores(features).argmax(1) != labels
        return {"loss": head(features, labels), "error": 100 * is_wrong.double().mean()}

    generator = torch.Generator().manual_seed(experiment.config.seed)
    return evaluation.landscape(experiment.network.body, measure, points=LANDSCAPE_POINTS, generator=generator)
