"""Running statistics of the feature norm, for a margin that depends on it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["moving_statistics"]


def moving_statistics(
    mean: Tensor, std: Tensor, norms: Tensor, counted: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return the running mean and standard deviation moved towards those of the rows that count.

    Fewer than two rows say nothing of a deviation, and move nothing; nor do rows that are not finite. No shape depends
    on how many count, so that this compiles.

    >>> mean, std = moving_statistics(torch.tensor(20.0), torch.tensor(100.0), torch.tensor([1.0, 3.0]), None, 1.0)
    >>> mean.item(), round(std.item(), 4)
    (2.0, 1.4142)
    """
    share = torch.ones_like(norms) if counted is None else counted.to(norms.dtype)
    count = share.sum()
    now = (norms * share).sum() / count.clamp_min(1)
    spread = ((norms - now).square() * share).sum().div((count - 1).clamp_min(1)).sqrt()
    enough = (count >= 2) & torch.isfinite(now + spread)
    moved = mean.lerp(now.to(mean.dtype), momentum), std.lerp(spread.to(std.dtype), momentum)
    return torch.where(enough, moved[0], mean), torch.where(enough, moved[1], std)
