"""An objective divided among processes: each takes a part of every batch, and all take the step of the whole batch.

Statistics of batches, as BatchNorm keeps them, are those of the first process's part. All else is what one process
would compute, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hypersphere.heads import ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training.objective import Objective
from hypersphere.training.optimizers import Together

__all__ = ["Parallel", "WholeObjective", "WholeOptimizer", "part_of"]


IGNORED = -100  # the label that torch's losses leave out


def part_of(inputs: Tensor, labels: Tensor, processes: Processes, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Return this process's rows of a batch: every R-th of R processes, or two whose labels are ignored.

    No part has fewer than two rows, since norms of batches cannot do with one: a batch that is too small for that is
    divided among the first processes, and the others have rows of it that count for nothing.

    >>> x, y = part_of(torch.zeros(5, 2), torch.arange(5), Processes())
    >>> y
    tensor([0, 1, 2, 3, 4])
    """
    rank, parts = processes.rank, max(min(processes.size, len(labels) // 2), 1)
    if rank < parts:
        return inputs[rank::parts], labels[rank::parts]
    return inputs[:2], torch.full_like(labels[:2], ignored)


class Parallel(nn.Module):
    """Maps a whole batch to the whole loss; its gradients, after backward, are those of the whole batch everywhere.

    Regularisers are computed alike in all processes. Random numbers of the network differ from process to process, and
    leave the global generators of all in one state.

    Args:
        objective: the same in all processes; its head may be a `ShardedHead`.
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
            self.local = DistributedDataParallel(_Share(objective))

    def features(self, inputs: Tensor) -> Tensor:
        """Map a whole batch to features, in this process alone."""
        return self.objective.features(inputs.to(next(self.parameters()).device))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the whole batch."""
        x, y = part_of(inputs, labels, self.processes, self.head.ignore_index)
        where = next(self.parameters()).device
        x, y = x.to(where), y.to(where)
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + self.processes.rank)
            loss: Tensor = self.local(x, y) if self.sharded else self.local(x, y, self._share(y, labels.to(where)))
        whole = self.processes.add_(loss.detach().clone()) / self.processes.size
        return loss + (whole - loss.detach())

    def _share(self, mine: Tensor, labels: Tensor) -> Tensor:
        """The factor that makes the average over processes of means over parts the mean over the batch."""
        size = self.processes.size
        if self.head.reduction == "sum":
            return torch.full((), float(size), device=mine.device)
        part, whole = (_weight(self.head, y) for y in (mine, labels))
        return part * size / torch.where(whole > 0, whole, 1)


def _weight(head: Any, labels: Tensor) -> Tensor:
    """What a mean over these labels is divided by."""
    counted = labels[labels != head.ignore_index]
    rows = torch.ones_like(counted, dtype=torch.float32)
    return (rows if head.class_weights is None else head.class_weights[counted]).sum()


class _Share(nn.Module):
    """An objective whose head's loss is multiplied by a share."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, inputs: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        loss = self.objective.head(self.objective.features(inputs), labels) * share
        for regularizer in (*self.objective.regularizers, *self.objective.penalties):
            loss = loss + regularizer()
        return loss


class WholeObjective:
    """The state of an objective with a sharded head, as that of one process; its methods are called by all."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def state_dict(self) -> dict[str, Any]:
        """Return the state to the first process, and a part of it to the others."""
        head: Any = self.objective.head
        own = {key: value for key, value in self.objective.state_dict().items() if not key.startswith("head.")}
        return {**own, **{f"head.{key}": value for key, value in head.full_state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's part of a state."""
        head: Any = self.objective.head
        head.load_full_state_dict({k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
        own = {key: value for key, value in self.objective.state_dict().items() if key.startswith("head.")}
        self.objective.load_state_dict({**{k: v for k, v in state.items() if not k.startswith("head.")}, **own})


class WholeOptimizer:
    """The state of the optimisers of an objective with a sharded head, as that of one process."""

    def __init__(self, optimizer: Together, head: ShardedHead) -> None:
        self.optimizer, self.head = optimizer, head
        self.spread = {id(p) for name, p in head.head.named_parameters() if name in head.sharded_parameters}

    def state_dict(self) -> dict[str, Any]:
        """Return the state; rows of all processes to the first."""
        sizes = self.head.sizes
        return self._with_rows(
            self.optimizer.state_dict(), lambda rows: self.head.processes.gather_at_first(rows, sizes)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's rows."""
        self.optimizer.load_state_dict(self._with_rows(state, lambda rows: rows[self.head.classes].clone()))

    def _with_rows(self, state: Mapping[str, Any], change: Any) -> dict[str, Any]:
        """A state with the rows of class vectors changed."""
        changed: dict[str, Any] = {}
        for place, optimizer in enumerate(self.optimizer.optimizers):
            one = state[str(place)]
            own = [p for group in optimizer.param_groups for p in group["params"]]
            entries = {
                key: {
                    name: change(value) if id(own[key]) in self.spread and _is_rows(value) else value
                    for name, value in entry.items()
                }
                for key, entry in one["state"].items()
            }
            changed[str(place)] = {**one, "state": entries}
        return changed


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
