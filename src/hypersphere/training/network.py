"""Build the model of an experiment for the shape of its data, and apply the operator to its layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hypersphere import data, layers, models
from hypersphere._signatures import accept_options_of
from hypersphere._validation import is_integer, require
from hypersphere.functions.magnitude import MAGNITUDES
from hypersphere.training.components import create
from hypersphere.training.config import Component, Config, Embedding

__all__ = ["NETWORKS", "OPERATORS", "Operator", "OperatorOptions", "build_body"]

# The factories of normalisation layers: for vectors, and for images.
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
LAYER_CHOICES = ("convolutions", "spatial", "all")  # the layers that an operator converts
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _auto() -> nn.Module:
    """A model that suits the shape of the data and the number of classes; shown before training."""
    raise ValueError("model.name must be resolved for the data before the model is built, not 'auto'")


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "auto": _auto,
    **{
        name: model
        for name, model in models.MODELS.items()
        if name not in ("generator", "discriminator", "autoencoder")
    },
}


# --- operators


@dataclass(frozen=True)
class Operator:
    """How the layers of a model compute.

    Attributes:
        conv: factory of convolutions that replaces `nn.Conv2d` in a model.
        convert_: changes a model in place.
    """

    conv: Callable[..., nn.Module] | None = None
    convert_: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class OperatorOptions:
    """Options of every operator that concern the training of its weights.

    Attributes:
        project_every: steps between two projections of the weights to norm 1.
        weighted_gradients: multiply gradients by the norms of the filters.
    """

    project_every: int | None = None
    weighted_gradients: bool = False

    def __post_init__(self) -> None:
        every, weighted = self.project_every, self.weighted_gradients
        require(every is None or is_integer(every, 1), "operator.project_every", "null or an integer >= 1", every)
        require(isinstance(weighted, bool), "operator.weighted_gradients", "true or false", weighted)


def _plain() -> Operator:
    """The layers of the model, unchanged."""
    return Operator()


def _sphere_norm(*, angular: str = "cosine", rescale: Any = "learned", storage: str = "full") -> Operator:
    """SphereNorm: convolutions that see only angles, rescaled by learned numbers."""

    def conv(*arguments: Any, **options: Any) -> nn.Module:
        return layers.SphereNorm(nn.Conv2d(*arguments, **options), angular=angular, rescale=rescale, storage=storage)

    return Operator(conv=conv)


def _decoupled(magnitude_type: Callable[..., Any]) -> Callable[..., Operator]:
    """Return the menu entry of decoupled layers with a magnitude function."""

    @accept_options_of(magnitude_type)
    def decoupled(
        *,
        angular: Any = "cosine",
        weighting: str | None = None,
        learn_k: str | None = None,
        learn_radius: str | None = None,
        radius_norm: str = "running",
        momentum: float = 0.1,
        storage: str = "full",
        scale: str | None = None,
        layers: str = "convolutions",
        **magnitude_options: Any,
    ) -> Operator:
        require(layers in LAYER_CHOICES, "operator.layers", f"one of {', '.join(LAYER_CHOICES)}", layers)
        options = {"angular": angular, "weighting": weighting, "learn_k": learn_k, "learn_radius": learn_radius}
        options |= {"radius_norm": radius_norm, "momentum": momentum, "storage": storage, "scale": scale}
        magnitude = magnitude_type(**magnitude_options)
        return Operator(convert_=partial(_convert_, magnitude=magnitude, which=layers, options=options))

    decoupled.__doc__ = magnitude_type.__doc__
    return decoupled


def _convert_(body: nn.Module, *, magnitude: Any, which: str, options: Mapping[str, Any]) -> None:
    """Convert layers of a body to decoupled layers, in place.

    Args:
        which: "convolutions"; "spatial" for kernels larger than one pixel, which leaves out the projections of
            shortcuts; "all" for linear layers, too. A body without convolutions has its linear layers converted.
    """
    convolutions_only = which != "all" and any(isinstance(module, _CONVOLUTIONS) for module in body.modules())
    converted = _CONVOLUTIONS if convolutions_only else (*_CONVOLUTIONS, nn.Linear)

    def is_chosen(name: str, module: nn.Module) -> bool:
        kernel = getattr(module, "kernel_size", ())
        return isinstance(module, converted) and not (which == "spatial" and all(side == 1 for side in kernel))

    layers.convert_(body, magnitude=magnitude, **options, where=is_chosen)


OPERATORS: dict[str, Callable[..., Operator]] = {
    "none": _plain,
    "sphere_norm": _sphere_norm,
    **{name: _decoupled(magnitude_type) for name, magnitude_type in MAGNITUDES.items()},
}


# --- the body


def build_body(config: Config, operator: Operator, shape: tuple[int, ...], graph: data.Graph | None) -> nn.Module:
    """Return the model of a config for inputs of a shape. It has an attribute `feature_dim`.

    Sizes that the config does not set follow from the data. A model without `feature_dim`, or with settings in
    `embedding`, becomes the backbone of an `Embedder`, which has one.
    """
    component = config.model
    if component.name in NETWORKS:
        name = component.name
        accepted = "'gcn' on a graph, and another model otherwise"
        require((graph is not None) == (name == "gcn"), "model.name", accepted, name)
        is_points = len(shape) == 2 and graph is None
        accepted = "a pointnet on points, and another model otherwise"
        require(is_points == name.startswith("pointnet"), "model.name", accepted, name)
        component = _with_layer_factories(component)
    context: dict[str, Any] = {"in_features": math.prod(shape) if graph is None else graph.features.shape[1]}
    if len(shape) == 3:
        context["in_channels"] = shape[0]
        context["image_size"] = shape[1] if shape[1] == shape[2] else shape[1:]
    # SphereNorm layers replace convolutions while the model is built. Other operators convert the finished body below.
    if operator.conv is not None:
        context["conv"] = operator.conv
    body: nn.Module = create(component, "model", context=context)
    require(isinstance(body, nn.Module), "model", "the import path of a module or of a function that returns one", body)
    if config.embedding != Embedding() or not isinstance(getattr(body, "feature_dim", None), int):
        require(graph is None, "embedding", "unset on a graph", asdict(config.embedding))
        # A forward pass on zeros finds the dimension of the features.
        body = models.Embedder(body, torch.zeros(2, *shape), **asdict(config.embedding))
    if operator.convert_ is not None:
        operator.convert_(body)
    return body


def _with_layer_factories(component: Component) -> Component:
    """Return a component with the names of normalisations and activations replaced by factories of layers."""
    options = dict(component.options)
    if "norm" in options:
        require(options["norm"] in NORMS, "model.norm", f"one of {', '.join(NORMS)}", options["norm"])
        takes_vectors = "in_channels" not in inspect.signature(NETWORKS[component.name]).parameters
        options["norm"] = NORMS[options["norm"]][0 if takes_vectors else 1]
    for option in ("activation", "feature_activation"):
        if option in options:
            accepted = f"one of {', '.join(ACTIVATIONS)}"
            require(options[option] in ACTIVATIONS, f"model.{option}", accepted, options[option])
            options[option] = ACTIVATIONS[options[option]]
    return Component(component.name, options)
