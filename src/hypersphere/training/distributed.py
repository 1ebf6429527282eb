"""Training in several processes: each computes a part of every batch, and all take the step of the full batch.

The loader of each process yields its part of a batch. Features are gathered before the head, so that the loss is that
of the full batch for every head, including those that couple the samples of a batch. Without `sync_batch_norm_`,
BatchNorm uses the statistics of the part of each process. All other results agree with those of one process up to the
order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hypersphere._validation import require
from hypersphere.heads import ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training.loop import Objective

__all__ = ["Parallel", "local_tensor", "shard_network_", "sync_batch_norm_"]


class Parallel(nn.Module):
    """Map the part of a batch in this process to the loss of the full batch.

    After backward, all processes have the gradients of the full batch. All processes compute the same regularisers. The
    random numbers of the network differ between processes, but the global generators remain in the same state.

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
        network = objective.network if is_divided or not trains else DistributedDataParallel(objective.network)
        head = objective.head if isinstance(objective.head, ShardedHead) else _GatheredHead(objective.head)
        terms: list[Any] = [*objective.regularizers, *objective.penalties]
        self.local = Objective(
            network,
            head,
            terms,
            precision=objective.precision,
            attack=objective.attack,
            attack_weight=objective.attack_weight,
        )
        self.local.train(objective.training)

    def features(self, inputs: Tensor) -> Tensor:
        """Map inputs to features in this process, without communication between heads."""
        return self.objective.features(inputs)

    def weight(self, labels: Tensor) -> float | Tensor:
        """Return the denominator of the mean loss of the full batch, of which `labels` are the part of this process."""
        part = self.objective.weight(labels)
        return part if isinstance(part, float) else self.processes.add_(part.clone())

    def forward(
        self, inputs: Tensor, labels: Tensor, share: float | Tensor | None = None, regularize: bool = True
    ) -> Tensor:
        """Return the loss of the full batch; `share` and `regularize` as in `Objective`."""
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
        counts = torch.stack(self.processes.all_gather(torch.tensor(len(features), device=features.device))).tolist()
        everything = self.processes.gather_rows(features, counts, self.processes.size)
        return self.head(everything, self.processes.concatenate_rows(labels, counts))


def shard_network_(network: nn.Module) -> None:
    """Divide the parameters of a network among processes (FSDP2), block by block, in place.

    Blocks are the items of lists of modules of one class, such as the layers of a transformer.
    """
    from torch.distributed.fsdp import fully_shard

    for module in list(network.modules()):
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in children}) == 1:
            for child in children:
                if any(True for _ in child.parameters()):
                    fully_shard(child)
    fully_shard(network)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync_batch_norm_(network: nn.Module) -> int:
    """Let all BatchNorm layers use the statistics of the full batch; return the number of layers.

    `torch.nn.SyncBatchNorm` needs a GPU; these layers work on every device.
    """
    count = 0
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, _SyncedBatchNorm):
                require(child.track_running_stats, "sync_batch_norm", "false if BatchNorm has no statistics", True)
                setattr(module, name, _SyncedBatchNorm(child))
                count += 1
    return count


class _SyncedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the mean and variance over the batches of all processes."""

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine)
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.variance_floor = layer.eps  # the setting of the replaced layer
        self.processes = Processes()

    def _check_input_dim(self, input: Tensor) -> None:
        require(input.ndim >= 2, "input", "a tensor with at least two dimensions", tuple(input.shape))

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.processes.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        values = input.float()
        others = [dim for dim in range(values.ndim) if dim != 1]
        shape = [1, -1, *([1] * (values.ndim - 2))]
        count = self.processes.add_(values.new_tensor(values.numel() / values.shape[1]))
        # Two passes: the sum of squares minus the square of the sum would cancel in float32.
        mean = self._sum(values.sum(others)) / count
        centred = values - mean.view(shape)
        variance = self._sum(centred.square().sum(others)) / count
        self._update(mean.detach(), variance.detach() * count / (count - 1).clamp_min(1))
        result = centred * (variance + self.variance_floor).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _sum(self, part: Tensor) -> Tensor:
        """Return the sum over processes. Every process uses it, so its gradients are summed over processes too."""
        (total,) = self.processes.share(self.processes.sum_parts(part))
        assert total is not None
        return total

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
