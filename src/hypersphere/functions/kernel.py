r"""Energy kernels f_s: how strongly two vectors on the sphere repel each other at a given distance.

Distances are raised to a floor (`_numerics.squared_distance_floor`, 4.2e-8 for small powers), so coincident vectors
have a finite energy and a zero gradient. To add a kernel, write a frozen dataclass and list it in KERNELS.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import choose, is_number, require

__all__ = ["KERNELS", "Capped", "Kernel", "Logarithmic", "Riesz", "kernel_of"]


class Kernel(abc.ABC):
    """A repulsion f(z) that can also be evaluated at a squared distance, which saves a square root per pair."""

    power: float
    """The growth rate s at small distances, f(z) ~ z^−s. It determines the floor of the distance."""

    @abc.abstractmethod
    def at_square(self, u: Tensor) -> Tensor:
        """Return f(√u) for squared distances `u` at or above the floor."""

    def of_square(self, squared: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return f(√u) for any squared distances: raise them to the floor, then call `at_square`.

        The floor is that of `dtype`, the dtype of the final result; None for the dtype of `squared`.
        """
        floor = _numerics.squared_distance_floor(dtype or squared.dtype, self.power)
        return self.at_square(squared.clamp_min(floor))

    def __call__(self, distance: Tensor) -> Tensor:
        """Return f(z) for distances z."""
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
        """Check the power."""
        positive = is_number(self.power, 0) and self.power > 0
        require(positive, "power", "a positive number (0 is the logarithmic kernel)", self.power)

    def at_square(self, u: Tensor) -> Tensor:
        """Return u^(−s/2)."""
        # The usual powers have instructions that are several times faster than `pow`.
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
        """Return 0: the logarithm grows more slowly than any power."""
        return 0.0

    def at_square(self, u: Tensor) -> Tensor:
        """Return −½·log u."""
        return -0.5 * u.log()


@dataclass(frozen=True)
class Capped(Kernel):
    r"""A kernel whose force is bounded: below the distance z₀ it continues as its tangent line,

        f(z) = f(z₀) + f′(z₀)·(z − z₀)   for z < z₀.

    Near-duplicate neurons still push each other apart, with the force at z₀ instead of one that grows without bound.

    Args:
        kernel: the kernel to cap.
        min_distance: z₀ > 0.

    Example:
        >>> import torch
        >>> Capped(Riesz(power=2), min_distance=0.5)(torch.tensor([1.0, 0.5, 0.25]))  # the slope at ½ is −16
        tensor([1., 4., 8.])
    """

    kernel: Kernel
    min_distance: float

    def __post_init__(self) -> None:
        """Check the kernel and the distance."""
        require(isinstance(self.kernel, (Riesz, Logarithmic)), "kernel", "a Riesz or Logarithmic kernel", self.kernel)
        positive = is_number(self.min_distance, 0) and self.min_distance > 0
        require(positive, "min_distance", "a positive number", self.min_distance)

    @property
    def power(self) -> float:  # type: ignore[override]
        """Return 0: the capped kernel is bounded."""
        return 0.0

    def at_square(self, u: Tensor) -> Tensor:
        """Return f(√u), linear in √u below the square of `min_distance`."""
        near, s = self.min_distance, self.kernel.power
        # f′(z₀) of z^−s, or of log(1/z) for s = 0.
        slope = -s * near ** (-s - 1) if s else -1 / near
        # Distances are raised to z₀ in the kernel itself, so that neither it nor its derivative can overflow.
        return self.kernel.at_square(u.clamp_min(near**2)) + slope * (u.sqrt() - near).clamp_max(0.0)


KERNELS: dict[str, type[Kernel]] = {"riesz": Riesz, "logarithmic": Logarithmic}


def kernel_of(
    power: float | str | Callable[[Tensor], Tensor], min_distance: float | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a kernel given by its power s ≥ 0 (0 is logarithmic), by its name, or as a callable of the distance.

    If `min_distance` is given, the kernel is capped there.

    >>> kernel_of(0), kernel_of(2)
    (Logarithmic(), Riesz(power=2))
    """
    kernel: Callable[[Tensor], Tensor]
    if isinstance(power, (int, float)):
        require(is_number(power, 0), "power", "a number >= 0, a kernel or a callable of the distance", power)
        kernel = Logarithmic() if power == 0 else Riesz(power)
    else:
        kernel = choose(KERNELS, power, "power")
    if min_distance is None:
        return kernel
    accepted = "None for a callable that is not a Riesz or Logarithmic kernel"
    require(isinstance(kernel, Kernel), "min_distance", accepted, min_distance)
    assert isinstance(kernel, Kernel)
    return Capped(kernel, min_distance)
