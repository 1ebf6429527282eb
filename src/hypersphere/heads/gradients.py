r"""Gradients that are not the derivative: what public code trains with under the same names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["normalized_correction", "straight_through"]


def straight_through(plain: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of `plain`."""
    return plain + (value - plain).detach()


def normalized_correction(
    psi: Callable[[Tensor, Tensor], Tensor], c: Tensor, x_norm: Tensor, x_hat: Tensor, w_hat: Tensor
) -> Tensor:
    r"""Zero in value; its gradient turns the target's plain gradient in x, ŵ, into the original SphereFace's.

    There ∂f_y/∂x = (ψ'·ŵ + (ψ − ψ'c)·x̂)/√(ψ'² + ((ψ − ψ'c)/‖x‖)²), a direction of bounded length whatever the margin,
    while ∂f_y/∂w is that of no margin.

    Args:
        psi: the margin, a function of the target cosines and the feature norms.
        c: (B,) target cosines.
        x_norm: (B, 1) feature norms.
        x_hat: (B, d) feature directions.
        w_hat: (B, d) directions of the target class vectors.
    """
    if not torch.is_grad_enabled():
        return torch.zeros_like(c)
    norms = x_norm.detach().squeeze(1)
    leaf = c.detach()
    value = psi(leaf, norms).detach()
    slope = torch.func.grad(lambda t: psi(t, norms).sum())(leaf).detach()
    with torch.no_grad():
        along_x = value - slope * leaf
        per_norm = torch.where(x_norm.squeeze(1) > 0, along_x / x_norm.squeeze(1), 0)
        length = torch.hypot(slope, per_norm)
        wanted = (slope.unsqueeze(1) * w_hat + along_x.unsqueeze(1) * x_hat) / length.masked_fill(length == 0, 1)[
            :, None
        ]
        turn = (wanted - w_hat).masked_fill(x_norm == 0, 0)
    x = x_norm * x_hat
    return ((x - x.detach()) * turn).sum(1)
