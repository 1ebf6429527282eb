r"""Orthogonal maps: free parameters become a rotation of rows, W = V·Rᵀ.

Each entry is a frozen dataclass whose docstring begins with the formula of R. `expression` is the map in ordinary torch
operations. Where autograd of these is slow, an entry has kernels, an explicit forward and backward pass. The module
`hypersphere.functions._rowmap` says which of the two runs. The argument `free` holds the unconstrained parameters of a
map: a square matrix P, or the entries of a skew matrix S. In docstrings and comments, V are the rows, W = V·Rᵀ, and G
is the gradient of W.

To add an entry, write a frozen dataclass with `expression` (and `identity`) and list it in ORTHOGONALS.

Reference:
    Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions import _expm
from hypersphere.functions import _factorizations as factorizations
from hypersphere.functions._autograd import differentiable_gradients
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
    r"""R = Q of P = QT, with T upper triangular and positive on the diagonal.

    For a change dP, QᵀdQ is the skew matrix with the lower triangle of QᵀdP·T⁻¹. So with A = QᵀGᵀV the gradient
    of P is Q·tril(A − Aᵀ, −1)·T⁻ᵀ. The gradient of V is G·Q.
    """

    def expression(self, free: Float[Tensor, "*batch d d"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·Qᵀ by torch's QR decomposition."""
        # torch's derivative of QR divides by the diagonal of T, which has zeros if P is singular. With E = 1 at these
        # zeros, P + QE = Q(T + E) has the same Q and an invertible triangle. This takes a second decomposition.
        q, triangle = factorizations.householder_qr(free.detach())
        regular = free + q * factorizations.zeros_of_diagonal(triangle).unsqueeze(-2)
        return v @ factorizations.householder_qr(regular)[0].mT


class _QrResiduals(NamedTuple):
    """P = QT."""

    q: Tensor
    triangle: Tensor


@dataclass(frozen=True)
class GramSchmidt(_TriangularMap):
    r"""R = Q of P = QT, T upper triangular with positive diagonal: Gram–Schmidt on the columns of P (thesis, F.1).

    The form "classical" is Cholesky QR: T is the Cholesky factor of PᵀP. The forms agree in exact arithmetic.
    "iterative" repeats Cholesky QR for Q, which makes Q orthogonal to working precision (thesis, algorithm 2).
    "modified" projects out one column at a time (F.3). If an ill-conditioned P makes the result inaccurate, Householder
    reflections are used. They are also used outside the CPU, where checking the result would make the host wait.

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
        if _numerics.all_on_cpu(free, v):
            q, triangle, accurate = self._orthogonalize(free)
            w = v @ q.mT
            if accurate and norms_preserved(w, v):
                return w, _QrResiduals(q, triangle)
        # Reflections are accurate for every P, but slower.
        q, triangle = factorizations.householder_qr(free)
        return v @ q.mT, _QrResiduals(q, triangle)

    def _orthogonalize(self, p: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return Q, T and False if the factorisation failed."""
        if self.form == "modified":
            q, triangle = factorizations.modified_gram_schmidt(p)
            # This form normalises columns explicitly, so norms cannot reveal that they are not orthogonal.
            return q, triangle, factorizations.is_orthogonal(q)
        q, triangle, accurate = factorizations.cholesky_qr(p)
        if self.form == "iterative" and accurate:
            q, second_triangle, accurate = factorizations.cholesky_qr(q)
            triangle = second_triangle @ triangle  # P = Q₁T₁ and Q₁ = Q₂T₂, so P = Q₂·(T₂T₁)
        return q, triangle, accurate

    def backward_kernel(
        self, free: Tensor, v: Tensor, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True
    ) -> Gradients:
        """Return Q·tril(A − Aᵀ, −1)·T⁻ᵀ with A = QᵀGᵀV, and G·Q."""
        grad_rotated = grad @ residuals.q  # G·Q, the gradient of V, which the gradient of P needs in any case
        coordinates = factorizations.q_gradient_coordinates(grad_rotated, v, residuals.triangle)
        return factorizations.product_with_lower_triangle(residuals.q, coordinates), grad_rotated


class _ReflectionResiduals(NamedTuple):
    """P = HT with H = H₁H₂⋯, as LAPACK returns it, and the signs D = diag(±1) with Q = HD."""

    reflectors: Tensor  # T in the upper triangle, the vectors of the reflections below it
    tau: Tensor  # the coefficients of the reflections
    signs: Tensor


