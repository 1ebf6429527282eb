"""The training objective as one module: features, loss of the head, and regularisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Objective"]


class Objective(nn.Module):
    """Map inputs and labels to the loss of a head on the features of a network, plus regularisers.

    As a single module it can be passed to DDP, `torch.compile` and hooks.

    Args:
        network: maps inputs to features.
        head: maps features and labels to a scalar loss.
        regularizers: modules or functions without arguments.
        precision: autocast dtype of the network; losses and regularisers are computed in float32.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        regularizers: Sequence[Callable[[], Tensor]] = (),
        *,
        precision: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.regularizers = nn.ModuleList([r for r in regularizers if isinstance(r, nn.Module)])
        self.penalties = [r for r in regularizers if not isinstance(r, nn.Module)]
        self.precision = precision

    def features(self, inputs: Tensor) -> Tensor:
        """Map inputs to features, in float32."""
        if self.precision == torch.float32:
            return self.network(inputs)
        with torch.autocast(inputs.device.type, self.precision):
            return self.network(inputs).float()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        loss = self.head(self.features(inputs), labels)
        for regularizer in (*self.regularizers, *self.penalties):
            loss = loss + regularizer()
        return loss
