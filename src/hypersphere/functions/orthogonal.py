r"""Orthogonal maps: how free parameters become a rotation of rows, W = V·Rᵀ.

An entry turns a free tensor into a rotation without forming R where it can be avoided: `apply` gives V·Rᵀ and a memory
of the factorisation, `pull` takes the gradient of W back through that memory. Both work on a batch of blocks (k, n, d)
as on one (n, d). To add one, write a frozen dataclass and list it in ORTHOGONALS.

Reference:
    Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions import skew
from hypersphere.functions.orthogonalize import GramSchmidt, Householder, Lowdin
from hypersphere.functions.rowmap import Memory, RowMap, keeps_norms

__all__ = [
    "ORTHOGONALS",
    "Cayley",
    "Exponential",
    "Free",
    "GramSchmidt",
    "Householder",
    "Lowdin",
    "Neumann",
    "SkewMap",
]


class SkewMap(RowMap):
    """A map of a skew matrix S from d(d−1)/2 numbers."""

    def identity(self, d: int) -> Tensor:
        """Return S = 0."""
        return torch.zeros(d * (d - 1) // 2)

    def size(self, free: Tensor) -> int:
        """Return d of the d(d−1)/2 numbers."""
        return skew.size_of(free.shape[-1])

    def generator(self, free: Tensor) -> Tensor:
        """Return S."""
        return skew.unpack(free)


@dataclass(frozen=True)
class Cayley(SkewMap):
    r"""The Cayley transform: R = (I+S)(I−S)⁻¹, S skew   (OPT, 3.4).

    Rᵀ = 2(I+S)⁻¹ − I, so V·Rᵀ = 2Z − V with Z(I+S) = V: one LU factorisation, which the gradient uses again. With a
    `bound`, S is shrunk to that Frobenius norm where it is longer: the constrained form of orthogonal fine-tuning.
    I+S of an odd d has the eigenvalue 1 beside those of S: where S is so large that the solve stretches rows, it is
    done in float64, which serves up to ‖S‖ ≈ 10¹²; larger ones, and those in a compiled graph, are not guarded.

    >>> Cayley()(torch.tensor([1.0]))
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        """Refuse a bound that is not positive."""
        positive = self.bound is None or (is_number(self.bound, 0) and self.bound > 0)
        require(positive, "bound", "None or a positive number", self.bound)

    def generator(self, free: Tensor) -> Tensor:
        """Return S, shrunk to the bound."""
        return skew.unpack(free if self.bound is None else free * self._shrinking(free, self.bound)[0])

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return 2Z − V."""
        w, memory = self._solved(free, v)
        if keeps_norms(w, v):
            return w, memory
        w, memory = self._solved(_numerics.to_float64(free), _numerics.to_float64(v))
        return w.to(v), memory

    def _solved(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        shifted = self.generator(free)
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        factor, pivots = torch.linalg.lu_factor(shifted)
        z = torch.linalg.lu_solve(factor, pivots, v, left=False)
        return 2 * z - v, (free, factor, pivots, z)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return the skew part of −ZᵀH and H − G, where H(I+S)ᵀ = 2G."""
        free, factor, pivots, z = memory
        wide = gradient.to(factor)
        h = torch.linalg.lu_solve(factor, pivots, 2 * wide, left=False, adjoint=True)
        return self._through_bound(free, skew.pack(-(z.mT @ h))).to(gradient), (h - wide).to(gradient)

    @staticmethod
    def _shrinking(free: Tensor, bound: float) -> tuple[Tensor, Tensor]:
        """How much S is shrunk, and whether at all."""
        length = math.sqrt(2) * sphere.norm(free, keepdim=True)
        return torch.where(length > bound, bound / length, torch.ones_like(length)), length > bound

    def _through_bound(self, free: Tensor, gradient: Tensor) -> Tensor:
        """Where S is shrunk, only what turns its direction counts."""
        if self.bound is None:
            return gradient
        factor, shrunk = self._shrinking(free, self.bound)
        direction = sphere.normalize(free)
        along = (gradient * direction).sum(-1, keepdim=True) * direction
        return factor * torch.where(shrunk, gradient - along, gradient)


