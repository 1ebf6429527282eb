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
    "cosine",
    "cosines",
    "distance_floor",
    "full_precision",
    "inspectable",
    "narrow",
    "norm",
    "normalize",
    "polar",
    "require_finite_rows",
    "widen",
]

_HALF = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is half precision, unchanged otherwise."""
    return x.float() if x.dtype in _HALF else x


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` as `dtype`; what float16 cannot hold saturates at its largest number instead of becoming infinite."""
    if x.dtype == dtype:
        return x
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off on the device of `x`, so that products of widened tensors stay wide."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def _zero_floor(dtype: torch.dtype) -> float:
    """The largest entry below which a vector counts as zero: below it entries are denormal, direction noise."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def distance_floor(dtype: torch.dtype) -> float:
    r"""The smallest chord that a matrix of cosines in `dtype` can tell from zero: √(8·eps).

    2 − 2c is rounded by a few eps, so a shorter chord is noise. It is 9.8e-4 in float32 (and in half precision, which
    is computed there), 4.2e-8 in float64. Energies take no distance smaller than this, so coincident vectors have a
    finite energy and no gradient.
    """
    return math.sqrt(8 * torch.finfo(torch.float32 if dtype in _HALF else dtype).eps)


def polar(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    r"""Split vectors into their norms (dimension kept) and directions, in float32 or wider.

    >>> polar(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    (tensor([[5.],
            [0.]]), tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]]))
    """
    x = widen(x)
    peak = x.detach().abs().amax(dim, keepdim=True)
    zero = peak < _zero_floor(x.dtype)  # a NaN is not below it, and so is not hidden
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
    return polar(x, dim)[1].to(x.dtype)


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
    outside = wide.abs() >= 1  # a NaN is not outside, and so stays one
    theta = wide.masked_fill(outside, 0.0).acos()
    return theta.masked_fill(outside, 0.0).masked_fill(wide <= -1, math.pi).to(c.dtype)


def inspectable(*tensors: Tensor) -> bool:
    """Whether Python may look at the numbers: not while compiling or exporting, under `torch.func`, or on meta."""
    if torch.compiler.is_compiling():
        return False
    return not any(t.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def require_finite_rows(name: str, x: Tensor) -> None:
    """Raise a `ValueError` that names the first row of `x` with a NaN or an infinity."""
    if x.numel() and inspectable(x) and not bool(torch.isfinite(x.detach().sum())):
        bad = (~torch.isfinite(x.detach())).flatten(1).any(1).nonzero().flatten().tolist()
        if bad:  # a finite but huge matrix may overflow in the sum
            raise ValueError(f"{name} must be finite, but row {bad[0]} is not ({len(bad)} such rows of {len(x)})")
