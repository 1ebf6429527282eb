"""Build the model of an experiment for its data, with the operator of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hypersphere import data, layers, models
from hypersphere._validation import is_integer, require
from hypersphere.functions.magnitude import MAGNITUDES
from hypersphere.training.components import accept_options_of, find_factory
from hypersphere.training.config import Component, Config, Embedding

__all__ = ["NETWORKS", "OPERATORS", "Operator", "build_body"]

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
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _auto() -> nn.Module:
    """A model that suits the shape of the data and the number of classes; shown before training."""
    raise ValueError("the model auto can be built only for data")


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
        project_every: steps between two projections of the weights to norm 1.
        weighted_gradients: multiply gradients by the norms of the filters.
    """

    conv: Callable[..., nn.Module] | None = None
    convert_: Callable[[nn.Module], None] | None = None
    project_every: int | None = None
    weighted_gradients: bool = False

    def __post_init__(self) -> None:
        every = self.project_every
        require(every is None or is_integer(every, 1), "operator.project_every", "null or an integer >= 1", every)


def _plain() -> Operator:
    """The layers of the model, unchanged."""
    return Operator()


def _sphere_norm(
    *,
    angular: str = "cosine",
    rescale: Any = "learned",
    storage: str = "full",
    project_every: int | None = None,
    weighted_gradients: bool = False,
) -> Operator:
    """SphereNorm: convolutions that see only angles, rescaled by learned numbers, as a normalisation."""

    def conv(*arguments: Any, **options: Any) -> nn.Module:
        return layers.SphereNorm(nn.Conv2d(*arguments, **options), angular=angular, rescale=rescale, storage=storage)

    return Operator(conv, None, project_every, weighted_gradients)


def _decoupled(entry: Callable[..., Any]) -> Callable[..., Operator]:
    @accept_options_of(entry)
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
        project_every: int | None = None,
        weighted_gradients: bool = False,
        **of_magnitude: Any,
    ) -> Operator:
        require(layers in ("convolutions", "all"), "operator.layers", "'convolutions' or 'all'", layers)
        options = {"angular": angular, "weighting": weighting, "learn_k": learn_k, "learn_radius": learn_radius}
        options |= {"radius_norm": radius_norm, "momentum": momentum, "storage": storage, "scale": scale}
        magnitude = entry(**of_magnitude)
        convert_ = partial(_convert_, magnitude=magnitude, which=layers, options=options)
        return Operator(None, convert_, project_every, weighted_gradients)

    decoupled.__doc__ = entry.__doc__
    return decoupled


def _convert_(body: nn.Module, *, magnitude: Any, which: str, options: Mapping[str, Any]) -> None:
    """Convert the convolutions of a body, or all its layers, to decoupled layers."""
    only = which == "convolutions" and any(isinstance(module, _CONVOLUTIONS) for module in body.modules())
    kinds = _CONVOLUTIONS if only else (*_CONVOLUTIONS, nn.Linear)
    layers.convert_(body, magnitude=magnitude, **options, where=lambda _, module: isinstance(module, kinds))


OPERATORS: dict[str, Callable[..., Operator]] = {
    "none": _plain,
    "sphere_norm": _sphere_norm,
    **{name: _decoupled(entry) for name, entry in MAGNITUDES.items()},
}


# --- the body


def build_body(
    config: Config, operator: Operator, shape: tuple[int, ...], *, graph: data.Graph | None, create_: Callable[..., Any]
) -> nn.Module:
    """Return the model of a config for inputs of a shape, with a known dimension of its features.

    Sizes that the config does not set follow from the data. A model without `feature_dim`, or with settings in
    `embedding`, becomes the backbone of an `Embedder`.
    """
    component = config.model
    name = component.name
    if not (component.is_import_path or ":" in name):
        require(
            (graph is not None) == (name == "gcn"), "model.name", "'gcn' on a graph, and another model otherwise", name
        )
        is_points = len(shape) == 2 and graph is None
        accepted = "a pointnet on points, and another model otherwise"
        require(is_points == name.startswith("pointnet"), "model.name", accepted, name)
    is_image = len(shape) == 3
    sizes: dict[str, Any] = {
        "in_channels": shape[0] if is_image else None,
        "image_size": (shape[1] if shape[1] == shape[2] else shape[1:]) if is_image else None,
        "in_features": torch.Size(shape).numel() if graph is None else graph.features.shape[1],
    }
    context = {key: value for key, value in sizes.items() if value is not None}
    if operator.conv is not None:
        context["conv"] = operator.conv
    if not (component.is_import_path or ":" in name):
        component = _with_layer_factories(component)
    body: nn.Module = create_(component, "model", context=context)
    require(isinstance(body, nn.Module), "model", "the import path of a module or of a function that returns one", body)
    if config.embedding != Embedding() or not isinstance(getattr(body, "feature_dim", None), int):
        require(graph is None, "embedding", "unset on a graph", config.embedding)
        chosen = config.embedding
        options: dict[str, Any] = {"dim": chosen.dim, "pool": chosen.pool, "neck": chosen.neck}
        body = models.Embedder(body, torch.zeros(2, *shape), **options, dropout=chosen.dropout)
    if operator.convert_ is not None:
        operator.convert_(body)
    return body


def _with_layer_factories(component: Component) -> Component:
    """Return a component with the names of norms and activations replaced by factories of layers."""
    options = dict(component.options)
    parameters = find_factory(component, "model", "model")
    if "norm" in options:
        require(options["norm"] in NORMS, "model.norm", f"one of {', '.join(NORMS)}", options["norm"])
        import inspect

        is_flat = "in_channels" not in inspect.signature(parameters).parameters
        options["norm"] = NORMS[options["norm"]][0 if is_flat else 1]
    for option in ("activation", "feature_activation"):
        if option in options:
            accepted = f"one of {', '.join(ACTIVATIONS)}"
            require(options[option] in ACTIVATIONS, f"model.{option}", accepted, options[option])
            options[option] = ACTIVATIONS[options[option]]
    return Component(component.name, options)
