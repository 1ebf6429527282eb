"""Rotations as a component of training: which layers are rotated, by which map, and what happens after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import rotation, sphere
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation import rotatable_layers
from hypersphere.training.components import accept_options_of

__all__ = ["ROTATIONS", "TrainedRotation"]


@dataclass(frozen=True)
class TrainedRotation:
    """What a rotation adds to training.

    Attributes:
        penalty: term that is added to the loss.
        on_group: parameters that are trained by descent on the orthogonal group.
        group_options: options of that descent.
        stochastic: rotation of a random subset of dimensions, folded and redrawn periodically.
    """

    penalty: Callable[[], Tensor] | None = None
    on_group: list[nn.Parameter] = field(default_factory=list)
    group_options: Mapping[str, Any] = field(default_factory=dict)
    stochastic: rotation.Stochastic | None = None


def _none(modules: nn.ModuleDict) -> TrainedRotation:
    """Train the weights directly, without rotation."""
    return TrainedRotation()


def _rotate(
    modules: nn.ModuleDict,
    method: Any,
    *,
    blocks: int = 1,
    shared: bool = False,
    factors: int = 1,
    learn_neurons: bool = False,
    normalize: bool = False,
    refine: str | None = None,
    refine_steps: int = 5000,
    refine_rate: float = 0.1,
    spread: float | None = None,
    output: bool = False,
    hidden: bool = True,
    whole_first: bool = False,
) -> TrainedRotation:
    which = None if hidden else _among(["head"])
    names = [layer.name for layer in rotatable_layers(modules, which, output=output)]
    layout = {"blocks": blocks, "shared": shared, "factors": factors}
    # The first layer of an image network has few channels, which are rarely divisible by the number of blocks.
    parts: list[tuple[list[str], dict[str, Any]]] = (
        [(names[:1], {}), (names[1:], layout)] if whole_first else [(names, layout)]
    )
    for part, blocks_of_part in parts:
        rotation.rotate_(
            modules,
            method,
            where=_among(part),
            **blocks_of_part,
            learn_neurons=learn_neurons,
            normalize=normalize,
            refine=refine,
            refine_steps=refine_steps,
            refine_rate=refine_rate,
            spread=spread,
            output=output,
        )
    return TrainedRotation()


_ROTATION_OPTIONS = tuple(_rotate.__kwdefaults__ or ())


def _rotation_by(entry: Callable[..., Any]) -> Callable[..., TrainedRotation]:
    """Return the component that rotates by an entry of the menus of maps, with the options of both."""

    @accept_options_of(entry, partial(_rotate, nn.ModuleDict(), None))
    def rotate(modules: nn.ModuleDict, **options: Any) -> TrainedRotation:
        of_rotation = {key: options.pop(key) for key in list(options) if key in _ROTATION_OPTIONS}
        return _rotate(modules, entry(**options), **of_rotation)

    rotate.__doc__ = entry.__doc__
    return rotate


def _among(names: Sequence[str]) -> Callable[[str, nn.Module], bool]:
    return lambda name, _: name in names


def _penalized(
    modules: nn.ModuleDict,
    *,
    weight: float = 1.0,
    normalize: bool = False,
    refine: str | None = None,
    refine_steps: int = 5000,
    refine_rate: float = 0.1,
) -> TrainedRotation:
    """Unconstrained matrices with a penalty that keeps them close to orthogonal (OR)."""
    refinement: dict[str, Any] = {"refine": refine, "refine_steps": refine_steps, "refine_rate": refine_rate}
    _rotate(modules, "free", normalize=normalize, **refinement)
    return TrainedRotation(penalty=rotation.RotationPenalty(modules, weight))


def _descent(
    modules: nn.ModuleDict,
    *,
    momentum: float = 0.9,
    adam: bool = False,
    blocks: int = 1,
    shared: bool = False,
    whole_first: bool = False,
    normalize: bool = False,
    refine: str | None = None,
    refine_steps: int = 5000,
    refine_rate: float = 0.1,
) -> TrainedRotation:
    """Orthogonal matrices trained by gradient descent on the orthogonal group (OGD, or with adaptive steps)."""
    refinement: dict[str, Any] = {"refine": refine, "refine_steps": refine_steps, "refine_rate": refine_rate}
    layout: dict[str, Any] = {"blocks": blocks, "shared": shared, "whole_first": whole_first}
    _rotate(modules, "free", normalize=normalize, **layout, **refinement)
    options = {"adam": True} if adam else {"momentum": momentum}
    return TrainedRotation(on_group=rotation.rotation_parameters(modules), group_options=options)


def _stochastic(
    modules: nn.ModuleDict,
    *,
    fraction: float | int = 0.25,
    every: int = 750,
    method: str = "cayley",
    whole_first: bool = True,
    normalize: bool = False,
    refine: str | None = None,
    refine_steps: int = 5000,
    refine_rate: float = 0.1,
) -> TrainedRotation:
    """Rotations of a random subset of dimensions, folded and redrawn periodically (S-OPT); fraction 0 freezes."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    layers = rotatable_layers(modules, None)
    for layer in layers:
        rows = layer.rows().detach()
        if refine is not None:
            rows = rotation.refine_neurons(rows, refine, steps=refine_steps, rate=refine_rate)
        if refine is not None or normalize:
            layer.write(sphere.normalize(rows) if normalize else rows)
    if fraction == 0:  # the baseline of the source: random neurons that are never trained
        for layer in layers:
            layer.tensor.requires_grad_(False)
        return TrainedRotation()
    return TrainedRotation(
        stochastic=rotation.Stochastic(modules, fraction, every, method, whole_first=whole_first, generator=generator)
    )


ROTATIONS: dict[str, Callable[..., TrainedRotation]] = {
    "none": _none,
    **{name: _rotation_by(entry) for name, entry in {**ORTHOGONALS, **TRANSFORMS}.items()},
    "penalized": _penalized,
    "descent": _descent,
    "stochastic": _stochastic,
}
