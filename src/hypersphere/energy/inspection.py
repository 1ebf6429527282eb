"""How redundant the neurons of a network are, layer by layer, beside random neurons of the same shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, require
from hypersphere.energy.checkpoint import weights_of
from hypersphere.energy.energy import random_energy, stacked_energy
from hypersphere.energy.holes import hole_radius
from hypersphere.functions._pairwise import PairPotential
from hypersphere.functions.kernel import kernel_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["Energy", "Inspection", "LayerInspection", "Norms", "Pair", "inspect", "inspect_layers"]


@dataclass(frozen=True)
class Energy:
    """A mean energy in one form, and what random neurons of that shape have."""

    value: float
    random_mean: float
    random_deviation: float

    @property
    def excess(self) -> float:
        """By which factor the energy is above that of random neurons; NaN where that is infinite."""
        return self.value / self.random_mean if math.isfinite(self.random_mean) and self.random_mean else math.nan


@dataclass(frozen=True)
class Pair:
    """Two neurons by their rows, and the angle between them."""

    first: int
    second: int
    angle: float


@dataclass(frozen=True)
class Norms:
    """Of the neurons of a layer."""

    mean: float
    least: float
    largest: float


@dataclass(frozen=True)
class LayerInspection:
    """What one layer shows; pair statistics are of `sampled` neurons where there are more.

    The `orthogonality_error` is the root of the mean squared cosine of pairs. The `hole_radius` is the covering radius
    without estimate, in the plane and in space (d ≤ 3) for at most 128 neurons.
    """

    name: str
    shape: tuple[int, ...]
    neurons: int
    length: int
    sampled: int
    zero_neurons: int
    norms: Norms
    energies: dict[tuple[float, str, bool], Energy] = field(repr=False)
    separation: float
    covering_radius: float
    hole_radius: float | None
    orthogonality_error: float
    effective_rank: float
    nearest: tuple[Pair, ...] = field(repr=False)
    most_opposite: tuple[Pair, ...] = field(repr=False)
    angle_counts: tuple[int, ...] = field(repr=False)

    def energy(self, power: float = 2, distance: str = "euclidean", half_space: bool = False) -> Energy:
        """Return the energy in one form."""
        require((power, distance, half_space) in self.energies, "power", "0, 1 or 2", (power, distance, half_space))
        return self.energies[power, distance, half_space]


@dataclass(frozen=True)
class Inspection:
    """The layers of one network; it prints as a table in `rich`, and plots itself."""

    layers: tuple[LayerInspection, ...]
    skipped: tuple[str, ...]

    def __rich__(self) -> Table:
        """Show one line a layer."""
        from hypersphere.energy.inspection_view import table_of

        return table_of(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the histogram of angles of every layer beside that of random neurons; save it if a path is given."""
        from hypersphere.energy.inspection_view import figure_of

        figure = figure_of(self)
        if path is not None:
            figure.savefig(path)
        return figure


def inspect(
    model: nn.Module | Mapping[str, Any] | str | Path,
    *,
    pairs: int = 5,
    bins: int = 36,
    most: int = 2048,
    probes: int = 1024,
    seed: int = 0,
) -> Inspection:
    r"""Look at the neurons of a model, a state dict or a file, layer by layer.

    Files are read tensor by tensor, without the model's code and without unrestricted pickles.

    Args:
        model: a module; a state dict (nested dictionaries and NumPy arrays too); the path of a .safetensors file, of a
            folder of them, or of a file of `torch.save`.
        pairs: how many nearest and most opposite pairs to list.
        bins: of the histogram of angles over [0, π].
        most: neurons of larger layers are sampled for everything that looks at pairs.
        probes: random directions for the estimate of the covering radius (from below).
        seed: of samples and probes.

    Example:
        >>> found = inspect(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
        >>> [(layer.name, layer.neurons, layer.length) for layer in found.layers]
        [('0', 16, 8), ('1', 4, 16)]
    """
    for name, number, low in (("pairs", pairs, 1), ("bins", bins, 1), ("probes", probes, 1), ("most", most, 2)):
        require(is_integer(number, low), name, f"an integer >= {low}", number)
    found = list(inspect_layers(model, pairs=pairs, bins=bins, most=most, probes=probes, seed=seed))
    layers = tuple(layer for layer in found if isinstance(layer, LayerInspection))
    require(bool(layers), "model", "one with a matrix of two finite neurons or more", "without any")
    return Inspection(layers, tuple(fault for fault in found if isinstance(fault, str)))


