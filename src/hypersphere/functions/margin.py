r"""Margins ψ, which lower the response of the target class during training.

A margin maps the target cosine c to ψ(θ) ≤ g(θ), monotone and continuous on [0, π]. Most entries belong to one family,
ψ(θ) = G(m₁θ + m₂) − m₃. G continues g beyond π so that it keeps falling: G(φ) = g(φ − kπ) − 2k with k = ⌊φ/π⌋. Margins
with `changes_other_classes` also change the response of the other classes. Every margin accepts a strength from 0 (no
margin) to 1, which schedules use. Margins of the family also have their derivative in closed form. A margin that
depends on the features of a batch overrides `for_batch`. To add a margin, write a frozen dataclass that derives from
`Margin` or `AffineAngleMargin`, and list it in MARGINS.
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
from hypersphere._deprecation import accept_old_methods, deprecated_attribute, deprecated_names
from hypersphere._validation import is_number, require
from hypersphere.functions._entries import attribute_matches
from hypersphere.functions.angular import Cosine, at_angle

__all__ = [
    "MARGINS",
    "AdditiveAngle",
    "AdditiveCosine",
    "AffineAngleMargin",
    "Combined",
    "DividedOthers",
    "Margin",
    "Multiplicative",
    "NormAdaptive",
    "NormLinear",
    "RandomAngle",
    "TruncatedMultiplicative",
    "TwoSided",
    "shifted_response",
]

AngularFunction = Callable[[Tensor], Tensor]
Strength = float | Tensor
COSINE = Cosine()
_RECURRENCE_RANGE = range(2, 17)  # for larger m the recurrence is less accurate than the arc cosine


class Margin(abc.ABC):
    """The interface of a margin: responses of the target and of the other classes, for any g and strength in [0, 1]."""

    changes_other_classes = False
    """True if `others` is not g: the margin changes the response of classes that are not the target."""

    uses_feature_norm = False
    """True if `for_batch` or `norm_penalty` depends on feature norms."""

    uses_norm_statistics = False
    """True if `for_batch` also depends on their running mean and deviation, which a head updates with `momentum`."""

    uses_noise = False
    """True if `for_batch` depends on random numbers."""

    touches_others = deprecated_attribute("touches_others", "changes_other_classes")

    def __init_subclass__(cls) -> None:
        """Set `changes_other_classes` if a subclass defines only `others`, and reset `for_batch` if only `__call__`."""
        super().__init_subclass__()
        accept_old_methods(cls, {"touches_others": "changes_other_classes"})
        if not attribute_matches(cls, "changes_other_classes", of=("others",)):
            cls.changes_other_classes = True
        if not any(attribute_matches(cls, hook, of=("__call__",)) for hook in ("for_batch", "for_quality")):
            cls.for_batch = Margin.for_batch  # type: ignore[method-assign]

    @abc.abstractmethod
    def __call__(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return ψ(θ) for the target cosines c = cos θ."""

    def others(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return the response of classes that are not the target: g, unless `changes_other_classes`."""
        return angular(c)

    def for_batch(
        self, x_norm: Tensor | None, norm_statistics: tuple[Tensor, Tensor] | None, noise: Tensor | None
    ) -> Margin:
        """Return the margin of one batch, this one unless it depends on the batch.

        Args:
            x_norm: (B,) feature norms; may be None unless `uses_feature_norm`.
            norm_statistics: the running mean and standard deviation of feature norms; None unless
                `uses_norm_statistics`.
            noise: (B,) standard normal numbers; None unless `uses_noise`, and None in evaluation mode.
        """
        return self

    def norm_penalty(self, x_norm: Tensor) -> Tensor | None:
        """Return a penalty on the norm of each feature, (B,), whose mean is added to the loss; None for none."""
        return None


# The family G(m₁θ + m₂) − m₃ -----------------------------------------------------------------------------------------


class AffineAngleMargin(Margin):
    """A margin ψ(θ) = G(m₁θ + m₂) − m₃, given by its coefficients. A strength a means 1 + a(m₁−1), a·m₂ and a·m₃."""

    has_slope: ClassVar[bool]
    """True if `value_and_slope` belongs to `__call__`, False in a subclass that overrides only `__call__`."""

    def __init_subclass__(cls) -> None:
        """Find out whether the closed form matches the margin of the subclass."""
        super().__init_subclass__()
        accept_old_methods(cls, {"_parts": "coefficients"})
        cls.has_slope = attribute_matches(cls, "value_and_slope", of=("__call__",))

    @property
    @abc.abstractmethod
    def coefficients(self) -> tuple[float, Strength, Strength]:
        """m₁, m₂ and m₃. The last two may be tensors with one number per sample."""

    def __call__(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return G(m₁θ + m₂) − m₃. The angle is computed only if needed."""
        m1, m2, m3 = self._scaled_coefficients(strength)
        wide = _numerics.widen(c)
        # g of the cosine is exact at ±1, where the arc cosine has an infinite derivative. Avoid the angle if possible.
        if _equals(m1, 1) and _equals(m2, 0):
            psi = angular(wide)
        elif type(angular) is Cosine and _has_recurrence(m1, m2):
            psi = _cosine_of_multiple(wide, int(m1))
        else:
            psi = _continue_beyond_pi(angular, _shifted_angle(wide, m1, m2))
        return (psi if _equals(m3, 0) else psi - m3).to(c.dtype)

    @torch.no_grad()
    def value_and_slope(self, c: Tensor, strength: Strength = 1.0) -> tuple[Tensor, Tensor | float]:
        """Return ψ and dψ/dc = m₁·|sin(m₁θ + m₂)|/sin θ ≥ 0 for g = cos, for an explicit backward pass."""
        m1, m2, m3 = self._scaled_coefficients(strength)
        if _equals(m1, 1) and _equals(m2, 0):
            return c - m3, 1.0
        if _has_recurrence(m1, m2):
            c = c.clamp(-1, 1)  # `angle` and `cosecant` below accept cosines beyond ±1
            # |T_m′| is m·|sin mθ|/sin θ without the division, which is 0/0 at c = ±1.
            polynomial, polynomial_derivative = _chebyshev_and_derivative(c, int(m1))
            assert isinstance(polynomial_derivative, Tensor)  # a number only for m = 1
            psi, slope = _continue_polynomial(polynomial, c, int(m1)), polynomial_derivative.abs()
        else:
            phi = _shifted_angle(c, m1, m2)
            psi, slope = _continue_beyond_pi(COSINE, phi), phi.sin().abs_().mul_(_numerics.cosecant(c))
            slope = slope if _equals(m1, 1) else slope * m1
        return psi if _equals(m3, 0) else psi - m3, slope

    def _scaled_coefficients(self, strength: Strength) -> tuple[Strength, Strength, Strength]:
        """Return the coefficients at a strength from 0 to 1."""
        m1, m2, m3 = self.coefficients
        if _equals(strength, 1):
            return m1, m2, m3
        # Coefficients without effect stay numbers, so that later steps can skip them.
        scaled_m1 = 1 if m1 == 1 else 1 + strength * (m1 - 1)
        return scaled_m1, m2 if _equals(m2, 0) else strength * m2, m3 if _equals(m3, 0) else strength * m3


def _equals(coefficient: Strength, number: float) -> bool:
    """Return True if a coefficient is this number. The values of tensors are not read."""
    return not isinstance(coefficient, Tensor) and coefficient == number


def _has_recurrence(m1: Strength, m2: Strength) -> bool:
    """Return True if cos(m₁θ + m₂) is a polynomial in cos θ that the Chebyshev recurrence computes accurately."""
    return not isinstance(m1, Tensor) and m1 in _RECURRENCE_RANGE and _equals(m2, 0)


def _shifted_angle(c: Tensor, m1: Strength, m2: Strength) -> Tensor:
    """Return φ = m₁θ + m₂."""
    theta = sphere.angle(c)
    return (theta if _equals(m1, 1) else m1 * theta) + m2


def shifted_response(angular: AngularFunction, c: Tensor, shift: float) -> Tensor:
    """Return G(θ + shift), the response at an angle that is larger or smaller by `shift` radians.

    >>> shifted_response(COSINE, torch.tensor([0.0, 1.0]), -0.5)
    tensor([0.4794, 1.1224])
    """
    return _continue_beyond_pi(angular, _shifted_angle(_numerics.widen(c), 1, shift)).to(c.dtype)


def _continue_beyond_pi(angular: AngularFunction, phi: Tensor) -> Tensor:
    """Return G(φ): g on [0, π], g(φ − π) − 2 on [π, 2π], and so on. It is continuous because g(π) = g(0) − 2."""
    # k is a step function: detached, because its derivative is zero wherever it exists.
    half_turns = torch.floor(phi.detach() / math.pi)
    return at_angle(angular, torch.sub(phi, half_turns, alpha=math.pi)).sub(half_turns, alpha=2)


def _cosine_of_multiple(c: Tensor, m: int) -> Tensor:
    """Return (−1)^k cos(mθ) − 2k as a polynomial in c by the Chebyshev recurrence (thesis, 2.6), smooth at c = ±1."""
    # Rounding may produce cosines beyond ±1, where the polynomial grows fast. Clamp the value, keep the gradient.
    clamped = c.detach().clamp(-1, 1)
    polynomial, _ = _chebyshev_and_derivative(c + (clamped - c.detach()), m)
    return _continue_polynomial(polynomial, clamped, m)


def _chebyshev_and_derivative(c: Tensor, n: int) -> tuple[Tensor, Tensor | float]:
    """Return T_n(c) = cos(nθ) and T_n′(c) by T_{a+b} = 2·T_a·T_b − T_{a−b}, which needs about log₂ n steps."""
    if n == 1:
        return c, 1.0
    half, half_derivative = _chebyshev_and_derivative(c, n // 2)
    if n % 2 == 0:
        return 2 * half.square() - 1, (4 * half_derivative) * half
    next_half, next_derivative = _chebyshev_and_derivative(c, n // 2 + 1)
    return 2 * half * next_half - c, 2 * (half_derivative * next_half + half * next_derivative) - 1


def _continue_polynomial(polynomial: Tensor, c: Tensor, m: int) -> Tensor:
    """Return (−1)^k T − 2k for T = cos(mθ) and k = ⌊mθ/π⌋, which continues T beyond mθ = π so that it keeps falling."""
    # At θ = π, mθ/π is m; the last branch is k = m − 1. Rounding next to a branch point is harmless: both branches have
    # the same value and a zero derivative with respect to θ there.
    half_turns = (sphere.angle(c) * (m / math.pi)).floor().clamp_max(m - 1)
    return torch.sub((1 - 2 * (half_turns % 2)) * polynomial, half_turns, alpha=2)


@dataclass(frozen=True)
class Multiplicative(AffineAngleMargin):
    r"""Multiply the target angle: ψ_m(θ) = g(mθ − kπ) − 2k, k = ⌊mθ/π⌋   (thesis, 2.6, 2.20 and 3.11).

    For cosine this is (−1)^k cos(mθ) − 2k, for linear it is 1 − 2mθ/π. m need not be an integer.

    >>> Multiplicative(m=4)(torch.tensor([1.0, 0.0, -1.0]))
    tensor([ 1., -3., -7.])
    """

    m: float = 4

    def __post_init__(self) -> None:
        """Check that m >= 1."""
        require(is_number(self.m, 1), "m", "a number >= 1", self.m)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = m, m₂ = 0 and m₃ = 0."""
        return self.m, 0, 0


@dataclass(frozen=True)
class AdditiveCosine(AffineAngleMargin):
    r"""Lower the target response by a constant: ψ(θ) = g(θ) − m   (thesis, D.11; CosFace, AM-Softmax).

    >>> AdditiveCosine(m=0.35)(torch.tensor(1.0))
    tensor(0.6500)
    """

    m: float = 0.35

    def __post_init__(self) -> None:
        """Check that m >= 0."""
        require(is_number(self.m, 0), "m", "a number >= 0", self.m)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = 1, m₂ = 0 and m₃ = m."""
        return 1, 0, self.m


@dataclass(frozen=True)
class AdditiveAngle(AffineAngleMargin):
    r"""Increase the target angle by a constant: ψ(θ) = cos(θ+m) up to θ+m = π, then −cos(θ+m) − 2   (ArcFace).

    Beyond π the continuation is monotone and continuous, unlike that of most public code. The same holds for other g.

    >>> AdditiveAngle(m=0.5)(torch.tensor([1.0, -1.0]))
    tensor([ 0.8776, -1.1224])
    """

    m: float = 0.5

    def __post_init__(self) -> None:
        """Check that m is in [0, π]."""
        require(is_number(self.m, 0, math.pi), "m", "an angle in [0, pi]", self.m)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = 1, m₂ = m and m₃ = 0."""
        return 1, self.m, 0


@dataclass(frozen=True)
class Combined(AffineAngleMargin):
    r"""The whole family: ψ(θ) = G(m₁θ + m₂) − m₃   (combined margin of the ArcFace paper).

    >>> Combined(m1=1.0, m2=0.5, m3=0.2)(torch.tensor(1.0))
    tensor(0.6776)
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0

    def __post_init__(self) -> None:
        """Check that no coefficient raises the target's response."""
        require(is_number(self.m1, 1), "m1", "a number >= 1", self.m1)
        require(is_number(self.m2, 0, math.pi), "m2", "an angle in [0, pi]", self.m2)
        require(is_number(self.m3, 0), "m3", "a number >= 0", self.m3)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁, m₂ and m₃."""
        return self.m1, self.m2, self.m3


@dataclass(frozen=True)
class TwoSided(AffineAngleMargin):
    r"""Lower the target's response and raise all others by m: g(θ_y) − m and g(θ_j) + m   (SphereFace2, type C).

    >>> TwoSided(m=0.4)(torch.tensor(1.0)), TwoSided(m=0.4).others(torch.tensor(0.0))
    (tensor(0.6000), tensor(0.4000))
    """

    m: float = 0.4
    changes_other_classes = True

    def __post_init__(self) -> None:
        """Check that m >= 0."""
        require(is_number(self.m, 0), "m", "a number >= 0", self.m)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = 1, m₂ = 0 and m₃ = m."""
        return 1, 0, self.m

    def others(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return g(θ) + m."""
        return (angular(_numerics.widen(c)) + strength * self.m).to(c.dtype)


@dataclass(frozen=True)
class NormAdaptive(AffineAngleMargin):
    r"""A margin that depends on the quality q of a feature: ψ(θ) = G(θ − m·q) − m·(1 + q)   (AdaFace).

    The quality q = clip(h·(‖x‖ − mean)/std, −1, 1) compares the norm of a feature with the others. The head keeps the
    running mean and standard deviation (with `momentum`); called directly, the margin assumes q = 0. AdaFace clips
    norms to [0.001, 100] and the angle to [0, π]. Here norms are not clipped, and G is continued on both sides, below 0
    by 2 − cos φ, so that ψ is monotone.

    >>> NormAdaptive(m=0.4)(torch.tensor(1.0))
    tensor(0.6000)
    """

    m: float = 0.4
    h: float = 0.333
    momentum: float = 0.01
    uses_feature_norm = True
    uses_norm_statistics = True

    def __post_init__(self) -> None:
        """Check the ranges of all fields."""
        require(is_number(self.m, 0, math.pi), "m", "a number in [0, pi]", self.m)
        require(is_number(self.h, 0) and self.h > 0, "h", "a positive number", self.h)
        require(is_number(self.momentum, 0, 1) and self.momentum > 0, "momentum", "a number in (0, 1]", self.momentum)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = 1, m₂ = 0 and m₃ = m."""
        return 1, 0, self.m

    def quality(self, x_norm: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return q for feature norms with the given mean and standard deviation; 0 if the deviation is 0."""
        # An infinite divisor makes q = 0 if all norms are equal. `threshold` replaces numbers <= 0.
        factor = self.h / torch.threshold(std, 0.0, math.inf)
        return ((x_norm - mean) * factor).clamp(-1, 1)

    def for_quality(self, q: Tensor) -> AffineAngleMargin:
        """Return the margin of features of quality q: m₂ = −m·q and m₃ = m·(1 + q)."""
        m2 = -self.m * q
        return _PerSample(m2, self.m - m2)

    def for_batch(
        self, x_norm: Tensor | None, norm_statistics: tuple[Tensor, Tensor] | None, noise: Tensor | None
    ) -> Margin:
        """Return the margin for the qualities of a batch."""
        assert x_norm is not None
        assert norm_statistics is not None
        # The norm decides how large the margin is, but no gradient flows through this choice.
        mean, std = (statistic.to(x_norm.dtype) for statistic in norm_statistics)
        return self.for_quality(self.quality(x_norm.detach(), mean, std))


@dataclass(frozen=True)
class NormLinear(AffineAngleMargin):
    r"""An angle margin that grows with the feature norm, and a penalty on small norms   (MagFace).

        ψ(θ) = G(θ + m(a)),   m(a) = m_low + (m_high − m_low)·(a − norm_low)/(norm_high − norm_low),
        penalty·(1/a + a/norm_high²)   with a = ‖x‖ clipped to [norm_low, norm_high].

    Gradients flow through m(a). The head adds the mean of `norm_penalty`. Called directly, the margin assumes
    a = norm_low.

    >>> NormLinear()(torch.tensor(1.0))
    tensor(0.9004)
    """

    m_low: float = 0.45
    m_high: float = 0.8
    norm_low: float = 10.0
    norm_high: float = 110.0
    penalty: float = 35.0
    uses_feature_norm = True

    def __post_init__(self) -> None:
        """Check the ranges of all fields."""
        for name in ("m_low", "m_high"):
            require(is_number(getattr(self, name), 0, math.pi), name, "an angle in [0, pi]", getattr(self, name))
        require(is_number(self.norm_low, 0) and self.norm_low > 0, "norm_low", "a positive number", self.norm_low)
        is_above = is_number(self.norm_high, 0) and self.norm_high > self.norm_low
        require(is_above, "norm_high", f"a number above norm_low={self.norm_low}", self.norm_high)
        require(is_number(self.penalty, 0), "penalty", "a number >= 0", self.penalty)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = 1, m₂ = m_low and m₃ = 0."""
        return 1, self.m_low, 0

    def for_batch(
        self, x_norm: Tensor | None, norm_statistics: tuple[Tensor, Tensor] | None, noise: Tensor | None
    ) -> Margin:
        """Return the margin for the norms of a batch: m₂ = m(a)."""
        assert x_norm is not None
        slope = (self.m_high - self.m_low) / (self.norm_high - self.norm_low)
        return _PerSample(self.m_low + slope * (self._clipped(x_norm) - self.norm_low))

    def norm_penalty(self, x_norm: Tensor) -> Tensor:
        """Return the penalty of each feature, which is smallest at a = norm_high."""
        a = self._clipped(x_norm)
        return self.penalty * (1 / a + a / self.norm_high**2)

    def _clipped(self, x_norm: Tensor) -> Tensor:
        return x_norm.clamp(self.norm_low, self.norm_high)


@dataclass(frozen=True)
class RandomAngle(AffineAngleMargin):
    r"""An angle margin that is drawn for each sample from N(m, σ), clipped to [0, π]   (ElasticFace).

    The head draws standard normal numbers in training mode; called directly, the margin is m.

    >>> RandomAngle(m=0.5).for_batch(None, None, torch.tensor([0.0, 2.0]))(torch.tensor([1.0, 1.0]))
    tensor([0.8776, 0.8253])
    """

    m: float = 0.5
    sigma: float = 0.05
    uses_noise = True

    def __post_init__(self) -> None:
        """Check the ranges of all fields."""
        require(is_number(self.m, 0, math.pi), "m", "an angle in [0, pi]", self.m)
        require(is_number(self.sigma, 0), "sigma", "a number >= 0", self.sigma)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """m₁ = 1, m₂ = m and m₃ = 0."""
        return 1, self.m, 0

    def for_batch(
        self, x_norm: Tensor | None, norm_statistics: tuple[Tensor, Tensor] | None, noise: Tensor | None
    ) -> Margin:
        """Return the margin with m₂ = m + σ·noise."""
        return self if noise is None else _PerSample((self.m + self.sigma * noise).clamp(0, math.pi))


@dataclass(frozen=True, eq=False)
class _PerSample(AffineAngleMargin):
    """A member of the family with one m₂ and one m₃ per sample."""

    m2: Tensor
    m3: Strength = 0

    @property
    def coefficients(self) -> tuple[float, Tensor, Strength]:
        return 1, self.m2, self.m3


# Margins outside the family ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TruncatedMultiplicative(Margin):
    r"""Multiply the target angle and stop at π: ψ(θ) = g(min(mθ, π))   (SphereFace-R v1).

    >>> TruncatedMultiplicative(m=2)(torch.tensor([1.0, 0.0, -1.0]))
    tensor([ 1., -1., -1.])
    """

    m: float = 1.5

    def __post_init__(self) -> None:
        """Check that m >= 1."""
        require(is_number(self.m, 1), "m", "a number >= 1", self.m)

    def __call__(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return g(min(mθ, π))."""
        # Beyond π the response is constant, and `clamp` makes the gradient zero there.
        theta = (1 + strength * (self.m - 1)) * sphere.angle(_numerics.widen(c))
        return at_angle(angular, theta.clamp(max=math.pi)).to(c.dtype)


@dataclass(frozen=True)
class DividedOthers(Margin):
    r"""Divide the angles of the other classes instead of changing the target: g(θ_j/m), j ≠ y   (SphereFace-R v2).

    >>> DividedOthers(m=2).others(torch.tensor(-1.0))
    tensor(-4.3711e-08)
    """

    m: float = 1.5
    changes_other_classes = True

    def __post_init__(self) -> None:
        """Check that m >= 1."""
        require(is_number(self.m, 1), "m", "a number >= 1", self.m)

    def __call__(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return g(θ)."""
        return angular(c)

    def others(self, c: Tensor, angular: AngularFunction = COSINE, strength: Strength = 1.0) -> Tensor:
        """Return g(θ/m)."""
        theta = sphere.angle(_numerics.widen(c)) / (1 + strength * (self.m - 1))
        return at_angle(angular, theta).to(c.dtype)


MARGINS: dict[str, type[Margin]] = {
    "multiplicative": Multiplicative,
    "additive_cosine": AdditiveCosine,
    "additive_angle": AdditiveAngle,
    "combined": Combined,
    "truncated_multiplicative": TruncatedMultiplicative,
    "divided_others": DividedOthers,
    "two_sided": TwoSided,
    "norm_adaptive": NormAdaptive,
    "norm_linear": NormLinear,
    "random_angle": RandomAngle,
}

__getattr__ = deprecated_names(__name__, {"FamilyMargin": "hypersphere.functions.margin:AffineAngleMargin"})
