"""Lower the energy of neurons before they are fixed (OPT, section 3.7).

Rotations keep the energy of the neurons that they rotate, so a low energy must be reached before training starts.
`refine_neurons` does this by gradient descent on the sphere. `rotate_(model, refine=...)` calls it for every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, is_number, require
from hypersphere.energy import hyperspherical_energy

__all__ = ["REFINEMENTS", "CompressiveEnergy", "refine_neurons", "require_energy"]

Energy = Callable[[Tensor], Tensor]

_half_space_energy = partial(hyperspherical_energy, half_space=True)


def _energy_without_antipodal_minimum(rows: Tensor) -> Tensor:
    """Return the full-space energy if n ≤ d, and the half-space energy otherwise.

    With more neurons than dimensions, the full-space minimum contains antipodal pairs. These are far apart on the
    sphere, but redundant as neurons, since one is the negative of the other.
    """
    n, d = rows.shape
    return hyperspherical_energy(rows, half_space=n > d)


@dataclass(frozen=True)
class CompressiveEnergy:
    """The mean half-space energy of random projections of the rows, new ones in every call (CoMHE).

    Args:
        dim: the number of dimensions of a projection; at most the dimension of the rows is used.
        views: the number of projections.
        generator: the generator of the projections; the global one if None.

    Example:
        >>> energy = CompressiveEnergy(dim=3, views=2, generator=torch.Generator().manual_seed(0))
        >>> bool(energy(torch.eye(6)) > hyperspherical_energy(torch.eye(6), half_space=True))
        True
    """

    dim: int = 30
    views: int = 5
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Check the integers."""
        require(is_integer(self.dim, 2), "dim", "an integer >= 2", self.dim)
        require(is_integer(self.views, 1), "views", "an integer >= 1", self.views)

    def __call__(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        """Return the energy."""
        # `projection.Random` draws the same distribution, but its entries in another order and always in float32, so it
        # would refine the neurons of a given seed differently.
        shape = rows.shape[1], min(self.dim, rows.shape[1])
        # A generator draws only on its device.
        device = rows.device if self.generator is None else self.generator.device
        bases = [
            torch.randn(shape, dtype=rows.dtype, device=device, generator=self.generator) for _ in range(self.views)
        ]
        return torch.stack([_half_space_energy(rows @ basis.to(rows.device)) for basis in bases]).mean()


REFINEMENTS: dict[str, Energy] = {
    "mhe": _energy_without_antipodal_minimum,
    "half_space_mhe": _half_space_energy,
    "comhe": CompressiveEnergy(),
}


def require_energy(argument: str, energy: object) -> None:
    """Raise a `ValueError` unless `energy` is one of REFINEMENTS or a callable."""
    if isinstance(energy, str) or not callable(energy):
        accepted = "a callable of rows or one of " + ", ".join(map(repr, REFINEMENTS))
        require(isinstance(energy, str) and energy in REFINEMENTS, argument, accepted, energy)


def refine_neurons(
    rows: Float[Tensor, "n d"],
    energy: str | Energy = "mhe",
    *,
    steps: int = 5000,
    rate: float = 0.1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n d"]:
    r"""Return rows with the same norms and lower energy, by gradient descent on the sphere.

    The best iterate is returned. For the named energies, the half-space energy of the result is never above the one of
    `rows`; in the worst case `rows` are returned unchanged.

    Args:
        rows: the neurons.
        energy: "mhe" (half-space energy if there are more neurons than dimensions), "half_space_mhe", "comhe" (random
            projections, see `CompressiveEnergy`), or a differentiable function from rows to a scalar.
        steps: the number of descent steps.
        rate: the length of the first step, in radians for the row that moves most. It falls linearly to zero.
        generator: the generator of the random projections of "comhe"; the global one if None.

    Example:
        >>> rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        >>> refined = refine_neurons(rows, steps=50)
        >>> bool(hyperspherical_energy(refined, half_space=True) < hyperspherical_energy(rows, half_space=True))
        True
    """
    require_energy("energy", energy)
    require(is_integer(steps, 1), "steps", "an integer >= 1", steps)
    require(is_number(rate, 0) and rate > 0, "rate", "a positive number", rate)
    if energy == "comhe":
        function: Energy = CompressiveEnergy(generator=generator)
    else:
        function = REFINEMENTS[energy] if isinstance(energy, str) else energy
    is_known = isinstance(energy, (str, CompressiveEnergy))
    require(not is_known or len(rows) >= 2, "rows", "at least two neurons", len(rows))
    # Values of the compressive energy are random, so its iterates are compared by the half-space energy.
    criterion = _half_space_energy if isinstance(function, CompressiveEnergy) else None
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
        (gradient,) = torch.autograd.grad(value, leaf)
        # Only the component perpendicular to a row moves it on the sphere. The scale of the energy does not matter:
        # the row with the longest gradient moves by `angle`, the others in proportion.
        tangent = gradient - (gradient * current).sum(1, keepdim=True) * current
        longest = tangent.norm(dim=1).max()
        angle = rate * (1 - step / steps)
        current = sphere.normalize(current - angle / longest.masked_fill(longest == 0, 1.0) * tangent)
    # The full-space energy can fall while the half-space energy rises, for example from orthogonal rows.
    if is_known and _half_space_energy(best) > _half_space_energy(start):
        return rows.detach().clone()
    return _numerics.narrow(norms * best, rows.dtype)
