"""Measure rotations during training: orthogonality error, energy drift, degrees of freedom; and the OR penalty.

In exact arithmetic the first two are zero for every orthogonal map, so they show rounding errors and mistakes. The
penalty replaces the constraint for the unconstrained map "free".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_number, require
from hypersphere.energy import hyperspherical_energy
from hypersphere.functions._factorizations import gram_error
from hypersphere.functions.orthogonal import SkewMap
from hypersphere.rotation.input_rotation import InputRotation
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.rotate import original_weight, rotated_layers
from hypersphere.rotation.two_sided import TwoSidedRotation

__all__ = ["RotationPenalty", "RotationState", "degrees_of_freedom", "orthogonality_error", "rotation_states"]

# The cost of the energy is quadratic in the number of rows, so only the first rows of a large layer are compared.
_MAX_ENERGY_ROWS = 1024


@dataclass(frozen=True)
class RotationState:
    """The state of one rotation.

    Attributes:
        orthogonality_error: max |RᵀR − I|.
        energy_drift: relative change of the energy of the neurons, |E(W)/E(V) − 1|. Zero for exact rotations, except
            rotations of outputs, which change the angles between neurons (`TwoSidedRotation`).
        generator_norm: ‖S‖₂, or None if the map has no generator.
        degrees_of_freedom: dimension of the set of all R that training can reach.
    """

    orthogonality_error: float
    energy_drift: float
    generator_norm: float | None
    degrees_of_freedom: int


@torch.no_grad()
def rotation_states(model: nn.Module) -> dict[str, RotationState]:
    """Return the state of every rotated layer and of every `InputRotation`, by name.

    >>> from hypersphere.rotation import rotate_
    >>> rotation_states(rotate_(nn.Linear(6, 4)))["weight"].degrees_of_freedom
    15
    """
    states = {}
    for name, module, rotation in rotated_layers(model):
        part = rotation.part
        with evaluation_mode(rotation):  # without the dropout of blocks
            rotated = part.rows(cast(Tensor, getattr(module, part.parameter)))
        neurons = part.rows(original_weight(module, part.parameter))
        if isinstance(rotation, Rotation):
            states[name] = _state([rotation], neurons, rotated, experts=part.groups if part.stacked else 1)
        elif isinstance(rotation, TwoSidedRotation):
            states[name] = _state(rotation.rotations, rotation.unpermuted(neurons), rotated)
    for name, module in model.named_modules():
        if isinstance(module, InputRotation):
            rows = _numerics.widen(module.rows[:_MAX_ENERGY_ROWS])
            states[name] = _state([module.rotation], rows, module.rotation(rows))
    return states


def _state(rotations: Sequence[Rotation], neurons: Tensor, rotated: Tensor, *, experts: int = 1) -> RotationState:
    generator_norm = None
    for rotation in rotations:
        if isinstance(rotation.method, SkewMap):
            generator = rotation.method.generator(_numerics.widen(rotation.parameter))
            generator_norm = max(generator_norm or 0.0, float(torch.linalg.matrix_norm(generator, 2).max()))
    # Every expert has a rotation of its own, which changes the angles to the neurons of other experts.
    pairs = zip(neurons.chunk(experts), rotated.chunk(experts), strict=True)
    energy_drift = max(_energy_drift(before, after) for before, after in pairs)
    error = max(_max_error(rotation) for rotation in rotations)
    return RotationState(error, energy_drift, generator_norm, sum(r.degrees_of_freedom() for r in rotations))


def _energy_drift(neurons: Tensor, rotated: Tensor) -> float:
    """Return the relative change of the energy of one set of neurons."""
    if len(neurons) < 2:
        return 0.0  # a single neuron has no energy
    first_rows = (_numerics.to_float64(w[:_MAX_ENERGY_ROWS]) for w in (neurons, rotated))
    before, after = (float(hyperspherical_energy(rows)) for rows in first_rows)
    return abs(after / before - 1)


def _max_error(rotation: Rotation) -> float:
    """Return max |RᵀR − I|, computed in float64 so that the product itself adds no error."""
    r = rotation.method.matrix(_numerics.widen(rotation.parameter))
    return float(gram_error(_numerics.to_float64(r)).abs().max())


@torch.no_grad()
def orthogonality_error(model: nn.Module) -> float:
    """Return max |RᵀR − I| over all rotations of the model.

    >>> from hypersphere.rotation import rotate_
    >>> orthogonality_error(rotate_(nn.Linear(6, 4), "gram_schmidt"))
    0.0
    """
    errors = [_max_error(module) for module in model.modules() if isinstance(module, Rotation)]
    require(bool(errors), "model", "a rotated model", type(model).__name__)
    return max(errors)


def degrees_of_freedom(model: nn.Module, *, on_group: Iterable[Tensor] = ()) -> int:
    """Return the number of dimensions in which training can move: d(d−1)/2 per rotation, plus all other parameters.

    Table 10 of the OPT paper counts like this: the d² parameters of Gram–Schmidt have d(d−1)/2 degrees of freedom.

    Args:
        model: any model, rotated or not.
        on_group: parameters that an optimiser such as `hypersphere.optim.OGD` keeps orthogonal. The model does not know
            about them. Each of their d×d matrices counts d(d−1)/2 instead of d².

    Example:
        >>> from hypersphere.rotation import rotate_
        >>> degrees_of_freedom(rotate_(nn.Linear(6, 4), "gram_schmidt"))
        19
    """
    rotations = [module for module in model.modules() if isinstance(module, Rotation)]
    of_rotations = {id(p) for rotation in rotations for p in rotation.free.values()}
    total = sum(rotation.degrees_of_freedom() for rotation in rotations)
    total += sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in of_rotations)
    unique = {id(p): p for p in on_group if p.requires_grad}.values()
    # Every matrix in `on_group` was counted with d². Orthogonality removes d(d+1)/2 dimensions.
    return total - sum(p.numel() // p.shape[-1] * (p.shape[-1] + 1) // 2 for p in unique)


class RotationPenalty:
    r"""β·Σ‖RᵀR − I‖²_F over all rotations by "free": the relaxation OR (OPT, equation 5).

    Rotations by the maps of `hypersphere.transform`, which are not orthogonal either, are penalised, too.

    >>> from hypersphere.rotation import rotate_
    >>> RotationPenalty(rotate_(nn.Linear(6, 4), "free"), 0.1)()
    tensor(0., grad_fn=<MulBackward0>)
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        require(is_number(weight, 0), "weight", "a number >= 0", weight)
        self.weight = weight
        self.rotations = [r for r in model.modules() if isinstance(r, Rotation) and not r.method.always_orthogonal]
        require(bool(self.rotations), "model", "rotated by 'free' or another inexact map", type(model).__name__)

    def __call__(self) -> Float[Tensor, ""]:
        """Return the penalty to add to the loss."""
        errors = [gram_error(r.method.matrix(_numerics.widen(r.parameter))).square().sum() for r in self.rotations]
        return self.weight * torch.stack(errors).sum()
