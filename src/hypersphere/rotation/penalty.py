"""The relaxation of a rotation: a free matrix and a penalty that keeps it near the orthogonal group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypersphere import _numerics
from hypersphere._validation import is_number, require
from hypersphere.rotation.convert import rotated_layers
from hypersphere.rotation.parametrization import Rotation

__all__ = ["RotationPenalty"]


class RotationPenalty:
    r"""β·Σ‖RᵀR − I‖²_F over the layers rotated by "free": the relaxation OR (OPT, equation 5).

    >>> from hypersphere.rotation import rotate_
    >>> RotationPenalty(rotate_(nn.Linear(6, 4), "free"), 0.1)()
    tensor(0., grad_fn=<MulBackward0>)
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        require(is_number(weight, 0), "weight", "a number >= 0", weight)
        self.weight = weight
        self.turnings = [t for _, _, t in rotated_layers(model) if isinstance(t, Rotation) and not t.method.exact]
        require(bool(self.turnings), "model", "rotated by 'free' or another inexact map", type(model).__name__)

    def __call__(self) -> Tensor:
        """Return the penalty to add to the loss."""
        return (
            self.weight
            * torch.stack([_squared_error(t.method(_numerics.widen(t.parameter))) for t in self.turnings]).sum()
        )


def _squared_error(r: Tensor) -> Tensor:
    return (r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)).square().sum()
