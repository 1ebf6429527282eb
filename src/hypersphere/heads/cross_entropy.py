"""Cross entropy from the few numbers a row that a head has, with the options of `torch.nn.CrossEntropyLoss`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reduce_rows", "row_losses"]


def row_losses(
    others: Tensor,
    total: Tensor | None,
    score: Tensor,
    labels: Tensor,
    num_classes: int,
    weights: Tensor | None,
    smoothing: float,
) -> Tensor:
    """Loss of each row: log(1 + exp(others − f_y)), weighted by class, and smoothed if the total of others is given.

    Args:
        others: log-sum-exp of the other classes' scores.
        total: Σ_{j≠y} v_j f_j with v the class weights (ones without), or None without smoothing.
        score: f_y.
        labels: y.
        num_classes: C.
        weights: (C,) class weights, or None.
        smoothing: ε, the share of the loss that is spread over all classes.
    """
    gap = others - score
    losses = torch.logaddexp(gap, torch.zeros_like(gap))
    if weights is not None:
        losses = losses * weights[labels]
    if total is None:
        return losses
    own, everyone = (1.0, num_classes) if weights is None else (weights[labels], weights.sum())
    spread = everyone * torch.logaddexp(others, score) - total - own * score
    return (1 - smoothing) * losses + smoothing / num_classes * spread


def reduce_rows(
    losses: Tensor, labels: Tensor, weights: Tensor | None, counted: Tensor | None, reduction: str
) -> Tensor:
    """Return the rows, their sum, or their mean weighted by class; uncounted rows are 0, as is a mean of none."""
    if counted is not None:
        losses = losses.masked_fill(~counted, 0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    shares = torch.ones_like(losses) if weights is None else weights[labels]
    if counted is not None:
        shares = shares.masked_fill(~counted, 0)
    whole = shares.sum()
    return losses.sum() / whole.masked_fill(whole == 0, 1)
