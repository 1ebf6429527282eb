r"""Margins ψ: how much harder the target class is made.

A margin maps the target cosine c to ψ(θ) ≤ g(θ), monotone and continuous on [0, π]. All of ours are members of one
family, ψ(θ) = G(m₁θ + m₂) − m₃, where G continues g beyond π so that it keeps falling: G(φ) = g(φ − kπ) − 2k with
k = ⌊φ/π⌋. To add one, write a frozen dataclass and list it in MARGINS.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.functions.angular import Cosine, response
from hypersphere.functions.menu import require

__all__ = ["MARGINS", "AdditiveAngle", "AdditiveCosine", "Combined", "Margin", "Multiplicative"]

AngularFunction = Callable[[Tensor], Tensor]


class Margin(abc.ABC):
    """What the library asks of a ψ of its own: the target's response under the margin, for any g."""

    @abc.abstractmethod
    def __call__(self, c: Tensor, angular: AngularFunction = Cosine()) -> Tensor:  # noqa: B008
        """Return ψ(θ) for the target cosines c = cos θ."""


def _continued(angular: AngularFunction, phi: Tensor) -> Tensor:
    """G(φ): g up to π, then g again from π to 2π lowered by 2, and so on; continuous because g(π) = g(0) − 2."""
    turns = torch.floor(phi.detach() / math.pi)
    return response(angular, phi - math.pi * turns) - 2 * turns


def _multiple_of_cosine(c: Tensor, m: int) -> Tensor:
    """(−1)^k cos(mθ) − 2k as a polynomial in c, by the Chebyshev recurrence (thesis, 2.6): smooth at c = ±1."""
    before, now = torch.ones_like(c), c
    for _ in range(m - 1):
        before, now = now, 2 * c * now - before
    turns = torch.zeros_like(c)
    for j in range(1, m):
        turns = turns + (c < math.cos(j * math.pi / m))
    return (1 - 2 * (turns % 2)) * now - 2 * turns


def _family(c: Tensor, angular: AngularFunction, m1: float, m2: float, m3: float) -> Tensor:
    """ψ(θ) = G(m₁θ + m₂) − m₃, through the angle only where that is needed."""
    wide = sphere.widen(c)
    if m1 == 1 and m2 == 0:
        psi = angular(wide)
    elif m2 == 0 and float(m1).is_integer() and isinstance(angular, Cosine):
        psi = _multiple_of_cosine(wide, int(m1))
    else:
        psi = _continued(angular, m1 * sphere.angle(wide) + m2)
    return (psi - m3).to(c.dtype)


@dataclass(frozen=True)
class Multiplicative(Margin):
    r"""Multiply the target angle: ψ_m(θ) = g(mθ − kπ) − 2k, k = ⌊mθ/π⌋   (thesis, 2.6, 2.20 and 3.11).

    For cosine this is (−1)^k cos(mθ) − 2k, for linear it is 1 − 2mθ/π. m need not be an integer.

    >>> Multiplicative(m=4)(torch.tensor([1.0, 0.0, -1.0]))
    tensor([ 1., -3., -7.])
    """

    m: float = 4

    def __post_init__(self) -> None:
        """Refuse m < 1, which would be no margin."""
        require(1 <= self.m < math.inf, "m", "a number >= 1", self.m)

    def __call__(self, c: Tensor, angular: AngularFunction = Cosine()) -> Tensor:  # noqa: B008
        """Return G(mθ)."""
        return _family(c, angular, self.m, 0, 0)


@dataclass(frozen=True)
class AdditiveCosine(Margin):
    r"""Lower the target response by a constant: ψ(θ) = g(θ) − m   (thesis, D.11; CosFace, AM-Softmax).

    >>> AdditiveCosine(m=0.35)(torch.tensor(1.0))
    tensor(0.6500)
    """

    m: float = 0.35

    def __post_init__(self) -> None:
        """Refuse m < 0, which would make the target easier."""
        require(0 <= self.m < math.inf, "m", "a number >= 0", self.m)

    def __call__(self, c: Tensor, angular: AngularFunction = Cosine()) -> Tensor:  # noqa: B008
        """Return g(θ) − m."""
        return _family(c, angular, 1, 0, self.m)


@dataclass(frozen=True)
class AdditiveAngle(Margin):
    r"""Widen the target angle by a constant: ψ(θ) = cos(θ+m) up to θ+m = π, then −cos(θ+m) − 2   (ArcFace).

    The continuation beyond π is monotone and continuous, unlike the fall-backs of common code; other g likewise.

    >>> AdditiveAngle(m=0.5)(torch.tensor([1.0, -1.0]))
    tensor([ 0.8776, -1.1224])
    """

    m: float = 0.5

    def __post_init__(self) -> None:
        """Refuse an m outside [0, π]."""
        require(0 <= self.m <= math.pi, "m", "an angle in [0, pi]", self.m)

    def __call__(self, c: Tensor, angular: AngularFunction = Cosine()) -> Tensor:  # noqa: B008
        """Return G(θ+m)."""
        return _family(c, angular, 1, self.m, 0)


@dataclass(frozen=True)
class Combined(Margin):
    r"""All three at once: ψ(θ) = G(m₁θ + m₂) − m₃.

    >>> Combined(m1=1.0, m2=0.5, m3=0.2)(torch.tensor(1.0))
    tensor(0.6776)
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what would make the target easier."""
        require(1 <= self.m1 < math.inf, "m1", "a number >= 1", self.m1)
        require(0 <= self.m2 <= math.pi, "m2", "an angle in [0, pi]", self.m2)
        require(0 <= self.m3 < math.inf, "m3", "a number >= 0", self.m3)

    def __call__(self, c: Tensor, angular: AngularFunction = Cosine()) -> Tensor:  # noqa: B008
        """Return G(m₁θ + m₂) − m₃."""
        return _family(c, angular, self.m1, self.m2, self.m3)


MARGINS: dict[str, type[Margin]] = {
    "multiplicative": Multiplicative,
    "additive_cosine": AdditiveCosine,
    "additive_angle": AdditiveAngle,
    "combined": Combined,
}
