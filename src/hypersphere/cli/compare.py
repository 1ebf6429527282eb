"""Compare the outputs of two forms of a network on test inputs and on random inputs.

Both are evaluated in float32 even if the run was trained in bfloat16. In bfloat16, rounding differences between two
correct forms would be larger than the errors to be detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypersphere.training.job import Assembly
from hypersphere.training.objective import Objective

__all__ = ["FeaturesAndScores", "Probe", "largest_difference"]


class FeaturesAndScores(nn.Module):
    """The network and head of an objective as one float32 module with outputs features (B, d) and scores (B, C)."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.network, self.head = objective.network, objective.head

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and scores."""
        features = self.network(inputs)
        return features, self.head.scores(features)  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Probe:
    """Batches of inputs for the comparison: some of the test data, and random inputs in the same range."""

    batches: tuple[Tensor, ...]

    @classmethod
    def of(cls, assembly: Assembly, count: int = 32) -> Probe:
        """Return the first test inputs and as many random ones; for a graph, all test nodes."""
        task = assembly.task
        if task.graph is not None:
            return cls((task.test_inputs,))
        real, _ = next(assembly.test_batches(count))
        generator = torch.Generator().manual_seed(0)
        low, high = real.min(), real.max()
        random = low + (high - low) * torch.rand(real.shape, generator=generator)
        return cls((real, random, random[:1]))  # also a batch of one, because the exported batch size must be variable

    @torch.no_grad()
    def outputs(self, assembly: Assembly) -> list[tuple[Tensor, Tensor]]:
        """Return features and scores of each batch."""
        model = FeaturesAndScores(assembly.objective)
        return [model(batch) for batch in self.batches]


def largest_difference(ones: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> float:
    """Return the largest difference between two lists of outputs, relative to the largest entry of each output.

    >>> largest_difference([[torch.tensor([100.0])]], [[torch.tensor([101.0])]])
    0.01
    """
    worst = 0.0
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one, other, strict=True):
            scale = float(a.abs().max()) or 1.0
            difference = float((a - b).abs().max()) / scale
            worst = difference if not difference <= worst else worst  # NaN counts as the largest difference
    return worst
