r"""Angular activations g: how a layer or a head maps an angle to a response.

Each maps the cosine c = cos θ to g(θ), decreasing from g(0) = 1 to g(π) = −1. The argument is the cosine, because a g
that is smooth in c can be computed and differentiated without the arc cosine. To add an activation, write a frozen
dataclass and list it in ANGULARS.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_names
from hypersphere._validation import is_number, require
from hypersphere.functions._entries import attribute_matches

__all__ = ["ANGULARS", "Angular", "Cosine", "Linear", "PowerCosine", "Sigmoid", "SquareCosine", "at_angle"]


class Angular(abc.ABC):
    """Interface of the activations in ANGULARS: the response to a cosine, and to an angle."""

    has_angle_form: ClassVar[bool]
    """True if `at` belongs to `__call__`, False in a subclass that overrides only `__call__`."""

    has_slope: ClassVar[bool]
    """True if `slope` belongs to `__call__` and `at`, False in a subclass that overrides only those."""

    def __init_subclass__(cls) -> None:
        """Find out which closed forms match the function of the subclass."""
        super().__init_subclass__()
        cls.has_angle_form = attribute_matches(cls, "at", of=("__call__",))
        cls.has_slope = attribute_matches(cls, "slope", of=("__call__", "at"))

    @abc.abstractmethod
    def __call__(self, c: Tensor) -> Tensor:
        """Return g(θ) for c = cos θ."""

    def at(self, theta: Tensor) -> Tensor:
        """Return g(θ) for an angle in [0, π]. Functions of the angle itself avoid the cosine here."""
        return self(theta.cos())

    @abc.abstractmethod
    def slope(self, c: Tensor, value: Tensor) -> Tensor:
        """Return dg/dc, given c and the value g(c), for operators with an explicit backward."""


def at_angle(angular: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """Return g(θ) for any function g of the cosine. The entries of ANGULARS avoid the cosine where they can."""
    if isinstance(angular, Angular) and angular.has_angle_form:
        return angular.at(theta)
    return angular(theta.cos())


@dataclass(frozen=True)
class Cosine(Angular):
    r"""The cosine: g(θ) = cos θ   (thesis, 3.3 and 4.12).

    >>> Cosine()(torch.tensor(0.5))
    tensor(0.5000)
    """

    def __call__(self, c: Tensor) -> Tensor:
        """Return c."""
        return c

    def slope(self, c: Tensor, value: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(c)


@dataclass(frozen=True)
class Linear(Angular):
    r"""Linear in the angle: g(θ) = 1 − 2θ/π   (thesis, 4.11).

    >>> Linear()(torch.tensor(0.0))
    tensor(0.)
    """

    def __call__(self, c: Tensor) -> Tensor:
        """Return 1 − 2·arccos(c)/π."""
        return self.at(sphere.angle(_numerics.widen(c))).to(c.dtype)

    def at(self, theta: Tensor) -> Tensor:
        """Return 1 − 2θ/π."""
        return 1 - theta * (2 / math.pi)

    def slope(self, c: Tensor, value: Tensor) -> Tensor:
        """Return (2/π)/√(1−c²)."""
        return _numerics.angle_derivative(c).mul_(self.angle_slope())

    def angle_slope(self) -> float:
        """Return dg/dθ = −2/π."""
        return -2 / math.pi


@dataclass(frozen=True)
class Sigmoid(Angular):
    r"""A sigmoid of the angle, steep for small k: g(θ) = tanh((π/2−θ)/(2k)) / tanh(π/(4k))   (thesis, 3.4 and 4.13).

    This equals (3.4) but has no exponentials that overflow for small k. `k` may be a tensor that broadcasts with the
    cosines, for example a learned one.

    >>> Sigmoid(k=0.5)(torch.tensor([0.8, -0.8]))
    tensor([ 0.7952, -0.7952])
    """

    k: float | Tensor = 0.5

    def __post_init__(self) -> None:
        """Check that `k` is a positive number or a tensor."""
        if not isinstance(self.k, Tensor):
            require(
                is_number(self.k, *_numerics.SAFE_PARAMETER_RANGE),
                "k",
                f"a number in {_numerics.SAFE_PARAMETER_RANGE} or a tensor",
                self.k,
            )

    def __call__(self, c: Tensor) -> Tensor:
        """Return the sigmoid of arccos(c)."""
        return self.at(sphere.angle(_numerics.widen(c))).to(c.dtype)

    def at(self, theta: Tensor) -> Tensor:
        """Return the sigmoid of θ."""
        # tanh(t/2) = 2·sigmoid(t) − 1, and the sigmoid is several times faster.
        return (2 * torch.sigmoid((math.pi / 2 - theta) / self.k) - 1) / self.height

    @property
    def height(self) -> float | Tensor:
        """T = tanh(π/(4k)), which normalises g to g(0) = 1."""
        if isinstance(self.k, Tensor):
            return torch.tanh(math.pi / (4 * _numerics.widen(self.k)))
        return math.tanh(math.pi / (4 * self.k))

    def slope(self, c: Tensor, value: Tensor) -> Tensor:
        """Return (1 − (gT)²)/(2kT)/√(1−c²) with T = tanh(π/(4k))."""
        return _numerics.angle_derivative(c) * self.angle_slope(value)

    def angle_slope(self, value: Tensor) -> Tensor:
        """Return dg/dθ = ((gT)² − 1)/(2kT) = T·g²/(2k) − 1/(2kT) at the value g."""
        return value.square().mul_(self.height / (2 * self.k)).sub_(1 / (2 * self.k * self.height))


@dataclass(frozen=True)
class SquareCosine(Angular):
    r"""The signed square of the cosine, flat around the right angle: g(θ) = sign(cos θ)·cos²θ   (thesis, 4.14).

    >>> SquareCosine()(torch.tensor([0.5, -0.5]))
    tensor([ 0.2500, -0.2500])
    """

    def __call__(self, c: Tensor) -> Tensor:
        """Return c·|c|."""
        return c * c.abs()

    def slope(self, c: Tensor, value: Tensor) -> Tensor:
        """Return 2|c|."""
        return 2 * c.abs()


@dataclass(frozen=True)
class PowerCosine(Angular):
    r"""A power of the similarity: g(θ) = 2·((1+cos θ)/2)^t − 1   (SphereFace2's similarity adjustment).

    It is steeper near θ = 0 for larger t.

    >>> PowerCosine(t=3)(torch.tensor([1.0, 0.0, -1.0]))
    tensor([ 1.0000, -0.7500, -1.0000])
    """

    t: float = 3.0

    def __post_init__(self) -> None:
        """Check t ≥ 1; for t < 1 the slope at θ = π is infinite."""
        require(is_number(self.t, 1), "t", "a number >= 1", self.t)

    def __call__(self, c: Tensor) -> Tensor:
        """Return 2·((1+c)/2)^t − 1."""
        return (2 * ((1 + _numerics.widen(c)) / 2).clamp_min(0) ** self.t - 1).to(c.dtype)

    def slope(self, c: Tensor, value: Tensor) -> Tensor:
        """Return t·((1+c)/2)^(t−1)."""
        return self.t * ((1 + c) / 2).clamp_min(0) ** (self.t - 1)


ANGULARS: dict[str, type[Angular]] = {
    "cosine": Cosine,
    "linear": Linear,
    "sigmoid": Sigmoid,
    "square_cosine": SquareCosine,
    "power_cosine": PowerCosine,
}

__getattr__ = deprecated_names(__name__, {"response": "hypersphere.functions.angular:at_angle"})
