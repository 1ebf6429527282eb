"""Measure rotations during training: orthogonality error, energy drift, degrees of freedom; and the OR penalty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.functions._factorizations import gram_error
from hypersphere.functions._rowmap import RowMap
from hypersphere.functions.orthogonal import SkewMap
from hypersphere.rotation.activations import InputRotation
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.refine import mean_energy
from hypersphere.rotation.rotate import neurons_of, rotated_layers

__all__ = ["RotationPenalty", "RotationState", "degrees_of_freedom", "measure", "orthogonality_error"]

# The cost of the energy is quadratic in the number of rows, so only the first rows of a large layer are compared.
_MAX_ENERGY_ROWS = 1024


@dataclass(frozen=True)
class RotationState:
    """The state of one rotation.

    Attributes:
        orthogonality_error: max |RᵀR − I|.
        energy_drift: relative change of the energy of the neurons, |E(W)/E(V) − 1|. Zero for exact rotations.
        generator_norm: ‖S‖₂, or None if the map has no generator.
        degrees_of_freedom: dimension of the set of all R that training can reach.
    """

    orthogonality_error: float
    energy_drift: float
    generator_norm: float | None
    degrees_of_freedom: int


@torch.no_grad()
def measure(model: nn.Module) -> dict[str, RotationState]:
    """Return the state of every rotated layer and of every `InputRotation`, by name.

    >>> from hypersphere.rotation import rotate_
    >>> measure(rotate_(nn.Linear(6, 4)))[""].degrees_of_freedom
    15
    """
    states = {}
    for name, rotation, method, free in _rotations(model):
        if isinstance(rotation, InputRotation):
            neurons = _numerics.widen(rotation.rows.detach())
            rotated = method(free, neurons)
        else:
            module = model.get_submodule(name)
            neurons, rotated = neurons_of(module), cast(Tensor, module.weight)
        states[name] = RotationState(
            orthogonality_error=_max_error(method(free)),
            energy_drift=_energy_drift(neurons, rotated),
            generator_norm=_generator_norm(method, free),
            degrees_of_freedom=rotation.degrees_of_freedom(),
        )
    return states


@torch.no_grad()
def orthogonality_error(model: nn.Module) -> float:
    """Return max |RᵀR − I| over all rotations of the model.

    >>> from hypersphere.rotation import rotate_
    >>> orthogonality_error(rotate_(nn.Linear(6, 4), "gram_schmidt"))
    0.0
    """
    errors = [_max_error(method(free)) for _, _, method, free in _rotations(model)]
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
    total, counted = 0, set()
    for module in model.modules():
        if isinstance(module, (Rotation, InputRotation)):
            total += module.degrees_of_freedom()
            parameters = module.free.values() if isinstance(module, Rotation) else [module.free]
            counted |= {id(p) for p in parameters}
    total += sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in counted)
    unique = {id(p): p for p in on_group if p.requires_grad}.values()
    # A matrix that is not a rotation of the model was counted with d². Orthogonality removes d(d+1)/2 dimensions.
    return total - sum(p.numel() // p.shape[-1] * (p.shape[-1] + 1) // 2 for p in unique)


class RotationPenalty:
    r"""β·Σ‖RᵀR − I‖²_F over the layers rotated with "free": the relaxation OR (OPT, equation 5).

    >>> from hypersphere.rotation import rotate_
    >>> RotationPenalty(rotate_(nn.Linear(6, 4), "free"), 0.1)()
    tensor(0., grad_fn=<MulBackward0>)
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        require(is_number(weight, 0), "weight", "a number >= 0", weight)
        self.weight = weight
        self.rotations = [r for _, _, r in rotated_layers(model) if isinstance(r, Rotation) and not r.method.exact]
        require(bool(self.rotations), "model", "rotated by 'free' or another inexact map", type(model).__name__)

    def __call__(self) -> Float[Tensor, ""]:
        """Return the penalty to add to the loss."""
        errors = [gram_error(r.method(_numerics.widen(r.parameter))).square().sum() for r in self.rotations]
        return self.weight * torch.stack(errors).sum()


def _rotations(model: nn.Module) -> Iterator[tuple[str, Rotation | InputRotation, RowMap, Tensor]]:
    """Yield layer name, module, map and widened free parameters of every rotation."""
    for name, _, rotation in rotated_layers(model):
        if isinstance(rotation, Rotation):
            yield name, rotation, rotation.method, _numerics.widen(rotation.parameter.detach())
    for name, module in model.named_modules():
        if isinstance(module, InputRotation):
            yield name, module, module.method, _numerics.widen(module.free.detach())


def _max_error(r: Tensor) -> float:
    """Return max |RᵀR − I|, computed in float64 so that the product itself adds no error."""
    return float(gram_error(_numerics.to_float64(r)).abs().max())


def _energy_drift(before: Tensor, after: Tensor) -> float:
    """Return |E(after)/E(before) − 1|, or 0 for a single neuron, which has no energy."""
    if len(before) < 2:
        return 0.0
    start, end = (
        float(mean_energy(_numerics.to_float64(w.detach().flatten(1)[:_MAX_ENERGY_ROWS]))) for w in (before, after)
    )
    return abs(end / start - 1)


def _generator_norm(method: RowMap, free: Tensor) -> float | None:
    """Return the largest ‖S‖₂ of a batch, or None if the map has no generator."""
    if not isinstance(method, SkewMap):
        return None
    return float(torch.linalg.matrix_norm(method.generator(free), 2).max())
