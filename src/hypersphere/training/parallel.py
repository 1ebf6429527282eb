"""Data-parallel training: each process computes a part of every batch, and all take the step of the full batch.

Batch statistics, such as those of BatchNorm, come from the part of the first process. All other results agree with
those of one process up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hypersphere.heads import ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training.loop import Objective
from hypersphere.training.optimizers import Optimizers

__all__ = ["Parallel", "WholeObjective", "WholeOptimizer", "part_of"]


IGNORED = -100  # the default `ignore_index` of torch losses


def part_of(inputs: Tensor, labels: Tensor, processes: Processes, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Return the rows of a batch for this process: every R-th row for R processes.

    Each part has at least two rows, because BatchNorm needs at least two rows per process. A batch that is too small is
    divided among the first processes; the others get two rows whose labels are ignored.

    >>> x, y = part_of(torch.zeros(5, 2), torch.arange(5), Processes())
    >>> y
    tensor([0, 1, 2, 3, 4])
    """
    rank, parts = processes.rank, max(min(processes.size, len(labels) // 2), 1)
    if rank < parts:
        return inputs[rank::parts], labels[rank::parts]
    return inputs[:2], torch.full_like(labels[:2], ignored)


class Parallel(nn.Module):
    """Map a full batch to its loss; after backward, all processes have the gradients of the full batch.

    All processes compute the same regularisers. The random numbers of the network differ between processes, but the
    global generators remain in the same state.

    Args:
        objective: objective that is equal in all processes; its head may be a `ShardedHead`.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.processes = Processes()
        self.objective = objective
        head = objective.head
        self.sharded = isinstance(head, ShardedHead)
        self.head: Any = head.head if isinstance(head, ShardedHead) else head
        self.local: nn.Module
        if self.sharded:
            network = DistributedDataParallel(objective.network)
            terms: list[Any] = [*objective.regularizers, *objective.penalties]
            self.local = Objective(network, head, terms, precision=objective.precision)
        else:
            self.local = DistributedDataParallel(objective)

    def features(self, inputs: Tensor) -> Tensor:
        """Map a full batch to features in this process, without communication."""
        return self.objective.features(inputs.to(next(self.parameters()).device))

    def weight(self, labels: Tensor) -> float | Tensor:
        """Return the denominator of the mean loss of a full batch."""
        return self.objective.weight(labels)

    def forward(
        self, inputs: Tensor, labels: Tensor, share: float | Tensor | None = None, regularize: bool = True
    ) -> Tensor:
        """Return the loss of the full batch; `share` and `regularize` as in `Objective`."""
        x, y = part_of(inputs, labels, self.processes, self.head.ignore_index)
        where = next(self.parameters()).device
        x, y = x.to(where), y.to(where)
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + self.processes.rank)
            factor = share if self.sharded else self._share(y, labels.to(where)) * (1.0 if share is None else share)
            loss: Tensor = self.local(x, y, factor, regularize)
        full = self.processes.add_(loss.detach().clone()) / self.processes.size
        return loss + (full - loss.detach())  # the value of the full batch with the gradient of this part

    def _share(self, mine: Tensor, labels: Tensor) -> Tensor:
        """Return the factor by which the mean over processes of the partial means becomes the mean over the batch."""
        size = self.processes.size
        if self.head.reduction == "sum":
            return torch.full((), float(size), device=mine.device)
        part, full = (_weight(self.head, y) for y in (mine, labels))
        return part * size / torch.where(full > 0, full, 1)


def _weight(head: Any, labels: Tensor) -> Tensor:
    """Return the denominator of a mean over these labels: the sum of their class weights."""
    counted = labels[labels != head.ignore_index]
    rows = torch.ones_like(counted, dtype=torch.float32)
    return (rows if head.class_weights is None else head.class_weights[counted]).sum()


class WholeObjective:
    """State of an objective with a sharded head, in the form of a single process; all processes call its methods."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def state_dict(self) -> dict[str, Any]:
        """Return the full state in the first process, and a part of it in the others."""
        head: Any = self.objective.head
        others = {key: value for key, value in self.objective.state_dict().items() if not key.startswith("head.")}
        return {**others, **{f"head.{key}": value for key, value in head.full_state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the part of this process from a full state."""
        head: Any = self.objective.head
        head.load_full_state_dict({k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
        of_head = {key: value for key, value in self.objective.state_dict().items() if key.startswith("head.")}
        self.objective.load_state_dict({**{k: v for k, v in state.items() if not k.startswith("head.")}, **of_head})


class WholeOptimizer:
    """State of the optimisers of an objective with a sharded head, in the form of a single process."""

    def __init__(self, optimizer: Optimizers, head: ShardedHead) -> None:
        self.optimizer, self.head = optimizer, head
        self.spread = {id(p) for name, p in head.head.named_parameters() if name in head.sharded_parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the first process gets the rows of all processes."""
        sizes = self.head.sizes
        return self._with_rows(
            self.optimizer.state_dict(), lambda rows: self.head.processes.gather_at_first(rows, sizes)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rows of this process from a full state."""
        self.optimizer.load_state_dict(self._with_rows(state, lambda rows: rows[self.head.classes].clone()))

    def _with_rows(self, state: Mapping[str, Any], change: Any) -> dict[str, Any]:
        """Return a state in which `change` is applied to the rows that belong to class vectors."""
        changed: dict[str, Any] = {}
        for place, optimizer in enumerate(self.optimizer.optimizers):
            one = state[str(place)]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            entries = {
                key: {
                    name: change(value) if id(parameters[key]) in self.spread and _is_rows(value) else value
                    for name, value in entry.items()
                }
                for key, entry in one["state"].items()
            }
            changed[str(place)] = {**one, "state": entries}
        return changed


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
