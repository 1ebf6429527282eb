r"""Magnitudes h: the factor of a response that depends on norms and not on the angle.

Each maps the norms ‖w‖ and ‖x‖ to h(‖w‖, ‖x‖). Only `InnerProduct` and the weighted forms use ‖w‖; `weighted` turns any
other magnitude into a weighted form. To add a magnitude, write a frozen dataclass and list it in MAGNITUDES (or
WEIGHTINGS).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import choose, is_number, require
from hypersphere.functions._entries import attribute_matches

__all__ = [
    "MAGNITUDES",
    "WEIGHTINGS",
    "Ball",
    "InnerProduct",
    "Linear",
    "LinearlyWeighted",
    "Log",
    "Magnitude",
    "Mix",
    "Radial",
    "Seg",
    "Sphere",
    "Tanh",
    "TanhJointlyWeighted",
    "TanhSeparatelyWeighted",
    "weighted",
]


class Magnitude(abc.ABC):
    """Interface of the magnitudes in MAGNITUDES. `uses_weight_norm` is True if h depends on ‖w‖."""

    uses_weight_norm = False

    @abc.abstractmethod
    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return h(‖w‖, ‖x‖) for norms that broadcast against each other."""


class Radial(Magnitude):
    """A magnitude that depends on ‖x‖ only. Its fields are numbers or tensors; a `radius` is positive."""

    has_slope: ClassVar[bool]
    """True if `slope` belongs to `__call__`, False in a subclass that overrides only `__call__`."""

    def __init_subclass__(cls) -> None:
        """Find out whether the slope matches the function of the subclass."""
        super().__init_subclass__()
        cls.has_slope = attribute_matches(cls, "slope", of=("__call__",))

    def __post_init__(self) -> None:
        """Check numbers. Tensors are not checked, because that would read their values."""
        for name, value in vars(self).items():
            low, high = _numerics.SAFE_PARAMETER_RANGE if name == "radius" else (-math.inf, math.inf)
            accepted = "a number or a tensor" if name != "radius" else f"a number in {(low, high)} or a tensor"
            require(isinstance(value, Tensor) or is_number(value, low, high), name, accepted, value)

    def at(self, x_norm: Tensor) -> Tensor:
        """Return h for ‖x‖ alone: `__call__` ignores ‖w‖."""
        return self(x_norm, x_norm)

    @abc.abstractmethod
    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return dh/d‖x‖, given ‖x‖ and the value h, for operators with an explicit backward."""


@dataclass(frozen=True)
class Sphere(Radial):
    r"""Constant: h = α   (thesis, 4.4).

    >>> Sphere()(torch.tensor(2.0), torch.tensor(3.0))
    tensor(1.)
    """

    alpha: float = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α in the shape of ‖x‖."""
        return torch.ones_like(x_norm) * self.alpha

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(x_norm)


@dataclass(frozen=True)
class Ball(Radial):
    r"""Linear up to the radius, then constant: h = α·min(‖x‖, ρ)/ρ   (thesis, 4.5).

    >>> Ball(radius=2.0)(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    tensor([0.5000, 1.0000])
    """

    alpha: float = 1.0
    radius: float | Tensor = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α·min(‖x‖/ρ, 1)."""
        return (self.alpha * (_numerics.widen(x_norm) / self.radius).clamp(max=1)).to(x_norm.dtype)

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return α/ρ up to the radius, then 0."""
        return (x_norm <= self.radius).to(x_norm.dtype) * (self.alpha / self.radius)


@dataclass(frozen=True)
class Tanh(Radial):
    r"""A smooth version of `Ball`: h = α·tanh(‖x‖/ρ)   (thesis, 4.6).

    >>> Tanh()(torch.tensor(1.0), torch.tensor(0.0))
    tensor(0.)
    """

    alpha: float = 1.0
    radius: float | Tensor = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α·tanh(‖x‖/ρ)."""
        return (self.alpha * torch.tanh(_numerics.widen(x_norm) / self.radius)).to(x_norm.dtype)

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return α(1 − tanh²(‖x‖/ρ))/ρ = 4α·q(1 − q)/ρ with q = σ(−2‖x‖/ρ), which keeps its digits for large ‖x‖."""
        q = (x_norm * (-2 / self.radius)).sigmoid_()
        return torch.addcmul(q, q, q, value=-1).mul_(4 * self.alpha / self.radius)


@dataclass(frozen=True)
class Linear(Radial):
    r"""Proportional to ‖x‖: h = α‖x‖   (thesis, 4.7).

    >>> Linear()(torch.tensor(2.0), torch.tensor(3.0))
    tensor(3.)
    """

    alpha: float = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α‖x‖."""
        return _numerics.narrow(self.alpha * _numerics.widen(x_norm), x_norm.dtype)

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return α."""
        return torch.full_like(x_norm, self.alpha)


@dataclass(frozen=True)
class Seg(Radial):
    r"""Piecewise linear with two slopes: h = α‖x‖ up to ρ, then β‖x‖ + (α−β)ρ   (thesis, 4.8).

    >>> Seg()(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    tensor([1., 2.])
    """

    alpha: float = 1.0
    beta: float = 0.5
    radius: float | Tensor = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return β‖x‖ + (α−β)·min(‖x‖, ρ), which equals both branches."""
        wide = _numerics.widen(x_norm)
        radius = torch.as_tensor(self.radius, dtype=wide.dtype, device=wide.device)
        return _numerics.narrow(self.beta * wide + (self.alpha - self.beta) * torch.minimum(wide, radius), x_norm.dtype)

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return α up to the radius, then β."""
        return self.beta + (x_norm <= self.radius).to(x_norm.dtype) * (self.alpha - self.beta)


