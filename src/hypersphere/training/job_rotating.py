"""Rotations as a component of a job: which layers are rotated, by which map, and what happens after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import rotation
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation import rotatable_layers
from hypersphere.training.parts import Spec, accepted_options, make, split_spec

__all__ = ["ROTATIONS", "Turning", "turn_"]


@dataclass(frozen=True)
class Turning:
    """What a rotation adds to training.

    Attributes:
        penalty: term that is added to the loss.
        on_group: parameters that are trained by descent on the orthogonal group.
        stochastic: rotation of a random subset of dimensions, folded and redrawn periodically.
    """

    penalty: Callable[[], Tensor] | None = None
    on_group: list[nn.Parameter] = field(default_factory=list)
    stochastic: rotation.Stochastic | None = None


def _none(modules: nn.ModuleDict) -> Turning:
    """Train the weights directly, without rotation."""
    return Turning()


def _rotated(method: str) -> Callable[..., Turning]:
    def turn(
        modules: nn.ModuleDict,
        *,
        blocks: int = 1,
        shared: bool = False,
        factors: int = 1,
        learn_neurons: bool = False,
        normalize: bool = False,
        refine: str | None = None,
        spread: float | None = None,
        output: bool = False,
        hidden: bool = True,
        whole_first: bool = False,
        **options: Any,
    ) -> Turning:
        chosen = make("rotation", {**ORTHOGONALS, **TRANSFORMS}, {"name": method, **options})
        which = None if hidden else _among(["head"])
        names = [layer.name for layer in rotatable_layers(modules, which, output=output)]
        cut = {"blocks": blocks, "shared": shared, "factors": factors}
        # the first layer of an image network has few channels, which are rarely divisible by the number of blocks
        parts: list[tuple[list[str], dict[str, Any]]] = (
            [(names[:1], {}), (names[1:], cut)] if whole_first else [(names, cut)]
        )
        for part, layout in parts:
            rotation.rotate_(
                modules,
                chosen,
                where=_among(part),
                **layout,
                learn_neurons=learn_neurons,
                normalize=normalize,
                refine=refine,
                spread=spread,
                output=output,
            )
        return Turning()

    turn.__doc__ = {**ORTHOGONALS, **TRANSFORMS}[method].__doc__
    return turn


def _among(names: Sequence[str]) -> Callable[[str, nn.Module], bool]:
    return lambda name, _: name in names


def _penalized(
    modules: nn.ModuleDict, *, weight: float = 1.0, normalize: bool = False, refine: str | None = None
) -> Turning:
    """Unconstrained matrices with a penalty that keeps them close to orthogonal (OR)."""
    _rotated("free")(modules, normalize=normalize, refine=refine)
    return Turning(penalty=rotation.RotationPenalty(modules, weight))


def _descent(modules: nn.ModuleDict, *, normalize: bool = False, refine: str | None = None) -> Turning:
    """Orthogonal matrices trained by gradient descent on the orthogonal group (OGD)."""
    _rotated("free")(modules, normalize=normalize, refine=refine)
    return Turning(on_group=rotation.rotation_parameters(modules))


def _stochastic(
    modules: nn.ModuleDict,
    *,
    fraction: float | int = 0.25,
    every: int = 750,
    method: str = "cayley",
    whole_first: bool = True,
) -> Turning:
    """Rotations of a random subset of dimensions, folded and redrawn periodically (S-OPT)."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return Turning(
        stochastic=rotation.Stochastic(modules, fraction, every, method, whole_first=whole_first, generator=generator)
    )


ROTATIONS: dict[str, Callable[..., Turning]] = {
    "none": _none,
    **{name: _rotated(name) for name in (*ORTHOGONALS, *TRANSFORMS)},
    "penalized": _penalized,
    "descent": _descent,
    "stochastic": _stochastic,
}


def turn_(modules: nn.ModuleDict, spec: Spec) -> Turning:
    """Rotate the hidden layers of `modules`, a network and its head, according to `spec`."""
    name, _ = split_spec("rotation", ROTATIONS, spec)
    entry = {**ORTHOGONALS, **TRANSFORMS}.get(name)
    more = [] if entry is None else accepted_options(entry)
    return make("rotation", ROTATIONS, spec, None, modules, more=more)
