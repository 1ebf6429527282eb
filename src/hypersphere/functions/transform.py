r"""Maps of rows that are not rotations: R positive definite, triangular or banded (G-OPT).

To add one, write a frozen dataclass and list it in TRANSFORMS.

Reference:
    Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021, appendix J.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.functions.rowmap import Memory, RowMap

__all__ = ["TRANSFORMS", "Banded", "PositiveDefinite", "Transform", "Triangular"]


class Transform(RowMap):
    """A map given by its matrix R, which is formed."""

    exact: ClassVar[bool] = False

    @abc.abstractmethod
    def matrix(self, free: Tensor) -> Tensor:
        """Return R."""

    @abc.abstractmethod
    def matrix_gradient(self, free: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the free parameters for a gradient of R."""

    def identity(self, d: int) -> Tensor:
        """Return I."""
        return torch.eye(d)

    def apply(self, free: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Return V·Rᵀ."""
        r = self.matrix(free)
        return v @ r.mT, (free, r, v)

    def pull(self, memory: Memory, gradient: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return the gradient through R, and G·R."""
        free, r, v = memory
        return self.matrix_gradient(free, gradient.mT @ v), gradient @ r if rows else None


@dataclass(frozen=True)
class PositiveDefinite(Transform):
    r"""R = LLᵀ, L lower triangular: no neuron is turned by more than a right angle   (OPT, appendix J).

    >>> PositiveDefinite()(torch.tensor([[1.0, 9.0], [2.0, 3.0]]))
    tensor([[ 1.,  2.],
            [ 2., 13.]])
    """

    def degrees_of_freedom(self, d: int) -> int:
        """Return d(d+1)/2."""
        return d * (d + 1) // 2

    def matrix(self, free: Tensor) -> Tensor:
        """Return LLᵀ."""
        lower = free.tril()
        return lower @ lower.mT

    def matrix_gradient(self, free: Tensor, gradient: Tensor) -> Tensor:
        """Return the lower triangle of (G + Gᵀ)L."""
        return ((gradient + gradient.mT) @ free.tril()).tril()


@dataclass(frozen=True)
class Triangular(Transform):
    r"""R lower triangular, or upper   (OPT, appendix J).

    >>> Triangular()(torch.tensor([[1.0, 9.0], [2.0, 3.0]]))
    tensor([[1., 0.],
            [2., 3.]])
    """

    upper: bool = False

    def degrees_of_freedom(self, d: int) -> int:
        """Return d(d+1)/2."""
        return d * (d + 1) // 2

    def matrix(self, free: Tensor) -> Tensor:
        """Return the triangle."""
        return free.triu() if self.upper else free.tril()

    def matrix_gradient(self, free: Tensor, gradient: Tensor) -> Tensor:
        """Return the triangle of the gradient."""
        return self.matrix(gradient)


@dataclass(frozen=True)
class Banded(Transform):
    r"""R with `width` diagonals on either side of the main one   (OPT, appendix J).

    >>> Banded(width=1)(torch.ones(3, 3))
    tensor([[1., 1., 0.],
            [1., 1., 1.],
            [0., 1., 1.]])
    """

    width: int = 1

    def __post_init__(self) -> None:
        """Refuse a negative width."""
        require(is_integer(self.width, 0), "width", "a whole number >= 0", self.width)

    def degrees_of_freedom(self, d: int) -> int:
        """Return d + 2·Σ(d − i) over the diagonals i = 1…width."""
        return d + 2 * sum(d - i for i in range(1, min(self.width, d - 1) + 1))

    def matrix(self, free: Tensor) -> Tensor:
        """Return the band."""
        return free.triu(-self.width).tril(self.width)

    def matrix_gradient(self, free: Tensor, gradient: Tensor) -> Tensor:
        """Return the band of the gradient."""
        return self.matrix(gradient)


TRANSFORMS: dict[str, type[RowMap]] = {
    "positive_definite": PositiveDefinite,
    "triangular": Triangular,
    "banded": Banded,
}
