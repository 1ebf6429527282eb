"""Train in several processes: each computes a part of every batch, and all take the step of the full batch.

The loader of each process yields its part of a batch. Features are gathered before the head, so that the loss is that
of the full batch for every head, including those that couple the samples of a batch. Without `models.sync_batch_norm_`,
BatchNorm uses the statistics of the part of each process. All other results agree with those of one process up to the
order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hypersphere._collectives import Processes
from hypersphere.heads import ShardedHead
from hypersphere.training.objective import Objective

__all__ = ["Parallel", "SharedGradScaler", "local_tensor", "shard_network_"]


class Parallel(nn.Module):
    """Map the part of a batch in this process to the loss of the full batch.

    After backward, all processes have the gradients of the full batch. All processes compute the same regularisers. The
    random numbers of the network differ between processes, but the CPU generators remain in the same state.

    Args:
        objective: objective that is equal in all processes. Its head may be a `ShardedHead`, and its network may have
            been divided by `shard_network_`.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.processes = Processes()
        self.objective = objective
        is_divided = any(isinstance(parameter, DTensor) for parameter in objective.network.parameters())
        trains = any(parameter.requires_grad for parameter in objective.network.parameters())
        # FSDP reduces gradients itself, and DDP rejects a network without gradients.
        network = objective.network if is_divided or not trains else DistributedDataParallel(objective.network)
        head = objective.head if isinstance(objective.head, ShardedHead) else _GatheredHead(objective.head)
        terms: list[Any] = [*objective.regularizers, *objective.penalties]
        # A new module is in training mode. Calling `train` here would also change the mode of frozen layers.
        self.local = Objective(
            network,
            head,
            terms,
            precision=objective.precision,
            attack=objective.attack,
            attack_weight=objective.attack_weight,
        )

    def features(self, inputs: Tensor) -> Tensor:
        """Map inputs to features, without gathering those of other processes."""
        return self.objective.features(inputs)

    def loss_denominator(self, labels: Tensor) -> float | Tensor:
        """Return the denominator of the mean loss of the full batch, of which `labels` are the part of this process."""
        part = self.objective.loss_denominator(labels)
        return part if isinstance(part, float) else self.processes.all_reduce_(part.clone())

    def forward(
        self, inputs: Tensor, labels: Tensor, share: float | Tensor | None = None, regularize: bool = True
    ) -> Tensor:
        """Return the loss of the full batch; `share` and `regularize` as in `Objective`."""
        # Every process draws the same seed from its global generator, so that the generators stay equal. Dropout must
        # use another seed in each process: with equal seeds, the rows of different parts would have equal masks.
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + self.processes.rank)
            return self.local(inputs, labels, share, regularize)


class _GatheredHead(nn.Module):
    """A head that every process applies to the features of all processes.

    Each process computes the full gradient of the head, so it is not summed over processes. Gradients of features are
    multiplied by the number of processes, because the gradients of the network are averaged over them.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.processes = Processes()

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        # Parts of a batch may differ in size.
        counts = torch.stack(self.processes.all_gather(torch.tensor(len(features), device=features.device))).tolist()
        all_features = self.processes.gather_rows(features, counts, self.processes.size)
        return self.head(all_features, self.processes.concatenate_rows(labels, counts))


class SharedGradScaler(torch.amp.GradScaler):
    """Loss scaling that skips a step in all processes if gradients overflow in one of them.

    Gradients may overflow in one process only, for example in its part of a sharded head. A step in the others would
    leave the processes with different weights and scales.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimiser, and share whether they overflowed with all processes."""
        super().unscale_(optimizer)
        for overflows in self._found_inf_per_device(optimizer).values():
            Processes().all_reduce_(overflows)


def shard_network_(network: nn.Module) -> None:
    """Divide the parameters of a network among processes (FSDP2), block by block, in place.

    Blocks are the items of a `ModuleList` or `Sequential` if all are of one class, such as the layers of a transformer.
    """
    from torch.distributed.fsdp import fully_shard

    for module in list(network.modules()):  # a list, because `fully_shard` changes the classes of modules
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in children}) == 1:
            for child in children:
                if any(True for _ in child.parameters()):
                    fully_shard(child)
    fully_shard(network)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
