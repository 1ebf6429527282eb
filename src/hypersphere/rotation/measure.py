"""What can be seen of a rotation in training: is it one, does it keep the energy, how far has it turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from hypersphere import sphere
from hypersphere.functions.menu import require
from hypersphere.functions.orthogonal import SkewMap
from hypersphere.rotation.convert import original_of, rotated_layers
from hypersphere.rotation.inputs import InputRotation
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.refine import energy_of

__all__ = ["RotationPenalty", "RotationState", "degrees_of_freedom", "measure", "orthogonality_error"]

_ROWS = 1024  # an energy takes all pairs, so of a very large layer only the first rows are compared


@dataclass(frozen=True)
class RotationState:
    """One rotated layer: max |RᵀR − I|, relative change of the energy of its neurons, ‖S‖₂ or None, and its numbers."""

    orthogonality_error: float
    energy_drift: float
    generator_norm: float | None
    degrees_of_freedom: int


@torch.no_grad()
def measure(model: nn.Module) -> dict[str, RotationState]:
    """Return the state of every rotated layer by name.

    >>> from hypersphere.rotation import rotate_
    >>> measure(rotate_(nn.Linear(6, 4)))[""].degrees_of_freedom
    15
    """
    states = {}
    for name, layer, turning in rotated_layers(model):
        if isinstance(turning, Rotation):
            states[name] = RotationState(
                _error(turning.matrices()),
                _drift(original_of(layer), cast(Tensor, layer.weight)),
                _generator_norm(turning),
                turning.degrees_of_freedom(),
            )
    return states


@torch.no_grad()
def orthogonality_error(model: nn.Module) -> float:
    """Return max |RᵀR − I| over all rotations of the model.

    >>> from hypersphere.rotation import rotate_
    >>> orthogonality_error(rotate_(nn.Linear(6, 4), "gram_schmidt"))
    0.0
    """
    errors = [_error(t.matrices()) for _, _, t in rotated_layers(model) if isinstance(t, Rotation)]
    errors += [_error(m.method(m.free)) for m in model.modules() if isinstance(m, InputRotation)]
    require(bool(errors), "model", "a rotated model", type(model).__name__)
    return max(errors)


def degrees_of_freedom(model: nn.Module) -> int:
    """Return how many numbers training can change: d(d−1)/2 for a rotation, and every other trained parameter.

    The OPT paper counts so in its Table 10: d² numbers behind Gram–Schmidt are d(d−1)/2.

    >>> from hypersphere.rotation import rotate_
    >>> degrees_of_freedom(rotate_(nn.Linear(6, 4), "gram_schmidt"))
    19
    """
    total, counted = 0, set()
    for module in model.modules():
        if isinstance(module, Rotation):
            total += module.degrees_of_freedom()
            counted |= {id(p) for p in module.free.values()}
        elif isinstance(module, InputRotation):
            total += module.method.degrees_of_freedom(module.method.size(module.free))
            counted.add(id(module.free))
    return total + sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in counted)


class RotationPenalty:
    r"""β·Σ‖RᵀR − I‖²_F over the layers rotated by "free": the relaxation OR (OPT, equation 5).

    >>> from hypersphere.rotation import rotate_
    >>> RotationPenalty(rotate_(nn.Linear(6, 4), "free"), 0.1)()
    tensor(0., grad_fn=<MulBackward0>)
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        require(weight >= 0, "weight", "a number >= 0", weight)
        self.weight = weight
        self.turnings = [t for _, _, t in rotated_layers(model) if isinstance(t, Rotation) and not t.method.exact]
        require(bool(self.turnings), "model", "rotated by 'free' or another inexact map", type(model).__name__)

    def __call__(self) -> Tensor:
        """Return the penalty to add to the loss."""
        return self.weight * torch.stack([_squared_error(t.method(t.parameter)) for t in self.turnings]).sum()


def _squared_error(r: Tensor) -> Tensor:
    return (r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)).square().sum()


def _error(r: Tensor) -> float:
    r = sphere.widest(r)
    return float((r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)).abs().max())


def _drift(before: Tensor, after: Tensor) -> float:
    if len(before) < 2:
        return 0.0
    start, now = (float(energy_of(sphere.widest(w.detach().flatten(1)[:_ROWS]))) for w in (before, after))
    return abs(now / start - 1)


def _generator_norm(turning: Rotation) -> float | None:
    if not isinstance(turning.method, SkewMap):
        return None
    return float(torch.linalg.matrix_norm(turning.method.generator(turning.parameter), 2).max())