def inspect_layers(
    model: nn.Module | Mapping[str, Any] | str | Path, *, pairs: int, bins: int, most: int, probes: int, seed: int
) -> Iterator[LayerInspection | str]:
    """Yield a layer after the other, or the name and the fault of one that cannot be inspected."""
    for name, tensor in weights_of(model):
        if isinstance(tensor, str):
            yield f"{name}: {tensor}"
            continue
        w = tensor.flatten(1)
        if w.shape[0] < 2 or w.shape[1] < 2:
            yield f"{name}: {tuple(tensor.shape)}, not two neurons of two numbers"
        elif not all(bool(torch.isfinite(block.float()).all()) for block in w.split(1 << 14)):
            yield f"{name}: not finite"
        else:
            generator = torch.Generator().manual_seed(seed)
            yield _inspect_rows(name, tuple(tensor.shape), w, pairs, bins, most, probes, generator)


@torch.no_grad()
def _inspect_rows(
    name: str,
    shape: tuple[int, ...],
    w: Tensor,
    pairs: int,
    bins: int,
    most: int,
    probes: int,
    generator: torch.Generator,
) -> LayerInspection:
    n, d = w.shape
    drawn = torch.arange(n) if n <= most else torch.randperm(n, generator=generator)[:most].sort().values
    rows = w[drawn.to(w.device)]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    unit = sphere.polar(rows)[1]
    energies: dict[tuple[float, str, bool], Energy] = {}
    for power in (0, 1, 2):
        for distance in ("euclidean", "angular"):
            for half_space in (False, True):
                value = stacked_energy(rows, PairPotential(kernel_of(power), distance, half_space), sampled_from=n)
                form = (power, distance, half_space)
                energies[form] = Energy(float(value), *random_energy(n, d, power, distance, half_space))
    i, j = torch.triu_indices(len(unit), len(unit), 1, device=w.device)
    c = (unit @ unit.mT)[i, j]
    count = min(pairs, len(c))

    def listed(closest: bool) -> tuple[Pair, ...]:
        at = c.topk(count, largest=closest).indices
        angles = _exact_angles(unit[i[at]], unit[j[at]])
        original = drawn.to(w.device)
        return tuple(map(Pair, original[i[at]].tolist(), original[j[at]].tolist(), angles.tolist()))

    nearest = listed(True)
    directions = sphere.normalize(torch.randn(probes, d, generator=generator).to(rows))
    norms = torch.cat([_numerics.to_float64(sphere.polar(block)[0]) for block in w.split(1 << 14)])
    return LayerInspection(
        name=name,
        shape=shape,
        neurons=n,
        length=d,
        sampled=len(rows),
        zero_neurons=int((norms == 0).sum()),
        norms=Norms(*(float(v) for v in (norms.mean(), norms.min(), norms.max()))),
        energies=energies,
        separation=nearest[0].angle,
        covering_radius=float(sphere.angle((directions @ unit.mT).amax(1).amin())),
        hole_radius=hole_radius(unit[(unit != 0).any(1)]),
        orthogonality_error=float(c.square().mean().sqrt()),
        effective_rank=_effective_rank(rows),
        nearest=nearest,
        most_opposite=listed(False),
        angle_counts=tuple(torch.histc(sphere.angle(c).float(), bins, 0, math.pi).long().tolist()),
    )


def _effective_rank(rows: Tensor) -> float:
    """The exponential of the entropy of the singular values' shares; 0 of zeros."""
    rows = rows * _numerics.unit_scale(rows.abs().amax())
    gram = rows @ rows.mT if len(rows) <= rows.shape[1] else rows.mT @ rows
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    share = values / values.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum())) if values.any() else 0.0


def _exact_angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles of unit rows by differences, which tell nearly equal rows apart where cosines cannot."""
    return 2 * torch.atan2((a - b).norm(dim=1), (a + b).norm(dim=1))
