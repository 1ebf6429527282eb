r"""The hyperspherical energy of one set of vectors: how unevenly they cover the sphere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere import sphere
from hypersphere.functions.kernel import Kernel, kernel_of
from hypersphere.functions.menu import require

__all__ = ["hyperspherical_energy"]


def hyperspherical_energy(
    w: Tensor,
    *,
    power: float | str | Callable[[Tensor], Tensor] = 2,
    distance: str = "euclidean",
    half_space: bool = False,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Energy of the directions of the rows of `w`, over ordered pairs (thesis, 5.1 and 5.5).

    .. math:: E_s = \sum_{i \ne j} f_s(\mathrm{dist}(\hat w_i, \hat w_j)),
              \quad f_s(z) = z^{-s} \ (s > 0), \ \log(1/z) \ (s = 0)

    Args:
        w: (N, d) or (N, …), rows are neurons and are flattened; only their directions matter.
        power: s ≥ 0, or a kernel of `hypersphere.functions.kernel`, or a callable of the distance.
        distance: "euclidean" (the chord) or "angular" (the arc).
        half_space: count −ŵᵢ beside every ŵᵢ, so that collinear neurons repel each other too (2N vectors).
        weights: (N,) positive βᵢ, for the energy of βᵢ·ŵᵢ (Euclidean distance only).
        reduction: "mean" over the ordered pairs, /(N(N−1)) or /(2N(2N−1)) in half space, or "sum".

    Returns:
        A scalar. Pairs closer than `sphere.distance_floor` count as that far apart.

    Example:
        >>> hyperspherical_energy(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]), power=1)
        tensor(0.5000)

    Reference:
        Liu et al., Learning towards Minimum Hyperspherical Energy, NeurIPS 2018.
    """
    require(w.ndim >= 2 and w.is_floating_point(), "w", "a floating-point matrix (N, d)", f"{w.dtype} {tuple(w.shape)}")
    require(distance in ("euclidean", "angular"), "distance", "'euclidean' or 'angular'", distance)
    require(reduction in ("mean", "sum"), "reduction", "'mean' or 'sum'", reduction)
    n = len(w)
    require(n >= (1 if half_space else 2), "w", "a matrix with at least two rows (one in half space)", tuple(w.shape))
    if weights is not None:
        require(distance == "euclidean", "distance", "'euclidean' when weights are given", distance)
        require(weights.shape == (n,), "weights", f"a vector of {n} numbers", tuple(weights.shape))
    sphere.require_finite_rows("w", w)
    kernel = kernel_of(power)

    c = sphere.cosines(*[sphere.widen(w.flatten(1))] * 2)
    diagonal = torch.eye(n, dtype=torch.bool, device=w.device)
    pairs = _repulsion(kernel, c, distance, weights).masked_fill(diagonal, 0.0).sum()
    if half_space:
        mirrored = _repulsion(kernel, -c, distance, weights).masked_fill(diagonal, 0.0).sum()
        antipodal = _repulsion(kernel, -torch.ones_like(c.diagonal()), distance, None, scale=weights).sum()
        pairs = 2 * (pairs + mirrored + antipodal)
        n *= 2
    return sphere.narrow(pairs / (n * (n - 1)) if reduction == "mean" else pairs, w.dtype)


def _repulsion(
    kernel: Callable[[Tensor], Tensor],
    c: Tensor,
    distance: str,
    weights: Tensor | None,
    scale: Tensor | None = None,
) -> Tensor:
    """f(dist) for cosines; `weights` are those of rows and columns alike, `scale` stretches the distance."""
    if distance == "angular":
        return kernel(sphere.angle(c))
    if weights is None:
        squared = 2 - 2 * c
    else:
        b = sphere.widen(weights)
        squared = (b[:, None] - b[None, :]).square() + 2 * b[:, None] * b[None, :] * (1 - c)
    if scale is not None:
        squared = squared * sphere.widen(scale).square()
    if isinstance(kernel, Kernel):
        return kernel.of_square(squared)
    return kernel(squared.clamp_min(sphere.distance_floor(squared.dtype) ** 2).sqrt())
