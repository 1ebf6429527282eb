r"""Energy kernels f_s: how strongly two vectors on the sphere repel each other at a given distance.

Distances are raised to a floor, so coincident vectors have a finite energy and a zero gradient. The floor is 4.2e-8 for
small powers (`_numerics.squared_distance_floor` returns its square). `PairPotential` combines a kernel with a distance,
and with the mirror images of half space.

To add a kernel:

1. Write a frozen dataclass with `power` and `value_at_square`, and set `bounded_by_power` if it holds: without it,
   regularisers read their value once per step to check that it is finite. `derivative_at_square` is optional and saves
   time.
2. List it in KERNELS. Add the formula to `tests/oracle.py` under the same name.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._deprecation import accept_old_methods, deprecated_attribute
from hypersphere._validation import choose, is_number, require
from hypersphere.functions._autograd import inner_graph
from hypersphere.functions._entries import reset_outdated_attributes

__all__ = [
    "KERNELS",
    "CallableKernel",
    "Capped",
    "Gaussian",
    "Kernel",
    "Logarithmic",
    "PairPotential",
    "Riesz",
    "kernel_of",
]

# Above this power, z^−s overflows or vanishes in float32 for all distances that differ from 1 by more than 1 %.
_LARGEST_POWER = 10_000
_LARGEST_T = 100  # float64 can represent exp(−4t), the smallest value of the Gaussian kernel


class Kernel(abc.ABC):
    """A repulsion f(z) that is evaluated at a squared distance u = z², which saves a square root per pair."""

    power: float
    """The growth rate s at small distances, f(z) ~ z^−s. It determines the floor of the distance."""

    bounded_by_power: ClassVar[bool] = False
    """True if f grows no faster than z^−s, so that energies without close pairs are known to be finite."""

    at_square = deprecated_attribute("at_square", "value_at_square")
    of_square = deprecated_attribute("of_square", "floored_value_at_square")
    of_scaled_square = deprecated_attribute("of_scaled_square", "floored_value_at_scaled_square")

    def __init_subclass__(cls) -> None:
        """Accept old names of methods, and drop closed forms of a parent class whose value the subclass overrides."""
        super().__init_subclass__()
        renamed = {"at_square": "value_at_square", "of_scaled_square": "floored_value_at_scaled_square"}
        accept_old_methods(cls, renamed)
        attributes = ("derivative_at_square", "floored_value_at_scaled_square", "bounded_by_power")
        reset_outdated_attributes(cls, Kernel, attributes, of=("value_at_square",))

    @abc.abstractmethod
    def value_at_square(self, u: Tensor) -> Tensor:
        """Return f(√u) for squared distances `u` at or above the floor."""

    def derivative_at_square(self, u: Tensor, value: Tensor) -> Tensor:
        """Return df/du as a new tensor without a graph, given f(√u) too. The default is slower than a formula."""
        with inner_graph():
            leaf = u.detach().requires_grad_()
            return torch.autograd.grad(self.value_at_square(leaf).sum(), leaf)[0]

    def floored_value_at_square(self, u: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return f(√u) for any squared distances: raise them to the floor, then call `value_at_square`.

        The floor is that of `dtype`, the dtype of the final result; None for the dtype of `u`.
        """
        return self.value_at_square(u.clamp_min(_numerics.squared_distance_floor(dtype or u.dtype, self.power)))

    def floored_value_at_scaled_square(self, u: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Return f(√(u·a·b)), where only `u` is raised to the floor. Roots come first, because a·b could overflow."""
        floored = u.clamp_min(_numerics.squared_distance_floor(dtype, self.power))
        return self(floored.sqrt() * a.sqrt() * b.sqrt())

    def __call__(self, distance: Tensor) -> Tensor:
        """Return f(z) for distances z."""
        return _numerics.narrow(self.floored_value_at_square(_numerics.widen(distance).square()), distance.dtype)


@dataclass(frozen=True)
class Riesz(Kernel):
    r"""The Riesz kernel: f_s(z) = z^−s, s > 0   (thesis, 5.1).

    >>> import torch
    >>> Riesz(power=2)(torch.tensor(0.5))
    tensor(4.)
    """

    power: float = 2
    bounded_by_power = True

    def __post_init__(self) -> None:
        """Check the power."""
        is_in_range = is_number(self.power, 0, _LARGEST_POWER) and self.power > 0
        accepted = f"a positive number up to {_LARGEST_POWER} (0 is the logarithmic kernel)"
        require(is_in_range, "power", accepted, self.power)

    def value_at_square(self, u: Tensor) -> Tensor:
        """Return u^(−s/2)."""
        # The usual powers have instructions that are several times faster than `pow`.
        if self.power == 2:
            return u.reciprocal()
        return u.rsqrt() if self.power == 1 else u.pow(-self.power / 2)

    def derivative_at_square(self, u: Tensor, value: Tensor) -> Tensor:
        """Return −(s/2)·f/u."""
        return (value * (-self.power / 2)).div_(u)

    def floored_value_at_scaled_square(self, u: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Return f(√u)·a^(−s/2)·b^(−s/2)."""
        half = -self.power / 2
        return self.floored_value_at_square(u, dtype) * a.pow(half) * b.pow(half)


@dataclass(frozen=True)
class Logarithmic(Kernel):
    r"""The limit of small powers: f_0(z) = log(1/z)   (thesis, 5.1).

    >>> import torch
    >>> Logarithmic()(torch.tensor(1.0))
    tensor(-0.)
    """

    power: ClassVar[float] = 0.0  # type: ignore[misc]  # the logarithm grows more slowly than any power
    bounded_by_power = True

    def value_at_square(self, u: Tensor) -> Tensor:
        """Return −½·log u."""
        return -0.5 * u.log()

    def derivative_at_square(self, u: Tensor, value: Tensor) -> Tensor:
        """Return −1/(2u)."""
        return -0.5 / u

    def floored_value_at_scaled_square(self, u: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Return f(√u) − ½·log a − ½·log b."""
        return self.floored_value_at_square(u, dtype) - (a.log() + b.log()) / 2


@dataclass(frozen=True)
class Gaussian(Kernel):
    r"""The Gaussian kernel: f(z) = exp(−t·z²).

    Unlike the Riesz kernels it is bounded: the force between near-duplicates vanishes with their distance.

    Args:
        t: a positive number up to 100.

    Example:
        >>> import torch
        >>> Gaussian(t=2)(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.1353])
    """

    t: float = 2.0
    power: ClassVar[float] = 0.0  # type: ignore[misc]  # bounded at z = 0
    bounded_by_power = True

    def __post_init__(self) -> None:
        """Check t."""
        is_in_range = is_number(self.t, 0, _LARGEST_T) and self.t > 0
        require(is_in_range, "t", f"a positive number up to {_LARGEST_T}", self.t)

    def value_at_square(self, u: Tensor) -> Tensor:
        """Return exp(−t·u)."""
        return (u * -self.t).exp()

    def derivative_at_square(self, u: Tensor, value: Tensor) -> Tensor:
        """Return −t·f."""
        return value * -self.t


@dataclass(frozen=True)
class Capped(Kernel):
    r"""A kernel whose force is bounded: below the distance z₀ it continues as its tangent line,

        f(z) = f(z₀) + f′(z₀)·(z − z₀)   for z < z₀.

    Near-duplicate neurons still push each other apart, with the force at z₀ instead of one that grows without bound.

    Args:
        kernel: the kernel to cap.
        min_distance: z₀ > 0. It is raised to the smallest distance at which the energy of the kernel is finite in
            float32, 4.2e-8 for powers up to 3.6 and 0.1 for s = 32.

    Example:
        >>> import torch
        >>> Capped(Riesz(power=2), min_distance=0.5)(torch.tensor([1.0, 0.5, 0.25]))  # the slope at ½ is −16
        tensor([1., 4., 8.])
    """

    kernel: Kernel
    min_distance: float
    # The capped kernel has a largest value, f(0), so distances need no floor for a power. But `bounded_by_power` stays
    # False: `kernel` may grow faster than its own power says, and then f(0) may be close to the largest number.
    power: ClassVar[float] = 0.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        """Check the kernel and the distance."""
        is_kernel = isinstance(self.kernel, Kernel) and not isinstance(self.kernel, CallableKernel)
        require(is_kernel, "kernel", "a kernel such as Riesz or Logarithmic", self.kernel)
        is_distance = is_number(self.min_distance, 0, math.pi) and self.min_distance > 0
        require(is_distance, "min_distance", "a positive number up to pi, the largest distance", self.min_distance)

    @property
    def _square_start(self) -> float:
        """The squared distance z₀² below which the kernel is linear."""
        return max(self.min_distance**2, _numerics.squared_distance_floor(torch.float32, self.kernel.power))

    def value_at_square(self, u: Tensor) -> Tensor:
        """Return f(√u), linear in √u below z₀."""
        # Distances are raised to z₀ in the kernel itself, so that neither it nor its derivative can overflow.
        start = self._square_start
        value = self.kernel.value_at_square(u.clamp_min(start))
        return value + self._slope(u) * (u.sqrt() - math.sqrt(start)).clamp_max(0.0)

    def derivative_at_square(self, u: Tensor, value: Tensor) -> Tensor:
        """Return df/du of the kernel, and f′(z₀)/(2√u) below z₀."""
        above = u.clamp_min(self._square_start)
        derivative = self.kernel.derivative_at_square(above, self.kernel.value_at_square(above))
        return torch.where(u < self._square_start, self._slope(u) / (2 * u.sqrt()), derivative)

    def _slope(self, u: Tensor) -> Tensor:
        """Return f′(z₀) = 2·z₀·df/du as a scalar tensor with the dtype and device of `u`."""
        start = u.new_full((), self._square_start)
        return 2 * start.sqrt() * self.kernel.derivative_at_square(start, self.kernel.value_at_square(start))


@dataclass(frozen=True)
class CallableKernel(Kernel):
    r"""A user's function of the distance as a kernel. It is assumed to grow like z^−4 when distances get a floor.

    >>> import torch
    >>> CallableKernel(torch.exp)(torch.tensor(0.0))
    tensor(1.0000)
    """

    function: Callable[[Tensor], Tensor]
    power: ClassVar[float] = 4.0  # type: ignore[misc]

    def value_at_square(self, u: Tensor) -> Tensor:
        """Return the function of √u."""
        return self.function(u.sqrt())


KERNELS: dict[str, type[Kernel]] = {"riesz": Riesz, "logarithmic": Logarithmic, "gaussian": Gaussian}


def kernel_of(power: float | str | Callable[[Tensor], Tensor], min_distance: float | None = None) -> Kernel:
    """Return a kernel given by its power s ≥ 0 (0 is logarithmic), by its name, or as a callable of the distance.

    If `min_distance` is given, the kernel is capped there.

    >>> kernel_of(0), kernel_of(2)
    (Logarithmic(), Riesz(power=2))
    """
    if isinstance(power, (int, float)):
        accepted = f"a number >= 0 and at most {_LARGEST_POWER}, a kernel or a callable of the distance"
        require(is_number(power, 0, _LARGEST_POWER), "power", accepted, power)
        kernel: Kernel = Logarithmic() if power == 0 else Riesz(power)
    else:
        choice = choose(KERNELS, power, "power")
        kernel = choice if isinstance(choice, Kernel) else CallableKernel(choice)
    if min_distance is None:
        return kernel
    accepted = "None for a callable, whose derivative is not known"
    require(not isinstance(kernel, CallableKernel), "min_distance", accepted, min_distance)
    return Capped(kernel, min_distance)


# The potential of one pair -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairPotential:
    r"""The repulsion φ of two directions: a kernel f of their distance; half space adds f of the distance to −ŵⱼ.

    It is evaluated at the squared chords u = ‖ŵᵢ − ŵⱼ‖² = 2 − 2c and v = ‖ŵᵢ + ŵⱼ‖² = 2 + 2c, where c is the cosine.

    There are three ways to compute φ together with dφ/dc, from the fastest to the most general:

    * `unclamped_with_derivative`, from cosines: Euclidean distances, no weights, and no pair near the floor;
    * `with_derivative` by the kernel's formula: Euclidean distances, no weights, any pairs;
    * `with_derivative` by automatic differentiation: angular distances or weights.

    >>> import torch
    >>> PairPotential(Riesz(2))(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.2500])
    """

    kernel: Kernel = Riesz(2)
    distance: str = "euclidean"
    half_space: bool = False

    def __post_init__(self) -> None:
        """Check the distance."""
        require(self.distance in ("euclidean", "angular"), "distance", "'euclidean' or 'angular'", self.distance)

    def __call__(
        self,
        u: Tensor,
        v: Tensor,
        weights: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return φ at squared chords.

        Args:
            u: squared chords ‖ŵᵢ − ŵⱼ‖².
            v: squared chords ‖ŵᵢ + ŵⱼ‖².
            weights: factors βᵢ and βⱼ of weighted vectors βᵢ·ŵᵢ, which broadcast with `u`; None for factors of 1.
            dtype: the dtype of the final result, which determines the smallest distance; None for the dtype of `u`.
        """
        value = self._one_sided(u, v, weights, dtype or u.dtype)
        return value + self._one_sided(v, u, weights, dtype or u.dtype) if self.half_space else value

    def with_derivative(
        self, u: Tensor, v: Tensor, weights: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return φ and its derivative dφ/dc = −2·∂φ/∂u + 2·∂φ/∂v, both without a graph."""
        value, derivative = self._one_sided_with_derivative(u, v, weights, dtype)
        derivative = derivative.mul_(-2)
        if self.half_space:
            mirrored, mirrored_derivative = self._one_sided_with_derivative(v, u, weights, dtype)
            value, derivative = value + mirrored, derivative.add_(mirrored_derivative, alpha=2)
        return value, derivative

    def unclamped_with_derivative(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return φ and dφ/dc at cosines of which none belongs to a close pair, in as few passes as possible."""
        if self.half_space and self.kernel == Riesz(2):
            # 1/(2 − 2c) + 1/(2 + 2c) = 1/(1 − c²), whose derivative is 2c/(1 − c²)².
            value = torch.addcmul(torch.ones_like(c), c, c, value=-1).reciprocal_()
            return value, (value * value).mul_(c).mul_(2)
        u = torch.rsub(c, 2, alpha=2)
        value = self.kernel.value_at_square(u)
        derivative = self.kernel.derivative_at_square(u, value).mul_(-2)
        if self.half_space:
            v = torch.rsub(c, 2, alpha=-2)
            mirrored = self.kernel.value_at_square(v)
            derivative.add_(self.kernel.derivative_at_square(v, mirrored), alpha=2)
            value = value + mirrored
        return value, derivative

    def _one_sided(self, u: Tensor, v: Tensor, weights: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> Tensor:
        """Return f at the distance whose squared chord is `u`, without the mirror image."""
        if self.distance == "angular":
            # θ = 2·atan2(√u, √v) is accurate at both ends. At θ = π the clamp of v removes the infinite derivative.
            floor = _numerics.squared_distance_floor(dtype, self.kernel.power)
            theta = 2 * torch.atan2(u.clamp_min(floor).sqrt(), v.clamp_min(torch.finfo(v.dtype).tiny).sqrt())
            return self.kernel.floored_value_at_square(theta.square(), dtype)
        if weights is None:
            return self.kernel.floored_value_at_square(u, dtype)
        # ‖βᵢŵᵢ − βⱼŵⱼ‖² = βᵢβⱼ·((√(βᵢ/βⱼ) − √(βⱼ/βᵢ))² + u). Only the second factor has a floor.
        ratio = (weights[0] / weights[1]).sqrt()
        return self.kernel.floored_value_at_scaled_square((ratio - 1 / ratio).square() + u, *weights, dtype)

    def _one_sided_with_derivative(
        self, u: Tensor, v: Tensor, weights: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return f and df/du, which is 0 below the floor."""
        # By the formula of the kernel.
        if weights is None and self.distance == "euclidean":
            floor = _numerics.squared_distance_floor(dtype, self.kernel.power)
            floored = u.clamp_min(floor)
            value = self.kernel.value_at_square(floored)
            return value, self.kernel.derivative_at_square(floored, value).mul_(u >= floor)
        # By automatic differentiation.
        with inner_graph():
            leaf = u.detach().requires_grad_()
            opposite = v.detach() + (u.detach() - leaf)  # equal to v, with derivative −1
            value = self._one_sided(leaf, opposite, weights, dtype)
            (derivative,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return value.detach(), derivative
