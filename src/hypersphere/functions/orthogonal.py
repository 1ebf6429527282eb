r"""Orthogonal maps: free parameters become a rotation of rows, W = V·Rᵀ.

Each entry is a frozen dataclass with two implementations of the same map, see `RowMap`: `expression` in ordinary torch
operations, and kernels that never form R where that can be avoided and that share one factorisation between the forward
and the backward pass. In docstrings and comments, G is the gradient of W.

To add an entry, write a frozen dataclass with `expression` (and `identity`) and list it in ORTHOGONALS.

Reference:
    Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions import _expm
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions._rowmap import Gradients, Residuals, RowMap, norms_preserved

__all__ = [
    "ORTHOGONALS",
    "Cayley",
    "Exponential",
    "Free",
    "GramSchmidt",
    "Householder",
    "Lowdin",
    "Neumann",
    "RowMap",
    "SkewMap",
]


# Maps of a free square matrix P --------------------------------------------------------------------------------------


class _TriangularMap(RowMap):
    r"""R = Q of P = QT, with T upper triangular and positive on the diagonal."""

    def expression(self, free: Float[Tensor, "*batch d d"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·Qᵀ by torch's QR decomposition."""
        # torch's derivative of QR divides by the diagonal of T, which has zeros if P is singular. With E = 1 at these
        # zeros, P + QE = Q(T + E) has the same Q and an invertible triangle. This takes a second decomposition.
        q, triangle = factorizations.householder_qr(free.detach())
        regular = free + q * factorizations.zeros_of_diagonal(triangle).unsqueeze(-2)
        return v @ factorizations.householder_qr(regular)[0].mT


@dataclass(frozen=True)
class GramSchmidt(_TriangularMap):
    r"""Gram–Schmidt on the columns of P: P = QT, T upper triangular with positive diagonal (thesis, F.1).

    The forms agree in exact arithmetic. "classical" computes T by the Cholesky factorisation of PᵀP. "iterative"
    repeats this for Q, which makes Q orthogonal to working precision (thesis, algorithm 2). "modified" projects out one
    column at a time (F.3). If an ill-conditioned P makes the result inaccurate, Householder reflections are used.

    >>> GramSchmidt()(torch.tensor([[3.0, 1.0], [4.0, 1.0]]))
    tensor([[ 0.6000,  0.8000],
            [ 0.8000, -0.6000]])
    """

    form: str = "classical"

    def __post_init__(self) -> None:
        """Check the form."""
        forms = ("classical", "modified", "iterative")
        require(self.form in forms, "form", "'classical', 'modified' or 'iterative'", self.form)

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Qᵀ."""
        if self.form == "modified":
            q, triangle = factorizations.modified_gram_schmidt(free)
            w = v @ q.mT
            # This form normalises columns explicitly, so norms cannot reveal that they are not orthogonal.
            accurate = factorizations.is_orthogonal(q)
        else:
            q, triangle, accurate = factorizations.cholesky_qr(free)
            if self.form == "iterative" and accurate:
                q, second_triangle, accurate = factorizations.cholesky_qr(q)
                # P = Q₁T₁ and Q₁ = Q₂T₂, so P = Q₂·(T₂T₁).
                triangle = second_triangle @ triangle
            w = v @ q.mT
            accurate = accurate and norms_preserved(w, v)
        # PᵀP squares the condition number of P. Reflections work on P itself and are stable, but slower.
        if not accurate:
            q, triangle = factorizations.householder_qr(free)
            w = v @ q.mT
        return w, (q, triangle, v)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return Q·tril(A − Aᵀ, −1)·T⁻ᵀ with A = QᵀGᵀV, and G·Q."""
        q, triangle, v = residuals
        grad_rotated = grad @ q  # the gradient of V, which that of P needs in any case
        coordinates = factorizations.q_gradient_coordinates(grad_rotated, v, triangle)
        return factorizations.product_with_lower_triangle(q, coordinates), grad_rotated


