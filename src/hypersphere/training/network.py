"""The network of a job: one of `hypersphere.models` that fits the task, standardised, decoupled and rotated."""

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
from hypersphere.training.parts import Spec, accepted_options, make, nearest, split_spec, truth
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
    """Inputs to features: the body of a model after its inputs were standardised, (x − mean)/deviation by channel.

    On a graph the inputs are numbers of nodes; all nodes go through the body and the features of these are given.
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
    """Return the network for a task: sizes that the spec leaves open are the data's."""
    name, options = split_spec("model", NETWORKS, spec)
    standardize = options.pop("standardize", task.inputs.dtype == torch.uint8)
    shape = tuple(task.inputs.shape[1:])
    factory = NETWORKS[name]
    known = accepted_options(factory)
    ours = [key for key in options if key in _ALWAYS_OURS]
    require(not ours, "model", "without conv, linear and num_classes: see operator and head", ours)
    options |= _layers_by_name(options, flat="in_channels" not in known)
    if operator["name"] == "sphere_norm":
        options["conv"] = partial(_sphere_norm, **{k: v for k, v in operator.items() if k != "name"})
    graph = task.graph
    require((graph is not None) == (name == "gcn"), "model.name", "'gcn' on a graph, and only there", name)
    points = task.inputs.ndim == 3
    require(points == name.startswith("pointnet"), "model.name", "a pointnet on points, and only there", name)
    given = {
        "in_channels": shape[0] if len(shape) == 3 else None,
        "image_size": shape[1] if len(shape) == 3 and shape[1] == shape[2] else shape[1:],
        "in_features": task.inputs[0].numel() if graph is None else graph.features.shape[1],
    }
    body = make("model", NETWORKS, {"name": name, **options}, given, beside=["standardize", "init", "init_mean"])
    network = Network(body, task, standardize=truth("model.standardize", standardize))
    if operator["name"] not in ("none", "sphere_norm"):
        decouple_(network.body, operator)
    return network


@torch.no_grad()
def initialize_(modules: nn.Module, name: str, mean: float = 0.0) -> None:
    """Draw the weights of all linear and convolution layers and heads anew, and move them by `mean`.

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
    """Make the convolutions of a body decoupled, or all its layers, as `operator` says.

    Its name is a magnitude's. It has the options of that, of `convert_`, and `layers`: "convolutions" or "all".
    """
    name, options = split_spec("operator", MAGNITUDES, operator)
    chosen = {key: options.pop(key) for key in list(options) if key in _CONVERSION}
    which = options.pop("layers", "convolutions")
    require(which in ("convolutions", "all"), "operator.layers", "'convolutions' or 'all'", which)
    own = accepted_options(MAGNITUDES[name])
    unknown = [key for key in options if key not in own]
    known = [*own, *_CONVERSION, "layers"]
    if unknown:
        words = f"operator.{unknown[0]} is no option of {name}{nearest(unknown[0], known)} It has {', '.join(known)}"
        raise ValueError(words)
    if isinstance(chosen.get("angular"), Mapping):
        chosen["angular"] = make("operator.angular", ANGULARS, chosen["angular"])
    only = which == "convolutions" and any(isinstance(module, _CONVOLUTIONS) for module in body.modules())
    kinds = _CONVOLUTIONS if only else (*_CONVOLUTIONS, nn.Linear)
    magnitude = make("operator", MAGNITUDES, {"name": name, **options})
    layers.convert_(body, magnitude=magnitude, **chosen, where=lambda _, module: isinstance(module, kinds))


def _sphere_norm(*arguments: Any, angular: str = "cosine", rescale: Any = "learned", **named: Any) -> nn.Module:
    return layers.SphereNorm(nn.Conv2d(*arguments, **named), angular=angular, rescale=rescale)


def _layers_by_name(options: Mapping[str, Any], *, flat: bool) -> dict[str, Any]:
    """The makers that the words of a config stand for."""
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
    """Mean and deviation of the training inputs by channel, in the scale that `Batches` gives them."""
    require(task.graph is None, "model.standardize", "False on a graph", True)
    inputs = task.inputs.float() / 255 if task.inputs.dtype == torch.uint8 else task.inputs
    if inputs.ndim != 4:
        mean, deviation = inputs.mean(), inputs.std()
    else:
        mean, deviation = (of.view(-1, 1, 1) for of in (inputs.mean((0, 2, 3)), inputs.std((0, 2, 3))))
    return mean, torch.where(deviation > 0, deviation, 1)
