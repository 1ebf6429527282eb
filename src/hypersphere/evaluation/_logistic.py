r"""Weighted logistic regression by Newton's method in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics

__all__ = ["LogisticMap", "fit_logistic"]

NEWTON_STEPS = 50  # convergence is quadratic, so about ten are needed unless the data are separable
HALVINGS = 30  # most halvings of a step that does not lower the loss


@dataclass(frozen=True)
class LogisticMap:
    """Log-likelihood ratios by logistic regression: ℓ = slope·score + quality_slope·quality + intercept."""

    slope: float
    intercept: float
    quality_slope: float | None = None

    @classmethod
    def fit(cls, scores: Tensor, same: Tensor, quality: Tensor | None, weights: Tensor, prior: float) -> LogisticMap:
        """Fit the map by `fit_logistic`."""
        columns = torch.stack([scores] if quality is None else [scores, quality], 1)
        slope, *quality_slope, intercept = fit_logistic(columns, same, weights, prior).tolist()
        return cls(slope, intercept, *quality_slope)

    def llr(self, score: Tensor, quality: Tensor | None = None) -> Tensor:
        """Return log-likelihood ratios."""
        return self.slope * score + self._offset(quality)

    def score_at(self, llr: float, quality: float | None = None) -> float:
        """Return the score at which the ratio is `llr`.

        Without a positive slope there is no such threshold, and the result is −∞ (accept all pairs) or ∞ (none).
        """
        offset = float(self._offset(quality))
        if self.slope > 0:
            return (llr - offset) / self.slope
        # With slope 0, all pairs have the same ratio. A negative slope is not trusted: all pairs get the ratio 0.
        constant = offset if self.slope == 0 else 0.0
        return -math.inf if constant >= llr else math.inf

    def _offset(self, quality: Tensor | float | None) -> Tensor | float:
        """Return the terms that do not depend on the score."""
        if quality is None or self.quality_slope is None:
            return self.intercept
        return self.quality_slope * quality + self.intercept


def fit_logistic(
    columns: Float[Tensor, "pairs columns"], same: Tensor, weights: Float[Tensor, " pairs"], prior: float
) -> Float[Tensor, " coefficients"]:
    r"""Return the slopes of all columns and the intercept of the log-likelihood ratio of a same pair.

    They minimise −π·mean over same pairs of log σ(z) − (1 − π)·mean over different pairs of log σ(−z), in which
    z = slopes·columns + intercept + log[π/(1 − π)] and the means are weighted.

    Separable data have no minimum at finite slopes. The labels 1 and 0 are then replaced by (n₁ + 1)/(n₁ + 2) and
    1/(n₀ + 2), where n₁ and n₀ are the numbers of same and of different pairs (Platt, Probabilistic outputs for support
    vector machines, 1999).

    Args:
        columns: scores, and qualities if there are any.
        same: True for same pairs.
        weights: the number of times that each pair counts.
        prior: π, the weight of the same pairs; that of the different pairs is 1 − π.
    """
    counted = weights > 0
    x, targets, weights = columns[counted], same[counted].double(), weights[counted].double()
    # Standardised columns make Newton's equations well-conditioned. A constant column becomes zero.
    centre, scale = x.mean(0), x.std(0, correction=0)
    scale = torch.where(scale > _numerics.machine_epsilon(x.dtype) * centre.abs(), scale, torch.inf)
    design = torch.cat([(x - centre) / scale, torch.ones_like(x[:, :1])], 1)
    is_same = targets == 1
    totals = weights[is_same].sum(), weights[~is_same].sum()
    pair_weights = weights * torch.where(is_same, prior / totals[0], (1 - prior) / totals[1])
    start = design.new_zeros(design.shape[1])
    start[-1] = math.log(prior / (1 - prior))
    solution = _newton(design, targets, pair_weights, start)
    projected = design[:, :-1] @ solution[:-1]
    if bool(projected[~is_same].max() <= projected[is_same].min()) and bool((solution[:-1] != 0).any()):
        smoothed = torch.where(is_same, (totals[0] + 1) / (totals[0] + 2), 1 / (totals[1] + 2))
        solution = _newton(design, smoothed, pair_weights, start)
    slopes = solution[:-1] / scale
    intercept = solution[-1] - slopes @ centre - math.log(prior / (1 - prior))
    return torch.cat([slopes, intercept[None]])


def _newton(design: Tensor, targets: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """Minimise the weighted cross-entropy of σ(design @ solution) with the targets, which need not be 0 or 1."""

    def loss(coefficients: Tensor) -> Tensor:
        z = design @ coefficients
        return weights @ (F.softplus(z) - targets * z)

    solution, value = start, loss(start)
    root = math.sqrt(_numerics.machine_epsilon(design.dtype))
    for _ in range(NEWTON_STEPS):
        probability = torch.sigmoid(design @ solution)
        gradient = design.mT @ (weights * (probability - targets))
        curvature = design.mT @ (design * (weights * probability * (1 - probability))[:, None])
        # The pseudo-inverse leaves the coefficients of constant and of redundant columns at their smallest values.
        step = torch.linalg.pinv(curvature, hermitian=True) @ gradient
        size = float(step.abs().max())
        for _ in range(HALVINGS):
            moved_value = loss(solution - step)
            # Close to the minimum, rounding of the loss hides its decrease, and the full step is safe.
            if moved_value <= value or size <= root**0.5:
                break
            step = step / 2
        solution, value = solution - step, moved_value
        if size <= root:
            return solution  # convergence is quadratic: the next step would be about as small as rounding errors
    return solution
