r"""Orthogonalisations of a free square matrix P: Gram–Schmidt, Householder, Löwdin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import require
from hypersphere.functions.rowmap import Memory, RowMap, keeps_norms

__all__ = ["GramSchmidt", "Householder", "Lowdin"]


class _TriangularFactor(RowMap):
    r"""Q of P = QT, T upper triangular with a positive diagonal.

    With A = QᵀGᵀV, the gradient of P is Q·tril(A − Aᵀ, −1)·T⁻ᵀ: everything that changes T alone drops out.
    """

    def identity(self, d: int) -> Tensor:
        """Return P = I."""
        return torch.eye(d)

    @staticmethod
    def _pulled(turned: Tensor, v: Tensor, triangle: Tensor) -> Tensor:
        """tril(A − Aᵀ, −1)·T⁻ᵀ, with `turned` = G·Q."""
        a = turned.mT @ v
        below = (a - a.mT).tril(-1)
        lost = _numerics.squared_norm_is_zero(
            triangle.diagonal(dim1=-2, dim2=-1)
        )  # a singular P has no unique Q: stay finite
        triangle = triangle + torch.diag_embed(lost.to(triangle))
        return torch.linalg.solve_triangular(triangle.mT, below, upper=False, left=False)


@dataclass(frozen=True)
class GramSchmidt(_TriangularFactor):
    r"""Gram–Schmidt on the columns of P: P = QT with T upper triangular and positive on the diagonal   (thesis, F.1).

    "classical" takes T from the Cholesky factor of PᵀP, "iterative" does so twice, which makes Q orthogonal to working
    precision (Algorithm 2 of the thesis), "modified" removes one direction after the other (F.3). They agree in exact
    arithmetic. Where digits are lost (an ill-conditioned P), and where nobody can look whether they are (in a compiled
    graph), reflections take over.

    >>> GramSchmidt()(torch.tensor([[3.0, 1.0], [4.0, 1.0]]))
    tensor([[ 0.6000,  0.8000],
            [ 0.8000, -0.6000]])
    """

    form: str = "classical"

    def __post_init__(self) -> None:
        """Refuse an unknown form."""
        forms = ("classical", "modified", "iterative")
        require(self.form in forms, "form", "'classical', 'modified' or 'iterative'", self.form)

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·Qᵀ."""
        if not _numerics.values_readable(free, v):
            return _by_reflections(free, v)
        if self.form == "modified":
            q, triangle = _modified(free)
            return (v @ q.mT, (q, triangle, v)) if _is_orthogonal(q) else _by_reflections(free, v)
        q, triangle, failed = _by_cholesky(free)
        if self.form == "iterative" and not failed:
            q, again, failed = _by_cholesky(q)
            triangle = again @ triangle
        w = v @ q.mT
        return _by_reflections(free, v) if failed or not keeps_norms(w, v) else (w, (q, triangle, v))

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return Q·tril(A − Aᵀ, −1)·T⁻ᵀ and G·Q."""
        q, triangle, v = memory
        turned = gradient @ q
        return _times_lower(q, self._pulled(turned, v, triangle)), turned


@dataclass(frozen=True)
class Householder(_TriangularFactor):
    r"""Q of P by reflections, P = H₁H₂⋯T   (thesis, F.6), which are applied to V and never multiplied out.

    The signs are those of Gram–Schmidt (T positive on the diagonal), so the map is continuous at P = I; the thesis
    leaves the sign of the last column to the parity of d.

    >>> Householder()(torch.tensor([[3.0, 1.0], [4.0, 1.0]]))
    tensor([[ 0.6000,  0.8000],
            [ 0.8000, -0.6000]])
    """

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·Qᵀ = (Q·Vᵀ)ᵀ."""
        if not _numerics.values_readable(free, v):
            return _by_reflections(free, v)
        factor, tau = torch.geqrf(free)
        signs = _signs(factor)
        signed = v * signs.unsqueeze(-2)
        return torch.ormqr(factor, tau, signed, left=False, transpose=True), (factor, tau, signs, v)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return Q·tril(A − Aᵀ, −1)·T⁻ᵀ and G·Q."""
        if len(memory) == 3:  # Q itself, as `GramSchmidt` has it
            return GramSchmidt().pull(memory, gradient, rows=rows)
        factor, tau, signs, v = memory
        turned = torch.ormqr(factor, tau, gradient, left=False) * signs.unsqueeze(-2)
        triangle = factor.triu() * signs.unsqueeze(-1)
        below = self._pulled(turned, v, triangle)
        return torch.ormqr(factor, tau, below * signs.unsqueeze(-1)), turned


@dataclass(frozen=True)
class Lowdin(RowMap):
    r"""The nearest orthogonal matrix: U = P(PᵀP)^−½   (thesis, F.10).

    PᵀP = BΣ²Bᵀ gives the value, and in the basis B the gradient is U·X with X_ij = K_ij/(σ_i + σ_j): sums of singular
    values, never differences, so it is finite where they repeat and at P = I. An ill-conditioned P goes through its
    singular values instead of their squares, and so does every P in a compiled graph, where nobody can look.

    >>> Lowdin()(torch.tensor([[0.0, -2.0], [3.0, 0.0]]))
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """

    def identity(self, d: int) -> Tensor:
        """Return P = I."""
        return torch.eye(d)

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·Uᵀ."""
        if _numerics.values_readable(free, v):
            squares, basis = torch.linalg.eigh(_lower_gram(free))
            sigma = squares.clamp_min(0).sqrt()
            sigma = sigma.masked_fill(sigma == 0, 1.0)  # a singular P has no nearest orthogonal matrix: stay finite
            inverse = sigma.reciprocal().unsqueeze(-2)
            inner = v @ basis
            w = ((inner * inverse) @ basis.mT) @ free.mT
            if keeps_norms(w, v):
                return w, (free, basis, sigma, inverse, inner)
        outer, sigma, across = torch.linalg.svd(free)
        sigma = sigma.masked_fill(sigma == 0, 1.0)
        inner = v @ across.mT
        return inner @ outer.mT, (outer, across.mT, sigma, None, inner)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return U·X and G·U, where HX + XH = K, H = UᵀP and K = A − Aᵀ, A = UᵀGᵀV."""
        left, basis, sigma, inverse, inner = memory
        turned = gradient @ left if inverse is None else ((gradient @ left) @ basis) * inverse
        a = turned.mT @ inner
        x = (a - a.mT).div_(sigma.unsqueeze(-1) + sigma.unsqueeze(-2)) @ basis.mT
        free = left @ x if inverse is None else (left @ (basis * inverse)) @ x
        return free, turned @ basis.mT if rows else None


def _is_orthogonal(q: Tensor) -> bool:
    """Whether QᵀQ = I; the columns have length one in any case, so the lengths of rows of V would not tell."""
    off = q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return bool((off.abs() <= _numerics.rotation_tolerance(q.dtype)).all())


def _signs(triangle: Tensor) -> Tensor:
    """The signs of a diagonal, 1 for zero."""
    diagonal = triangle.diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal < 0, -torch.ones_like(diagonal), torch.ones_like(diagonal))


def _lower_gram(p: Tensor) -> Tensor:
    """The lower triangle of PᵀP, all that a symmetric factorisation reads, panel by panel: 5/8 of the product."""
    gram, width = torch.zeros_like(p), -(-p.shape[-1] // 4)
    for i in range(0, p.shape[-1], width):
        gram[..., i:, i : i + width] = p[..., i:].mT @ p[..., i : i + width]
    return gram


def _times_lower(q: Tensor, lower: Tensor) -> Tensor:
    """Q·T for T lower triangular, panel by panel: 5/8 of the product."""
    width = -(-q.shape[-1] // 4)
    panels = [q[..., i:] @ lower[..., i:, i : i + width] for i in range(0, q.shape[-1], width)]
    return torch.cat(panels, -1)


def _by_cholesky(p: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Q and T of P = QT from TᵀT = PᵀP, and whether the factorisation failed."""
    lower, info = torch.linalg.cholesky_ex(_lower_gram(p))
    failed = bool((info != 0).any())
    return torch.linalg.solve_triangular(lower.mT, p, upper=True, left=False), lower.mT, failed


def _by_reflections(p: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
    """V·Qᵀ, and Q, T and V, by torch's QR factorisation: stable for every P, and known to compilers."""
    q, triangle = torch.linalg.qr(p)
    signs = _signs(triangle)
    q, triangle = q * signs.unsqueeze(-2), triangle * signs.unsqueeze(-1)
    return v @ q.mT, (q, triangle, v)


def _modified(p: Tensor) -> tuple[Tensor, Tensor]:
    """Q and T of P = QT, one direction after the other."""
    peak = p.abs().amax((-2, -1), keepdim=True) if p.numel() else p.new_ones(1, 1)
    peak = peak.masked_fill(peak == 0, 1.0)  # so that no length over- or underflows
    rest, triangle = p / peak, torch.zeros_like(p)
    for j in range(p.shape[-1]):
        column = rest[..., :, j : j + 1]
        length = column.norm(dim=-2, keepdim=True)
        column = column / length.masked_fill(length == 0, 1.0)
        along = column.mT @ rest[..., :, j:]
        rest[..., :, j:] -= column @ along
        rest[..., :, j : j + 1] = column
        triangle[..., j : j + 1, j:] = along
    return rest, triangle * peak
