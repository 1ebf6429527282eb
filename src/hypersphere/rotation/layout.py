"""How a rotation is composed of blocks and factors.

A full rotation of d dimensions has d(d−1)/2 parameters and costs d³. Blocks and butterfly factors make it cheap. A
`BlockLayout` knows which entries of a neuron each block acts on. The rest of the package only splits rows into the
parts of the blocks, multiplies, and joins the parts again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hypersphere._deprecation import deprecated_attribute
from hypersphere._validation import is_integer, require
from hypersphere.functions._rowmap import RowMap

__all__ = ["BlockLayout"]


@dataclass(frozen=True)
class BlockLayout:
    r"""How R is composed: R = Diag(R₁…R_k), or a product of `factors` such matrices (block butterfly, BOFT).

    R = B_{m−1}⋯B₁B₀. The blocks of B₀ act on b = size/blocks consecutive entries. For j ≥ 1, cut the entries into
    groups of b/2. Each block of B_j acts on two groups that are 2^j groups apart:

        entries of a neuron = chunks × 2 halves × 2^j groups × b/2 entries    one block: both halves of one group

    With m factors every entry reaches 2^(m−1)·b others. The order is the same as in PEFT's BOFT.

    Attributes:
        size: d, the number of entries of a neuron.
        blocks: k, the number of blocks of each factor.
        shared: use one matrix for all blocks of a factor.
        factors: m, the number of factors.

    Example:
        >>> import torch
        >>> layout = BlockLayout(size=16, blocks=4, factors=2)
        >>> layout.split(torch.arange(16.0).unsqueeze(0), 1)[0]  # the entries of the first block of B₁
        tensor([[0., 1., 4., 5.]])
    """

    size: int
    blocks: int = 1
    shared: bool = False
    factors: int = 1

    def __post_init__(self) -> None:
        """Check that blocks and factors divide the neuron."""
        accepted = f"a divisor of {self.size}, the length of a neuron"
        require(is_integer(self.blocks, 1) and self.size % self.blocks == 0, "blocks", accepted, self.blocks)
        require(is_integer(self.factors, 1), "factors", "an integer >= 1", self.factors)
        if self.factors > 1:
            even = f"of even size for more than one factor, but {self.size}/{self.blocks} = {self.block_size} is odd"
            require(self.block_size % 2 == 0, "blocks", even, self.blocks)
            chunk = 2 ** (self.factors - 1)
            accepted = f"a number with 2^(factors−1) dividing the {self.blocks} blocks"
            require(self.blocks % chunk == 0, "factors", accepted, self.factors)

    @property
    def block_size(self) -> int:
        """The block size b."""
        return self.size // self.blocks

    @property
    def matrix_count(self) -> int:
        """The number of learned b×b matrices."""
        return self.factors * (1 if self.shared else self.blocks)

    block = deprecated_attribute("block", "block_size")
    matrices = deprecated_attribute("matrices", "matrix_count")

    def expand(self, one: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return free parameters of all matrices, each equal to `one`: ([factors], [blocks], *one.shape)."""
        lead = [self.factors] if self.factors > 1 else []
        lead += [self.blocks] if self.blocks > 1 and not self.shared else []
        return one.expand(*lead, *one.shape).clone()

    def of_factors(self, matrices: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], ...]:
        """Return the matrices or free parameters of each factor, B₀ first."""
        return matrices.unbind() if self.factors > 1 else (matrices,)

    def draw_order(self, size: int, seed: int, folds: int) -> Int[Tensor, " size"]:
        """Return a random order of `size` entries. The blocks act on its first entries, ascending within each block.

        Args:
            size: the number of entries, at least the size of the layout. The remaining ones are not rotated.
            seed: the seed of the draws.
            folds: the number of the draw. The order is a function of the seed and of this number.
        """
        # Consecutive seeds give independent streams, because torch's Mersenne twister scrambles the seed. Another
        # function of the two numbers would change how saved runs continue.
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed + folds))
        rotated = order[: self.size].view(self.blocks, self.block_size).sort(1).values.flatten()
        return torch.cat([rotated, order[self.size :]])

    def rotate(
        self,
        method: RowMap,
        free: Float[Tensor, "..."],
        rows: Float[Tensor, "n d"],
        dimensions: Int[Tensor, " p"] | None = None,
    ) -> Float[Tensor, "n d"]:
        """Return the rotated rows V·Rᵀ. If `dimensions` are given, only these entries of each row change."""
        if dimensions is not None:
            # Autograd saves the indices. `DistributedDataParallel` writes to buffers in every forward pass, which would
            # invalidate saved ones if there are several forward passes before the backward pass, so save a copy.
            dimensions = dimensions.clone()
        selected = rows if dimensions is None else rows.index_select(1, dimensions)
        # Applying the map to n rows avoids forming R, which pays off if there are fewer rows than dimensions. Blocks
        # are usually much smaller than the number of rows: one product per block is then cheaper than one solve.
        if self.blocks == 1 or (rows.shape[0] < self.block_size and not self.shared):
            for j, free_of_factor in enumerate(self.of_factors(free)):
                selected = self.join(method(free_of_factor, self.split(selected, j)), rows.shape[0], j)
        else:
            selected = self.rotate_rows(method(free), selected)
        return selected if dimensions is None else rows.index_copy(1, dimensions, selected)

    def rotate_rows(self, matrices: Float[Tensor, "..."], rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return V·Rᵀ = V·B₀ᵀ⋯B_{m−1}ᵀ for given matrices."""
        for j, blocks in enumerate(self.of_factors(matrices)):
            rows = self.join(self.split(rows, j) @ blocks.mT, rows.shape[0], j)
        return rows

    def rotate_inputs(self, matrices: Float[Tensor, "..."], x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return x·R = x·B_{m−1}⋯B₀ for given matrices. The outputs of the layer are then those for V·Rᵀ."""
        for j, blocks in reversed(list(enumerate(self.of_factors(matrices)))):
            x = self.join(self.split(x, j) @ blocks, x.shape[0], j)
        return x

    def split(self, rows: Float[Tensor, "n d"], j: int = 0) -> Float[Tensor, "..."]:
        """Cut rows into the parts that the blocks of factor j act on: (k, n, b), or (n·k, b) for a shared matrix."""
        if self.blocks == 1:
            return rows
        n, k, b = rows.shape[0], self.blocks, self.block_size
        parts = rows.reshape(n, k, b)
        if j > 0:  # n, chunks, halves, groups, entries
            parts = rows.reshape(n, k >> j, 2, 1 << j, b // 2).transpose(2, 3).reshape(n, k, b)
        return parts.reshape(n * k, b) if self.shared else parts.transpose(0, 1)

    def join(self, parts: Float[Tensor, "..."], n: int, j: int = 0) -> Float[Tensor, "n d"]:
        """Undo `split` for `n` rows."""
        if self.blocks == 1:
            return parts
        rows = parts if self.shared else parts.transpose(0, 1)
        if j > 0:
            rows = rows.reshape(n, self.blocks >> j, 1 << j, 2, self.block_size // 2).transpose(2, 3)
        return rows.reshape(n, self.size)
