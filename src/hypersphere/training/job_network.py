"""Build the network of a job: a model from `hypersphere.models` that fits the task, with standardised inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import layers, models
from hypersphere._validation import require
from hypersphere.functions.angular import ANGULARS
from hypersphere.functions.magnitude import MAGNITUDES
from hypersphere.training.parts import Spec, accepted_options, make, split_spec, truth, unknown_option
from hypersphere.training.task import Task

__all__ = ["INITIALIZATIONS", "NETWORKS", "OPERATORS", "Network", "build_network", "decouple_", "initialize_"]

NETWORKS = {
    name: model for name, model in models.MODELS.items() if name not in ("generator", "discriminator", "autoencoder")
}
NORMS: dict[str, tuple[Callable[[int], nn.Module] | None, Callable[[int], nn.Module] | None]] = {
    "batch": (nn.BatchNorm1d, nn.BatchNorm2d),
    "group": (partial(nn.GroupNorm, 8), partial(nn.GroupNorm, 8)),
    "none": (None, None),
}
ACTIVATIONS: dict[str, Callable[[int], nn.Module] | None] = {
    "relu": models.relu,
    "prelu": nn.PReLU,
    "leaky_relu": models.leaky_relu,
    "none": None,
}
INITIALIZATIONS: dict[str, Callable[[Tensor], Any]] = {
    "normal": nn.init.normal_,
    "xavier": nn.init.xavier_uniform_,
    "he": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
}
OPERATORS = {"none": None, "sphere_norm": layers.SphereNorm, **MAGNITUDES}
_ALWAYS_OURS = ("conv", "linear", "num_classes")
_CONVERSION = ("angular", "weighting", "learn_k", "learn_radius", "momentum")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Network(nn.Module):
    """Map inputs to features: standardise the inputs, (x − mean)/deviation per channel, and apply the body of a model.

    On a graph the inputs are indices of nodes; the body is applied to all nodes and the features of these are returned.
    """

    mean: Tensor
    deviation: Tensor
    nodes: Tensor | None
    adjacency: Tensor | None

    def __init__(self, body: nn.Module, task: Task, *, standardize: bool) -> None:
        super().__init__()
        self.body = body
        self.feature_dim = int(body.feature_dim)  # type: ignore[arg-type]
        mean, deviation = _statistics(task) if standardize else (torch.zeros(()), torch.ones(()))
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        graph = task.graph
        nodes = None if graph is None else _rows_of_sum_one(graph.features).to_sparse()
        adjacency = None if graph is None else models.normalized_adjacency(graph.edge_index, len(graph.features))
        self.register_buffer("nodes", nodes, persistent=False)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to features (B, feature_dim)."""
        if self.nodes is not None:
            return self.body(self.nodes, self.adjacency)[inputs]
        return self.body((inputs - self.mean) / self.deviation)


def build_network(spec: Spec, operator: Spec, task: Task) -> Network:
    """Return the network for a task; sizes that the spec does not set are taken from the data."""
    name, options = split_spec("model", NETWORKS, spec)
    standardize = options.pop("standardize", task.inputs.dtype == torch.uint8)
    shape = tuple(task.inputs.shape[1:])
    factory = NETWORKS[name]
    accepted = accepted_options(factory)
    reserved = [key for key in options if key in _ALWAYS_OURS]
    require(not reserved, "model", "without conv, linear and num_classes, which operator and head set", reserved)
    options |= _layers_by_name(options, flat="in_channels" not in accepted)
    if operator["name"] == "sphere_norm":
        options["conv"] = partial(_sphere_norm, **{k: v for k, v in operator.items() if k != "name"})
    graph = task.graph
    require((graph is not None) == (name == "gcn"), "model.name", "'gcn' on a graph, and another model otherwise", name)
    points = task.inputs.ndim == 3
    require(
        points == name.startswith("pointnet"), "model.name", "a pointnet on points, and another model otherwise", name
    )
    given = {
        "in_channels": shape[0] if len(shape) == 3 else None,
        "image_size": shape[1] if len(shape) == 3 and shape[1] == shape[2] else shape[1:],
        "in_features": task.inputs[0].numel() if graph is None else graph.features.shape[1],
    }
    body = make("model", NETWORKS, {"name": name, **options}, given, handled=["standardize", "init", "init_mean"])
    network = Network(body, task, standardize=truth("model.standardize", standardize))
    if operator["name"] not in ("none", "sphere_norm"):
        decouple_(network.body, operator)
    return network