@dataclass(frozen=True)
class Householder(_TriangularMap):
    r"""R = Q of P = QT by Householder reflections, P = H₁H₂⋯T (thesis, F.6), applied to V without forming Q.

    The signs are chosen as in Gram–Schmidt, so the map is continuous at P = I. In the thesis the sign of the last
    column depends on the parity of d.

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
        return w, _ReflectionResiduals(reflectors, tau, signs)

    def backward_kernel(
        self, free: Tensor, v: Tensor, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True
    ) -> Gradients:
        """Return Q·tril(A − Aᵀ, −1)·T⁻ᵀ with A = QᵀGᵀV, and G·Q."""
        reflectors, tau, signs = residuals
        grad_rotated = torch.ormqr(reflectors, tau, grad, left=False) * signs.unsqueeze(-2)  # G·Q
        triangle = reflectors.triu() * signs.unsqueeze(-1)  # DT
        coordinates = factorizations.q_gradient_coordinates(grad_rotated, v, triangle)
        return torch.ormqr(reflectors, tau, coordinates * signs.unsqueeze(-1)), grad_rotated


class _PolarResiduals(NamedTuple):
    """P = U·H with H = B·diag(σ)·Bᵀ."""

    u_in_basis: Tensor  # U·B
    basis: Tensor  # B
    sigma: Tensor  # (…, d)
    v_in_basis: Tensor  # V·B


@dataclass(frozen=True)
class Lowdin(RowMap):
    r"""R = U = P(PᵀP)^−½, the orthogonal matrix nearest to P: Löwdin's symmetric orthogonalisation (thesis, F.10).

    With PᵀP = B·diag(σ²)·Bᵀ and A = UᵀGᵀV, the gradient of P is U·X, where X solves HX + XH = A − Aᵀ and
    H = UᵀP = B·diag(σ)·Bᵀ. The solution divides by σ_i + σ_j, so it is finite at repeated singular values and at P = I.

    If P is ill-conditioned, B and σ come from an SVD of P. The SVD is also used outside the CPU; on a GPU torch's SVD
    itself waits for the device.

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
        left, sigma, basis = factorizations.singular_vectors(free.detach())
        nearest = left @ basis.mT  # U₀
        eye = torch.eye(free.shape[-1], dtype=free.dtype, device=free.device)
        m, correction = nearest.mT @ free, eye.expand_as(free)  # U₀ᵀP, which has the value H₀, and E
        for _ in range(3):
            asymmetry = correction.mT @ m - m.mT @ correction
            # The linearised equation for a rotation exp(X) ≈ I + X of E is H₀X + XH₀ = asymmetry.
            half_step = factorizations.sylvester_in_basis(asymmetry, basis, sigma) / 2
            half_step = (half_step - half_step.mT) / 2  # exactly skew, so that the Cayley factor is orthogonal
            correction = correction @ torch.linalg.solve_ex(eye - half_step, eye + half_step)[0]
        return v @ correction.mT @ nearest.mT

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·Uᵀ = (V·B)(U·B)ᵀ."""
        if _numerics.all_on_cpu(free, v):
            u_in_basis, sigma, basis = factorizations.polar_by_eigenvectors(free)
            v_in_basis = v @ basis
            w = v_in_basis @ u_in_basis.mT
            if norms_preserved(w, v):
                return w, _PolarResiduals(u_in_basis, basis, sigma, v_in_basis)
        # The eigenvalues σ² lose small σ. The SVD does not square them, but takes several times as long.
        u_in_basis, sigma, basis = factorizations.singular_vectors(free)
        v_in_basis = v @ basis
        # The singular vectors are finite even if P is not, so the NaN of such a P is added here.
        w = v_in_basis @ u_in_basis.mT + factorizations.zero_or_nan(free)
        return w, _PolarResiduals(u_in_basis, basis, sigma, v_in_basis)

    def backward_kernel(
        self, free: Tensor, v: Tensor, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True
    ) -> Gradients:
        """Return U·X and G·U, computed in the basis B."""
        u_in_basis, basis, sigma, v_in_basis = residuals
        grad_in_basis = grad @ u_in_basis  # G·U·B
        a = grad_in_basis.mT @ v_in_basis  # Bᵀ·A·B
        x = (a - a.mT).div_(sigma.unsqueeze(-1) + sigma.unsqueeze(-2))  # Bᵀ·X·B
        return u_in_basis @ (x @ basis.mT), grad_in_basis @ basis.mT if needs_rows else None


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


class _CayleyMap(SkewMap):
    """R = (I+S)(I−S)⁻¹. Rᵀ = 2(I+S)⁻¹ − I, so V·Rᵀ = 2Z − V with Z(I+S) = V."""

    def expression(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return 2Z − V."""
        shifted = self.generator(free) + torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
        z = factorizations.solve_from_right(shifted, v)  # I+S is never singular
        # An infinite entry of S is the limit of a rotation by 180°, but not a parameter to continue training from.
        return 2 * z - v + factorizations.zero_or_nan(free.detach().unsqueeze(-1))


