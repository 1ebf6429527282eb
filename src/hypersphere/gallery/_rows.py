"""Storage of unit vectors: blocks of rows in one of four encodings.

An encoding maps unit rows to one or two *columns* (tensors with the same number of rows) and back. All blocks except
the last have `BLOCK_ROWS` rows, so the block of a row follows from its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

__all__ = ["BLOCK_ROWS", "ENCODINGS", "Block", "Encoding", "Rows"]

BLOCK_ROWS = 32_768  # a float32 block of dimension 128 has 16 MB
WORD_BYTES = 8  # sign bits are padded to words of 64 bits, which are compared with one instruction

Block: TypeAlias = dict[str, Tensor]


class Encoding:
    """Float32 storage: the rows themselves. The other encodings define the same methods."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def columns(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return, for each column, its dtype and the shape of one of its rows."""
        return {"values": (torch.float32, (self.dim,))}

    def encode(self, directions: Float[Tensor, "rows dim"]) -> Block:
        """Return the columns of float32 unit rows."""
        return {"values": directions}

    def decode(self, block: Block) -> Float[Tensor, "rows dim"]:
        """Return the unit rows that the columns represent, in float32."""
        return block["values"]

    def multiply(
        self, x: Float[Tensor, "queries dim"], block: Block, out: Tensor, buffer: Tensor
    ) -> Float[Tensor, "queries rows"]:
        """Write the cosines of unit queries and the decoded rows into `out`. `buffer` is memory for decoded rows."""
        return torch.mm(x, block["values"].mT, out=out)


class _Float16(Encoding):
    """Half-precision storage."""

    def columns(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"values": (torch.float16, (self.dim,))}

    def encode(self, directions: Tensor) -> Block:
        return {"values": directions.half()}

    def decode(self, block: Block) -> Tensor:
        return block["values"].float()

    def multiply(self, x: Tensor, block: Block, out: Tensor, buffer: Tensor) -> Tensor:
        # Products in float16 are slower on most processors than widening the block first.
        return torch.mm(x, buffer.copy_(block["values"]).mT, out=out)


class _Int8(Encoding):
    r"""Eight bits per entry and one scale per row: w ≈ q/‖q‖ with q = round(127·w/max|w|).

    The scale 1/‖q‖ makes the decoded row a unit vector again, so that the cosine of a row with itself is 1.
    """

    def columns(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"values": (torch.int8, (self.dim,)), "scales": (torch.float32, ())}

    def encode(self, directions: Tensor) -> Block:
        peak = directions.abs().amax(1, keepdim=True)
        levels = (directions * (127 / peak)).nan_to_num_(0.0).round_()  # 0/0 for a zero row
        norms = torch.linalg.vector_norm(levels, dim=1)
        return {"values": levels.to(torch.int8), "scales": norms.reciprocal().masked_fill_(norms == 0, 0.0)}

    def decode(self, block: Block) -> Tensor:
        return block["values"].float() * block["scales"].unsqueeze(1)

    def multiply(self, x: Tensor, block: Block, out: Tensor, buffer: Tensor) -> Tensor:
        return torch.mm(x, buffer.copy_(block["values"]).mT, out=out).mul_(block["scales"])


