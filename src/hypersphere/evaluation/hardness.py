r"""Angular visual hardness: how hard a sample is, by its angles to the class vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.evaluation.arrays import Array, as_features, as_labels, blocks

__all__ = ["angular_visual_hardness"]


@torch.no_grad()
def angular_visual_hardness(features: Array, labels: Array, weight: Array) -> Tensor:
    r"""AVH(x) = θ(w_y, x)/Σ_i θ(w_i, x) of each sample; smaller is easier (thesis, section 1.1, without number).

    Args:
        features: (N, d).
        labels: (N,) in [0, C).
        weight: (C, d) class vectors, for example `head.weight`.

    Returns:
        (N,) in float32 or wider. A zero feature is as far from every class vector: 1/C; so is one that lies on all.

    Example:
        >>> angular_visual_hardness(torch.tensor([[1.0, 1.0], [0.0, 2.0]]), [0, 0], torch.eye(2))
        tensor([0.5000, 1.0000])

    Reference:
        Chen et al., Angular Visual Hardness, ICML 2020.
    """
    x = as_features("features", features)
    w = as_features("weight", weight, like=x).to(x.device)
    y = as_labels("labels", labels, len(x), x.device)
    outside = ((y < 0) | (y >= len(w))).nonzero().flatten().tolist()
    if outside:
        require(False, "labels", f"in [0, {len(w)})", f"{int(y[outside[0]])} (row {outside[0]})")
    wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, w.dtype))
    hardness = []
    for start, rows in blocks(x, 1024):
        rows = rows.to(wide)
        total = rows.new_zeros(len(rows))
        for _, vectors in blocks(w, 4096):
            total += sphere.angle(sphere.cosines(rows, vectors.to(wide))).sum(1)
        own = sphere.angle(sphere.cosine(rows, w[y[start : start + len(rows)]].to(wide)))
        hardness.append(torch.where(total > 0, own / total.masked_fill(total == 0, 1), 1 / len(w)))
    return torch.cat(hardness)