@dataclass(frozen=True)
class Householder(_TriangularMap):
    r"""Q of P by Householder reflections, P = H₁H₂⋯T (thesis, F.6), applied to V without forming Q.

    The signs are those of Gram–Schmidt, so the map is continuous at P = I. In the thesis the sign of the last column
    depends on the parity of d.

    >>> Householder()(torch.tensor([[3.0, 1.0], [4.0, 1.0]]))
    tensor([[ 0.6000,  0.8000],
            [ 0.8000, -0.6000]])
    """

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Qᵀ."""
        reflectors, tau = torch.geqrf(free)
        # LAPACK leaves the signs of T's diagonal open: P = (HD)(DT) with D = diag(±1) makes it positive, and Q = HD.
        signs = factorizations.diagonal_signs(reflectors)
        w = torch.ormqr(reflectors, tau, v * signs.unsqueeze(-2), left=False, transpose=True)
        return w, (reflectors, tau, signs, v)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return Q·tril(A − Aᵀ, −1)·T⁻ᵀ with A = QᵀGᵀV, and G·Q."""
        reflectors, tau, signs, v = residuals
        grad_rotated = torch.ormqr(reflectors, tau, grad, left=False) * signs.unsqueeze(-2)
        # `geqrf` stores T in the upper triangle and the reflections below it.
        triangle = reflectors.triu() * signs.unsqueeze(-1)
        coordinates = factorizations.q_gradient_coordinates(grad_rotated, v, triangle)
        return torch.ormqr(reflectors, tau, coordinates * signs.unsqueeze(-1)), grad_rotated


class _EigenResiduals(NamedTuple):
    """P = U·H by the eigenvectors B of PᵀP: U·B is P·B·diag(1/σ)."""

    free: Tensor  # P
    basis: Tensor  # B
    sigma: Tensor
    inverse_sigma: Tensor  # (…, 1, d)
    v_in_basis: Tensor  # V·B


class _SvdResiduals(NamedTuple):
    """P = U·H by the singular vectors of P: U·B is the left ones, and B the right ones."""

    left: Tensor  # U·B
    basis: Tensor  # B
    sigma: Tensor
    v_in_basis: Tensor  # V·B


