"""How a rotation of d numbers is cut into blocks: one, several along the channels, or a butterfly of several layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hypersphere._validation import is_integer, require

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    r"""R = Diag(R₁…R_k), or a product of `factors` such matrices whose blocks take every b^j-th number.

    `shared` makes all blocks of a factor one matrix; of a single block it says nothing.

    >>> Layout(size=8, blocks=4, factors=3).block
    2
    """

    size: int
    blocks: int = 1
    shared: bool = False
    factors: int = 1

    def __post_init__(self) -> None:
        """Refuse blocks that do not divide the neuron."""
        accepted = f"a divisor of {self.size}, the length of a neuron"
        require(is_integer(self.blocks, 1) and self.size % self.blocks == 0, "blocks", accepted, self.blocks)
        require(is_integer(self.factors, 1), "factors", "a whole number >= 1", self.factors)
        reach = self.block**self.factors
        accepted = f"a number >= 1 with (d/blocks)^factors = {self.block}^factors dividing d = {self.size}"
        require(self.factors == 1 or self.size % reach == 0, "factors", accepted, self.factors)

    @property
    def block(self) -> int:
        """The side of a block."""
        return self.size // self.blocks

    @property
    def matrices(self) -> int:
        """How many matrices are learned."""
        return self.factors * (1 if self.shared else self.blocks)

    def repeated(self, one: Tensor) -> Tensor:
        """Return the free parameters of all matrices, each equal to `one`."""
        lead = [self.factors] if self.factors > 1 else []
        lead += [self.blocks] if self.blocks > 1 and not self.shared else []
        return one.expand(*lead, *one.shape).clone()

    def of_factor(self, free: Tensor, j: int) -> Tensor:
        """Return the free parameters of one factor."""
        return free[j] if self.factors > 1 else free

    def split(self, rows: Tensor, j: int = 0) -> Tensor:
        """Cut rows (n, d) into what the blocks of factor j turn: (k, n, b), or (n·k, b) where they share one matrix."""
        if self.blocks == 1:
            return rows
        stride = self.block**j
        cut = rows.reshape(len(rows), -1, self.block, stride).permute(1, 3, 0, 2)
        return cut.reshape(-1, self.block) if self.shared else cut.reshape(self.blocks, len(rows), self.block)

    def join(self, cut: Tensor, n: int, j: int = 0) -> Tensor:
        """Undo `split`."""
        if self.blocks == 1:
            return cut
        stride = self.block**j
        return cut.reshape(-1, stride, n, self.block).permute(2, 0, 3, 1).reshape(n, self.size)
