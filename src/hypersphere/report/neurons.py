"""Tables and a page about the neurons of each layer, from the result of `hypersphere.energy.inspect`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from hypersphere.energy.inspect import Inspection, LayerInspection, Pair, angle_density
from hypersphere.report import charts
from hypersphere.report.page import Chart, Page, Section, Tabs
from hypersphere.report.tables import Cell, Column, Table

__all__ = ["inspection_page", "layer_table", "layer_tables", "verdict"]

MOST_DRAWN = 60  # layers with a histogram
CLEAR = 3.0  # standard deviations of random neurons beyond which a difference is not chance
LARGE = 0.01  # relative difference below which a layer is like random neurons
ABOUT_ANGLES = (
    "Nearest is the smallest angle between two neurons. Covering is the largest angle between a direction and its "
    "nearest neuron. Rank is the effective number of dimensions of the neurons, largest if they are spread evenly."
)


def verdict(layer: LayerInspection) -> str:
    """Return what the half-space energy says about a layer, compared with random neurons of the same shape.

    "redundant" and "diverse" mean at least three standard deviations of random neurons and 1 % above or below their
    mean.
    Two neurons within one degree of each other, or of opposite directions, make a layer "duplicated".
    """
    opposite = max((pair.angle for pair in layer.most_opposite), default=0.0)
    if layer.neurons > 1 and min(layer.separation, math.pi - opposite) < math.radians(1):
        return "duplicated"
    energy = layer.energy(half_space=True)
    if not (math.isfinite(energy.random_mean) and math.isfinite(energy.random_deviation)) or layer.neurons < 2:
        return "no reference"
    difference = energy.value - energy.random_mean
    if abs(difference) < max(CLEAR * energy.random_deviation, LARGE * energy.random_mean):
        return "like random"
    return "redundant" if difference > 0 else "diverse"


def layer_table(inspection: Inspection) -> Table:
    """Return one short row per layer, for the terminal."""
    columns = [Column("layer"), Column("neurons"), Column("verdict")]
    columns += [Column(f"{kind} factor", None, ".3f") for kind in ("energy", "half-space")]
    columns += [Column("nearest", None, ".1f", "°"), Column("rank", None, ".1f")]
    rows: list[list[Cell]] = []
    for layer in inspection.layers:
        factors = [layer.energy().excess, layer.energy(half_space=True).excess]
        rows.append([layer.name, _size(layer), verdict(layer), *factors, math.degrees(layer.separation)])
        rows[-1].append(layer.effective_rank)
    return Table("Neurons per layer", columns, rows, f"{_caption(inspection)} {ABOUT_ANGLES}")


def layer_tables(inspection: Inspection) -> list[Table]:
    """Return two tables with one row per layer: energies, and angles and norms."""
    columns = [Column("layer"), Column("neurons"), Column("verdict")]
    for kind in ("energy", "half-space energy"):
        columns += [Column(kind, None, ".4f"), Column(f"{kind} of random neurons", None, ".4f")]
        columns.append(Column(f"{kind.removesuffix(' energy')} factor", None, ".3f"))
    rows: list[list[Cell]] = []
    for layer in inspection.layers:
        rows.append([layer.name, _size(layer), verdict(layer)])
        for energy in (layer.energy(), layer.energy(half_space=True)):
            finite = math.isfinite(energy.random_mean)
            rows[-1] += [energy.value, energy.random_mean if finite else None, energy.excess]
    return [Table("Energy per layer", columns, rows, _caption(inspection)), _angle_table(inspection)]


def inspection_page(inspection: Inspection, source: str) -> Page:
    """Return the page: tables, energies relative to random neurons, histograms of angles, and the nearest pairs."""
    drawn = inspection.layers[:MOST_DRAWN]
    forms = {"full space": False, "half space": True}
    series = [
        charts.Series(name, [one.energy(half_space=half).excess for one in drawn]) for name, half in forms.items()
    ]
    factors = charts.bars([one.name for one in drawn], series, value_name="factor", format=".3f", start=1.0)
    caption = "Random directions have 1; larger values mean redundancy. s = 2, Euclidean distance."
    sections: list[Section] = [
        *layer_tables(inspection),
        Chart("Energy relative to random neurons", factors, caption),
        Tabs("Angles between neurons", [_angles(layer) for layer in drawn]),
        _pair_table(inspection),
    ]
    lead = f"{len(inspection.layers)} layers, {sum(layer.neurons for layer in inspection.layers)} neurons."
    return Page(f"Neurons of {source}", lead, sections, {"source": source})


def _angle_table(inspection: Inspection) -> Table:
    has_holes = any(layer.hole_radius is not None for layer in inspection.layers)
    angles = ["nearest pair", "covering radius", *["largest hole"] * has_holes]
    columns = [Column("layer"), *(Column(name, None, ".1f", "°") for name in angles)]
    columns += [Column("orthogonality error", None, ".3f"), Column("effective rank", None, ".1f")]
    columns += [Column(f"{what} norm", None, ".3f") for what in ("mean", "smallest", "largest")]
    rows: list[list[Cell]] = []
    for layer in inspection.layers:
        radii = [layer.separation, layer.covering_radius, *[layer.hole_radius] * has_holes]
        rows.append([layer.name, *(None if radius is None else math.degrees(radius) for radius in radii)])
        rows[-1] += [layer.orthogonality_error, layer.effective_rank, *dataclasses.astuple(layer.norms)]
    hole = "; the largest hole is exact, for few neurons in 3 dimensions or fewer" * has_holes
    about = (
        f"The covering radius is a lower bound{hole}. The orthogonality error is the root mean square of the cosines."
    )
    return Table("Angles and norms per layer", columns, rows, f"{ABOUT_ANGLES} {about}")


def _size(layer: LayerInspection) -> str:
    return f"{layer.neurons}×{layer.length}{'*' * (layer.sampled < layer.neurons)}"


def _caption(inspection: Inspection) -> str:
    lines = [
        "Energies are means over pairs with s = 2; factors are energies divided by those of random neurons. "
        f"The verdict compares half-space energies: redundant or diverse means more than {CLEAR:g} standard deviations "
        f"of random neurons and {LARGE:.0%} above or below their mean, duplicated that two neurons are within 1° "
        "of the same or opposite direction."
    ]
    if any(not math.isfinite(layer.energy().random_mean) for layer in inspection.layers):
        lines.append("In 3 dimensions or fewer the energy of random neurons has no finite mean.")
    if any(layer.sampled < layer.neurons for layer in inspection.layers):
        lines.append("* Computed from a sample of the neurons.")
    return " ".join([*lines, *[f"Skipped: {'; '.join(inspection.skipped)}."] * bool(inspection.skipped)])


def _angles(layer: LayerInspection) -> Chart:
    bins = len(layer.angle_counts)
    theta, share = angle_density(layer.length)
    expected = torch.zeros(bins, dtype=share.dtype).index_add_(0, (theta / math.pi * bins).long(), share)
    found = torch.tensor(layer.angle_counts)
    counts = {"these neurons": found, "random neurons": expected * found.sum()}
    edges = [180 / bins * edge for edge in range(bins + 1)]
    return Chart(layer.name, charts.histogram(counts, edges=edges, counts=True, x_name="angle in degrees"))


def _pair_table(inspection: Inspection) -> Table:
    columns = [Column(name) for name in ("layer", "nearest pairs", "most opposite pairs")]
    rows = [[layer.name, *map(_pairs, (layer.nearest, layer.most_opposite))] for layer in inspection.layers]
    return Table("Extreme pairs", columns, rows, "Neurons are given by their row, counted from 0, with their angle.")


def _pairs(pairs: Sequence[Pair]) -> str:
    dash, gap = "\N{WORD JOINER}–\N{WORD JOINER}", "\N{NO-BREAK SPACE}"
    return ", ".join(f"{pair.first}{dash}{pair.second}:{gap}{math.degrees(pair.angle):.1f}°" for pair in pairs)
