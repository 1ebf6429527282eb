"""The meaning of settings of heads: magnitudes, learned fields of g and ψ, callables as margins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hypersphere._validation import is_number, require
from hypersphere.functions.angular import Angular
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Magnitude, Sphere
from hypersphere.functions.margin import COSINE, Margin

__all__ = ["CallableMargin", "magnitude_of", "tensor_field_names"]


def magnitude_of(radius: str | float, weight_norm: bool) -> Magnitude:
    """Return h(‖w‖, ‖x‖) as one of the magnitudes that layers use."""
    if radius == "feature":
        return Linear() if weight_norm else InnerProduct()
    is_positive = is_number(radius, 0) and float(radius) > 0
    accepted = "'feature' or a positive number, or 'adaptive' for that of AdaCos"
    require(is_positive or radius == "adaptive", "radius", accepted, radius)
    fixed = Sphere(alpha=1.0 if radius == "adaptive" else float(radius))
    return fixed if weight_norm else LinearlyWeighted(fixed)


def tensor_field_names(owner: str, entry: object) -> tuple[str, ...]:
    """Return the names of the fields of a g or ψ that hold tensors. In a head each must hold one number."""
    if not isinstance(entry, (Angular, Margin)):
        return ()
    fields = {name: value for name, value in vars(entry).items() if isinstance(value, Tensor)}
    for name, value in fields.items():
        require(value.numel() == 1, f"{name} of {owner}", "one number in a head", tuple(value.shape))
    return tuple(fields)


@dataclass(frozen=True)
class CallableMargin(Margin):
    """A user's function of the cosine as a margin. Strengths other than 1 interpolate: g + strength·(ψ − g)."""

    function: Callable[[Tensor], Tensor]

    def __call__(
        self, c: Tensor, angular: Callable[[Tensor], Tensor] = COSINE, strength: float | Tensor = 1.0
    ) -> Tensor:
        psi = self.function(c)
        if not isinstance(strength, Tensor) and strength == 1:
            return psi
        g = angular(c)
        return g + strength * (psi - g)
