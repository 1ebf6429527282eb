r"""The repulsion of two directions as a function of their cosine: a kernel, a distance, and half space or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import require
from hypersphere.functions.kernel import Kernel, Logarithmic, Riesz

__all__ = ["PairPotential"]


@dataclass(frozen=True)
class PairPotential:
    r"""The repulsion of two directions as a function φ(c) of their cosine; f(−c) is added in half space.

    >>> PairPotential(Riesz(2))(torch.tensor([0.0, -1.0]))
    tensor([0.5000, 0.2500])
    """

    kernel: Callable[[Tensor], Tensor] = Riesz(2)  # noqa: RUF009
    distance: str = "euclidean"
    half_space: bool = False

    def __post_init__(self) -> None:
        """Refuse an unknown distance."""
        require(self.distance in ("euclidean", "angular"), "distance", "'euclidean' or 'angular'", self.distance)

    def __call__(self, c: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """Return φ(c); `rows` and `columns` are the factors β of weighted vectors and broadcast with `c`."""
        direct = self._one_sided(c, rows, columns)
        return direct + self._one_sided(-c, rows, columns) if self.half_space else direct

    def with_slope(self, c: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return φ(c) and dφ/dc for a block of cosines, whatever the kernel is."""
        if rows is None and self.distance == "euclidean" and isinstance(self.kernel, (Riesz, Logarithmic)):
            value, slope = _chord_jet(self.kernel, c)
            if self.half_space:
                mirrored, back = _chord_jet(self.kernel, -c)
                value, slope = value.add_(mirrored), slope.sub_(back)
            return value, slope
        with torch.enable_grad():
            leaf = c.detach().requires_grad_()
            value = self(leaf, rows, columns)
            (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return value.detach(), slope

    def _one_sided(self, c: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        if self.distance == "angular":
            theta = sphere.angle(c)
            return self.kernel(
                theta if isinstance(self.kernel, Kernel) else theta.clamp_min(_numerics.distance_floor(c.dtype))
            )
        squared = 2 - 2 * c
        if rows is not None and columns is not None:
            return self._weighted(squared, rows, columns)
        if isinstance(self.kernel, Kernel):
            return self.kernel.of_square(squared)
        return self.kernel(squared.clamp_min(_numerics.squared_distance_floor(squared.dtype)).sqrt())

    def _weighted(self, squared: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """f of ‖βᵢŵᵢ − βⱼŵⱼ‖² = βᵢβⱼ·((√(βᵢ/βⱼ) − √(βⱼ/βᵢ))² + ‖ŵᵢ − ŵⱼ‖²), whose last factor alone has a floor."""
        ratio = (rows / columns).sqrt()
        relative = (ratio - 1 / ratio).square() + squared
        if isinstance(self.kernel, Riesz):
            half = -self.kernel.power / 2
            return self.kernel.of_square(relative) * rows.pow(half) * columns.pow(half)
        if isinstance(self.kernel, Logarithmic):
            return self.kernel.of_square(relative) - (rows.log() + columns.log()) / 2
        floored = relative.clamp_min(_numerics.squared_distance_floor(relative.dtype))
        return self.kernel(floored.sqrt() * rows.sqrt() * columns.sqrt())


def _chord_jet(kernel: Riesz | Logarithmic, c: Tensor) -> tuple[Tensor, Tensor]:
    """f(√u) of u = 2 − 2c and its derivative to c, s·f/u or 1/u; none where u is below the floor."""
    floor = _numerics.squared_distance_floor(c.dtype, kernel.power)
    u = torch.rsub(c, 2, alpha=2)
    floored = u.clamp_min(floor)
    value = kernel.at_square(floored)
    slope = (value * kernel.power).div_(floored) if isinstance(kernel, Riesz) else 1 / floored
    return value, slope.mul_(u >= floor)