@dataclass(frozen=True)
class Lowdin(RowMap):
    r"""Löwdin's symmetric orthogonalisation: U = P(PᵀP)^−½, the orthogonal matrix nearest to P (thesis, F.10).

    With PᵀP = B·diag(σ²)·Bᵀ and A = UᵀGᵀV, the gradient of P is U·X, where X solves HX + XH = A − Aᵀ and
    H = UᵀP = B·diag(σ)·Bᵀ. The solution divides by σ_i + σ_j, so it is finite at repeated singular values and at P = I.

    >>> Lowdin()(torch.tensor([[0.0, -2.0], [3.0, 0.0]]))
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """

    def expression(self, free: Float[Tensor, "*batch d d"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        r"""Return V·Uᵀ. Derivatives are exact up to the third order.

        torch's derivative of the SVD is infinite at repeated singular values, so the SVD gives only the values U₀ and
        H₀. The derivatives come from U = U₀·E(P), where E has the value I and solves "EᵀU₀ᵀP is symmetric". Each of
        three Newton steps makes one more order of derivatives exact: after k steps the error of E is of order δ^(k+1)
        for a change δ of P.
        """
        left, sigma, right_t = torch.linalg.svd(free.detach())
        sigma = sigma.masked_fill(sigma == 0, 1.0)  # a singular P has no nearest orthogonal matrix: stay finite
        basis, nearest = right_t.mT, left @ right_t  # B and U₀
        eye = torch.eye(free.shape[-1], dtype=free.dtype, device=free.device)
        m, correction = nearest.mT @ free, eye.expand_as(free)  # U₀ᵀP, which has the value H₀, and E
        for _ in range(3):
            asymmetry = correction.mT @ m - m.mT @ correction
            # The linearised equation for a rotation exp(X) ≈ I + X of E is H₀X + XH₀ = asymmetry.
            half_step = factorizations.sylvester_in_basis(asymmetry, basis, sigma) / 2
            half_step = (half_step - half_step.mT) / 2  # exactly skew, so that the Cayley factor is orthogonal
            correction = correction @ torch.linalg.solve(eye - half_step, eye + half_step)
        return v @ correction.mT @ nearest.mT

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Uᵀ from the eigenvectors of PᵀP, or from an SVD if P is ill-conditioned."""
        # PᵀP = B·diag(σ²)·Bᵀ. Products with V from the left never form U: V·Uᵀ = ((V·B)/σ)·Bᵀ·Pᵀ.
        squares, basis = torch.linalg.eigh(factorizations.gram_lower_triangle(free))
        sigma = squares.clamp_min(0).sqrt()
        sigma = sigma.masked_fill(sigma == 0, 1.0)  # a singular P has no nearest orthogonal matrix: stay finite
        inverse = sigma.reciprocal().unsqueeze(-2)
        v_in_basis = v @ basis
        w = ((v_in_basis * inverse) @ basis.mT) @ free.mT
        if norms_preserved(w, v):
            return w, _EigenResiduals(free, basis, sigma, inverse, v_in_basis)
        # Small σ are lost in σ². The SVD does not square them, but takes several times as long.
        left, sigma, right_t = torch.linalg.svd(free)
        sigma = sigma.masked_fill(sigma == 0, 1.0)
        v_in_basis = v @ right_t.mT
        return v_in_basis @ left.mT, _SvdResiduals(left, right_t.mT, sigma, v_in_basis)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return U·X and G·U, computed in the basis B, where U·B is P·B·diag(1/σ) or the left singular vectors."""
        basis, sigma = residuals.basis, residuals.sigma
        if isinstance(residuals, _SvdResiduals):
            u_in_basis = residuals.left
            grad_in_basis = grad @ u_in_basis  # G·U·B
        else:
            u_in_basis = residuals.free @ (basis * residuals.inverse_sigma)
            grad_in_basis = ((grad @ residuals.free) @ basis) * residuals.inverse_sigma  # G·U·B
        a = grad_in_basis.mT @ residuals.v_in_basis
        x = (a - a.mT).div_(sigma.unsqueeze(-1) + sigma.unsqueeze(-2)) @ basis.mT  # Bᵀ·X
        grad_free = u_in_basis @ x
        return grad_free, grad_in_basis @ basis.mT if needs_rows else None


# Maps of a skew matrix S ---------------------------------------------------------------------------------------------


class SkewMap(RowMap):
    """A map of a skew matrix S, the generator, which has m = d(d−1)/2 free parameters."""

    def identity(self, d: int) -> Float[Tensor, " m"]:
        """Return the parameters of S = 0."""
        return torch.zeros(d * (d - 1) // 2)

    def size(self, free: Float[Tensor, "*batch m"]) -> int:
        """Return d for d(d−1)/2 parameters."""
        return factorizations.skew_size(free.shape[-1])

    def generator(self, free: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch d d"]:
        """Return S."""
        return factorizations.unpack_skew(free)


class _CayleyResiduals(NamedTuple):
    """The factorisation of I+S and the solution Z of Z(I+S) = V."""

    free: Tensor
    lu: Tensor
    pivots: Tensor
    z: Tensor


class _CayleyMap(SkewMap):
    """R = (I+S)(I−S)⁻¹. Rᵀ = 2(I+S)⁻¹ − I, so V·Rᵀ = 2Z − V with Z(I+S) = V."""

    def expression(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return 2Z − V."""
        shifted = self.generator(free) + torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
        return 2 * torch.linalg.solve(shifted, v, left=False) - v


@dataclass(frozen=True)
class Cayley(_CayleyMap):
    r"""The Cayley transform: R = (I+S)(I−S)⁻¹ (OPT, section 3.4).

    V·Rᵀ = 2Z − V with Z(I+S) = V takes one LU factorisation, which the gradient reuses.

    A `bound` limits the Frobenius norm of S: a longer S is scaled down to it. This is the constrained form of
    orthogonal fine-tuning (COFT).

    Precision: for odd d, I+S has the eigenvalue 1 in addition to eigenvalues of the size of S. If S is too large for
    float32 to resolve the 1, float64 is used. From ‖S‖_F = 10¹² on, float64 cannot resolve it either, and an error is
    raised. Compiled graphs and `torch.func` transforms cannot read values, so they have neither of these guards.

    >>> Cayley()(torch.tensor([1.0]))
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """

    LARGEST_NORM: ClassVar[float] = 1e12

    bound: float | None = None

    def __post_init__(self) -> None:
        """Check the bound."""
        positive = self.bound is None or (is_number(self.bound, 0) and self.bound > 0)
        require(positive, "bound", "None or a positive number", self.bound)

    def generator(self, free: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch d d"]:
        """Return S, scaled down to the bound."""
        return factorizations.unpack_skew(self._bounded(free))

    def _bounded(self, free: Tensor) -> Tensor:
        if self.bound is None:
            return free
        largest = self.bound / math.sqrt(2)  # for the vector: every parameter occurs twice in S
        is_longer = sphere.norm(free.detach(), keepdim=True) > largest
        return torch.where(is_longer, largest * sphere.normalize(free), free)

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return 2Z − V."""
        # Only for odd d does every S have the eigenvalue 0. For even d the eigenvalues are pairs ±iλ.
        is_critical = v.shape[-1] % 2 and free.numel()
        norm = math.sqrt(2) * float(sphere.norm(self._bounded(free)).amax()) if is_critical else 0.0
        if norm > self.LARGEST_NORM:
            raise ValueError(
                f"the generator of a Cayley rotation must have a norm below {self.LARGEST_NORM:.0e}, not {norm:.1e}: "
                "lower the learning rate, set a bound, or use the method 'exponential'"
            )
        # Near norm = 1/eps the 1 of I+S is rounded away. The solution then preserves norms but is wrong, so a norm
        # within a factor of 1000 of this limit goes to float64 without a trial.
        if norm * _numerics.machine_epsilon(v.dtype) < 1e-3:
            w, residuals = self._solve(free, v)
            if norms_preserved(w, v):
                return w, residuals
        w, residuals = self._solve(_numerics.to_float64(free), _numerics.to_float64(v))
        return w.to(v), residuals

    def _solve(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        shifted = self.generator(free)
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        lu, pivots = torch.linalg.lu_factor(shifted)
        z = torch.linalg.lu_solve(lu, pivots, v, left=False)
        return 2 * z - v, _CayleyResiduals(free, lu, pivots, z)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return the skew part of −ZᵀH, and H − G, where H(I+S)ᵀ = 2G."""
        free, lu, pivots, z = residuals
        wide_grad = grad.to(lu)  # the factorisation may be in float64
        h = torch.linalg.lu_solve(lu, pivots, 2 * wide_grad, left=False, adjoint=True)
        grad_free = factorizations.pack_skew(-(z.mT @ h))
        # Where S is scaled down, its norm does not matter, so the gradient of the parameters is perpendicular to them.
        if self.bound is not None:
            with torch.enable_grad():
                leaf = free.detach().requires_grad_()
                (grad_free,) = torch.autograd.grad(self._bounded(leaf), leaf, grad_free)
        return grad_free.to(grad), (h - wide_grad).to(grad)


class _SeriesResiduals(NamedTuple):
    """S and the solution Z of Z(I+S) = V by the series."""

    free: Tensor
    s: Tensor
    z: Tensor


@dataclass(frozen=True)
class Neumann(_CayleyMap):
    r"""The Cayley transform by a truncated Neumann series: (I+S)⁻¹ ≈ Σ_k (−S)^k, matrix products only.

    The last term is checked for every row. If one is not negligible, the exact solution is used, as it is in compiled
    graphs and `torch.func` transforms. Term k has the size ‖S‖^k, so six terms suffice in float32 up to ‖S‖ ≈ 0.2 and
    in float64 up to 0.01. More terms extend this range, but the series diverges from ‖S‖ = 1 on.

    >>> Neumann(terms=8)(torch.tensor([0.01]))
    tensor([[ 0.9998, -0.0200],
            [ 0.0200,  0.9998]])
    """

    terms: int = 6

    def __post_init__(self) -> None:
        """Check the number of terms."""
        require(is_integer(self.terms, 1), "terms", "an integer >= 1", self.terms)

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return 2Z − V."""
        s = factorizations.unpack_skew(free)
        z, converged = self._series(v, s)
        if not converged:
            return Cayley().forward_kernel(free, v)
        return 2 * z - v, _SeriesResiduals(free, s, z)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return the gradients of `Cayley`, with the series of Sᵀ = −S."""
        if isinstance(residuals, _CayleyResiduals):  # the forward pass used the exact solution
            return Cayley().backward_kernel(residuals, grad)
        free, s, z = residuals
        h, converged = self._series(2 * grad, -s)
        if not converged:
            # Convergence is checked per row, so the series may suffice for V but not for G. Here V = Z(I+S).
            return Cayley().backward_kernel(Cayley().forward_kernel(free, z + z @ s)[1], grad)
        return factorizations.pack_skew(-(z.mT @ h)), h - grad

    def _series(self, rows: Tensor, s: Tensor) -> tuple[Tensor, bool]:
        """Return Σ_k rows·(−S)^k by Horner's rule, and whether the last term is below rounding in every row."""
        total = previous = rows
        for _ in range(self.terms):
            total, previous = rows - total @ s, total
        last_term = torch.linalg.vector_norm(total - previous, dim=-1)
        tolerance = _numerics.rotation_tolerance(rows.dtype)
        return total, bool((last_term <= tolerance * torch.linalg.vector_norm(rows, dim=-1)).all())


class _ActionResiduals(NamedTuple):
    """The terms of the series for V·exp(−S)."""

    series: _expm.SeriesResiduals


class _SquaringResiduals(NamedTuple):
    """V, the powers E, E², E⁴, … of E = exp(−S/2^k), and the terms of the series for E."""

    v: Tensor
    powers: list[Tensor]
    series: _expm.SeriesResiduals


@dataclass(frozen=True)
class Exponential(SkewMap):
    r"""The matrix exponential: R = exp(S) (OPT, section 3.4), by its action on V.

    A Chebyshev series gives V·exp(−S) without forming the exponential. Its length depends on an estimate of ‖S‖₂. If
    the estimate was too small, the series is repeated with an upper bound. `torch.func` transforms and second
    derivatives use `torch.linalg.matrix_exp`, which is slower.

    >>> Exponential()(torch.tensor([1.0]))
    tensor([[ 0.5403, -0.8415],
            [ 0.8415,  0.5403]])
    """

    LARGEST_SERIES_RADIUS: ClassVar[float] = 16.0
    """Generators with a larger ‖S‖₂ are halved k times until they are below it, and exp(S/2^k) is squared k times."""

    def expression(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·exp(−S)."""
        # The length of the series depends on values, which a graph cannot read, so it is one custom op in the graph.
        if torch.compiler.is_compiling() and type(self).generator is SkewMap.generator:
            return _exponential_op(free, v)
        return v @ torch.linalg.matrix_exp(-self.generator(free))

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·exp(−S)."""
        s = factorizations.unpack_skew(free)
        w, residuals, accurate = self._action(v, s, _expm.spectral_radius(s))
        if not accurate:
            w, residuals, _ = self._action(v, s, _expm.radius_bound(s))
        return w, residuals

    def _action(self, v: Tensor, s: Tensor, radius: float) -> tuple[Tensor, Residuals, bool]:
        """Return V·exp(−S), residuals, and whether the series for this radius preserved the norms of rows."""
        halvings = max(0, math.ceil(math.log2(radius / self.LARGEST_SERIES_RADIUS)))
        # A term of the series costs n·d² for n rows, so with n ≤ d the action is cheaper than the exponential.
        if v.shape[-2] <= s.shape[-1] and not halvings:
            w, series = _expm.exponential_series(v, -s, radius)
            return w, _ActionResiduals(series), norms_preserved(w, v)
        # Squarings need the matrix. The error of the series shows in the root, before squarings restore orthogonality.
        eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device).expand_as(s)
        scale = 2.0**halvings
        root, series = _expm.exponential_series(eye, -s / scale, radius / scale)
        powers = [root]
        for _ in range(halvings):
            square = powers[-1] @ powers[-1]
            # Squaring doubles rounding errors. One Newton–Schulz step makes the result orthogonal again.
            powers.append(factorizations.newton_schulz_step(square))
        return v @ powers[-1], _SquaringResiduals(v, powers, series), norms_preserved(root, eye)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return the gradients of the series, after those of the squarings if there are any."""
        if isinstance(residuals, _ActionResiduals):
            grad_v, grad_s = _expm.exponential_series_gradient(residuals.series, grad)
            return factorizations.pack_skew(-grad_s), grad_v
        v, powers, series = residuals
        grad_v, grad = grad @ powers[-1].mT, v.mT @ grad  # of W = V·E: G·Eᵀ and VᵀG
        for power in reversed(powers[:-1]):
            # d(E·E) = dE·E + E·dE; the factor ½ turns gradients of S/2^k into gradients of S along the way.
            grad = 0.5 * (grad @ power.mT + power.mT @ grad)
        _, grad_s = _expm.exponential_series_gradient(series, grad)
        return factorizations.pack_skew(-grad_s), grad_v


# The kernels as custom ops for compiled graphs. Residuals cannot cross the boundary of an op as Python objects, so the
# backward op repeats the forward pass.


@torch.library.custom_op("hypersphere::exponential", mutates_args=())
def _exponential_op(free: Tensor, v: Tensor) -> Tensor:
    return Exponential().forward_kernel(free, v)[0].contiguous()


@torch.library.custom_op("hypersphere::exponential_gradient", mutates_args=())
def _exponential_gradient_op(free: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    _, residuals = Exponential().forward_kernel(free, v)
    grad_free, grad_v = Exponential().backward_kernel(residuals, grad)
    assert grad_v is not None
    return grad_free.contiguous(), grad_v.contiguous()


# Shapes and dtypes for tracing, and the gradient.
_exponential_op.register_fake(lambda free, v: v.new_empty(v.shape))
_exponential_gradient_op.register_fake(lambda free, v, grad: (free.new_empty(free.shape), v.new_empty(v.shape)))
_exponential_op.register_autograd(
    lambda ctx, grad: _exponential_gradient_op(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# No constraint -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Free(RowMap):
    r"""R itself, unconstrained: for the ablation (UPT), the relaxation with a penalty (OR), and the optimiser OGD.

    >>> Free()(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """

    exact: ClassVar[bool] = False

    def degrees_of_freedom(self, d: int) -> int:
        """Return d²."""
        return d * d

    def expression(self, free: Float[Tensor, "*batch d d"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·Rᵀ."""
        return v @ free.mT

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Rᵀ."""
        return v @ free.mT, (free, v)

    def backward_kernel(self, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True) -> Gradients:
        """Return GᵀV and G·R."""
        free, v = residuals
        return grad.mT @ v, grad @ free if needs_rows else None


ORTHOGONALS: dict[str, type[RowMap]] = {
    "gram_schmidt": GramSchmidt,
    "householder": Householder,
    "lowdin": Lowdin,
    "cayley": Cayley,
    "neumann": Neumann,
    "exponential": Exponential,
    "free": Free,
}
