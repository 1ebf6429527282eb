"""The named objectives: each is a way to set the one head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hypersphere.functions.margin import (
    AdditiveAngle,
    AdditiveCosine,
    Combined,
    DividedOthers,
    Multiplicative,
    NormAdaptive,
    TruncatedMultiplicative,
)
from hypersphere.functions.menu import require
from hypersphere.heads.angular_head import AngularHead
from hypersphere.heads.annealing import Annealing
from hypersphere.heads.binary_head import sphereface2

__all__ = [
    "PRESETS",
    "a_softmax",
    "adaface",
    "am_softmax",
    "arcface",
    "combined_margin",
    "ga_softmax",
    "l_softmax",
    "modified_softmax",
    "s_softmax",
    "softmax",
    "sphereface2",
    "sphereface_plus",
    "sphereface_r",
    "w_softmax",
]

AngularChoice = str | Callable[[Tensor], Tensor]


def softmax(in_features: int, num_classes: int, *, bias: bool = False) -> AngularHead:
    """Plain softmax: f_j = ‖w_j‖‖x‖ cos θ_j (thesis, 2.2)."""
    return AngularHead(in_features, num_classes, weight_norm=False, bias=bias)


def modified_softmax(in_features: int, num_classes: int, *, bias: bool = False) -> AngularHead:
    """Softmax with unit class vectors: f_j = ‖x‖ cos θ_j (thesis, 2.18)."""
    return AngularHead(in_features, num_classes, bias=bias)


def l_softmax(in_features: int, num_classes: int, m: float = 4, *, annealing: Annealing | None = None) -> AngularHead:
    """L-Softmax: both norms kept, the target angle multiplied by m (thesis, 2.4)."""
    return AngularHead(in_features, num_classes, weight_norm=False, margin=Multiplicative(m), annealing=annealing)


def a_softmax(
    in_features: int, num_classes: int, m: float = 4, *, annealing: Annealing | None = None, gradient: str = "true"
) -> AngularHead:
    """A-Softmax (SphereFace): unit class vectors and the target angle multiplied by m (thesis, 2.20)."""
    return AngularHead(in_features, num_classes, margin=Multiplicative(m), annealing=annealing, gradient=gradient)


def w_softmax(
    in_features: int, num_classes: int, angular: AngularChoice = "cosine", *, bias: bool = False
) -> AngularHead:
    """W-Softmax: unit class vectors and any g, f_j = ‖x‖ g(θ_j) (thesis, 3.10)."""
    return AngularHead(in_features, num_classes, angular=angular, bias=bias)


def ga_softmax(
    in_features: int,
    num_classes: int,
    angular: AngularChoice = "linear",
    m: float = 4,
    *,
    annealing: Annealing | None = None,
) -> AngularHead:
    """GA-Softmax: W-Softmax with the target angle multiplied by m under any g (thesis, 3.11)."""
    return AngularHead(in_features, num_classes, angular=angular, margin=Multiplicative(m), annealing=annealing)


def s_softmax(in_features: int, num_classes: int, s: float = 30.0, angular: AngularChoice = "cosine") -> AngularHead:
    """S-Softmax: features on a sphere of radius s, f_j = s·g(θ_j) (thesis, section 3.4)."""
    return AngularHead(in_features, num_classes, radius=s, angular=angular)


def am_softmax(
    in_features: int, num_classes: int, s: float = 30.0, m: float = 0.35, *, gradient: str = "true"
) -> AngularHead:
    """AM-Softmax (CosFace): the target's cosine lowered by m (thesis, D.11)."""
    return AngularHead(in_features, num_classes, radius=s, margin=AdditiveCosine(m), gradient=gradient)


def arcface(
    in_features: int, num_classes: int, s: float = 64.0, m: float = 0.5, *, gradient: str = "true"
) -> AngularHead:
    """ArcFace: the target angle widened by m, continued monotone beyond π."""
    return AngularHead(in_features, num_classes, radius=s, margin=AdditiveAngle(m), gradient=gradient)


def combined_margin(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m1: float = 1.0,
    m2: float = 0.3,
    m3: float = 0.2,
    *,
    gradient: str = "true",
) -> AngularHead:
    """Combined margin: the target's response is cos(m₁θ + m₂) − m₃, continued monotone beyond π."""
    return AngularHead(in_features, num_classes, radius=s, margin=Combined(m1, m2, m3), gradient=gradient)


def adaface(in_features: int, num_classes: int, s: float = 64.0, m: float = 0.4, h: float = 0.333) -> AngularHead:
    """AdaFace: a margin that depends on how long a feature is beside the others."""
    return AngularHead(in_features, num_classes, radius=s, margin=NormAdaptive(m, h))


def sphereface_plus(
    in_features: int,
    num_classes: int,
    m: float = 4,
    energy_weight: float = 1.0,
    *,
    annealing: Annealing | None = None,
) -> AngularHead:
    """SphereFace+: A-Softmax plus the data-dependent energy of the class vectors (thesis, 5.13)."""
    margin = Multiplicative(m)
    return AngularHead(in_features, num_classes, margin=margin, annealing=annealing, energy_weight=energy_weight)


def sphereface_r(
    in_features: int,
    num_classes: int,
    m: float = 1.5,
    *,
    version: int = 1,
    s: float = 30.0,
    normalization: str = "hard",
    norm_weight: float = 0.01,
    gradient: str = "detached",
) -> AngularHead:
    """SphereFace-R: v1 multiplies the target angle up to π, v2 divides the others'; feature norm none, hard or soft."""
    require(version in (1, 2), "version", "1 or 2", version)
    require(normalization in ("none", "hard", "soft"), "normalization", "'none', 'hard' or 'soft'", normalization)
    return AngularHead(
        in_features,
        num_classes,
        radius=s if normalization == "hard" else "feature",
        margin=TruncatedMultiplicative(m) if version == 1 else DividedOthers(m),
        gradient=gradient,
        norm_weight=norm_weight if normalization == "soft" else 0.0,
        norm_target=s,
    )


PRESETS: dict[str, Callable[..., AngularHead]] = {
    "softmax": softmax,
    "modified_softmax": modified_softmax,
    "l_softmax": l_softmax,
    "a_softmax": a_softmax,
    "w_softmax": w_softmax,
    "ga_softmax": ga_softmax,
    "s_softmax": s_softmax,
    "am_softmax": am_softmax,
    "arcface": arcface,
    "combined_margin": combined_margin,
    "adaface": adaface,
    "sphereface_plus": sphereface_plus,
    "sphereface_r": sphereface_r,
    "sphereface2": sphereface2,
}
