"""The detection error trade-off (DET) curve: false reject rate against false accept rate on probit axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere.evaluation._arrays import Array
from hypersphere.evaluation.roc import roc

__all__ = ["DetCurve", "det_curve"]


@dataclass(frozen=True, eq=False, repr=False)
class DetCurve:
    """Points of a DET curve. Created by `det_curve`.

    Attributes:
        thresholds: float64, descending from ∞.
        far: false accept rates, ascending from 0 to 1.
        frr: false reject rates 1 − TAR, descending from 1 to 0.
    """

    thresholds: Float[Tensor, " points"]
    far: Float[Tensor, " points"]
    frr: Float[Tensor, " points"]

    @property
    def probit_far(self) -> Float[Tensor, " points"]:
        """Φ⁻¹(FAR), the abscissa of the plot; ∓∞ at the rates 0 and 1."""
        return torch.special.ndtri(self.far)

    @property
    def probit_frr(self) -> Float[Tensor, " points"]:
        """Φ⁻¹(FRR), the ordinate of the plot; ±∞ at the rates 1 and 0."""
        return torch.special.ndtri(self.frr)

    def __repr__(self) -> str:
        return f"DetCurve({len(self.thresholds)} points)"


def det_curve(scores: Array, same: Array) -> DetCurve:
    """Compute the DET curve of scored pairs, with the points of `roc`.

    If the scores of both kinds are normally distributed, the curve is a straight line on probit axes.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.

    Example:
        >>> curve = det_curve([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0])
        >>> curve.far.tolist(), curve.frr.tolist()
        ([0.0, 0.0, 0.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.0, 0.0])
        >>> curve.probit_far[2:4].tolist()
        [0.0, 0.0]
    """
    curve = roc(scores, same)
    return DetCurve(curve.thresholds, curve.far, 1 - curve.tar)