@dataclass(frozen=True)
class Cayley(_CayleyMap):
    r"""R = (I+S)(I−S)⁻¹: the Cayley transform (OPT, section 3.4).

    V·Rᵀ = 2Z − V with Z(I+S) = V takes one LU factorisation, which the gradient of `torch.linalg.solve_ex` reuses.

    A `bound` limits the Frobenius norm of S: a longer S is scaled down to it. This is constrained orthogonal
    fine-tuning (COFT).

    Precision: for odd d, I+S has the eigenvalue 1 in addition to eigenvalues of the size of S. If S is too large for
    float32 to resolve the 1, float64 is used. From ‖S‖_F = 10¹² on, float64 cannot resolve it either, and an error is
    raised. Compiled graphs, `torch.func` transforms and devices other than the CPU have neither of these guards,
    because values cannot be read there, or not without waiting.

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

    def evaluate(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·Rᵀ, computed in float64 if the dtype of V would be inaccurate."""
        if not _numerics.may_branch_on_values(free, v):
            return super().evaluate(free, v)
        # Only for odd d does every S have the eigenvalue 0. For even d the eigenvalues are pairs ±iλ.
        is_critical = v.shape[-1] % 2 and free.numel()
        norm = math.sqrt(2) * float(sphere.norm(self._bounded(free.detach())).amax()) if is_critical else 0.0
        if self.LARGEST_NORM < norm < math.inf:
            raise ValueError(
                f"the generator of a Cayley rotation must have a norm below {self.LARGEST_NORM:.0e}, not {norm:.1e}: "
                "lower the learning rate, set a bound, or use the method 'exponential'"
            )
        # Near norm = 1/eps the 1 of I+S is rounded away. The solution then preserves norms but is wrong, so the
        # check of norms below would not detect it. From a thousandth of this limit on, float64 is used directly.
        if norm * _numerics.machine_epsilon(v.dtype) < 1e-3:
            w = super().evaluate(free, v)
            if norms_preserved(w.detach(), v.detach()):
                return w
        return super().evaluate(_numerics.to_float64(free), _numerics.to_float64(v)).to(v.dtype)

    def matrix(self, free: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch d d"]:
        """Return R, by matrix products only where S is small enough for them."""
        with _numerics.autocast_disabled(free):
            expanded = self.series(_numerics.widen_parameter(free))
            if expanded is not None:
                bounded, series = expanded
                return _numerics.narrow(_CayleyMatrix.apply(bounded, *series), free.dtype)
        return super().matrix(free)

    def series(self, free: Float[Tensor, "*batch m"]) -> tuple[Tensor, factorizations.SkewSeries] | None:
        """Return the entries of the bounded S, and the series of (I−S)⁻¹. Only the entries have a graph.

        Returns None where values cannot be read, and where S is too large for a short series.
        """
        if not _numerics.may_branch_on_values(free, free):
            return None
        bounded = self._bounded(free)
        series = factorizations.skew_series(factorizations.unpack_skew(bounded.detach()))
        return None if series is None else (bounded, series)


class _CayleyMatrix(torch.autograd.Function):
    """R as a function of the entries of S. Only R is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, free: Tensor, s: Tensor, square: Tensor, terms: int) -> Tensor:
        r = factorizations.cayley_from_series(factorizations.SkewSeries(s, square, terms))
        ctx.save_for_backward(free, r)
        return r

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        free, r = ctx.saved_tensors
        with _numerics.autocast_disabled(grad):
            if torch.is_grad_enabled():  # create_graph=True: the gradient must itself be differentiable
                eye = torch.eye(grad.shape[-1], dtype=grad.dtype, device=grad.device).expand_as(grad)

                def matrix(entries: Tensor) -> Tensor:
                    return Cayley().expression(entries, eye).mT

                return differentiable_gradients(matrix, (free,), (True,), grad)[0], None, None, None
            return factorizations.cayley_gradient(r, grad), None, None, None


@dataclass(frozen=True)
class Neumann(_CayleyMap):
    r"""R = (I+S)(I−S)⁻¹, with the truncated Neumann series (I+S)⁻¹ ≈ Σ_k (−S)^k: matrix products only.

    The last term is checked for every row. If one is not negligible, the exact solution of `Cayley` is used, as it is
    where the check is not possible (compiled graphs, `torch.func` transforms) or would make the host wait (outside the
    CPU). Term k has the size ‖S‖^k, so six terms suffice in float32 up to ‖S‖ ≈ 0.2 and in float64 up to 0.01. More
    terms extend this range, but the series diverges from ‖S‖ = 1 on.

    >>> Neumann(terms=8)(torch.tensor([0.01]))
    tensor([[ 0.9998, -0.0200],
            [ 0.0200,  0.9998]])
    """

    terms: int = 6

    def __post_init__(self) -> None:
        """Check the number of terms."""
        require(is_integer(self.terms, 1), "terms", "an integer >= 1", self.terms)

    def evaluate(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return 2Z − V, with Z from the series if its last term is negligible in every row."""
        if not _numerics.may_branch_on_values(free, v):
            return super().evaluate(free, v)
        # Σ_k V·(−S)^k by Horner's rule: the last term is the difference of the last two sums.
        s = self.generator(free)
        z = previous = v
        for _ in range(self.terms):
            z, previous = v - z @ s, z
        last_term = torch.linalg.vector_norm((z - previous).detach(), dim=-1)
        largest = _numerics.rotation_tolerance(v.dtype) * torch.linalg.vector_norm(v.detach(), dim=-1)
        if bool((last_term <= largest).all()):
            return 2 * z - v
        return Cayley().evaluate(free, v)


class _ExponentialResiduals(NamedTuple):
    """The series of V·E or of E, where E = exp(−S/2^k), and the powers E, E², E⁴, … if E was squared k times."""

    terms: Tensor  # of the series, stacked along the rows
    radius: Tensor  # a number on the CPU: the bound of ‖S/2^k‖₂ that the series was made for
    powers: Tensor | None  # (k+1, …, d, d), or None for the series of V·E


@dataclass(frozen=True)
class Exponential(SkewMap):
    r"""R = exp(S): the matrix exponential (OPT, section 3.4), by its action on V.

    A Chebyshev series gives V·exp(−S) without forming the exponential. Its length depends on an estimate of ‖S‖₂. If
    the estimate was too small, the series is repeated with an upper bound. `torch.func` transforms, second derivatives
    and devices other than the CPU use `torch.linalg.matrix_exp`, which is slower.

    >>> Exponential()(torch.tensor([1.0]))
    tensor([[ 0.5403, -0.8415],
            [ 0.8415,  0.5403]])
    """

    LARGEST_SERIES_RADIUS: ClassVar[float] = 16.0
    """Generators with a larger ‖S‖₂ are halved k times until they are below it, and exp(S/2^k) is squared k times."""

    def expression(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·exp(−S)."""
        # The length of the series depends on values. A compiled graph cannot read them, so the series is one custom op.
        has_plain_generator = type(self).generator is SkewMap.generator
        if torch.compiler.is_compiling() and has_plain_generator and _numerics.all_on_cpu(free, v):
            return _exponential_op(free, v)
        s = self.generator(free)
        # torch leaves the exponential of a matrix that is not finite undefined.
        return v @ torch.linalg.matrix_exp(-s) + factorizations.zero_or_nan(s.detach())

    def evaluate(self, free: Float[Tensor, "*batch m"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·exp(−S), by the series where its length may depend on values."""
        return super().evaluate(free, v) if _numerics.may_branch_on_values(free, v) else self.expression(free, v)

    def forward_kernel(self, free: Tensor, v: Tensor) -> tuple[Tensor, Residuals]:
        """Return V·exp(−S)."""
        s = factorizations.unpack_skew(free)
        w, residuals, accurate = self._action(v, s, _expm.spectral_radius(s))
        if not accurate:
            w, residuals, _ = self._action(v, s, _expm.radius_bound(s))
        return w, residuals

    def _action(self, v: Tensor, s: Tensor, radius: float) -> tuple[Tensor, _ExponentialResiduals, bool]:
        """Return V·exp(−S), residuals, and whether the series for this radius preserved the norms of rows."""
        halvings = max(0, math.ceil(math.log2(radius / self.LARGEST_SERIES_RADIUS)))
        series_radius = torch.tensor(radius / 2**halvings, dtype=torch.float64)
        # A term of the series costs n·d² for n rows, so with n ≤ d the action is cheaper than the exponential.
        if v.shape[-2] <= s.shape[-1] and not halvings:
            w, terms = _expm.exponential_series(v, -s, radius)
            return w, _ExponentialResiduals(terms, series_radius, None), norms_preserved(w, v)
        # Squarings need the matrix. The error of the series shows in the root, before squarings restore orthogonality.
        eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device).expand_as(s)
        root, terms = _expm.exponential_series(eye, -s / 2.0**halvings, radius / 2**halvings)
        powers = [root]
        for _ in range(halvings):
            square = powers[-1] @ powers[-1]
            # Squaring doubles rounding errors. One Newton–Schulz step makes the result orthogonal again.
            powers.append(factorizations.newton_schulz_step(square))
        residuals = _ExponentialResiduals(terms, series_radius, torch.stack(powers))
        return v @ powers[-1], residuals, norms_preserved(root, eye)

    def backward_kernel(
        self, free: Tensor, v: Tensor, residuals: Residuals, grad: Tensor, *, needs_rows: bool = True
    ) -> Gradients:
        """Return the gradients of the series, after the gradients of the squarings if there are any."""
        terms, radius, powers = residuals
        s, radius = factorizations.unpack_skew(free), float(radius)
        if powers is None:
            grad_v, grad_s = _expm.exponential_series_gradient(terms, -s, radius, grad)
            return factorizations.pack_skew(-grad_s), grad_v
        grad_v, grad = grad @ powers[-1].mT, v.mT @ grad  # of W = V·E: G·Eᵀ and VᵀG
        for power in reversed(powers[:-1].unbind()):
            # d(E·E) = dE·E + E·dE; the factor ½ turns gradients of S/2^k into gradients of S along the way.
            grad = 0.5 * (grad @ power.mT + power.mT @ grad)
        halvings = len(powers) - 1
        _, grad_s = _expm.exponential_series_gradient(terms, -s / 2.0**halvings, radius, grad)
        return factorizations.pack_skew(-grad_s), grad_v


# The kernels as custom ops for compiled graphs. Residuals cannot cross the boundary of an op as Python objects, so the
# backward op repeats the forward pass.


@torch.library.custom_op("hypersphere::exponential", mutates_args=())
def _exponential_op(free: Tensor, v: Tensor) -> Tensor:
    return Exponential().forward_kernel(free, v)[0].contiguous()


@torch.library.custom_op("hypersphere::exponential_gradient", mutates_args=())
def _exponential_gradient_op(free: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    _, residuals = Exponential().forward_kernel(free, v)
    grad_free, grad_v = Exponential().backward_kernel(free, v, residuals, grad)
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
    r"""R itself, unconstrained.

    It is for the ablation without orthogonality (UPT, unconstrained over-parameterized training), the relaxation with a
    penalty (OR, orthogonal regularization) and the optimiser OGD (orthogonality-preserving gradient descent).

    >>> Free()(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """

    always_orthogonal: ClassVar[bool] = False

    def degrees_of_freedom(self, d: int) -> int:
        """Return d²."""
        return d * d

    def expression(self, free: Float[Tensor, "*batch d d"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·Rᵀ."""
        return v @ free.mT


ORTHOGONALS: dict[str, type[RowMap]] = {
    "gram_schmidt": GramSchmidt,
    "householder": Householder,
    "lowdin": Lowdin,
    "cayley": Cayley,
    "neumann": Neumann,
    "exponential": Exponential,
    "free": Free,
}
