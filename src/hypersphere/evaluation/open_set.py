r"""Open-set identification: a search may find nobody, and a stranger should not be found.

TPIR is the share of mated probes found (at a good enough rank) with score ≥ threshold; FPIR the share of strangers
whose highest score is ≥ threshold. The DET curve is 1 − TPIR over FPIR.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere.evaluation.roc import OperatingPoint, Ranked, read_curve

__all__ = ["OpenSet", "open_set"]


@dataclass(frozen=True, eq=False, repr=False)
class OpenSet:
    """The curve from threshold ∞ down: rates ascend. Who is not found has no score, so TPIR may end below 1."""

    thresholds: Tensor
    tpir: Tensor
    fpir: Tensor
    mated: int
    strangers: int

    def __repr__(self) -> str:
        return f"OpenSet({self.mated} mated probes, {self.strangers} strangers, TPIR up to {float(self.tpir[-1]):.4f})"

    @property
    def fnir(self) -> Tensor:
        """False negative identification rate 1 − TPIR, the ordinate of a DET curve."""
        return 1 - self.tpir

    def at(self, fpir: float, *, rule: str = "step") -> OperatingPoint:
        """The operating point at a false positive identification rate, by the rules of `Roc.at`.

        >>> open_set(torch.tensor([0.9, 0.5]), torch.tensor([0.6, 0.2]), mated=4).at(0.5)
        OperatingPoint(asked=0.5, threshold=0.5, false_rate=0.5, true_rate=0.5, resolved=True)
        """
        return read_curve(self.thresholds, self.tpir, self.fpir, self.strangers, fpir, "fpir", rule)


def open_set(found: Tensor, strangers: Tensor, mated: int) -> OpenSet:
    """The curve from the scores of those found, the highest score of each stranger and the number of mated probes."""
    scores = torch.cat([found, strangers]).double()
    curve = Ranked(scores, torch.arange(len(scores), device=scores.device) < len(found)).roc()
    return OpenSet(
        curve.thresholds, curve.true_accepts / mated, curve.false_accepts / len(strangers), mated, len(strangers)
    )
