"""Lowering the energy of the neurons before they are fixed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.functions._pairwise import PairPotential, mutual_repulsion

__all__ = ["REFINEMENTS", "energy_of", "refined"]


def energy_of(rows: Tensor, *, half_space: bool = False) -> Tensor:
    r"""Mean of ‖ŵᵢ − ŵⱼ‖^−2 over the ordered pairs of directions; in half space, over those of ±ŵᵢ.

    >>> energy_of(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(0.2500)
    """
    n = len(rows)
    require(n >= 2, "rows", "at least two neurons", n)
    pairs = mutual_repulsion(_numerics.widen(rows), PairPotential(half_space=half_space))
    if not half_space:
        return pairs / (n * (n - 1))
    return (pairs + n / 4) / (n * (2 * n - 1))  # a direction and its mirror image are 2 apart


def _half_space(rows: Tensor) -> Tensor:
    return energy_of(rows, half_space=True)


def _compressive(rows: Tensor) -> Tensor:
    """Half-space energy of five random projections to at most 30 dimensions, drawn anew every time (CoMHE)."""
    dim = min(30, rows.shape[1])
    views = [rows @ torch.randn(rows.shape[1], dim, dtype=rows.dtype, device=rows.device) for _ in range(5)]
    return torch.stack([_half_space(view) for view in views]).mean()


REFINEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mhe": energy_of,
    "half_space_mhe": _half_space,
    "comhe": _compressive,
}


def refined(
    rows: Tensor, energy: str | Callable[[Tensor], Tensor] = "mhe", *, steps: int = 5000, rate: float = 0.1
) -> Tensor:
    r"""Return rows of the same norms and lower energy, by gradient descent on the sphere (OPT, section 3.7).

    Args:
        rows: neurons (n, d).
        energy: "mhe", "half_space_mhe", "comhe", or any differentiable energy of rows.
        steps: how many steps.
        rate: how far the first step goes, in radians at the row that moves most; it falls to zero over the steps.

    Example:
        >>> rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        >>> bool(energy_of(refined(rows, steps=50)) < energy_of(rows))
        True
    """
    if isinstance(energy, str):
        names = "None, a callable of rows or one of " + ", ".join(map(repr, REFINEMENTS))
        require(energy in REFINEMENTS, "refine", names, energy)
        energy = REFINEMENTS[energy]
    require(callable(energy), "refine", "a name or a callable of rows", energy)
    require(is_integer(steps, 1), "steps", "a whole number >= 1", steps)
    require(rate > 0, "rate", "a positive number", rate)
    norms, now = sphere.polar(rows.detach())
    for t in range(steps):
        at = now.clone().requires_grad_()
        with torch.enable_grad():
            value = energy(at)
        (slope,) = torch.autograd.grad(value, at)
        along = slope - (slope * now).sum(1, keepdim=True) * now
        longest = along.norm(dim=1).max()
        step = rate * (1 - t / steps) / longest.masked_fill(longest == 0, 1.0)
        now = sphere.normalize(now - step * along)
    return _numerics.narrow(norms * now, rows.dtype)