@torch.no_grad()
def initialize_(modules: nn.Module, name: str, mean: float = 0.0) -> None:
    """Re-initialise the weights of all linear and convolution layers and heads, and add `mean` to them.

    >>> layer = nn.Linear(100, 100)
    >>> initialize_(layer, "normal", 3.0)
    >>> bool((layer.weight.mean() - 3).abs() < 0.1)
    True
    """
    require(name in INITIALIZATIONS, "model.init", f"one of {', '.join(INITIALIZATIONS)}", name)
    for module in modules.modules():
        if isinstance(module, (*_CONVOLUTIONS, nn.Linear)) or hasattr(module, "num_classes"):
            weight = module._parameters.get("weight")
            if weight is not None:
                INITIALIZATIONS[name](weight)
                weight.add_(mean)


def decouple_(body: nn.Module, operator: Spec) -> None:
    """Convert the convolutions of a body, or all its layers, to decoupled layers.

    The name of `operator` is that of a magnitude. Its options are those of the magnitude, those of `convert_`, and
    `layers`, "convolutions" or "all".
    """
    name, options = split_spec("operator", MAGNITUDES, operator)
    chosen = {key: options.pop(key) for key in list(options) if key in _CONVERSION}
    which = options.pop("layers", "convolutions")
    require(which in ("convolutions", "all"), "operator.layers", "'convolutions' or 'all'", which)
    of_magnitude = accepted_options(MAGNITUDES[name])
    unknown = [key for key in options if key not in of_magnitude]
    accepted = [*of_magnitude, *_CONVERSION, "layers"]
    if unknown:
        raise ValueError(unknown_option("operator", unknown[0], name, accepted))
    if isinstance(chosen.get("angular"), Mapping):
        chosen["angular"] = make("operator.angular", ANGULARS, chosen["angular"])
    only = which == "convolutions" and any(isinstance(module, _CONVOLUTIONS) for module in body.modules())
    kinds = _CONVOLUTIONS if only else (*_CONVOLUTIONS, nn.Linear)
    magnitude = make("operator", MAGNITUDES, {"name": name, **options})
    layers.convert_(body, magnitude=magnitude, **chosen, where=lambda _, module: isinstance(module, kinds))


def _sphere_norm(*arguments: Any, angular: str = "cosine", rescale: Any = "learned", **named: Any) -> nn.Module:
    return layers.SphereNorm(nn.Conv2d(*arguments, **named), angular=angular, rescale=rescale)


def _layers_by_name(options: Mapping[str, Any], *, flat: bool) -> dict[str, Any]:
    """Return the layer factories for the names in a config."""
    makers: dict[str, Any] = {}
    if "norm" in options:
        require(options["norm"] in NORMS, "model.norm", f"one of {', '.join(NORMS)}", options["norm"])
        makers["norm"] = NORMS[options["norm"]][0 if flat else 1]
    for option in ("activation", "feature_activation"):
        if option in options:
            name = options[option]
            require(name in ACTIVATIONS, f"model.{option}", f"one of {', '.join(ACTIVATIONS)}", name)
            makers[option] = ACTIVATIONS[name]
    return makers


def _rows_of_sum_one(features: Tensor) -> Tensor:
    sums = features.sum(1, keepdim=True)
    return features / torch.where(sums > 0, sums, 1)


def _statistics(task: Task) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the training inputs per channel, in the scale of `Batches`."""
    require(task.graph is None, "model.standardize", "False on a graph", True)
    inputs = task.inputs.float() / 255 if task.inputs.dtype == torch.uint8 else task.inputs
    if inputs.ndim != 4:
        mean, deviation = inputs.mean(), inputs.std()
    else:
        mean, deviation = (of.view(-1, 1, 1) for of in (inputs.mean((0, 2, 3)), inputs.std((0, 2, 3))))
    return mean, torch.where(deviation > 0, deviation, 1)
