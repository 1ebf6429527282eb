"""The named objectives: each is a configuration of `AngularHead` or `BinaryHead`.

All presets except `sphereface2` accept the keywords of `HeadOptions`: `annealing`, `ramp`, `gradient`, `class_weights`,
`label_smoothing`, `ignore_index` and `reduction`, documented at `AngularHead`. Angles, such as the m of ArcFace, are in
radians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

from torch import Tensor

from hypersphere._validation import require
from hypersphere.functions.angular import PowerCosine
from hypersphere.functions.margin import (
    AdditiveAngle,
    AdditiveCosine,
    Combined,
    DividedOthers,
    Margin,
    Multiplicative,
    NormAdaptive,
    TruncatedMultiplicative,
    TwoSided,
)
from hypersphere.heads.binary import BinaryHead
from hypersphere.heads.head import AngularHead
from hypersphere.heads.schedules import Annealing, Ramp

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "PRESETS",
    "HeadOptions",
    "a_softmax",
    "adaface",
    "am_softmax",
    "arcface",
    "combined_margin",
    "cosface",
    "ga_softmax",
    "l_softmax",
    "modified_softmax",
    "s_softmax",
    "softmax",
    "sphereface",
    "sphereface2",
    "sphereface_plus",
    "sphereface_r",
    "w_softmax",
]

AngularChoice = str | Callable[[Tensor], Tensor]


class HeadOptions(TypedDict, total=False):
    """The options of `AngularHead` that presets pass on unchanged."""

    annealing: Annealing | None
    ramp: Ramp | None
    gradient: str
    class_weights: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str


def softmax(in_features: int, num_classes: int, *, bias: bool = False, **options: Unpack[HeadOptions]) -> AngularHead:
    """Softmax of a linear layer: f_j = ‖w_j‖‖x‖ cos θ_j (thesis, 2.2)."""
    return AngularHead(in_features, num_classes, weight_norm=False, bias=bias, **options)


def modified_softmax(
    in_features: int, num_classes: int, *, bias: bool = False, **options: Unpack[HeadOptions]
) -> AngularHead:
    """Softmax with unit class vectors: f_j = ‖x‖ cos θ_j (thesis, 2.18)."""
    return AngularHead(in_features, num_classes, bias=bias, **options)


def l_softmax(in_features: int, num_classes: int, m: float = 4, **options: Unpack[HeadOptions]) -> AngularHead:
    """L-Softmax: both norms kept, the target angle multiplied by m (thesis, 2.4; Liu et al., ICML 2016)."""
    return AngularHead(in_features, num_classes, weight_norm=False, margin=Multiplicative(m), **options)


def a_softmax(in_features: int, num_classes: int, m: float = 4, **options: Unpack[HeadOptions]) -> AngularHead:
    """A-Softmax, SphereFace: unit class vectors, target angle multiplied by m (thesis, 2.20; Liu et al., CVPR 2017).

    To train from scratch, pass ``annealing=Annealing()``.
    """
    return AngularHead(in_features, num_classes, margin=Multiplicative(m), **options)


def w_softmax(
    in_features: int,
    num_classes: int,
    angular: AngularChoice = "cosine",
    *,
    bias: bool = False,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """W-Softmax: unit class vectors and any g, f_j = ‖x‖ g(θ_j) (thesis, 3.10; Liu et al., NeurIPS 2017)."""
    return AngularHead(in_features, num_classes, angular=angular, bias=bias, **options)


def ga_softmax(
    in_features: int,
    num_classes: int,
    angular: AngularChoice = "linear",
    m: float = 4,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """GA-Softmax: W-Softmax with the target angle multiplied by m, for any g (thesis, 3.11; Liu et al. 2017)."""
    return AngularHead(in_features, num_classes, angular=angular, margin=Multiplicative(m), **options)


def s_softmax(
    in_features: int,
    num_classes: int,
    s: float = 30.0,
    angular: AngularChoice = "cosine",
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """S-Softmax: features on a sphere of radius s, f_j = s·g(θ_j) (thesis, chapter 3)."""
    return AngularHead(in_features, num_classes, radius=s, angular=angular, **options)


def am_softmax(
    in_features: int, num_classes: int, s: float = 30.0, m: float = 0.35, **options: Unpack[HeadOptions]
) -> AngularHead:
    """AM-Softmax, CosFace: the target's cosine lowered by m (thesis, D.11).

    AM-Softmax is by F. Wang et al., IEEE Signal Processing Letters 2018, CosFace by H. Wang et al., CVPR 2018.
    """
    return AngularHead(in_features, num_classes, radius=s, margin=AdditiveCosine(m), **options)


def arcface(
    in_features: int, num_classes: int, s: float = 64.0, m: float = 0.5, **options: Unpack[HeadOptions]
) -> AngularHead:
    """ArcFace: the target angle widened by m radians, continued monotone beyond π (Deng et al., CVPR 2019)."""
    return AngularHead(in_features, num_classes, radius=s, margin=AdditiveAngle(m), **options)


def combined_margin(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m1: float = 1.0,
    m2: float = 0.3,
    m3: float = 0.2,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """Combined margin: the target's response is cos(m₁θ + m₂) − m₃, continued monotone beyond π (Deng et al. 2019)."""
    return AngularHead(in_features, num_classes, radius=s, margin=Combined(m1, m2, m3), **options)


