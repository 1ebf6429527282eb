r"""Energy kernels f_s: how strongly two vectors on the sphere repel each other at a given distance.

Distances are raised to a floor (`_numerics.squared_distance_floor`), so coincident vectors have a finite energy and no
gradient.
To add one, write a frozen dataclass and list it in KERNELS.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import choose, is_number, require

__all__ = ["KERNELS", "Kernel", "Logarithmic", "Riesz", "kernel_of"]


class Kernel(abc.ABC):
    """What the library asks of an f of its own: the repulsion at a distance, and at a squared distance."""

    power: float

    @abc.abstractmethod
    def at_square(self, u: Tensor) -> Tensor:
        """Return f(√u) for u at or above the floor."""

    def of_square(self, squared: Tensor) -> Tensor:
        """Return f(√u), which spares the square root that a matrix of cosines does not give."""
        return self.at_square(squared.clamp_min(_numerics.squared_distance_floor(squared.dtype, self.power)))

    def __call__(self, distance: Tensor) -> Tensor:
        """Return f(z)."""
        return _numerics.narrow(self.of_square(_numerics.widen(distance).square()), distance.dtype)


@dataclass(frozen=True)
class Riesz(Kernel):
    r"""The Riesz kernel: f_s(z) = z^−s, s > 0   (thesis, 5.1).

    >>> import torch
    >>> Riesz(power=2)(torch.tensor(0.5))
    tensor(4.)
    """

    power: float = 2

    def __post_init__(self) -> None:
        """Refuse a power that is not positive."""
        positive = is_number(self.power, 0) and self.power > 0
        require(positive, "power", "a positive number (0 is the logarithmic kernel)", self.power)

    def at_square(self, u: Tensor) -> Tensor:
        """Return u^(−s/2)."""
        if self.power == 2:
            return u.reciprocal()
        return u.rsqrt() if self.power == 1 else u.pow(-self.power / 2)


@dataclass(frozen=True)
class Logarithmic(Kernel):
    r"""The limit of small powers: f_0(z) = log(1/z)   (thesis, 5.1).

    >>> import torch
    >>> Logarithmic()(torch.tensor(1.0))
    tensor(-0.)
    """

    @property
    def power(self) -> float:  # type: ignore[override]
        """The power that this is the limit of."""
        return 0.0

    def at_square(self, u: Tensor) -> Tensor:
        """Return −½·log u."""
        return -0.5 * u.log()


KERNELS: dict[str, type[Kernel]] = {"riesz": Riesz, "logarithmic": Logarithmic}


def kernel_of(power: float | str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Choose a kernel by its power s ≥ 0 (0 is logarithmic), by its name, or as a callable of the distance.

    >>> kernel_of(0), kernel_of(2)
    (Logarithmic(), Riesz(power=2))
    """
    if isinstance(power, (int, float)):
        require(is_number(power, 0), "power", "a number >= 0, a kernel or a callable of the distance", power)
        return Logarithmic() if power == 0 else Riesz(power)
    return choose(KERNELS, power, "power")
