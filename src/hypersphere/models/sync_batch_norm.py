"""BatchNorm with statistics over the batches of all processes, on every device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypersphere._collectives import Processes
from hypersphere._validation import require

__all__ = ["sync_batch_norm_"]


def sync_batch_norm_(network: nn.Module) -> int:
    """Replace all BatchNorm layers, in place, by layers with the statistics of the full batch; return their number.

    `torch.nn.SyncBatchNorm` needs a GPU; these layers work on every device.

    Example:
        >>> sync_batch_norm_(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
        1
    """
    count = 0
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, _SyncedBatchNorm):
                if not child.track_running_stats:
                    raise ValueError(
                        f"sync_batch_norm needs BatchNorm layers with running statistics, but {name} has none"
                    )
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
        self.variance_floor = layer.eps
        self.processes = Processes()
        self.train(layer.training)  # a frozen layer stays frozen

    def _check_input_dim(self, input: Tensor) -> None:
        require(input.ndim >= 2, "input", "a tensor with at least two dimensions", tuple(input.shape))

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.processes.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        reduced_dims = [dim for dim in range(values.ndim) if dim != 1]
        shape = [1, -1, *([1] * (values.ndim - 2))]
        count = self.processes.all_reduce_(values.new_tensor(values.numel() / values.shape[1]))
        # Two passes, because E[x²] − E[x]² would cancel in float32.
        mean = self._sum(values.sum(reduced_dims)) / count
        centred = values - mean.view(shape)
        variance = self._sum(centred.square().sum(reduced_dims)) / count
        self._update(mean.detach(), variance.detach() * count / (count - 1).clamp_min(1))
        result = centred * (variance + self.variance_floor).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _sum(self, part: Tensor) -> Tensor:
        """Return the sum over processes. Every process uses it, so the backward pass sums its gradients too."""
        (total,) = self.processes.share(self.processes.sum_parts(part))
        assert total is not None
        return total

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
