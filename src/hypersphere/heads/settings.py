"""What a head makes of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hypersphere.functions.angular import Angular
from hypersphere.functions.magnitude import InnerProduct, Linear, LinearlyWeighted, Magnitude, Sphere
from hypersphere.functions.margin import Margin
from hypersphere.functions.menu import is_number, require

__all__ = ["checked_class_weights", "learned_fields", "magnitude_of"]


def magnitude_of(radius: str | float, weight_norm: bool) -> Magnitude:
    """ρ(x)·ν(w) of the head as one of the magnitudes h that layers use."""
    if radius == "feature":
        return Linear() if weight_norm else InnerProduct()
    fits = is_number(radius, 0) and float(radius) > 0
    require(fits, "radius", "'feature' or a positive number", radius)
    fixed = Sphere(alpha=float(radius))
    return fixed if weight_norm else LinearlyWeighted(fixed)


def checked_class_weights(weights: Tensor | None, num_classes: int) -> Tensor | None:
    """One finite number ≥ 0 a class, as a copy of the head's own."""
    if weights is None:
        return None
    fits = weights.shape == (num_classes,) and bool((weights >= 0).all()) and bool(weights.isfinite().all())
    require(fits, "class_weights", f"{num_classes} finite numbers >= 0", tuple(weights.shape))
    return weights.detach().clone().float()


def learned_fields(angular: Callable[..., Any], margin: Callable[..., Any] | None) -> dict[str, nn.Parameter]:
    """Parameters that a g or ψ of ours holds (a learned k), by the names the head gives them."""
    return {
        f"{owner}_{name}": value
        for owner, entry in (("angular", angular), ("margin", margin))
        if isinstance(entry, (Angular, Margin))
        for name, value in vars(entry).items()
        if isinstance(value, nn.Parameter)
    }
