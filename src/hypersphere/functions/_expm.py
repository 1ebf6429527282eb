r"""The exponential of a skew-symmetric matrix, applied to rows without forming the exponential."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hypersphere import _numerics, sphere


def exponential_series(rows: Tensor, skew: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    r"""Return V·exp(S) for rows V, and the terms φ₀ … φ_{K−1}, stacked along the rows, which the gradient needs.

    The spectrum of a skew S is in i[−r, r] with r = ‖S‖₂. There, exp has a Chebyshev series with Bessel coefficients:

        V·exp(S) = J₀(r)·φ₀ + 2·Σ_k J_k(r)·φ_k,   φ₀ = V,   φ₁ = φ₀·S/r,   φ_{k+1} = 2·φ_k·S/r + φ_{k−1}

    The coefficients fall faster than exponentially once k > r, so about r + 10 terms suffice. exp is entire, hence the
    series also converges if `radius` is somewhat too small.
    """
    scaled = skew / radius
    coefficients = _bessel_coefficients(radius, _numerics.machine_epsilon(rows.dtype))
    terms = [rows, rows @ scaled]
    result = coefficients[0] * terms[0] + coefficients[1] * terms[1]
    for coefficient in coefficients[2:]:
        terms.append(_add_twice_product(terms[-2], terms[-1], scaled))
        result.add_(terms[-1], alpha=coefficient)
    return result, torch.cat(terms[:-1], -2)


def _add_twice_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return X + 2·A·B in one fused call, which torch has for up to one batch dimension."""
    if x.ndim == 2:
        return torch.addmm(x, a, b, alpha=2)
    return torch.baddbmm(x, a, b, alpha=2) if x.ndim == 3 else torch.add(x, a @ b, alpha=2)


def exponential_series_gradient(terms: Tensor, skew: Tensor, radius: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the gradients of the rows and of S, given the terms of `exponential_series` for the same S and radius.

    The adjoints ψ_k of φ_k follow from the recurrence run backwards (Clenshaw):

        ψ_k = c_k·G + 2·ψ_{k+1}·(S/r)ᵀ + ψ_{k+2}

    The gradient of S is the sum of φ_kᵀ·2ψ_{k+1}/r over k, computed as one product of the stacked terms.
    """
    transposed = skew.mT / radius
    coefficients = _bessel_coefficients(radius, _numerics.machine_epsilon(terms.dtype))
    next_adjoint, adjoint = torch.zeros_like(grad), coefficients[-1] * grad  # ψ_{K+1} and ψ_K
    factors = [2 * adjoint]  # of φ_kᵀ in the gradient of S, from k = K−1 down to 0
    for coefficient in coefficients[-2:0:-1]:
        previous = (2 * (adjoint @ transposed)).add_(next_adjoint).add_(grad, alpha=coefficient)
        next_adjoint, adjoint = adjoint, previous
        factors.append(2 * adjoint)
    factors[-1] = adjoint  # φ₁ = φ₀·S/r has no factor 2
    grad_rows = (adjoint @ transposed).add_(next_adjoint).add_(grad, alpha=coefficients[0])
    return grad_rows, (terms.mT @ torch.cat(factors[::-1], -2)) / radius


def spectral_radius(skew: Tensor) -> float:
    """Estimate the largest ‖S‖₂ of a batch by 12 power iterations, plus 10 %.

    The estimate can be too small if the start is nearly orthogonal to the dominant plane. `Exponential` detects this.
    """
    d = skew.shape[-1]
    peak = float(skew.abs().amax()) if skew.numel() else 0.0
    if not 0 < peak < math.inf:
        return 1.0
    skew = skew / peak  # so that no norm overflows
    # A fixed start keeps the result deterministic. Its entries differ, because generators with a regular pattern often
    # annihilate a constant vector.
    x = torch.linspace(0.5, 1.5, d, dtype=skew.dtype, device=skew.device).unsqueeze(-1)
    x = x.expand(*skew.shape[:-1], 1) / x.norm()
    length = x.new_zeros(())
    for _ in range(12):
        x = skew @ x
        length = x.norm(dim=-2, keepdim=True)
        x = x / length.masked_fill(length == 0, 1.0)
    return max(1.1 * peak * float(length.max()), 0.1)  # S is divided by the radius, so it must not be zero


def radius_bound(skew: Tensor) -> float:
    """Return an upper bound of the largest ‖S‖₂ of a batch: the smaller of ‖S‖₁ and ‖S‖_F/√2.

    >>> radius_bound(torch.tensor([[0.0, -3.0], [3.0, 0.0]]))
    3.0
    """
    frobenius = sphere.norm(skew.flatten(-2)) / math.sqrt(2)  # singular values of a skew matrix come in pairs
    bound = float(torch.minimum(skew.abs().sum(-1).amax(-1), frobenius).amax())
    return max(bound, 0.1) if math.isfinite(bound) else 1.0


def _bessel_coefficients(radius: float, tolerance: float) -> list[float]:
    """Return J₀(r), 2J₁(r), 2J₂(r), … down to `tolerance`, by Miller's backward recurrence."""
    # Start the recurrence where J_k ≈ (er/2k)^k is below the square of the tolerance.
    count = int(radius) + 3
    while count * math.log(max(2 * count / (math.e * radius), 1.0)) < -math.log(tolerance * tolerance):
        count += 1
    values = [0.0] * (count + 2)
    values[count] = 2.0**-1000  # any small number: the recurrence is linear, and the scale is set below
    for k in range(count, 0, -1):
        values[k - 1] = 2 * k / radius * values[k] - values[k + 1]
    total = values[0] + 2 * sum(values[2::2])  # J₀ + 2J₂ + 2J₄ + … = 1
    scaled = [values[0] / total, *(2 * v / total for v in values[1:])]
    # Coefficients fall once k > r, so all of them after the last one above the tolerance are negligible.
    last = max((k for k, v in enumerate(scaled) if abs(v) > tolerance), default=0)
    return scaled[: max(last + 1, 2)]
