r"""Directions, cosines and angles that never turn into NaN.

Every epsilon of the library lives here, and so does its only arc cosine. Three rules hold throughout:

* half precision is widened to float32 before anything is computed, and results go back to the caller's type;
* a zero vector has no direction: it becomes the zero vector, with zero gradient;
* a huge vector keeps its direction: rows are scaled by their largest entry before they are squared.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

__all__ = [
    "angle",
    "angle_slope",
    "cosine",
    "cosines",
    "cotangent",
    "directions",
    "distance_floor",
    "elevation_",
    "full_precision",
    "inspectable",
    "may_become_state",
    "narrow",
    "norm",
    "normalize",
    "off_poles",
    "parallel_width",
    "polar",
    "quick_polar",
    "rank_floor",
    "require_finite_rows",
    "resolution",
    "safe_scale",
    "sine_",
    "squared_distance_floor",
    "squares_are_safe",
    "tie_width",
    "unit_scale",
    "vanishes",
    "widen",
    "widen_weight",
    "widest",
]

_HALF = (torch.float16, torch.bfloat16)
SENSIBLE = (1e-6, 1e6)  # steepnesses and radii outside lose all digits in float32


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is half precision, in the default type if it is an integer, else unchanged.

    On its way back a gradient that float16 cannot hold becomes infinite, which is what gradient scalers look for.
    """
    if x.dtype in _HALF:
        return x.float()
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def widen_weight(w: Tensor) -> Tensor:
    """Widen a parameter; on its way back a gradient that float16 cannot hold saturates, since no scaler watches it."""
    wide = widen(w)
    if w.dtype == torch.float16 and wide.requires_grad and inspectable(w):
        largest = torch.finfo(w.dtype).max
        wide.register_hook(lambda gradient: gradient.clamp(-largest, largest))
    return wide


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` as `dtype`; what float16 cannot hold saturates at its largest number, and keeps its gradient."""
    if x.dtype == dtype or not dtype.is_floating_point:
        return x
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = x.detach().clamp(-largest, largest) + (x - x.detach())
    return x.to(dtype)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off on the device of `x`, so that products of widened tensors stay wide."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def _zero_floor(dtype: torch.dtype) -> float:
    """The largest entry below which a vector counts as zero: below it entries are denormal, direction noise."""
    info = torch.finfo(dtype)
    return info.tiny if dtype == torch.float16 else info.tiny / info.eps


def resolution(dtype: torch.dtype) -> float:
    """The relative step from one number of the type to the next: what no sum or series need go below."""
    return float(torch.finfo(dtype).eps)


def distance_floor(dtype: torch.dtype) -> float:
    r"""The smallest chord that a matrix of cosines in `dtype` can tell from zero: √(8·eps).

    2 − 2c is rounded by a few eps, so a shorter chord is noise. It is 9.8e-4 in float32 (and in half precision, which
    is computed there), 4.2e-8 in float64. Energies take no distance smaller than this, so coincident vectors have a
    finite energy and no gradient.
    """
    return math.sqrt(8 * torch.finfo(torch.float32 if dtype in _HALF else dtype).eps)


def squared_distance_floor(dtype: torch.dtype, power: float = 0.0) -> float:
    r"""The square of `distance_floor`, raised for large powers s so that z^−s, its derivative and sums stay finite.

    It is (max/(10⁴s²))^(−2/(s+4)), max the type's largest number, where that is larger: in float32 from s = 7 on (a
    distance of 0.27 at s = 50), in float64 from s = 34 on.
    """
    largest = torch.finfo(torch.float32 if dtype in _HALF else dtype).max
    room = largest / (1e4 * max(power, 1.0) ** 2)
    return max(distance_floor(dtype) ** 2, float(room ** (-2 / (power + 4))))


def polar(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    r"""Split vectors into their norms (dimension kept) and directions, in float32 or wider.

    >>> polar(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    (tensor([[5.],
            [0.]]), tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]]))
    """
    floor = _zero_floor(x.dtype if x.is_floating_point() else torch.get_default_dtype())
    x = widen(x)
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True), x
    peak = x.detach().abs().amax(dim, keepdim=True)
    zero = peak < floor  # a NaN is not below it, and so is not hidden
    peak = peak.masked_fill(zero, 1.0)
    scaled = x / peak
    length = scaled.square().sum(dim, keepdim=True).masked_fill(zero, 1.0).sqrt()
    return (peak * length).masked_fill(zero, 0.0), (scaled / length).masked_fill(zero, 0.0)


def norm(x: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    r"""Euclidean norm ‖x‖, finite in gradient at zero and without overflow for huge entries.

    >>> norm(torch.tensor([3e20, 4e20]))
    tensor(5.0000e+20)
    """
    length = narrow(polar(x, dim)[0], x.dtype)
    return length if keepdim else length.squeeze(dim)


def normalize(x: Tensor, dim: int = -1) -> Tensor:
    r"""Direction x̂ = x/‖x‖; the zero vector stays zero.

    >>> normalize(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return narrow(polar(x, dim)[1], x.dtype)


def cosine(x: Tensor, w: Tensor, dim: int = -1) -> Tensor:
    r"""Cosine of the angle between corresponding vectors; 0 where either is the zero vector.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor(0.7071)
    """
    c = (polar(x, dim)[1] * polar(w, dim)[1]).sum(dim)
    return c.to(torch.promote_types(x.dtype, w.dtype))


def cosines(x: Tensor, w: Tensor) -> Tensor:
    r"""All cosines between the rows of `x` (B, d) and the rows of `w` (C, d), as a (B, C) matrix.

    >>> cosines(torch.eye(2), torch.tensor([[1.0, 1.0]]))
    tensor([[0.7071],
            [0.7071]])
    """
    with full_precision(x):
        x_hat, w_hat = polar(x)[1], polar(w)[1]
        wide = torch.promote_types(x_hat.dtype, w_hat.dtype)
        c = x_hat.to(wide) @ w_hat.to(wide).mT
    return c.to(torch.promote_types(x.dtype, w.dtype))


def angle(c: Tensor) -> Tensor:
    r"""The angle θ = arccos c in [0, π] of a cosine that rounding may have pushed beyond ±1.

    The derivative −1/√(1−c²) is exact inside and zero at and beyond ±1, where the true one is infinite.

    >>> angle(torch.tensor([1.0000001, 0.0, -2.0]))
    tensor([0.0000, 1.5708, 3.1416])
    """
    wide = widen(c)
    if not (wide.requires_grad and torch.is_grad_enabled()):
        return narrow(wide.clamp(-1, 1).acos(), c.dtype)
    outside = wide.abs() >= 1  # a NaN is not outside, and so stays one
    theta = wide.masked_fill(outside, 0.0).acos()
    return narrow(theta.masked_fill(outside, 0.0).masked_fill(wide <= -1, math.pi), c.dtype)


def angle_slope(c: Tensor) -> Tensor:
    r"""The derivative dθ/dc = −1/√(1−c²) of `angle`, zero at and beyond ±1.

    >>> angle_slope(torch.tensor([0.0, 0.6, 1.0]))
    tensor([-1.0000, -1.2500,  0.0000])
    """
    squared_sine = (1 - c) * (1 + c)
    return squared_sine.rsqrt().neg_().masked_fill_(squared_sine <= 0, 0.0)


def inspectable(*tensors: Tensor) -> bool:
    """Whether Python may look at the numbers: not while compiling or exporting, under `torch.func`, or on meta."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(_is_plain(t) for t in tensors)


def may_become_state(x: Tensor) -> bool:
    """Whether a buffer may be made of `x`: not in inference mode, nor where a transform of `torch.func` owns it."""
    if torch.compiler.is_compiling():
        return True
    return not (torch.is_inference_mode_enabled() or torch._C._functorch.is_functorch_wrapped_tensor(x))


def _is_plain(t: Tensor) -> bool:
    """A tensor with numbers of its own: no fake one of a tracer, not on meta."""
    fake = type(t).__module__.startswith("torch._subclasses")
    return not (fake or t.is_meta)


def require_finite_rows(name: str, x: Tensor) -> None:
    """Raise a `ValueError` that names the first row of `x` with a NaN or an infinity."""
    if x.numel() and inspectable(x) and not bool(torch.isfinite(x.detach().sum())):
        bad = (~torch.isfinite(x.detach())).flatten(1).any(1).nonzero().flatten().tolist()
        if bad:  # a finite but huge matrix may overflow in the sum
            raise ValueError(f"{name} must be finite, but row {bad[0]} is not ({len(bad)} such rows of {len(x)})")


def quick_polar(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Norms and directions of rows as `polar` gives them, in fewer passes where all rows are of an ordinary length.

    >>> quick_polar(torch.tensor([[3.0, 4.0], [3e30, 4e30]]))[1]
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000]])
    """
    if x.numel() and inspectable(x):
        wide = widen(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        if squares_are_safe(length.detach()):
            return length, wide / length
    return polar(x)


def directions(x: Tensor) -> Tensor:
    r"""Directions of rows as `polar` gives them, by the quick way where it can be.

    >>> directions(torch.tensor([[3.0, 4.0], [3e30, 4e30]]))
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000]])
    """
    return quick_polar(x)[1]


def tie_width(dtype: torch.dtype) -> float:
    """Two cosines closer than this are tied: 16·eps, 1.9e-6 in float32. A product rounds equal pairs differently."""
    return 16 * torch.finfo(torch.float32 if dtype in _HALF else dtype).eps


def rank_floor(dtype: torch.dtype, size: int) -> float:
    """The share of the largest eigenvalue of a (size, size) matrix below which an eigenvalue counts as zero."""
    return size * torch.finfo(dtype).eps


def squares_are_safe(norms: Tensor) -> bool:
    """Whether all these norms are finite and so far from the ends of their type's range that squaring lost nothing."""
    info = torch.finfo(norms.dtype)
    low, high = (float(v) for v in torch.aminmax(norms))
    return info.tiny**0.5 / info.eps < low and high < info.max**0.5 * info.eps  # False for NaN


def rotation_tolerance(dtype: torch.dtype) -> float:
    r"""How far a factorisation may let a rotation stretch a row, relatively, before a stabler one takes over: eps^¾.

    It is 6.5e-6 in float32 and 1.8e-12 in float64.
    """
    return float(torch.finfo(torch.float32 if dtype in _HALF else dtype).eps ** 0.75)


def safe_scale(peak: Tensor) -> Tensor:
    r"""A power of two near 1/peak where squares of such entries would overflow or vanish, and 1 everywhere else.

    >>> safe_scale(torch.tensor([3.0, 1e20, 0.0]))
    tensor([1.0000e+00, 6.7763e-21, 1.0000e+00])
    """
    info = torch.finfo(peak.dtype)
    low, high = math.sqrt(info.tiny / info.eps), math.sqrt(info.max * info.eps)
    return unit_scale(peak.masked_fill((peak >= low) & (peak <= high), 1.0))


def unit_scale(peak: Tensor) -> Tensor:
    r"""The power of two that brings a peak to (½, 1]; 1 for one that is zero or not finite.

    >>> unit_scale(torch.tensor([3.0, 0.5, 0.0]))
    tensor([0.2500, 2.0000, 1.0000])
    """
    usable = (peak > _zero_floor(peak.dtype)) & (peak <= torch.finfo(peak.dtype).max)
    return torch.exp2(-torch.log2(peak.masked_fill(~usable, 1.0)).ceil())


def vanishes(squared_norm: Tensor) -> Tensor:
    """Whether a sum of squares is so small that it says nothing of a direction; a NaN is not, and so is not hidden."""
    return squared_norm < _zero_floor(squared_norm.dtype)


def parallel_width(dtype: torch.dtype) -> float:
    r"""1 − cos of two vectors, taken in float64, below which they are one direction that was rounded to `dtype`.

    It is α²/2 with α = 16·eps, and eps in half precision, but no less than float64's `tie_width`: 1.8e-12 in float32.
    """
    alpha = max(tie_width(dtype), resolution(dtype))
    return max(alpha**2 / 2, tie_width(torch.float64))


def widest(x: Tensor) -> Tensor:
    """Return `x` in float64: where it is if its device has that type, and else in the host's memory.

    >>> widest(torch.tensor([1.0]))
    tensor([1.], dtype=torch.float64)
    """
    try:
        return x.double()
    except (TypeError, RuntimeError):  # which of the two is up to the device
        return x.cpu().double()


def elevation_(c: Tensor) -> Tensor:
    r"""π/2 − θ = arcsin c, the angle from the right angle, written over cosines; for callers with their own derivative.

    >>> elevation_(torch.tensor([1.0000001, 0.0, -2.0]))
    tensor([ 1.5708,  0.0000, -1.5708])
    """
    return c.clamp_(-1, 1).asin_()


def _pole(dtype: torch.dtype) -> float:
    """What stands for the cotangent of a pole: beyond that of any cosine but ±1, and within half precision."""
    return float(torch.finfo(dtype).eps ** (-2 / 3))


def cotangent(c: Tensor) -> Tensor:
    r"""cot θ = c/√(1−c²): near a right angle it is c, near a pole 1/θ, so few bits of it say much at either end.

    >>> cotangent(torch.tensor([0.6, -1.0]))
    tensor([ 7.5000e-01, -4.1285e+04])
    """
    one = torch.ones((), dtype=c.dtype, device=c.device)
    return torch.addcmul(one, c, c, value=-1).clamp_min_(_pole(c.dtype) ** -2).rsqrt_().mul_(c)


def off_poles(gradient: Tensor, t: Tensor) -> Tensor:
    """Gradients where the cotangent `t` is not that of a pole; zero at the poles, as in `angle`."""
    limit = _pole(t.dtype) / 2
    masked: Tensor = torch.ops.aten.hardtanh_backward(gradient, t, -limit, limit)
    return masked


def sine_(t: Tensor) -> Tensor:
    r"""sin θ = 1/√(1+t²), written over cotangents.

    >>> sine_(torch.tensor([0.75, 0.0]))
    tensor([0.8000, 1.0000])
    """
    one = torch.ones((), dtype=t.dtype, device=t.device)
    return torch.addcmul(one, t, t, out=t).rsqrt_()