def adaface(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m: float = 0.4,
    h: float = 0.333,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """AdaFace: a margin that grows with the feature norm relative to its running mean (Kim et al., CVPR 2022)."""
    return AngularHead(in_features, num_classes, radius=s, margin=NormAdaptive(m, h), **options)


def sphereface_plus(
    in_features: int,
    num_classes: int,
    m: float = 4,
    energy_weight: float = 1.0,
    energy_start: int = 0,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """SphereFace+: A-Softmax plus the data-dependent energy of the class vectors (thesis, 5.8; Liu et al. 2018).

    The energy is added after `energy_start` steps: the thesis trains SphereFace first and then continues with energy.
    """
    return AngularHead(
        in_features,
        num_classes,
        margin=Multiplicative(m),
        energy_weight=energy_weight,
        energy_start=energy_start,
        **options,
    )


def sphereface_r(
    in_features: int,
    num_classes: int,
    m: float = 1.5,
    *,
    version: int = 1,
    s: float = 30.0,
    normalization: str = "hard",
    norm_weight: float = 0.01,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """SphereFace-R: v1 multiplies the target angle up to π, v2 divides the others' (Liu et al., TPAMI 2022).

    The feature norm is kept ("none"), set to s ("hard"), or pulled towards s by a penalty ("soft", `norm_weight`). The
    gradient is "detached" by default. The authors' code also multiplies the loss by 50/s, so its learning rates do not
    carry over.
    """
    require(version in (1, 2), "version", "1 or 2", version)
    require(normalization in ("none", "hard", "soft"), "normalization", "'none', 'hard' or 'soft'", normalization)
    return AngularHead(
        in_features,
        num_classes,
        radius=s if normalization == "hard" else "feature",
        margin=TruncatedMultiplicative(m) if version == 1 else DividedOthers(m),
        norm_weight=norm_weight if normalization == "soft" else 0.0,
        norm_target=s,
        **HeadOptions(gradient="detached") | options,
    )


def sphereface2(
    in_features: int,
    num_classes: int,
    s: float = 40.0,
    m: float | None = None,
    t: float = 3.0,
    *,
    balance: float = 0.7,
    margin: str | Margin | None = None,
    gradient: str = "detached",
    ramp: Ramp | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> BinaryHead:
    """SphereFace2: C binary classifiers with a two-sided margin and an analytic initial bias (Wen et al. 2022).

    The margin is `TwoSided(m)`, with m = 0.4 by default. `margin` replaces it and excludes `m`. None stands for this
    default; for a head without margin use `BinaryHead`.
    """
    require(m is None or margin is None, "m", "None if margin is given", m)
    return BinaryHead(
        in_features,
        num_classes,
        radius=s,
        balance=balance,
        angular=PowerCosine(t),
        margin=TwoSided(0.4 if m is None else m) if margin is None else margin,
        gradient=gradient,
        ramp=ramp,
        ignore_index=ignore_index,
        reduction=reduction,
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

# Names of the literature for two presets. Messages about unknown names in configs suggest the preset.
cosface = am_softmax
sphereface = a_softmax
PRESET_ALIASES = {"cosface": "am_softmax", "sphereface": "a_softmax"}
LITERATURE_NAMES = PRESET_ALIASES  # the name that `training.components` imports