class _Binary(Encoding):
    """The signs of the entries, eight per byte. The decoded row is sign(w)/√d."""

    def columns(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"bits": (torch.uint8, (-(-self.dim // (8 * WORD_BYTES)) * WORD_BYTES,))}

    def encode(self, directions: Tensor) -> Block:
        width = self.columns()["bits"][1][0]
        bits = np.zeros((len(directions), width), np.uint8)
        packed = np.packbits((directions > 0).numpy(), axis=1)
        bits[:, : packed.shape[1]] = packed
        return {"bits": torch.from_numpy(bits)}

    def decode(self, block: Block) -> Tensor:
        bits = np.unpackbits(block["bits"].numpy(), axis=1, count=self.dim)
        return torch.from_numpy(bits).float().mul_(2).sub_(1).div_(self.dim**0.5)

    def multiply(self, x: Tensor, block: Block, out: Tensor, buffer: Tensor) -> Tensor:
        return torch.mm(x, self.decode(block).mT, out=out)


ENCODINGS: dict[str, type[Encoding]] = {"float32": Encoding, "float16": _Float16, "int8": _Int8, "binary": _Binary}


class Rows:
    """A growing matrix of unit rows, stored in blocks.

    Args:
        dim: number of columns.
        dtype: a name of `ENCODINGS`.

    Example:
        >>> rows = Rows(2, "int8")
        >>> rows.append(torch.eye(2))
        >>> rows.keep(torch.tensor([False, True]))
        >>> len(rows), rows.gather(torch.tensor([0]))
        (1, tensor([[0., 1.]]))
    """

    def __init__(self, dim: int, dtype: str) -> None:
        self.dim, self.dtype = dim, dtype
        self.encoding = ENCODINGS[dtype](dim)
        self.blocks: list[Block] = []
        self._buffer: Block | None = None  # memory of the last block, which may have room for more rows

    def copy(self) -> Rows:
        """Return rows that share the blocks of this object. Only one of the two may be changed afterwards.

        A change writes behind the last row or replaces blocks, so the other object keeps its content.
        """
        copy = Rows(self.dim, self.dtype)
        copy.blocks, copy._buffer = list(self.blocks), self._buffer
        return copy

    def __len__(self) -> int:
        return max(len(self.blocks) - 1, 0) * BLOCK_ROWS + (_count(self.blocks[-1]) if self.blocks else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for block in self.blocks for column in block.values())

    def append(self, directions: Float[Tensor, "rows dim"]) -> None:
        """Encode float32 unit rows and add them at the end."""
        for part in directions.split(BLOCK_ROWS):
            self.append_encoded(self.encoding.encode(part))

    def append_encoded(self, columns: Block) -> None:
        """Add encoded rows at the end."""
        start, total = 0, _count(columns)
        while start < total:
            if not self.blocks or _count(self.blocks[-1]) == BLOCK_ROWS:
                self.blocks.append({name: column[:0] for name, column in columns.items()})
                self._buffer = None
            filled = _count(self.blocks[-1])
            stop = min(total, start + BLOCK_ROWS - filled)
            needed = filled + stop - start
            if self._buffer is None or _count(self._buffer) < needed:
                # Doubling the capacity keeps the total cost of many small additions linear in the number of rows.
                capacity = min(BLOCK_ROWS, max(needed, 2 * filled))
                last, self._buffer = self.blocks[-1], {}
                for name, column in last.items():
                    self._buffer[name] = column.new_empty(capacity, *column.shape[1:])
                    self._buffer[name][:filled] = column
            for name, column in columns.items():
                self._buffer[name][filled:needed] = column[start:stop]
            self.blocks[-1] = {name: column[:needed] for name, column in self._buffer.items()}
            start = stop

    def keep(self, mask: Bool[Tensor, " rows"]) -> None:
        """Remove the rows whose mask is False. The order of the others does not change."""
        blocks, masks = self.blocks, mask.split(BLOCK_ROWS) if len(mask) else ()
        # Blocks before the first removed row do not change. The remaining rows of the others are appended again.
        first = next((number for number, part in enumerate(masks) if not bool(part.all())), len(blocks))
        self.blocks, self._buffer = blocks[:first], None
        for block, part in zip(blocks[first:], masks[first:], strict=True):
            self.append_encoded({name: column[part] for name, column in block.items()})

    def decoded(self) -> Iterator[Float[Tensor, "rows dim"]]:
        """Yield the rows of each block in float32."""
        return map(self.encoding.decode, self.blocks)

    def gather(self, entries: Int64[Tensor, " entries"]) -> Float[Tensor, "entries dim"]:
        """Return the rows with these numbers, in this order, in float32."""
        result = torch.empty(len(entries), self.dim, dtype=torch.float32)
        # Sort the numbers, so that the entries of each block are consecutive.
        numbers, order = entries.sort()
        bounds = torch.searchsorted(numbers, torch.arange(len(self.blocks) + 1) * BLOCK_ROWS).tolist()
        for number, block in enumerate(self.blocks):
            low, high = bounds[number], bounds[number + 1]
            if low < high:
                index = numbers[low:high] - number * BLOCK_ROWS
                result[order[low:high]] = self.encoding.decode(_select(block, index))
        return result


def _count(block: Mapping[str, Tensor]) -> int:
    return len(next(iter(block.values())))


def _select(block: Block, index: Tensor) -> Block:
    return {name: column[index] for name, column in block.items()}
