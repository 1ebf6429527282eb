r"""Linear maps of rows that are not rotations: R positive definite, triangular or banded (G-OPT).

To add an entry, write a frozen dataclass with `matrix` and list it in TRANSFORMS.

Reference:
    Liu et al., Orthogonal Over-Parameterized Training, CVPR 2021, appendix J.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.functions._rowmap import RowMap

__all__ = ["TRANSFORMS", "Banded", "PositiveDefinite", "Transform", "Triangular"]


class Transform(RowMap):
    """A map that is given by its matrix R. The free parameters are a d×d matrix."""

    always_orthogonal: ClassVar[bool] = False

    @abc.abstractmethod
    def matrix(self, free: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """Return R in differentiable torch operations."""

    def degrees_of_freedom(self, d: int) -> int:
        """Return d(d+1)/2, the number of entries of a triangle."""
        return d * (d + 1) // 2

    def expression(self, free: Float[Tensor, "*batch d d"], v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "..."]:
        """Return V·Rᵀ."""
        return v @ self.matrix(free).mT


@dataclass(frozen=True)
class PositiveDefinite(Transform):
    r"""R = LLᵀ with L lower triangular (OPT, appendix J). No neuron is rotated by more than a right angle.

    >>> import torch
    >>> PositiveDefinite()(torch.tensor([[1.0, 9.0], [2.0, 3.0]]))
    tensor([[ 1.,  2.],
            [ 2., 13.]])
    """

    def matrix(self, free: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """Return LLᵀ."""
        lower = free.tril()
        return lower @ lower.mT


@dataclass(frozen=True)
class Triangular(Transform):
    r"""R lower or upper triangular (OPT, appendix J).

    >>> import torch
    >>> Triangular()(torch.tensor([[1.0, 9.0], [2.0, 3.0]]))
    tensor([[1., 0.],
            [2., 3.]])
    """

    upper: bool = False

    def matrix(self, free: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """Return the triangle."""
        return free.triu() if self.upper else free.tril()


@dataclass(frozen=True)
class Banded(Transform):
    r"""R with `width` diagonals on either side of the main diagonal (OPT, appendix J).

    >>> import torch
    >>> Banded(width=1)(torch.ones(3, 3))
    tensor([[1., 1., 0.],
            [1., 1., 1.],
            [0., 1., 1.]])
    """

    width: int = 1

    def __post_init__(self) -> None:
        """Check the width."""
        require(is_integer(self.width, 0), "width", "an integer >= 0", self.width)

    def degrees_of_freedom(self, d: int) -> int:
        """Return the number of entries in the band."""
        return d + 2 * sum(d - i for i in range(1, min(self.width, d - 1) + 1))

    def matrix(self, free: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """Return the band."""
        return free.triu(-self.width).tril(self.width)


TRANSFORMS: dict[str, type[RowMap]] = {
    "positive_definite": PositiveDefinite,
    "triangular": Triangular,
    "banded": Banded,
}
