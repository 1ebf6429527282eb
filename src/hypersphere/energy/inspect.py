"""Measure how redundant the neurons of a network are, compared with random neurons of the same shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import _numerics, sphere
from hypersphere._deprecation import deprecated_argument
from hypersphere._notebook import NotebookResult
from hypersphere._validation import is_integer, require
from hypersphere.energy._steps import check_seed
from hypersphere.energy._weight_files import UnreadableWeights, read_neurons
from hypersphere.energy.energy import MAX_NEURONS, random_energy
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential, kernel_of

__all__ = [
    "Energy",
    "Inspection",
    "LayerInspection",
    "Norms",
    "Pair",
    "UnreadableWeights",
    "angle_density",
    "hole_radius",
    "inspect",
]

# The forms of the energy that are computed for every layer, each in full and in half space.
_POWERS = (0, 1, 2)
_DISTANCES = ("euclidean", "angular")


@dataclass(frozen=True)
class Energy:
    """The mean energy of a layer in one form, and the energy of random neurons of the same shape."""

    value: float
    random_mean: float
    random_deviation: float

    @property
    def excess(self) -> float:
        """The energy divided by the energy of random neurons; NaN if the latter is infinite or 0."""
        return self.value / self.random_mean if math.isfinite(self.random_mean) and self.random_mean else math.nan


@dataclass(frozen=True)
class Pair:
    """The rows of two neurons, and the angle between them."""

    first: int
    second: int
    angle: float


@dataclass(frozen=True)
class Norms:
    """Mean, smallest and largest norm of the neurons of a layer."""

    mean: float
    least: float
    largest: float


@dataclass(frozen=True)
class LayerInspection:
    """Measurements of one layer. Statistics of pairs use a sample of `sampled` neurons if the layer has more.

    Attributes:
        name: the name of the layer.
        shape: the shape of its weight.
        neurons: the number of neurons.
        length: the number of entries per neuron.
        sampled: the number of neurons in statistics of pairs.
        zero_neurons: the number of neurons that are zero.
        norms: norms of the neurons.
        energies: energies by power, distance and half space; see `energy`.
        separation: the smallest angle between two neurons.
        covering_radius: the largest angle between a direction and its nearest neuron, estimated from below.
        hole_radius: the exact covering radius for d ≤ 3 and at most 128 neurons, else None.
        orthogonality_error: the root mean square of the cosines of pairs.
        effective_rank: the exponential of the entropy of the normalised singular values.
        nearest: the pairs with the smallest angles.
        most_opposite: the pairs with the largest angles.
        angle_counts: the histogram of angles over [0, π].
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
        """Return the energy for a power of 0, 1 or 2, a distance, and full or half space."""
        require(power in _POWERS, "power", "0, 1 or 2", power)
        require(distance in _DISTANCES, "distance", "'euclidean' or 'angular'", distance)
        require(isinstance(half_space, bool), "half_space", "a bool", half_space)
        return self.energies[power, distance, half_space]


