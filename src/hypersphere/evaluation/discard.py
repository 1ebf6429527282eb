r"""Error versus discard: the error rates at a fixed threshold when the pairs of lowest quality are left out.

A quality measure is useful if the false reject rate falls quickly (Grother and Tabassi, Performance of biometric
quality measures, 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere._validation import is_number, require
from hypersphere.evaluation._arrays import Array, as_flags, as_numbers, as_scores
from hypersphere.evaluation.roc import choose_threshold

__all__ = ["ErrorVersusDiscard", "error_vs_discard"]

FRACTIONS = tuple(step / 20 for step in range(20))  # 0, 0.05, …, 0.95


@dataclass(frozen=True, eq=False, repr=False)
class ErrorVersusDiscard:
    """Error rates by discarded fraction. Created by `error_vs_discard`.

    Attributes:
        threshold: scores at or above it are accepted, for all fractions.
        discarded: the fraction of pairs that is left out.
        frr: false reject rate of the remaining same pairs; NaN if there is none.
        far: false accept rate of the remaining different pairs; NaN if there is none.
    """

    threshold: float
    discarded: Float[Tensor, " fractions"]
    frr: Float[Tensor, " fractions"]
    far: Float[Tensor, " fractions"]

    def __repr__(self) -> str:
        first, last = float(self.frr[0]), float(self.frr[-1])
        ends = f"{float(self.discarded[0]):g} and {float(self.discarded[-1]):g}"
        return f"ErrorVersusDiscard(FRR {first:.4f} and {last:.4f} at discarded fractions {ends})"


def error_vs_discard(
    scores: Array,
    same: Array,
    quality: Array | tuple[Array, Array],
    *,
    far: float | None = None,
    threshold: float | None = None,
    fractions: Sequence[float] | Array = FRACTIONS,
) -> ErrorVersusDiscard:
    """Compute error rates after discarding the fraction of pairs with the lowest quality.

    The threshold is fixed before any pair is discarded. For a fraction f of M pairs, pairs are discarded whose quality
    is below that of the pair at position ⌊f·M⌋ in ascending order. Pairs of equal quality are therefore discarded
    together, and `discarded` may be less than f.

    Args:
        scores: (M,) higher means more similar.
        same: (M,) booleans, or zeros and ones.
        quality: (M,) higher means better, or the qualities (M,) of both sides, of which the lower one counts.
        far: choose the threshold at this false accept rate of all pairs, by the "step" rule of `Roc.at`.
        threshold: use this threshold. Exactly one of `far` and `threshold` must be given.
        fractions: fractions in [0, 1).

    Example:
        >>> scores, same = [0.9, 0.8, 0.2, 0.1], [1, 1, 1, 0]
        >>> error_vs_discard(scores, same, [5, 5, 1, 3], threshold=0.5, fractions=[0, 0.25]).frr
        tensor([0.3333, 0.0000], dtype=torch.float64)
    """
    values = as_scores("scores", scores)
    flags = as_flags("same", same, len(values), values.device)
    is_two_sided = len(quality) == 2 and torch.as_tensor(quality[0]).ndim == 1
    sides = [as_scores("quality", side) for side in (quality if is_two_sided else [quality])]
    for side in sides:
        require(len(side) == len(values), "quality", f"a vector of {len(values)} numbers", tuple(side.shape))
    pair_quality = torch.stack([side.to(values.device) for side in sides]).amin(0)
    rates = as_numbers("fractions", fractions)
    is_fraction = bool(rates) and all(is_number(rate, 0, 1) and rate < 1 for rate in rates)
    require(is_fraction, "fractions", "at least one number in [0, 1)", fractions)
    chosen = choose_threshold(values, flags, far, threshold)
    wrong = (values >= chosen) != flags
    sorted_quality = pair_quality.sort().values
    rows = []
    for rate in rates:
        # 0.29·100 is 28.999999999999996 in floating point, but means 29.
        position = min(int(round(rate * len(values), 9)), len(values) - 1)
        remaining = pair_quality >= sorted_quality[position]
        error_rates = [float(wrong[remaining & kind].double().mean()) for kind in (flags, ~flags)]
        rows.append([1 - float(remaining.double().mean()), *error_rates])
    discarded, frr, false_accept_rates = torch.tensor(rows, dtype=torch.float64).T
    return ErrorVersusDiscard(chosen, discarded, frr, false_accept_rates)