@dataclass(frozen=True)
class Log(Radial):
    r"""Logarithmic: h = α·log(1+‖x‖)   (thesis, 4.9).

    >>> Log()(torch.tensor(1.0), torch.tensor(0.0))
    tensor(0.)
    """

    alpha: float = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α·log(1+‖x‖)."""
        return (self.alpha * _numerics.widen(x_norm).log1p()).to(x_norm.dtype)

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return α/(1+‖x‖)."""
        return self.alpha / (1 + x_norm)


@dataclass(frozen=True)
class Mix(Radial):
    r"""The sum of a linear and a logarithmic term: h = α‖x‖ + β·log(1+‖x‖)   (thesis, 4.10).

    >>> Mix()(torch.tensor(1.0), torch.tensor(1.0))
    tensor(1.6931)
    """

    alpha: float = 1.0
    beta: float = 1.0

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α‖x‖ + β·log(1+‖x‖)."""
        wide = _numerics.widen(x_norm)
        return _numerics.narrow(self.alpha * wide + self.beta * wide.log1p(), x_norm.dtype)

    def slope(self, x_norm: Tensor, value: Tensor) -> Tensor:
        """Return α + β/(1+‖x‖)."""
        return self.alpha + self.beta / (1 + x_norm)


@dataclass(frozen=True)
class InnerProduct(Magnitude):
    r"""The magnitude of an ordinary layer: h = ‖w‖‖x‖   (thesis, 4.2).

    >>> InnerProduct()(torch.tensor(2.0), torch.tensor(3.0))
    tensor(6.)
    """

    uses_weight_norm = True

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return ‖w‖‖x‖."""
        return _product(w_norm, x_norm)


@dataclass(frozen=True)
class LinearlyWeighted(Magnitude):
    r"""Any magnitude times ‖w‖: ‖w‖·h(‖x‖)   (thesis, section 4.3.5).

    >>> LinearlyWeighted(Sphere())(torch.tensor(2.0), torch.tensor(3.0))
    tensor(2.)
    """

    magnitude: Callable[[Tensor, Tensor], Tensor] = Sphere()
    uses_weight_norm = True

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return ‖w‖·h(‖w‖, ‖x‖)."""
        return _product(w_norm, self.magnitude(w_norm, x_norm))


@dataclass(frozen=True)
class TanhJointlyWeighted(Magnitude):
    r"""tanh of the product of both norms: α·tanh(‖x‖‖w‖/ρ)   (thesis, 4.15).

    >>> TanhJointlyWeighted(Tanh(radius=6.0))(torch.tensor(2.0), torch.tensor(3.0))
    tensor(0.7616)
    """

    magnitude: Tanh = Tanh()
    uses_weight_norm = True

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α·tanh(‖x‖‖w‖/ρ)."""
        return self.magnitude(w_norm, _product(w_norm, x_norm))


@dataclass(frozen=True)
class TanhSeparatelyWeighted(Magnitude):
    r"""The product of tanh of each norm: α·tanh(‖w‖/ρ)·tanh(‖x‖/ρ)   (thesis, 4.16).

    >>> TanhSeparatelyWeighted(Tanh())(torch.tensor(1.0), torch.tensor(1.0))
    tensor(0.5800)
    """

    magnitude: Tanh = Tanh()
    uses_weight_norm = True

    def __call__(self, w_norm: Tensor, x_norm: Tensor) -> Tensor:
        """Return α·tanh(‖w‖/ρ)·tanh(‖x‖/ρ)."""
        bounded_weight = replace(self.magnitude, alpha=1.0)(x_norm, w_norm)
        return bounded_weight * self.magnitude(w_norm, x_norm)


def _product(w_norm: Tensor, x_norm: Tensor) -> Tensor:
    """Multiply norms in float32 or wider, because the product of two float16 norms may overflow."""
    return _numerics.narrow(
        _numerics.widen(w_norm) * _numerics.widen(x_norm), torch.promote_types(w_norm.dtype, x_norm.dtype)
    )


MAGNITUDES: dict[str, type[Magnitude]] = {
    "sphere": Sphere,
    "ball": Ball,
    "tanh": Tanh,
    "linear": Linear,
    "seg": Seg,
    "log": Log,
    "mix": Mix,
    "inner_product": InnerProduct,
}

WEIGHTINGS: dict[str, type[Magnitude]] = {
    "linear": LinearlyWeighted,
    "joint": TanhJointlyWeighted,
    "separate": TanhSeparatelyWeighted,
}


def weighted(
    magnitude: str | Callable[[Tensor, Tensor], Tensor], weighting: str | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a magnitude with the given weighting, the way ‖w‖ enters.

    Args:
        magnitude: a name from MAGNITUDES, an instance of its classes, or a callable of (‖w‖, ‖x‖).
        weighting: None, "linear" (any magnitude that does not use ‖w‖ already), "joint" or "separate" (Tanh only).

    Example:
        >>> weighted("tanh", "joint")
        TanhJointlyWeighted(magnitude=Tanh(alpha=1.0, radius=1.0))
    """
    h = choose(MAGNITUDES, magnitude, "magnitude")
    if weighting is None:
        return h
    is_name = isinstance(weighting, str) and weighting in WEIGHTINGS
    require(is_name, "weighting", f"None or one of {', '.join(map(repr, WEIGHTINGS))}", weighting)
    if isinstance(h, Magnitude) and h.uses_weight_norm:
        raise ValueError(f"weighting must be None for {h!r}, which already uses ‖w‖")
    if weighting != "linear" and not isinstance(h, Tanh):
        raise ValueError(f"weighting {weighting!r} is defined for the magnitude Tanh, not for {h!r}")
    return WEIGHTINGS[weighting](h)  # type: ignore[call-arg]
