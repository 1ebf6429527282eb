"""The network and head of a run as one module, and inputs to compare two forms of it.

Both forms are evaluated in float32 even if the run was trained in bfloat16. In bfloat16, rounding differences between
two correct forms would be larger than the errors to be detected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.training import Experiment

__all__ = ["FeaturesAndScores", "probe_inputs", "probe_outputs"]


class FeaturesAndScores(nn.Module):
    """The network and head of an experiment as one float32 module with outputs features (B, d) and scores (B, C)."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self.network, self.head = experiment.network, experiment.head

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and scores."""
        features = self.network(inputs)
        head: Any = self.head
        return features, head.scores(features)


def probe_inputs(experiment: Experiment, count: int = 32, *, as_bytes: bool = False) -> list[Tensor]:
    """Return batches of inputs: some of the data, random ones in the same range, and a single one; all test nodes of a
    graph.

    Args:
        experiment: an experiment with data, or with noise in their place.
        count: inputs per batch.
        as_bytes: return uint8 images, not floats in [0, 1].
    """
    split = experiment.data
    if split.graph is not None:
        return [torch.arange(len(split.graph.features))]
    real = torch.stack([split.train[index] for index in range(min(count, len(split.train)))])
    generator = torch.Generator().manual_seed(0)
    if real.dtype == torch.uint8 and as_bytes:
        random = torch.randint(256, real.shape, generator=generator, dtype=torch.uint8)
    else:
        real = real.float() / 255 if real.dtype == torch.uint8 else real
        low, high = real.min(), real.max()
        random = low + (high - low) * torch.rand(real.shape, generator=generator)
    return [real, random, random[:1]]  # also a batch of one, because the exported batch size must be variable


@torch.no_grad()
def probe_outputs(experiment: Experiment, batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return features and scores of each batch."""
    model = FeaturesAndScores(experiment)
    return [model(batch) for batch in batches]