@dataclass(frozen=True)
class Inspection(NotebookResult):
    """The measurements of all layers. It prints as the table of `hypersphere.report.layer_table`, in Markdown.

    Attributes:
        layers: one entry per layer.
        skipped: names of weights that were left out, with the reason.
    """

    layers: tuple[LayerInspection, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        report = self._report()
        return report.markdown(report.layer_table(self))

    def __rich__(self) -> str:
        from rich.markup import escape

        return escape(str(self))

    def plot(self, path: str | Path | None = None) -> Any:
        """Return an Altair chart of the angles in every layer and of random neurons; save it if `path` is given.

        A notebook displays the chart. The file is an image (.svg, .png, .pdf) or a page (.html).
        """
        chart = self._report().angle_chart(self)
        if path is not None:
            chart.save(path)
        return chart


@deprecated_argument("most", "max_neurons")
def inspect(
    model: nn.Module | Mapping[str, Any] | str | Path,
    *,
    pairs: int = 5,
    bins: int = 36,
    max_neurons: int = MAX_NEURONS,
    probes: int = 1024,
    seed: int = 0,
    report: bool = False,
) -> Inspection:
    r"""Measure how redundant the neurons of a model, a state dict or a file are, layer by layer.

    Files are read tensor by tensor, without the code of the model and without unrestricted pickles.

    Args:
        model: a module; a state dict (nested dictionaries and NumPy arrays too); the path of a .safetensors file, of a
            folder of them, or of a file of `torch.save`.
        pairs: the number of nearest and most opposite pairs to list.
        bins: the number of bins of the histogram of angles over [0, π].
        max_neurons: the largest number of neurons in statistics of pairs; larger layers are sampled at evenly spaced
            rows.
        probes: the number of random directions for the estimate of the covering radius.
        seed: the seed of the probes.
        report: print which layers were measured and skipped.

    Example:
        >>> inspection = inspect(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
        >>> [(layer.name, layer.neurons, layer.length) for layer in inspection.layers]
        [('0', 16, 8), ('1', 4, 16)]
    """
    lows = (("pairs", pairs, 1), ("bins", bins, 1), ("probes", probes, 1), ("max_neurons", max_neurons, 2))
    for name, number, low in lows:
        require(is_integer(number, low), name, f"an integer >= {low}", number)
    check_seed(seed)
    require(isinstance(report, bool), "report", "a bool", report)
    layers, skipped = [], []
    for name, tensor in read_neurons(model):
        reason = tensor if isinstance(tensor, str) else _reason_to_skip(tensor)
        if reason is not None:
            skipped.append(f"{name}: {reason}")
            continue
        assert isinstance(tensor, Tensor)
        # A generator per layer: the numbers of a layer do not depend on which other layers are measured.
        generator = torch.Generator().manual_seed(seed)
        shape = tuple(tensor.shape)
        w = tensor.flatten(1)
        layers.append(
            _inspect_rows(name, shape, w, generator, pairs=pairs, bins=bins, max_neurons=max_neurons, probes=probes)
        )
    if not layers:
        raise ValueError("model must have a layer with at least two finite neurons, but it has none")
    if report:
        print("\n".join([*(f"{layer.name}: {layer.neurons} x {layer.length}" for layer in layers), *skipped]))
    return Inspection(tuple(layers), tuple(skipped))


def _reason_to_skip(tensor: Tensor) -> str | None:
    """Return why the neurons of a tensor cannot be measured, or None."""
    w = tensor.flatten(1)
    if w.shape[0] < 2 or w.shape[1] < 2:
        return f"only {w.shape[0]} x {w.shape[1]}: at least two neurons of two numbers are needed"
    # In blocks, because the float32 copy of a 16-bit embedding would not be small.
    is_finite = all(bool(torch.isfinite(block.float()).all()) for block in w.split(1 << 14))
    return None if is_finite else "not finite"


@torch.no_grad()
def _inspect_rows(
    name: str,
    shape: tuple[int, ...],
    w: Tensor,
    generator: torch.Generator,
    *,
    pairs: int,
    bins: int,
    max_neurons: int,
    probes: int,
) -> LayerInspection:
    """Measure the neurons (N, d) of one layer. The arguments are described at `inspect`."""
    n, d = w.shape
    # Statistics of pairs use a sample of the rows of a large layer.
    index = _numerics.evenly_spaced(n, max_neurons).to(w.device)
    rows = w[index]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    unit = sphere.polar(rows)[1]
    i, j = torch.triu_indices(len(unit), len(unit), 1, device=w.device)
    cosines = (unit @ unit.mT)[i, j]

    def extreme_pairs(*, closest: bool) -> tuple[Pair, ...]:
        at = cosines.topk(min(pairs, len(cosines)), largest=closest).indices
        angles = _exact_angles(unit[i[at]], unit[j[at]])
        return tuple(map(Pair, index[i[at]].tolist(), index[j[at]].tolist(), angles.tolist()))

    nearest = extreme_pairs(closest=True)
    # Norms use all rows, in blocks because the float64 copy of a large layer would not be small.
    norms = torch.cat([_numerics.to_float64(sphere.polar(block)[0]) for block in w.split(1 << 14)])
    return LayerInspection(
        name=name,
        shape=shape,
        neurons=n,
        length=d,
        sampled=len(rows),
        zero_neurons=int((norms == 0).sum()),
        norms=Norms(*(float(v) for v in (norms.mean(), norms.min(), norms.max()))),
        energies=_energies(rows, n, d),
        separation=nearest[0].angle,
        covering_radius=_covering_radius(unit, probes, generator),
        hole_radius=hole_radius(unit[(unit != 0).any(1)]),
        orthogonality_error=float(cosines.square().mean().sqrt()),
        effective_rank=_effective_rank(rows),
        nearest=nearest,
        most_opposite=extreme_pairs(closest=False),
        angle_counts=tuple(torch.histc(sphere.angle(cosines).float(), bins, 0, math.pi).long().tolist()),
    )


def _covering_radius(unit: Tensor, probes: int, generator: torch.Generator) -> float:
    """Return the largest angle between random directions and their nearest neuron, a lower bound of the radius."""
    directions = sphere.normalize(torch.randn(probes, unit.shape[1], generator=generator).to(unit))
    return float(sphere.angle((directions @ unit.mT).amax(1).amin()))


def _energies(rows: Tensor, n: int, d: int) -> dict[tuple[float, str, bool], Energy]:
    """Return the energies of `rows`, a sample from `n` neurons, and the energies expected for random neurons."""
    energies: dict[tuple[float, str, bool], Energy] = {}
    for power, distance, half_space in itertools.product(_POWERS, _DISTANCES, (False, True)):
        potential = PairPotential(kernel_of(power), distance, half_space)
        value = float(pair_energy(PairSum(rows, potential, mean=True, sampled_from=n)))
        mean, deviation = random_energy(n, d, power, distance, half_space)
        # A sample has fewer pairs, and the variance of the mean is inversely proportional to their number.
        deviation *= math.sqrt(math.comb(n, 2) / math.comb(len(rows), 2))
        energies[power, distance, half_space] = Energy(value, mean, deviation)
    return energies


def _effective_rank(rows: Tensor) -> float:
    """Return the exponential of the entropy of the normalised singular values, or 0 for a zero matrix."""
    # The rank does not depend on the scale, and scaling by a power of two keeps the squares in range.
    rows = rows * _numerics.unit_scale(rows.abs().amax())
    # The smaller Gram matrix has the same nonzero eigenvalues, the squares of the singular values.
    gram = rows @ rows.mT if len(rows) <= rows.shape[1] else rows.mT @ rows
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    share = values / values.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum())) if values.any() else 0.0


