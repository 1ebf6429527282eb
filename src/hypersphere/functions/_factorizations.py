r"""Matrix factorisations behind the orthogonal maps: skew matrices from a vector, Q of P = QT, and U of P = UH.

All functions work on batches of square matrices (…, d, d).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hypersphere import _numerics

# Skew matrices -------------------------------------------------------------------------------------------------------


def skew_size(count: int) -> int:
    """Return d for d(d−1)/2 parameters.

    >>> skew_size(10)
    5
    """
    return (1 + math.isqrt(1 + 8 * count)) // 2


def unpack_skew(entries: Tensor) -> Tensor:
    """Return the skew matrices S = L − Lᵀ (…, d, d) of the vectors (…, d(d−1)/2).

    The entries fill a rectangle of d//2 columns. Its lower part is the left half of the strict lower triangle L, its
    upper part is the right half, transposed. So two slices unpack it, without tables of indices:

        d = 4    a b    . . . .        d = 5    a b    . . . . .
                 c d    a . . .                 c d    c . . . .
                 e f    c d . .                 e f    e f . . .
                        e f b .                 g h    g h a . .
                                                i j    i j b d .

    >>> unpack_skew(torch.tensor([1.0, 2.0, 3.0]))
    tensor([[ 0., -2., -3.],
            [ 2.,  0., -1.],
            [ 3.,  1.,  0.]])
    """
    d = skew_size(entries.shape[-1])
    half, odd = d // 2, d % 2
    lower = entries.new_empty(*entries.shape[:-1], d, d)
    if half:
        rectangle = entries.unflatten(-1, (-1, half))
        # Each slice also copies entries of the other one, to places on and above the diagonal, where `tril_` removes
        # them. For d = 4 the first slice writes b on the diagonal, and the second one writes it below.
        lower[..., 1 - odd :, :half] = rectangle
        lower[..., half + odd :, half : d - odd] = rectangle[..., :half, :].mT
    lower = lower.tril_(-1)
    return lower - lower.mT


def pack_skew(grad: Tensor) -> Tensor:
    """Return the gradient (…, d(d−1)/2) of the entries for a gradient (…, d, d) of S: `unpack_skew` transposed."""
    d = grad.shape[-1]
    half, odd = d // 2, d % 2
    if not half:
        return grad.new_zeros(*grad.shape[:-2], 0)
    difference = grad - grad.mT
    rectangle = difference[..., 1 - odd :, :half].tril(-odd)
    rectangle[..., :half, :] += difference[..., half + odd :, half : d - odd].mT.triu(1 - odd)
    return rectangle.flatten(-2)


def pack_generator(s: Tensor) -> Tensor:
    """Return the free parameters of a skew matrix: the inverse of `unpack_skew`."""
    return pack_skew(s) / 2  # the transpose of unpacking counts both occurrences of each entry


# The generator of a rotation by 180° is infinite. From this size of its entries on, float32 parameters do not represent
# the rotation accurately.
_LARGEST_GENERATOR = 1e5


def cayley_generator(r: Tensor) -> Tensor:
    r"""Return the skew S with R = (I+S)(I−S)⁻¹, which is (R−I)(R+I)⁻¹.

    Raises:
        ValueError: R is not orthogonal, or it rotates a plane by 180° or reflects, so that S would be infinite.

    Example:
        >>> cayley_generator(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        tensor([[ 0., -1.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    r = _numerics.to_float64(r)
    eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    is_orthogonal = gram_error(r).abs() <= _numerics.rotation_tolerance(torch.float32)
    if not bool(is_orthogonal.all()):
        raise ValueError("a matrix of the rotation is not orthogonal")
    s = solve_from_right(r + eye, r - eye)
    # Tested before S is made skew: the symmetric part that a reflection has would be lost.
    if not bool((s.abs() < _LARGEST_GENERATOR).all()):  # also True for the NaN of a singular R+I
        raise ValueError("a matrix of the rotation turns a plane by 180° or reflects, which has no finite generator")
    return (s - s.mT) / 2


def logarithm(r: Tensor) -> Tensor:
    r"""Return the principal logarithm of R: the skew A with exp(A) = R whose angles are in (−180°, 180°).

    R = (I+S)(I−S)⁻¹ has the eigenvectors of S, and iμ of S becomes e^(2i·arctan μ). The Hermitian matrix iS has
    orthonormal eigenvectors even if eigenvalues repeat.

    Example:
        >>> logarithm(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        tensor([[ 0.0000, -1.5708],
                [ 1.5708,  0.0000]], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(1j * cayley_generator(r))
    angles = -2 * torch.atan(values)
    a = ((vectors * (1j * angles).unsqueeze(-2)) @ vectors.mH).real
    return (a - a.mT) / 2


# Equations with a general matrix -------------------------------------------------------------------------------------

# In torch 2.13 with MKL and several threads, the LU factorisation of a batch of matrices is wrong from size 160 on.
_LARGEST_BATCHED_LU = 128


def solve_from_right(a: Tensor, v: Tensor) -> Tensor:
    """Return Z with Z·A = V. A must be invertible; this is not checked, because a check would wait for the device.

    >>> solve_from_right(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([[0.5000, 0.2500]])
    """
    is_batch = a.ndim > 2 and a.shape[-1] > _LARGEST_BATCHED_LU
    if is_batch and a.device.type == "cpu":
        size = torch.broadcast_shapes(a.shape[:-2], v.shape[:-2])
        matrices, rows = (x.expand(*size, *x.shape[-2:]).flatten(0, -3) for x in (a, v))
        solutions = [torch.linalg.solve_ex(*pair, left=False)[0] for pair in zip(matrices, rows, strict=True)]
        return torch.stack(solutions).unflatten(0, size)
    return torch.linalg.solve_ex(a, v, left=False)[0]


class SkewSeries(NamedTuple):
    r"""The terms of (I−S)⁻¹ = (I+S)(I + A + A² + ⋯) for skew matrices S, with A = S².

    After `terms` terms in A, the remainder is A^terms·(I−S)⁻¹, whose norm is at most ‖A‖₂^terms.
    """

    s: Tensor
    square: Tensor  # A, which is symmetric
    terms: int


# More terms cost more than the LU factorisation that replaces the series.
_MOST_SKEW_TERMS = 16


def skew_series(s: Tensor) -> SkewSeries | None:
    r"""Return the series of (I−S)⁻¹ that is accurate to working precision, or None if it would be too long.

    The norms of the matrices decide the number of terms: one for S = 0, three for ‖S‖₂ ≈ 0.05 in float32. The singular
    values of a skew matrix are pairs, and so are those of A, therefore ‖A‖₂ ≤ ‖A‖_F/√2. A batch takes the number of
    terms that its largest matrix needs.
    """
    square = product(s, s)
    terms = _series_terms(_paired_norm(square), s.dtype)
    if terms > _MOST_SKEW_TERMS:  # ‖A‖₂² = ‖A²‖₂ is a tighter bound, which costs one more product
        terms = _series_terms(math.sqrt(_paired_norm(product(square, square))), s.dtype)
    return SkewSeries(s, square, int(terms)) if terms <= _MOST_SKEW_TERMS else None


def _paired_norm(a: Tensor) -> float:
    """Return an upper bound of ‖A‖₂ over a batch of matrices whose singular values are pairs (and a single zero)."""
    return float(torch.linalg.vector_norm(a, dim=(-2, -1)).amax()) / math.sqrt(2)


def _series_terms(ratio: float, dtype: torch.dtype) -> float:
    """Return the number of terms after which ratio^terms is negligible. It is infinite if the series diverges."""
    remainder = _numerics.machine_epsilon(dtype)
    if ratio <= remainder:
        return 1
    return math.ceil(math.log(remainder) / math.log(ratio)) if ratio < 1 else math.inf  # also for NaN


def cayley_from_series(series: SkewSeries) -> Tensor:
    """Return R = (I+S)(I−S)⁻¹ = 2(I−S)⁻¹ − I."""
    s, a, terms = series
    if terms == 1:
        r = 2 * s
        r.diagonal(dim1=-2, dim2=-1).add_(1)
        return r
    total = a.clone()
    total.diagonal(dim1=-2, dim2=-1).add_(1)  # I + A
    if terms > 2:
        # Horner's rule in B = A²: T ← (I + A) + B·T adds two terms per product, starting from T = I + A + A².
        linear, b = total, product(a, a)
        total = linear + b
        for _ in range((terms - 2) // 2):
            total = add_product(linear, b, total)
    # 2(I+S)·(I + A + ⋯) − I
    r = add_product(total, s, total, beta=2, alpha=2)
    r.diagonal(dim1=-2, dim2=-1).sub_(1)
    return r


def apply_skew_series(rows: Tensor, series: SkewSeries, *, transposed: bool = False) -> Tensor:
    """Return V·(I−S)⁻¹ for rows V, or V·(I−S)⁻ᵀ = V·(I+S)⁻¹. With few rows, this is cheaper than the matrix."""
    total = rows
    for _ in range(series.terms - 1):  # Horner's rule: V + (V + ⋯)·A
        total = add_product(rows, total, series.square)
    return add_product(total, total, series.s, alpha=-1 if transposed else 1)


def cayley_gradient(r: Tensor, grad: Tensor) -> Tensor:
    r"""Return the gradient of the entries of S for a gradient G of R = (I+S)(I−S)⁻¹.

    With M = (I−S)⁻¹ = (I+R)/2, dR = 2M·dS·M. So the gradient of S is 2Mᵀ·G·Mᵀ = (I+Rᵀ)·G·(I+Rᵀ)/2.
    """
    left = add_product(grad, r.mT, grad)
    return pack_skew(add_product(left, left, r.mT, beta=0.5, alpha=0.5))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return A·B of matrices or of batches of matrices. `torch.bmm` takes fewer operations than `@` for a batch."""
    return torch.bmm(a, b) if a.ndim == b.ndim == 3 else a @ b


def add_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return βC + α·A·B of matrices or of batches of matrices, in one operation where torch has it."""
    if a.ndim == b.ndim == 3:
        return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    if a.ndim == b.ndim == 2:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    return beta * c + alpha * (a @ b)


def add_product_(c: Tensor, a: Tensor, b: Tensor) -> None:
    """Add A·B to C in place."""
    if a.ndim == b.ndim == 3:
        c.baddbmm_(a, b)
    else:
        c.add_(a @ b)


# Q of P = QT, with T upper triangular and positive on the diagonal ----------------------------------------------------


def diagonal_signs(triangle: Tensor) -> Tensor:
    """Return the signs of the diagonal (…, d), where the sign of zero is 1."""
    diagonal = triangle.detach().diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal < 0, -torch.ones_like(diagonal), torch.ones_like(diagonal))


def zeros_of_diagonal(triangle: Tensor) -> Tensor:
    """Return 1 where the diagonal of T is zero and 0 elsewhere (…, d). T is invertible if there is no 1."""
    diagonal = triangle.detach().diagonal(dim1=-2, dim2=-1)
    return (diagonal < _numerics.zero_floor(diagonal.dtype)).to(triangle.dtype)


def gram_error(q: Tensor) -> Tensor:
    """Return QᵀQ − I."""
    return q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)


def is_orthogonal(q: Tensor) -> bool:
    """Return True if QᵀQ = I up to `rotation_tolerance`."""
    return bool((gram_error(q).abs() <= _numerics.rotation_tolerance(q.dtype)).all())


def newton_schulz_step(q: Tensor, gram: Tensor | None = None) -> Tensor:
    """Return Q(3I − QᵀQ)/2, which squares the error of a nearly orthogonal Q. `gram` is QᵀQ if it is known."""
    return 1.5 * q - 0.5 * q @ (q.mT @ q if gram is None else gram)


def gram_lower_triangle(p: Tensor) -> Tensor:
    """Return the lower triangle of PᵀP, which is all that symmetric factorisations read.

    Four panels skip the blocks above the diagonal: 5/8 of the work of the full product.
    """
    gram, width = torch.zeros_like(p), math.ceil(p.shape[-1] / 4)
    for i in range(0, p.shape[-1], width):
        gram[..., i:, i : i + width] = p[..., i:].mT @ p[..., i : i + width]
    return gram


def product_with_lower_triangle(q: Tensor, lower: Tensor) -> Tensor:
    """Return Q·L for a lower triangular L in four panels: 5/8 of the work of the full product."""
    width = math.ceil(q.shape[-1] / 4)
    panels = [q[..., i:] @ lower[..., i:, i : i + width] for i in range(0, q.shape[-1], width)]
    return torch.cat(panels, -1)


def cholesky_qr(p: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return Q, T and whether the factorisation succeeded, by the Cholesky factorisation TᵀT = PᵀP.

    It consists of fast products and solves, but PᵀP squares the condition number of P.
    """
    lower, info = torch.linalg.cholesky_ex(gram_lower_triangle(p))
    q = torch.linalg.solve_triangular(lower.mT, p, upper=True, left=False)
    return q, lower.mT, not bool((info != 0).any())


def householder_qr(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and T by reflections. Stable for every P."""
    q, triangle = torch.linalg.qr(p)
    signs = diagonal_signs(triangle)
    return q * signs.unsqueeze(-2), triangle * signs.unsqueeze(-1)


def modified_gram_schmidt(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and T. Each new direction is removed from all later columns at once (thesis, F.3)."""
    # Scale by the largest entry, so that no column norm overflows or underflows.
    peak = p.abs().amax((-2, -1), keepdim=True) if p.numel() else p.new_ones(1, 1)
    peak = peak.masked_fill(peak == 0, 1.0)
    columns, triangle = p / peak, torch.zeros_like(p)
    for j in range(p.shape[-1]):
        direction = columns[..., :, j : j + 1]
        length = direction.norm(dim=-2, keepdim=True)
        direction = direction / length.masked_fill(length == 0, 1.0)  # a dependent column gives the direction zero
        coefficients = direction.mT @ columns[..., :, j:]
        columns[..., :, j:] -= direction @ coefficients
        columns[..., :, j : j + 1] = direction
        triangle[..., j : j + 1, j:] = coefficients
    return columns, triangle * peak


def q_gradient_coordinates(grad_rotated: Tensor, v: Tensor, triangle: Tensor) -> Tensor:
    r"""Return QᵀdP = tril(A − Aᵀ, −1)·T⁻ᵀ with A = QᵀGᵀV, where dP is the gradient of P for a gradient G of V·Qᵀ.

    Changes of P that only change T do not contribute. `grad_rotated` is G·Q.
    """
    a = grad_rotated.mT @ v
    below = (a - a.mT).tril(-1)
    # A singular P has no unique Q. Replace the zeros on the diagonal of T, so that the gradient stays finite.
    triangle = triangle + torch.diag_embed(zeros_of_diagonal(triangle))
    return torch.linalg.solve_triangular(triangle.mT, below, upper=False, left=False)


# The polar factor of P = UH, H = B·diag(σ)·Bᵀ -------------------------------------------------------------------------


def finite_or_identity(p: Tensor) -> Tensor:
    """Return P, and I in place of a matrix that is not finite, for which LAPACK's iterations need not converge."""
    is_finite = torch.isfinite(p).all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(is_finite, p, torch.eye(p.shape[-1], dtype=p.dtype, device=p.device))


def zero_or_nan(p: Tensor) -> Tensor:
    """Return 0 for a finite matrix and NaN for any other (…, 1, 1)."""
    return (p * 0).sum((-2, -1), keepdim=True)


def polar_by_eigenvectors(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U·B, σ and B from the eigenvectors of PᵀP = B·diag(σ²)·Bᵀ. Inaccurate if P is ill-conditioned."""
    squares, basis = torch.linalg.eigh(finite_or_identity(gram_lower_triangle(p)))
    sigma = squares.clamp_min(0).sqrt()
    sigma = sigma.masked_fill(sigma == 0, 1.0)  # a singular P has no nearest orthogonal matrix: stay finite
    return p @ (basis / sigma.unsqueeze(-2)), sigma, basis


def singular_vectors(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U·B, σ and B from the SVD of P = (U·B)·diag(σ)·Bᵀ. Finite for every P, see `zero_or_nan`."""
    left, sigma, right_t = torch.linalg.svd(finite_or_identity(p))
    sigma = sigma.masked_fill(sigma == 0, 1.0)  # as above
    return left, sigma, right_t.mT


def sylvester_in_basis(c: Tensor, basis: Tensor, sigma: Tensor) -> Tensor:
    r"""Return the solution X of HX + XH = C for H = B·diag(σ)·Bᵀ.

    Only sums of singular values are divided by, never differences, so repeated singular values cause no problem.
    """
    inner = (basis.mT @ c @ basis) / (sigma.unsqueeze(-1) + sigma.unsqueeze(-2))
    return basis @ inner @ basis.mT
