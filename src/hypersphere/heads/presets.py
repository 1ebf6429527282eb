"""The named objectives: each is one line, a way to set the one head."""

from __future__ import annotations

from collections.abc import Callable

from hypersphere.functions.margin import Multiplicative
from hypersphere.heads.angular_head import AngularHead
from hypersphere.heads.annealing import Annealing

__all__ = ["PRESETS", "a_softmax", "modified_softmax", "softmax"]


def softmax(in_features: int, num_classes: int, *, bias: bool = False) -> AngularHead:
    """Plain softmax: f_j = ‖w_j‖‖x‖ cos θ_j (thesis, 2.2)."""
    return AngularHead(in_features, num_classes, weight_norm=False, bias=bias)


def modified_softmax(in_features: int, num_classes: int, *, bias: bool = False) -> AngularHead:
    """Softmax with unit class vectors: f_j = ‖x‖ cos θ_j (thesis, 2.18)."""
    return AngularHead(in_features, num_classes, bias=bias)


def a_softmax(in_features: int, num_classes: int, m: float = 4, *, annealing: Annealing | None = None) -> AngularHead:
    """A-Softmax (SphereFace): unit class vectors and the target angle multiplied by m (thesis, 2.20)."""
    return AngularHead(in_features, num_classes, margin=Multiplicative(m), annealing=annealing)


PRESETS: dict[str, Callable[..., AngularHead]] = {
    "softmax": softmax,
    "modified_softmax": modified_softmax,
    "a_softmax": a_softmax,
}
