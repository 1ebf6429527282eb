"""The named objectives: each is a configuration of `AngularHead` or `BinaryHead`.

All presets except `sphereface2` accept the keywords of `HeadOptions`: `annealing`, `ramp`, `gradient`, `centers`,
`hard_negatives`, `hard_margin`, `interclass_filter`, `class_margins`, `class_sizes`, `class_weights`,
`label_smoothing`, `ignore_index` and `reduction`, documented at `AngularHead`. Angles, such as the m of ArcFace, are in
radians and at most π. Margins of cosines, such as the m of CosFace, are at most 2. Where m is a number or a tensor, a
tensor holds one margin per class.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypedDict, TypeVar

from torch import Tensor

from hypersphere._signatures import named_parameters
from hypersphere._validation import is_integer, is_number, nearest_name, require
from hypersphere.functions.angular import PowerCosine
from hypersphere.functions.margin import (
    AdditiveAngle,
    AdditiveCosine,
    Combined,
    DividedOthers,
    Margin,
    Multiplicative,
    NormAdaptive,
    NormLinear,
    RandomAngle,
    TruncatedMultiplicative,
    TwoSided,
)
from hypersphere.heads.binary import BinaryHead
from hypersphere.heads.head import AngularHead
from hypersphere.heads.schedules import Annealing, Ramp

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "OPTION_SYNONYMS",
    "PRESETS",
    "PRESET_ALIASES",
    "HeadOptions",
    "a_softmax",
    "aam_softmax",
    "adacos",
    "adaface",
    "am_softmax",
    "arcface",
    "combined_margin",
    "cosface",
    "curricularface",
    "elasticface",
    "ga_softmax",
    "l_softmax",
    "magface",
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
Arguments = ParamSpec("Arguments")
Head = TypeVar("Head", bound=AngularHead)

# Names of options in other libraries. Messages about unknown options suggest the name that they have here.
OPTION_SYNONYMS = {"margin": "m", "scale": "s", "radius": "s", "warmup": "ramp", "sub_centers": "centers"}


class HeadOptions(TypedDict, total=False):
    """The options of `AngularHead` that presets pass on unchanged."""

    annealing: Annealing | None
    ramp: Ramp | None
    gradient: str
    centers: int
    hard_negatives: int
    hard_margin: float
    interclass_filter: float | None
    class_margins: Tensor | None
    class_sizes: Tensor | None
    class_weights: Tensor | None
    label_smoothing: float
    ignore_index: int
    reduction: str


def _suggest_options(preset: Callable[Arguments, Head]) -> Callable[Arguments, Head]:
    """Decorate a preset so that the error for an unknown keyword suggests the nearest option."""
    sizes, parameters = ["in_features", "num_classes"], list(named_parameters(preset))[2:]
    passes_on = "options" in inspect.signature(preset).parameters
    head_options = list(HeadOptions.__annotations__) if passes_on else []

    @functools.wraps(preset)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Head:
        try:
            return preset(*args, **options)
        except TypeError:
            unknown = next((name for name in options if name not in [*sizes, *parameters, *head_options]), None)
            if unknown is None:
                raise
        near = nearest_name(unknown, [*parameters, *head_options], OPTION_SYNONYMS) or "."
        accepted = ", ".join([*parameters, *head_options])
        raise TypeError(f"{preset.__name__} has no option {unknown!r}{near} Options: {accepted}")

    return call


def _radius(s: float) -> float:
    require(is_number(s, 0) and s > 0, "s", "a positive number", s)
    return s


def _cosine_margin(m: float, name: str = "m") -> float:
    """Return an additive margin of cosines. No features can meet one above 2."""
    require(is_number(m, 0, 2), name, "a number in [0, 2], because cosines differ by at most 2", m)
    return m


def _largest_margin(
    m: float | Tensor, num_classes: int, options: HeadOptions, *, least: float = 0.0
) -> tuple[float, HeadOptions]:
    """Return the largest of C margins, and options with the strength of each class relative to it.

    Args:
        m: one margin, or (C,) margins.
        num_classes: C.
        options: the options of a preset.
        least: the value of m without effect, 1 for a multiplicative margin.
    """
    if not isinstance(m, Tensor):
        return m, options
    accepted = f"a number or {num_classes} numbers >= {least:g}"
    require(m.shape == (num_classes,), "m", accepted, tuple(m.shape))
    require(bool((m >= least).all()), "m", accepted, m.tolist())
    largest = float(m.max())
    strengths = (m - least) / (largest - least) if largest > least else m - least
    require(options.get("class_margins") is None, "class_margins", "None if m has one number per class", "a tensor")
    return largest, options | HeadOptions(class_margins=strengths)


@_suggest_options
def softmax(in_features: int, num_classes: int, *, bias: bool = False, **options: Unpack[HeadOptions]) -> AngularHead:
    """Softmax of a linear layer: f_j = ‖w_j‖‖x‖ cos θ_j (thesis, 2.2)."""
    return AngularHead(in_features, num_classes, normalize_weight=False, bias=bias, **options)


@_suggest_options
def modified_softmax(
    in_features: int, num_classes: int, *, bias: bool = False, **options: Unpack[HeadOptions]
) -> AngularHead:
    """Softmax with unit class vectors: f_j = ‖x‖ cos θ_j (thesis, 2.18)."""
    return AngularHead(in_features, num_classes, bias=bias, **options)


@_suggest_options
def l_softmax(in_features: int, num_classes: int, m: float | Tensor = 4, **options: Unpack[HeadOptions]) -> AngularHead:
    """L-Softmax: both norms kept, the target angle multiplied by m (thesis, 2.4; Liu et al., ICML 2016)."""
    m, options = _largest_margin(m, num_classes, options, least=1)
    return AngularHead(in_features, num_classes, normalize_weight=False, margin=Multiplicative(m), **options)


@_suggest_options
def a_softmax(in_features: int, num_classes: int, m: float | Tensor = 4, **options: Unpack[HeadOptions]) -> AngularHead:
    """A-Softmax, SphereFace: unit class vectors, target angle multiplied by m (thesis, 2.20; Liu et al., CVPR 2017).

    To train from scratch, pass ``annealing=Annealing()``.
    """
    m, options = _largest_margin(m, num_classes, options, least=1)
    return AngularHead(in_features, num_classes, margin=Multiplicative(m), **options)


@_suggest_options
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


@_suggest_options
def ga_softmax(
    in_features: int,
    num_classes: int,
    angular: AngularChoice = "linear",
    m: float = 4,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """GA-Softmax: W-Softmax with the target angle multiplied by m, for any g (thesis, 3.11; Liu et al. 2017)."""
    return AngularHead(in_features, num_classes, angular=angular, margin=Multiplicative(m), **options)


@_suggest_options
def s_softmax(
    in_features: int,
    num_classes: int,
    s: float = 30.0,
    angular: AngularChoice = "cosine",
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """S-Softmax: features on a sphere of radius s, f_j = s·g(θ_j) (thesis, chapter 3)."""
    return AngularHead(in_features, num_classes, radius=_radius(s), angular=angular, **options)


@_suggest_options
def am_softmax(
    in_features: int, num_classes: int, s: float = 30.0, m: float | Tensor = 0.35, **options: Unpack[HeadOptions]
) -> AngularHead:
    """AM-Softmax, CosFace: the target's cosine lowered by m (thesis, D.11).

    AM-Softmax is by F. Wang et al., IEEE Signal Processing Letters 2018, CosFace by H. Wang et al., CVPR 2018.
    """
    m, options = _largest_margin(m, num_classes, options)
    return AngularHead(in_features, num_classes, radius=_radius(s), margin=AdditiveCosine(_cosine_margin(m)), **options)


@_suggest_options
def arcface(
    in_features: int, num_classes: int, s: float = 64.0, m: float | Tensor = 0.5, **options: Unpack[HeadOptions]
) -> AngularHead:
    """ArcFace, AAM-Softmax: the target angle widened by m radians, continued monotone beyond π (Deng et al. 2019)."""
    m, options = _largest_margin(m, num_classes, options)
    return AngularHead(in_features, num_classes, radius=_radius(s), margin=AdditiveAngle(m), **options)


@_suggest_options
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
    return AngularHead(
        in_features, num_classes, radius=_radius(s), margin=Combined(m1, m2, _cosine_margin(m3, "m3")), **options
    )


@_suggest_options
def adaface(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m: float = 0.4,
    h: float = 0.333,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """AdaFace: a margin that grows with the feature norm relative to its running mean (Kim et al., CVPR 2022)."""
    return AngularHead(in_features, num_classes, radius=_radius(s), margin=NormAdaptive(m, h), **options)


@_suggest_options
def magface(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m_low: float = 0.45,
    m_high: float = 0.8,
    norm_low: float = 10.0,
    norm_high: float = 110.0,
    penalty: float = 35.0,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """MagFace: an angle margin that grows with the feature norm, plus a penalty on small norms (Meng et al. 2021).

    The norm of a trained feature measures the quality of its image.
    """
    margin = NormLinear(m_low, m_high, norm_low, norm_high, penalty)
    return AngularHead(in_features, num_classes, radius=_radius(s), margin=margin, **options)


@_suggest_options
def curricularface(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m: float = 0.5,
    momentum: float = 0.99,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """CurricularFace: ArcFace in which hard classes other than the target weigh more and more (Huang et al. 2020)."""
    return AngularHead(
        in_features, num_classes, radius=_radius(s), margin=AdditiveAngle(m), curriculum=momentum, **options
    )


@_suggest_options
def adacos(in_features: int, num_classes: int, *, dynamic: bool = True, **options: Unpack[HeadOptions]) -> AngularHead:
    """AdaCos: softmax of cosines without margin, with a scale that needs no tuning (Zhang et al., CVPR 2019).

    The scale is √2·log(C−1), and with `dynamic` it follows each training batch from there. Needs three classes.
    """
    require(isinstance(dynamic, bool), "dynamic", "True or False", dynamic)
    require(is_integer(num_classes, 3), "num_classes", "an integer >= 3 for adacos", num_classes)
    radius = "adaptive" if dynamic else math.sqrt(2) * math.log(num_classes - 1)
    return AngularHead(in_features, num_classes, radius=radius, **options)


@_suggest_options
def elasticface(
    in_features: int,
    num_classes: int,
    s: float = 64.0,
    m: float = 0.5,
    sigma: float = 0.05,
    **options: Unpack[HeadOptions],
) -> AngularHead:
    """ElasticFace: ArcFace with a margin drawn from N(m, σ) for each sample; m in evaluation (Boutros et al. 2022)."""
    return AngularHead(in_features, num_classes, radius=_radius(s), margin=RandomAngle(m, sigma), **options)


@_suggest_options
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


@_suggest_options
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
    radius = _radius(s)
    return AngularHead(
        in_features,
        num_classes,
        radius=radius if normalization == "hard" else "feature",
        margin=TruncatedMultiplicative(m) if version == 1 else DividedOthers(m),
        norm_weight=norm_weight if normalization == "soft" else 0.0,
        norm_target=radius,
        **HeadOptions(gradient="detached") | options,
    )


@_suggest_options
def sphereface2(
    in_features: int,
    num_classes: int,
    s: float = 40.0,
    m: float | None = None,
    t: float = 3.0,
    *,
    variant: str = "C",
    balance: float = 0.7,
    margin: str | Margin | None = None,
    gradient: str = "detached",
    ramp: Ramp | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> BinaryHead:
    """SphereFace2: C binary classifiers with a margin and an analytic initial bias (Wen et al. 2022).

    The variants are those of the paper: "C" lowers the target's response by m and raises the others' (m = 0.4 by
    default), "A" increases the target's angle by m (0.5), "M" multiplies it by m up to π (1.5). `margin` replaces them
    and excludes `m`. For a head without margin use `BinaryHead`.
    """
    require(m is None or margin is None, "m", "None if margin is given", m)
    names = ", ".join(map(repr, _SPHEREFACE2))
    require(isinstance(variant, str) and variant in _SPHEREFACE2, "variant", f"one of {names}", variant)
    require(margin is None or variant == "C", "variant", "'C' if margin is given", variant)
    accepted = "a number in [0, 1] for variant 'C', because responses differ by at most 2 and by 2m with the margin"
    require(m is None or variant != "C" or is_number(m, 0, 1), "m", accepted, m)
    kind, default_m = _SPHEREFACE2[variant]
    return BinaryHead(
        in_features,
        num_classes,
        radius=_radius(s),
        balance=balance,
        angular=PowerCosine(t),
        margin=kind(default_m if m is None else m) if margin is None else margin,
        gradient=gradient,
        ramp=ramp,
        ignore_index=ignore_index,
        reduction=reduction,
    )


# The margin of each variant of SphereFace2, with its default m.
_SPHEREFACE2: dict[str, tuple[Callable[[float], Margin], float]] = {
    "C": (TwoSided, 0.4),
    "A": (AdditiveAngle, 0.5),
    "M": (TruncatedMultiplicative, 1.5),
}

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
    "magface": magface,
    "curricularface": curricularface,
    "adacos": adacos,
    "elasticface": elasticface,
    "sphereface_plus": sphereface_plus,
    "sphereface_r": sphereface_r,
    "sphereface2": sphereface2,
}

# Names of the literature for presets. Configs accept them too.
cosface = am_softmax
sphereface = a_softmax
aam_softmax = arcface
PRESET_ALIASES = {"cosface": "am_softmax", "sphereface": "a_softmax", "aam_softmax": "arcface"}