def _exact_angles(a: Tensor, b: Tensor) -> Tensor:
    """Return angles between unit rows from differences, which resolve nearly equal rows better than cosines.

    The angle of a zero row and any other row is 90°, as its cosine says.
    """
    difference, total = (a - b).norm(dim=1), (a + b).norm(dim=1)
    both_zero = (difference == 0) & (total == 0)
    return 2 * torch.atan2(difference, total).masked_fill(both_zero, math.pi / 4)


# Holes ---------------------------------------------------------------------------------------------------------------

_MOST_POINTS_FOR_HOLES = 128


def hole_radius(unit: Tensor) -> float | None:
    r"""Return the exact covering radius max_x min_i θ(x, ŵᵢ) of unit rows (N, d).

    The centre of the largest hole is opposite to a point, opposite to the middle of two points, or at equal distance
    from three points. All of these directions are tried.

    Returns:
        The radius, or None for d > 3, for no rows and for more than 128 rows.

    Example:
        >>> round(hole_radius(torch.cat([torch.eye(3), -torch.eye(3)])), 4)  # arccos 1/√3
        0.9553
    """
    n, d = unit.shape
    if not 1 <= n <= _MOST_POINTS_FOR_HOLES or d not in (2, 3):
        return None
    points = _numerics.to_float64(unit)
    i, j = torch.triu_indices(n, n, device=points.device)
    # i = j is included: twice the point, whose opposite is the first kind of centre.
    middles = points[i] + points[j]
    nearest = [_smallest_nearest_cosine(points, centres) for centres in (middles, -middles)]
    if d == 3:
        for k in range(n - 2):
            first, second = torch.triu_indices(n - k - 1, n - k - 1, 1, device=points.device) + k + 1
            # Directions at equal distance from three points are normal to the plane through them.
            normals = torch.linalg.cross(points[first] - points[k], points[second] - points[k])
            nearest += [_smallest_nearest_cosine(points, centres) for centres in (normals, -normals)]
    return float(sphere.angle(torch.stack(nearest).amin()))


def _smallest_nearest_cosine(points: Tensor, centres: Tensor) -> Tensor:
    """Return the smallest, over centres, of the cosine with the nearest point. Zero centres do not count."""
    directions = sphere.normalize(centres)
    cosines = (directions @ points.mT).amax(1)
    return cosines.masked_fill((directions == 0).all(1), 1.0).amin() if len(cosines) else points.new_ones(())


def angle_density(d: int, points: int = 20_000) -> tuple[Tensor, Tensor]:
    """Return angles in (0, π) and the probability of each between two random directions of R^d.

    >>> theta, share = angle_density(3)
    >>> round(float((share * theta.cos().square()).sum()), 6)  # 1/d
    0.333333
    """
    require(is_integer(d, 2), "d", "an integer >= 2", d)
    theta = (torch.arange(points, dtype=torch.float64) + 0.5) * (math.pi / points)
    return theta, torch.softmax((d - 2) * theta.sin().log(), 0)
