"""Lower the energy of neurons before they are fixed (OPT, section 3.7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential

__all__ = ["REFINEMENTS", "half_space_energy", "mean_energy", "refine_neurons", "require_energy"]

Energy = Callable[[Tensor], Tensor]


def mean_energy(rows: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    r"""Return the mean of ‖ŵᵢ − ŵⱼ‖⁻² over ordered pairs of different rows.

    >>> mean_energy(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(0.2500)
    """
    require(len(rows) >= 2, "rows", "at least two neurons", len(rows))
    return pair_energy(PairSum(_numerics.widen(rows), PairPotential(), mean=True))


def half_space_energy(rows: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    r"""Return the mean of the same energy over ordered pairs of the 2n directions ±ŵᵢ.

    >>> half_space_energy(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor(0.4167)
    """
    require(len(rows) >= 2, "rows", "at least two neurons", len(rows))
    return pair_energy(PairSum(_numerics.widen(rows), PairPotential(half_space=True), mean=True))


def _energy_without_antipodal_minimum(rows: Tensor) -> Tensor:
    """Return the full-space energy if n ≤ d, and the half-space energy otherwise.

    With more neurons than dimensions, the full-space minimum contains antipodal pairs. These are far apart on the
    sphere, but redundant as neurons, since one is the negative of the other.
    """
    n, d = rows.shape
    return mean_energy(rows) if n <= d else half_space_energy(rows)


def _compressive_energy(rows: Tensor) -> Tensor:
    """Return the mean half-space energy of five random projections to at most 30 dimensions, new ones in every call
    (CoMHE).
    """
    d = rows.shape[1]
    projected = [rows @ torch.randn(d, min(30, d), dtype=rows.dtype, device=rows.device) for _ in range(5)]
    return torch.stack([half_space_energy(w) for w in projected]).mean()


REFINEMENTS: dict[str, Energy] = {
    "mhe": _energy_without_antipodal_minimum,
    "half_space_mhe": half_space_energy,
    "comhe": _compressive_energy,
}


def require_energy(argument: str, energy: object) -> None:
    """Raise a `ValueError` unless `energy` is one of REFINEMENTS or a callable."""
    if isinstance(energy, str) or not callable(energy):
        accepted = "a callable of rows or one of " + ", ".join(map(repr, REFINEMENTS))
        require(isinstance(energy, str) and energy in REFINEMENTS, argument, accepted, energy)


def refine_neurons(
    rows: Float[Tensor, "n d"], energy: str | Energy = "mhe", *, steps: int = 5000, rate: float = 0.1
) -> Float[Tensor, "n d"]:
    r"""Return rows with the same norms and lower energy, by gradient descent on the sphere.

    The best iterate is returned. For the named energies, the half-space energy of the result is never above that of
    `rows`; in the worst case `rows` are returned unchanged.

    Args:
        rows: the neurons.
        energy: "mhe" (half-space energy if there are more neurons than dimensions), "half_space_mhe", "comhe", or a
            differentiable function from rows to a scalar.
        steps: the number of descent steps.
        rate: the length of the first step, in radians for the row that moves most. It falls linearly to zero.

    Example:
        >>> rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        >>> bool(half_space_energy(refine_neurons(rows, steps=50)) < half_space_energy(rows))
        True
    """
    require_energy("energy", energy)
    is_named = isinstance(energy, str)
    # Values of the compressive energy are random, so its iterates are compared by the half-space energy.
    criterion = half_space_energy if energy == "comhe" else None
    function = REFINEMENTS[energy] if isinstance(energy, str) else energy
    require(is_integer(steps, 1), "steps", "a whole number >= 1", steps)
    require(is_number(rate, 0) and rate > 0, "rate", "a positive number", rate)
    norms, start = sphere.polar(rows.detach())
    current = best = start
    best_value = torch.full((), torch.inf)
    for step in range(steps + 1):
        leaf = current.clone().requires_grad_()
        with torch.enable_grad():
            value = function(leaf)
        score = value.detach() if criterion is None else criterion(current)
        if score < best_value:
            best, best_value = current, score
        if step == steps:
            break
        (slope,) = torch.autograd.grad(value, leaf)
        # Only the component perpendicular to a row moves it on the sphere. The scale of the energy does not matter:
        # the row with the longest gradient moves by `angle`, the others in proportion.
        tangent = slope - (slope * current).sum(1, keepdim=True) * current
        longest = tangent.norm(dim=1).max()
        angle = rate * (1 - step / steps)
        current = sphere.normalize(current - angle / longest.masked_fill(longest == 0, 1.0) * tangent)
    # The full-space energy can fall while the half-space energy rises, for example from orthogonal rows.
    if is_named and half_space_energy(best) > half_space_energy(start):
        return rows.detach().clone()
    return _numerics.narrow(norms * best, rows.dtype)
