"""Whether two forms of one network agree, on its own test inputs and on random ones.

Both compute in float32, also where the run trained in bfloat16: two forms of one map round differently there, by more
than what tells right from wrong.
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
    """The network and the head of an objective as one map in float32, to features (B, d) and plain scores (B, C)."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.network, self.head = objective.network, objective.head

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and scores."""
        features = self.network(inputs)
        return features, self.head.scores(features)  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Probe:
    """Batches of inputs that a network is tried with: some of the test data, and random ones of the same kind."""

    batches: tuple[Tensor, ...]

    @classmethod
    def of(cls, assembly: Assembly, count: int = 32) -> Probe:
        """Take the first test inputs, and as many random ones; of a graph all test nodes."""
        task = assembly.task
        if task.graph is not None:
            return cls((task.test_inputs,))
        real, _ = next(assembly.test_batches(count))
        generator = torch.Generator().manual_seed(0)
        low, high = real.min(), real.max()
        random = low + (high - low) * torch.rand(real.shape, generator=generator)
        return cls((real, random, random[:1]))  # one alone too: the number of inputs must be free

    @torch.no_grad()
    def outputs(self, assembly: Assembly) -> list[tuple[Tensor, Tensor]]:
        """Return features and scores of each batch."""
        model = FeaturesAndScores(assembly.objective)
        return [model(batch) for batch in self.batches]


def largest_difference(ones: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> float:
    """Return the largest difference of two lists of outputs, beside the largest number of each output.

    >>> largest_difference([[torch.tensor([100.0])]], [[torch.tensor([101.0])]])
    0.01
    """
    worst = 0.0
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one, other, strict=True):
            scale = float(a.abs().max()) or 1.0
            difference = float((a - b).abs().max()) / scale
            worst = difference if not difference <= worst else worst  # NaN is the worst
    return worst
