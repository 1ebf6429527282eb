r"""Norms of all patches, from one look at the input.

‖x‖² of a patch is a sum over the window and the channels of a group. Channels are summed first, so that the window is
walked over one channel a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere.layers.by_hand import blocks

__all__ = ["patch_norms", "plain_squares", "sample_peak", "squares"]


def plain_squares(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return Σ (scale·x)² over the channels of each group (N, groups, …), and the scale, in plain operations.

    The scale (N, 1, …) keeps the squares of a sample inside their type; it is 1 for ordinary numbers.
    """
    scale = _numerics.safe_scale(sample_peak(x))
    return (x * scale).square().unflatten(1, (groups, -1)).sum(2), scale


@torch.no_grad()
def squares(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the same without a graph; in one pass over `x`, which a compiler sees to by itself."""
    if torch.compiler.is_compiling():
        return plain_squares(x, groups)
    wide = _numerics.widen(x[:0]).dtype
    sums = torch.empty(len(x), groups, *x.shape[2:], dtype=wide, device=x.device)
    scales = torch.empty(len(x), *[1] * (x.ndim - 1), dtype=wide, device=x.device)
    for part in blocks(2**17, x[:1].numel(), x):  # half a megabyte in float32
        scales[part] = _numerics.safe_scale(sample_peak(x[part]))
        scaled = x[part] * scales[part]
        torch.sum(scaled.mul_(scaled).unflatten(1, (groups, -1)), 2, out=sums[part])
    return sums, scales


def sample_peak(x: Tensor) -> Tensor:
    """The largest absolute entry of each sample of `x` (N, …), as (N, 1, …) in float32 or wider."""
    flat = x.detach().flatten(1)
    peak = _numerics.widen(torch.maximum(flat.amax(1), -flat.amin(1)))
    return peak.reshape(-1, *[1] * (x.ndim - 1))


def patch_norms(squares: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Turn Σ (scale·x)² (N, groups, …) into ‖x‖ and 1/‖x‖, both (N, groups, 1, …) and both 0 for a zero patch.

    >>> patch_norms(torch.tensor([[25.0], [0.0]]), torch.ones(2, 1))
    (tensor([[[5.]],
    <BLANKLINE>
            [[0.]]]), tensor([[[0.2000]],
    <BLANKLINE>
            [[0.0000]]]))
    """
    zero = _numerics.squared_norm_is_zero(squares)
    length = squares.masked_fill(zero, 1.0).sqrt()
    norm, reciprocal = (length / scale).masked_fill(zero, 0.0), (scale / length).masked_fill(zero, 0.0)
    return norm.unsqueeze(2), reciprocal.unsqueeze(2)
