r"""Sums and gatherings over processes that have gradients.

Two kinds of tensors exist while several processes compute a loss. A *whole* one is the same in all of them, and so is
its gradient. A *part* is a summand that a process has by itself. A sum of parts is whole, and passes its gradient on
unchanged; a whole tensor that every process uses for its part collects the sum of their gradients. So no gradient is
counted twice, and the loss, which is whole, is that of one process with all classes.
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

__all__ = ["Processes", "problem_of"]


class Processes:
    """The processes of a `torch.distributed` group, or this one alone if there is no group.

    Args:
        group: a process group; None for the default one, if there is one when this is used.

    Example:
        >>> alone = Processes()
        >>> alone.rank, alone.size, alone.summed(torch.tensor([1.0, 2.0]))
        (0, 1, tensor([1., 2.]))
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        require(self.rank >= 0, "group", "a group that this process belongs to", group)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return dist.get_world_size(self.group) if self._connected else 1

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return dist.get_rank(self.group) if self._connected else 0

    @property
    def _connected(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def summed(self, part: Tensor) -> Tensor:
        """Return the whole: the sum of the parts."""
        return _Sum.apply(part, self)

    def stacked(self, part: Tensor) -> Tensor:
        """Return the whole (R, …): the parts of all R processes."""
        return _Stack.apply(part, self)

    def shared(self, *whole: Tensor | None) -> list[Tensor | None]:
        """Return whole tensors for use in a part, with the gradients of all parts summed."""
        present = iter(_Share.apply(self, *(t for t in whole if t is not None)))
        return [None if t is None else next(present) for t in whole]

    def gathered(self, rows: Tensor, counts: Sequence[int], factor: float = 1.0) -> Tensor:
        """Return the whole: the rows of all processes, `counts` of each; a gradient goes back to its rows, scaled."""
        return _Gather.apply(rows, self, counts, factor)

    def own(self, whole: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's rows of a whole tensor; what follows differs, so gradients are gathered."""
        return _Own.apply(whole, self, counts)

    def add_(self, part: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            with self._named("sum"):
                dist.all_reduce(part, group=self.group)
        return part

    def list_of(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which have one shape."""
        if self.size == 1:
            return [part]
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self._named("gather"):
            dist.all_gather(parts, part, group=self.group)
        return parts

    def rows_of_all(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all processes, of which each has a number of its own."""
        if self.size == 1:
            return rows.clone()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return torch.cat([part[:count] for part, count in zip(self.list_of(padded), counts, strict=True)])

    def exchanged(self, block: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Return this process's rows of a matrix whose columns lie in the processes."""
        if self.size == 1:
            return block
        mine = rows[self.rank]
        sent = [count * columns[self.rank] for count in rows]
        received = [mine * count for count in columns]
        flat = block.new_empty(sum(received))
        with self._named("exchange"):
            dist.all_to_all_single(flat, block.flatten(), received, sent, group=self.group)
        pieces = zip(flat.split(received), columns, strict=True)
        return torch.cat([piece.view(mine, count) for piece, count in pieces], 1)

    def at_first(self, rows: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Return the rows of all processes, in ordinary memory, to the first process; None to the others."""
        if self.rank > 0:
            with self._named("send"):
                dist.send(rows.contiguous(), group=self.group, group_dst=0)
            return None
        whole = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype, device=torch.default_generator.device)
        pieces = whole.split(list(counts))
        pieces[0].copy_(rows)
        for source in range(1, self.size):
            buffer = rows.new_empty(counts[source], *rows.shape[1:])
            with self._named("receive"):
                dist.recv(buffer, group=self.group, group_src=source)
            pieces[source].copy_(buffer)
        return whole

    def objects(self, mine: Any) -> list[Any]:
        """Return what every process says."""
        if self.size == 1:
            return [mine]
        said: list[Any] = [None] * self.size
        with self._named("gather"):
            dist.all_gather_object(said, mine, group=self.group)
        return said

    def raise_any(self, problem: str | None) -> None:
        """Raise a `ValueError` in every process if there is a problem in any."""
        for rank, found in enumerate(self.objects(problem)):
            if found is not None:
                raise ValueError(found if self.size == 1 else f"process {rank}: {found}")

    @contextlib.contextmanager
    def _named(self, action: str) -> Iterator[None]:
        """Say in words what a failed collective means."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"process {self.rank} of {self.size} could not {action} with the others: one of them has ended, or did "
                "not answer within the time-out of the process group"
            ) from error


def problem_of(check: Callable[[], object]) -> str | None:
    """Return what a check complains of, None if nothing."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        return processes.add_(part.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        ctx.rank = processes.rank
        return torch.stack(processes.list_of(part))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank], None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, *whole: Tensor) -> tuple[Tensor, ...]:
        ctx.processes = processes
        return tuple(t.view_as(t) for t in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.processes.add_(torch.cat([grad.flatten() for grad in grads]))
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, processes: Processes, counts: Sequence[int], factor: float) -> Tensor:
        first = sum(counts[: processes.rank])
        ctx.mine, ctx.factor = slice(first, first + len(rows)), factor
        return processes.rows_of_all(rows, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.mine] * ctx.factor, None, None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, processes: Processes, counts: Sequence[int]) -> Tensor:
        ctx.processes, ctx.counts = processes, counts
        return whole.split(list(counts))[processes.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.processes.rows_of_all(grad, ctx.counts), None, None
