"""What can be seen of a rotation in training: is it one, does it keep the energy, how far has it turned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.functions.orthogonal import SkewMap
from hypersphere.functions.rowmap import RowMap
from hypersphere.rotation.convert import original_of, rotated_layers
from hypersphere.rotation.inputs import InputRotation
from hypersphere.rotation.parametrization import Rotation
from hypersphere.rotation.refine import energy_of

__all__ = ["RotationState", "degrees_of_freedom", "measure", "orthogonality_error"]

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
    """Return the state of every rotated layer and every `InputRotation` by name.

    >>> from hypersphere.rotation import rotate_
    >>> measure(rotate_(nn.Linear(6, 4)))[""].degrees_of_freedom
    15
    """
    states = {}
    for name, layer, turning in rotated_layers(model):
        if isinstance(turning, Rotation):
            free = _numerics.widen(turning.parameter.detach())
            states[name] = RotationState(
                _error(turning.method(free)),
                _drift(original_of(layer), cast(Tensor, layer.weight)),
                _generator_norm(turning.method, free),
                turning.degrees_of_freedom(),
            )
    for name, module in model.named_modules():
        if isinstance(module, InputRotation):
            free, rows = (
                _numerics.widen(module.free.detach()),
                _numerics.widen(cast(Tensor, module.module.weight).detach()),
            )
            drift = _drift(rows, module.method(free, rows))
            norm = _generator_norm(module.method, free)
            states[name] = RotationState(_error(module.method(free)), drift, norm, module.degrees_of_freedom())
    return states


@torch.no_grad()
def orthogonality_error(model: nn.Module) -> float:
    """Return max |RᵀR − I| over all rotations of the model.

    >>> from hypersphere.rotation import rotate_
    >>> orthogonality_error(rotate_(nn.Linear(6, 4), "gram_schmidt"))
    0.0
    """
    errors = [
        _error(t.method(_numerics.widen(t.parameter.detach())))
        for _, _, t in rotated_layers(model)
        if isinstance(t, Rotation)
    ]
    errors += [
        _error(m.method(_numerics.widen(m.free.detach()))) for m in model.modules() if isinstance(m, InputRotation)
    ]
    require(bool(errors), "model", "a rotated model", type(model).__name__)
    return max(errors)


def degrees_of_freedom(model: nn.Module, *, on_group: Iterable[Tensor] = ()) -> int:
    """Return how many numbers training can change: d(d−1)/2 for a trained rotation, and every other trained parameter.

    The OPT paper counts so in its Table 10: d² numbers behind Gram–Schmidt are d(d−1)/2.

    Args:
        model: any, rotated or not.
        on_group: those of its parameters that the optimiser keeps orthogonal (`hs.optim.OGD`), which nothing in the
            model says; each d×d matrix of them counts d(d−1)/2 too.

    >>> from hypersphere.rotation import rotate_
    >>> degrees_of_freedom(rotate_(nn.Linear(6, 4), "gram_schmidt"))
    19
    """
    kept = {id(p): p for p in on_group}
    total, counted = 0, set()
    for module in model.modules():
        if isinstance(module, Rotation):
            total += module.degrees_of_freedom()
            counted |= {id(p) for p in module.free.values()}
        elif isinstance(module, InputRotation):
            total += module.degrees_of_freedom()
            counted.add(id(module.free))
    total += sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in counted)
    bound = sum(p.numel() // p.shape[-1] * (p.shape[-1] + 1) // 2 for p in kept.values() if p.requires_grad)
    return total - bound


def _error(r: Tensor) -> float:
    r = _numerics.to_float64(r)
    return float((r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)).abs().max())


def _drift(before: Tensor, after: Tensor) -> float:
    if len(before) < 2:
        return 0.0
    start, now = (float(energy_of(_numerics.to_float64(w.detach().flatten(1)[:_ROWS]))) for w in (before, after))
    return abs(now / start - 1)


def _generator_norm(method: RowMap, free: Tensor) -> float | None:
    if not isinstance(method, SkewMap):
        return None
    return float(torch.linalg.matrix_norm(method.generator(free), 2).max())