@dataclass(frozen=True)
class Neumann(SkewMap):
    r"""The Cayley transform by a Neumann series: (I+S)⁻¹ ≈ Σ_k (−S)^k, products only.

    The residual ‖Z(I+S) − V‖ of every row is checked; where one is not small the exact solve takes over, and where
    nobody can look (in a compiled graph) as well. The last of k terms is ‖S‖^k, so six terms serve in float32 up to
    ‖S‖ ≈ 0.2 and in float64 up to 0.01; more terms reach further, but never to 1.

    >>> Neumann(terms=8)(torch.tensor([0.01]))
    tensor([[ 0.9998, -0.0200],
            [ 0.0200,  0.9998]])
    """

    terms: int = 6

    def __post_init__(self) -> None:
        """Refuse an empty series."""
        require(is_integer(self.terms, 1), "terms", "a whole number >= 1", self.terms)

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return 2Z − V."""
        s = skew.unpack(free)
        z, small = self._series(v, s)
        if not small:
            w, memory = Cayley().apply(free, v)
            return w, (None, *memory)
        return 2 * z - v, (s, free, z)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return what `Cayley` does, with the series of Sᵀ = −S."""
        if memory[0] is None:
            return Cayley().pull(memory[1:], gradient)
        s, free, z = memory
        h, small = self._series(2 * gradient, -s)
        if not small:
            return Cayley().pull(Cayley().apply(free, z + z @ s)[1], gradient)
        return skew.pack(-(z.mT @ h)), h - gradient

    def _series(self, rows: Tensor, s: Tensor) -> tuple[Tensor, bool]:
        """Σ_k rows·(−S)^k by Horner, and whether the last term is lost in rounding."""
        z = rows
        for _ in range(self.terms):
            z, before = rows - z @ s, z
        left, lengths = torch.linalg.vector_norm(z - before, dim=-1), torch.linalg.vector_norm(rows, dim=-1)
        small = left <= _numerics.rotation_tolerance(rows.dtype) * lengths
        return z, _numerics.values_readable(rows) and bool(small.all())


@dataclass(frozen=True)
class Exponential(SkewMap):
    r"""The matrix exponential: R = exp(S), S skew   (OPT, 3.4), by its action on V.

    The series is as long as S is large, so a compiled graph holds it as one node, and computes it again to go back.
    Its length comes from an estimate of ‖S‖₂; where that turns out too small, a true bound takes its place.

    >>> Exponential()(torch.tensor([1.0]))
    tensor([[ 0.5403, -0.8415],
            [ 0.8415,  0.5403]])
    """

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·exp(−S)."""
        if not _numerics.values_readable(free, v):
            return _exponential(free, v), (free, v)
        s = skew.unpack(free)
        w, memory, kept = self._action(v, s, skew.spectral_radius(s))
        if not kept:  # the estimate was too small
            w, memory, _ = self._action(v, s, skew.radius_bound(s))
        return w, memory

    def _action(self, v: Tensor, s: Tensor, radius: float) -> tuple[Tensor, Memory, bool]:
        """V·exp(−S) by a series for this radius and by squaring, and whether the series kept the lengths of rows."""
        halvings = max(0, math.ceil(math.log2(radius / 16)))
        if v.shape[-2] <= s.shape[-1] and not halvings:
            w, memory = skew.exponential_rows(v, -s, radius)
            return w, (None, [], memory), keeps_norms(w, v)
        eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device).expand_as(s)
        back, memory = skew.exponential_rows(eye, -s / 2.0**halvings, radius / 2.0**halvings)
        powers = [back]
        for _ in range(halvings):
            square = powers[-1] @ powers[-1]
            powers.append(1.5 * square - 0.5 * square @ (square.mT @ square))  # squaring doubles the rounding errors
        return v @ powers[-1], (v, powers, memory), keeps_norms(back, eye)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the action, run backwards."""
        if len(memory) == 2:
            return _exponential_pull(*memory, gradient)
        v, powers, inner = memory
        if v is None:
            of_rows, s = skew.exponential_rows_gradient(inner, gradient)
            return skew.pack(-s), of_rows
        of_rows, gradient = gradient @ powers[-1].mT, v.mT @ gradient
        for power in reversed(powers[:-1]):
            gradient = 0.5 * (gradient @ power.mT + power.mT @ gradient)  # of S/2^k, halved on the way
        _, s = skew.exponential_rows_gradient(inner, gradient)
        return skew.pack(-s), of_rows


@torch.library.custom_op("hypersphere::exponential", mutates_args=())
def _exponential(free: Tensor, v: Tensor) -> Tensor:
    return Exponential().apply(free, v)[0].contiguous()


@torch.library.custom_op("hypersphere::exponential_pull", mutates_args=())
def _exponential_pull(free: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    of_free, of_rows = Exponential().pull(Exponential().apply(free, v)[1], gradient)
    assert of_rows is not None
    return of_free.contiguous(), of_rows.contiguous()


@_exponential.register_fake
def _(free: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@_exponential_pull.register_fake
def _(free: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return free.new_empty(free.shape), v.new_empty(v.shape)


@dataclass(frozen=True)
class Free(RowMap):
    r"""R itself, unconstrained: the ablation (UPT), the relaxation with a penalty (OR), and what OGD moves.

    >>> Free()(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [3., 4.]])
    """

    exact: ClassVar[bool] = False

    def identity(self, d: int) -> Tensor:
        """Return R = I."""
        return torch.eye(d)

    def degrees_of_freedom(self, d: int) -> int:
        """Return d²."""
        return d * d

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·Rᵀ."""
        return v @ free.mT, (free, v)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return GᵀV and G·R."""
        free, v = memory
        return gradient.mT @ v, gradient @ free if rows else None


ORTHOGONALS: dict[str, type[RowMap]] = {
    "gram_schmidt": GramSchmidt,
    "householder": Householder,
    "lowdin": Lowdin,
    "cayley": Cayley,
    "neumann": Neumann,
    "exponential": Exponential,
    "free": Free,
}
