r"""Skew-symmetric matrices from d(d−1)/2 numbers, and the exponential of one applied to rows.

The numbers are kept as a rectangle that two slices unfold into the strict lower triangle L, S = L − Lᵀ: no index
tables, no more numbers than a rotation has degrees of freedom.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hypersphere import _numerics, sphere

__all__ = [
    "exponential_rows",
    "exponential_rows_gradient",
    "pack",
    "radius_bound",
    "size_of",
    "spectral_radius",
    "unpack",
]


def size_of(numbers: int) -> int:
    """Return d for d(d−1)/2 numbers.

    >>> size_of(10)
    5
    """
    return (1 + math.isqrt(1 + 8 * numbers)) // 2


def unpack(numbers: Tensor) -> Tensor:
    """Return the skew matrices S (…, d, d) of (…, d(d−1)/2) numbers.

    >>> unpack(torch.tensor([1.0, 2.0, 3.0]))
    tensor([[ 0., -2., -3.],
            [ 2.,  0., -1.],
            [ 3.,  1.,  0.]])
    """
    d = size_of(numbers.shape[-1])
    half, odd = d // 2, d % 2
    lower = numbers.new_zeros(*numbers.shape[:-1], d, d)
    if half:
        sheet = numbers.unflatten(-1, (-1, half))
        lower[..., 1 - odd :, :half] = sheet.tril(-odd)
        lower[..., half + odd :, half : d - odd] = sheet[..., :half, :].triu(1 - odd).mT
    return lower - lower.mT


def pack(gradient: Tensor) -> Tensor:
    """Return the gradient (…, d(d−1)/2) of the numbers for a gradient (…, d, d) of S: the transpose of `unpack`."""
    d = gradient.shape[-1]
    half, odd = d // 2, d % 2
    if not half:
        return gradient.new_zeros(*gradient.shape[:-2], 0)
    folded = gradient - gradient.mT
    sheet = folded[..., 1 - odd :, :half].tril(-odd)
    sheet[..., :half, :] += folded[..., half + odd :, half : d - odd].mT.triu(1 - odd)
    return sheet.flatten(-2)


def exponential_rows(
    rows: Tensor, skew: Tensor, radius: float
) -> tuple[Tensor, tuple[Tensor, Tensor, list[float], float]]:
    r"""Return V·exp(S) for rows V, and what its gradient needs, without forming the exponential.

    S has its spectrum on i[−r, r], where exp is a fast Chebyshev series with Bessel coefficients:

        V·exp(S) = J₀(r)·φ₀ + 2·Σ_k J_k(r)·φ_k,   φ_{k+1} = (2/r)·φ_k·S + φ_{k−1},   φ₀ = V

    The series of an entire function converges everywhere, so r need only be an estimate of the largest frequency; it
    has about r + 10 terms.
    """
    scaled = skew / radius
    coefficients = _bessel(radius, _numerics.machine_epsilon(rows.dtype))
    terms = [rows, rows @ scaled]
    result = coefficients[0] * terms[0] + coefficients[1] * terms[1]
    for c in coefficients[2:]:
        terms.append(
            torch.baddbmm(terms[-2], terms[-1], scaled, alpha=2)
            if rows.ndim == 3
            else torch.addmm(terms[-2], terms[-1], scaled, alpha=2)
        )
        result.add_(terms[-1], alpha=c)
    return result, (torch.cat(terms[:-1], -2), scaled, coefficients, radius)


def exponential_rows_gradient(
    memory: tuple[Tensor, Tensor, list[float], float], gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of S: the recurrence run backwards (Clenshaw), one product for S."""
    terms, scaled, coefficients, radius = memory
    back = scaled.mT
    later, now = torch.zeros_like(gradient), coefficients[-1] * gradient
    adjoints = [2 * now]
    for c in coefficients[-2:0:-1]:
        step = (2 * (now @ back)).add_(later).add_(gradient, alpha=c)
        later, now = now, step
        adjoints.append(2 * now)
    adjoints[-1] = now  # φ_1 is φ_0·S/r, without the factor 2
    rows = (now @ back).add_(later).add_(gradient, alpha=coefficients[0])
    return rows, (terms.mT @ torch.cat(adjoints[::-1], -2)) / radius


def spectral_radius(skew: Tensor) -> float:
    """Estimate the largest ‖S‖₂ of a batch by a few steps of power iteration, and add a tenth; it may be too small."""
    d = skew.shape[-1]
    peak = float(skew.abs().amax()) if skew.numel() else 0.0
    if not 0 < peak < math.inf:
        return 1.0
    skew = skew / peak
    x = torch.linspace(0.5, 1.5, d, dtype=skew.dtype, device=skew.device).unsqueeze(-1)
    x = x.expand(*skew.shape[:-1], 1) / x.norm()
    size = x.new_zeros(())
    for _ in range(12):
        x = skew @ x
        size = x.norm(dim=-2, keepdim=True)
        x = x / size.masked_fill(size == 0, 1.0)
    return max(1.1 * peak * float(size.max()), 0.1)


def radius_bound(skew: Tensor) -> float:
    """Return a number that the largest ‖S‖₂ of a batch is never above: the smaller of ‖S‖₁ and ‖S‖_F/√2.

    >>> radius_bound(unpack(torch.tensor([3.0])))
    3.0
    """
    frobenius = sphere.norm(skew.flatten(-2)) / math.sqrt(2)  # singular values come in pairs
    bound = float(torch.minimum(skew.abs().sum(-1).amax(-1), frobenius).amax())
    return max(bound, 0.1) if math.isfinite(bound) else 1.0


def _bessel(radius: float, tolerance: float) -> list[float]:
    """J_0(r), 2J_1(r), 2J_2(r)… down to `tolerance`, by Miller's backward recurrence."""
    count = int(radius) + 3
    while count * math.log(max(2 * count / (math.e * radius), 1.0)) < -math.log(tolerance * tolerance):
        count += 1
    values = [0.0] * (count + 2)
    values[count] = 2.0**-1000  # any small start; the sum below sets the scale
    for k in range(count, 0, -1):
        values[k - 1] = 2 * k / radius * values[k] - values[k + 1]
    total = values[0] + 2 * sum(values[2::2])
    scaled = [values[0] / total, *(2 * v / total for v in values[1:])]
    last = max((k for k, v in enumerate(scaled) if abs(v) > tolerance), default=0)
    return scaled[: max(last + 1, 2)]
