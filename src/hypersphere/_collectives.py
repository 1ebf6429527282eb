r"""Sums and gathers over processes with gradients.

Two kinds of tensors occur while several processes compute one loss. A *global* tensor has the same value in all
processes, and so has its gradient. A *part* is a summand that one process contributes. A sum of parts is global, and
its gradient passes to every part unchanged. A global tensor that every process uses for its part collects the sum of
their gradients. With these two rules no gradient is counted twice, and the gradients of the loss, which is global, are
those of a single process that holds all classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypersphere._validation import require

__all__ = ["Processes", "error_message"]


class Processes:
    """The processes of a `torch.distributed` group, or this process alone if there is no group.

    Args:
        group: a process group; None for the default group, if there is one when this object is used.

    Example:
        >>> alone = Processes()
        >>> alone.rank, alone.size, alone.sum_parts(torch.tensor([1.0, 2.0]))
        (0, 1, tensor([1., 2.]))
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        require(self.rank >= 0, "group", "a group that this process belongs to", group)

    @property
    def size(self) -> int:
        """The number of processes."""
        return dist.get_world_size(self.group) if self._is_connected else 1

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return dist.get_rank(self.group) if self._is_connected else 0

    @property
    def _is_connected(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    # Differentiable collectives --------------------------------------------------------------------------------------

    def sum_parts(self, part: Tensor) -> Tensor:
        """Return the global sum of the parts of all processes."""
        return _SumParts.apply(part, self)

    def reduce_terms(
        self,
        terms: Tensor,
        across: Callable[[Tensor], Tensor],
        part_derivative: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> Tensor:
        """Return global terms (B, T) from the terms of all processes, one row per sample.

        Args:
            terms: (B, T) the terms of this process for the samples of all processes.
            across: a function that reduces the first term over R processes, (n, R) → (n,). The other terms are summed.
            part_derivative: d(reduced first term)/d(first term of one process), given that term and the reduced one;
                None if it is 1.
        """
        return _ReduceTerms.apply(terms, self, across, part_derivative)

    def share(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return global tensors for use in a part; their gradients are summed over processes."""
        shared = iter(_Share.apply(self, *(t for t in tensors if t is not None)))
        return [None if t is None else next(shared) for t in tensors]

    def gather_rows(self, rows: Tensor, counts: Sequence[int], factor: float = 1.0) -> Tensor:
        """Return the global tensor of the rows of all processes, `counts[r]` from process r.

        The gradient returns to the rows of this process, multiplied by `factor`.
        """
        return _GatherRows.apply(rows, self, counts, factor)

    def local_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's rows of a global tensor. Gradients are gathered, since they differ by process."""
        return _LocalRows.apply(rows, self, counts)

    # Collectives without gradient ------------------------------------------------------------------------------------

    def all_reduce_(self, part: Tensor) -> Tensor:
        """Sum a tensor over processes in place."""
        if self.size > 1:
            with self._explain_failure("sum"):
                dist.all_reduce(part, group=self.group)
        return part

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which must have the same shape."""
        if self.size == 1:
            return [part]
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self._explain_failure("gather"):
            dist.all_gather(parts, part, group=self.group)
        return parts

    def concatenate_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all processes, of which process r has `counts[r]`."""
        if self.size == 1:
            return rows.clone()
        # `all_gather` needs equal shapes, so pad to the largest count.
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return torch.cat([part[:count] for part, count in zip(self.all_gather(padded), counts, strict=True)])

    def exchange_columns(self, block: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Return this process's rows of a matrix whose columns are distributed over processes.

        Args:
            block: all rows of the columns of this process.
            rows: the number of rows of each process.
            columns: the number of columns of each process.
        """
        if self.size == 1:
            return block
        num_rows = rows[self.rank]
        sent = [count * columns[self.rank] for count in rows]
        received = [num_rows * count for count in columns]
        flat = block.new_empty(sum(received))
        with self._explain_failure("exchange"):
            dist.all_to_all_single(flat, block.flatten(), received, sent, group=self.group)
        pieces = zip(flat.split(received), columns, strict=True)
        return torch.cat([piece.view(num_rows, count) for piece, count in pieces], 1)

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to every process and return the rows received from every process, in the order of processes.

        Args:
            rows: the rows to send, ordered by the process that receives them.
            sent: the number of rows for each process.
            received: the number of rows from each process.
        """
        if self.size == 1:
            return rows
        result = rows.new_empty(sum(received), *rows.shape[1:])
        with self._explain_failure("exchange"):
            dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=self.group)
        return result

    def gather_at_first(self, rows: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Return the rows of all processes in CPU memory on the first process, and None on the others."""
        if self.rank > 0:
            with self._explain_failure("send"):
                dist.send(rows.contiguous(), group=self.group, group_dst=0)
            return None
        result = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype, device="cpu")
        pieces = result.split(list(counts))
        pieces[0].copy_(rows)
        for source in range(1, self.size):
            buffer = rows.new_empty(counts[source], *rows.shape[1:])
            with self._explain_failure("receive"):
                dist.recv(buffer, group=self.group, group_src=source)
            pieces[source].copy_(buffer)
        return result

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the Python objects of all processes."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._explain_failure("gather"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_everywhere(self, message: str | None, error: type[ValueError] = ValueError) -> None:
        """Raise an error in every process if the message of any process is not None."""
        for rank, other in enumerate(self.all_gather_objects(message)):
            if other is not None:
                raise error(other if self.size == 1 else f"process {rank}: {other}")

    @contextlib.contextmanager
    def _explain_failure(self, action: str) -> Iterator[None]:
        """Replace the error of a failed collective by one that says what happened."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"process {self.rank} of {self.size} could not {action} with the others: one of them has ended, or did "
                "not answer within the time-out of the process group"
            ) from error


def error_message(
    check: Callable[[], object], errors: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> str | None:
    """Return the message of the error that `check` raises, or None. Errors of other classes are not caught."""
    try:
        check()
    except errors as error:
        return str(error)
    return None


class _SumParts(torch.autograd.Function):
    """Forward: the sum of the parts. Backward: the gradient of the sum, which is global, for every part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        return processes.all_reduce_(part.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceTerms(torch.autograd.Function):
    """Forward: reduce the first term, sum the others. Backward: the first gradient times `part_derivative`.

    Each process reduces the terms of some samples, and the results are gathered. A process receives B·T numbers twice.
    If it received the terms of all R processes for all samples, it would receive R·B·T numbers, which exceeds the
    features if there are more processes than feature dimensions.
    """

    @staticmethod
    def forward(ctx: Any, terms: Tensor, processes: Processes, across: Any, part_derivative: Any) -> Tensor:
        (batch, width), size = terms.shape, processes.size
        counts = [batch // size + (rank < batch % size) for rank in range(size)]
        received = processes.exchange_columns(terms, counts, [width] * size).view(-1, size, width)
        reduced = torch.cat([across(received[..., 0]).unsqueeze(1), received[..., 1:].sum(1)], 1)
        total = processes.concatenate_rows(reduced, counts)
        ctx.part_derivative = part_derivative
        ctx.save_for_backward(terms[:, 0], total[:, 0])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.part_derivative is not None:
            grad = grad.clone()
            grad[:, 0] *= ctx.part_derivative(*ctx.saved_tensors)
        return grad, None, None, None


class _Share(torch.autograd.Function):
    """Forward: the tensors themselves. Backward: the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, processes: Processes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.processes = processes
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # One collective for all tensors.
        flat = ctx.processes.all_reduce_(torch.cat([grad.flatten() for grad in grads]))
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


class _GatherRows(torch.autograd.Function):
    """Forward: the rows of all processes. Backward: the gradient of the rows of this process, times a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, processes: Processes, counts: Sequence[int], factor: float) -> Tensor:
        first = sum(counts[: processes.rank])
        ctx.rows, ctx.factor = slice(first, first + len(rows)), factor
        return processes.concatenate_rows(rows, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.rows] * ctx.factor, None, None, None


class _LocalRows(torch.autograd.Function):
    """Forward: the rows of this process. Backward: the gradients of the rows of all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, processes: Processes, counts: Sequence[int]) -> Tensor:
        ctx.processes, ctx.counts = processes, counts
        return rows.split(list(counts))[processes.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.processes.concatenate_rows(grad, ctx.counts), None, None
