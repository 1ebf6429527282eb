"""What is minimised, as one module: features, the head's loss, and the regularisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Objective"]


class Objective(nn.Module):
    """Maps inputs and labels to the loss of a head on a network's features, plus regularisers.

    One module goes through DDP, `torch.compile` and hooks as a whole.

    Args:
        network: inputs to features.
        head: features and labels to a scalar.
        regularizers: modules or functions without arguments.
        precision: the type that the network computes in, by autocast, if not float32; losses and regularisers stay.
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
