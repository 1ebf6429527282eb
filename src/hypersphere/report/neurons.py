"""Tables and a page about the neurons of each layer, from the result of `hypersphere.energy.inspect`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from hypersphere.energy.inspect import Inspection, LayerInspection, Pair, angle_density
from hypersphere.report import charts
from hypersphere.report._vega import altair
from hypersphere.report.page import Chart, Page, Section, Tabs
from hypersphere.report.tables import Cell, Column, Table

__all__ = ["angle_chart", "inspection_page", "layer_table", "layer_tables", "verdict"]

MOST_DRAWN = 60  # layers with a histogram
CLEAR = 3.0  # a smaller difference, in standard deviations of random neurons, may be chance
LARGE = 0.01  # a smaller relative difference is not reported


def verdict(layer: LayerInspection) -> str:
    """Return "duplicated", "redundant", "diverse", "like random" or "no reference".

    The half-space energy of the layer is compared with that of random neurons of the same shape.

    "redundant" and "diverse" mean at least three standard deviations of random neurons, and 1 %, above or below their
    mean. Two neurons within one degree of each other, or of opposite directions, make a layer "duplicated".
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
    """Return a table with one row per layer: its verdict, and measures of how evenly its neurons are spread."""
    names = ["layer", "neurons", "verdict", "energy factor", "half-space factor", "nearest", "rank"]
    return _table("Neurons per layer", inspection, names, _caption(inspection))


def layer_tables(inspection: Inspection) -> list[Table]:
    """Return the short table and one with more measurements."""
    has_holes = any(layer.hole_radius is not None for layer in inspection.layers)
    names = ["layer", "energy", "half-space energy", "covering", *["largest hole"] * has_holes, "orthogonality error"]
    hole = "; the largest hole is exact, for few neurons in 3 dimensions or fewer" * has_holes
    about = (
        "Covering is the largest angle between a direction and its nearest neuron, estimated from below"
        f"{hole}. The orthogonality error is the root mean square of the cosines."
    )
    return [layer_table(inspection), _table("Energies, angles and norms", inspection, [*names, *NORMS], about)]


def inspection_page(inspection: Inspection, source: str) -> Page:
    """Return the page: tables, energies relative to random neurons, histograms of angles, and the nearest pairs."""
    drawn = inspection.layers[:MOST_DRAWN]
    forms = {"full space": False, "half space": True}
    series = [
        charts.Series(name, [layer.energy(half_space=half).excess for layer in drawn]) for name, half in forms.items()
    ]
    factors = charts.bars([layer.name for layer in drawn], series, value_name="factor", format=".3f", start=1.0)
    caption = "Random directions have 1; larger values mean redundancy. s = 2, Euclidean distance."
    about = "Neurons are given by their row, counted from 0, with their angle."
    sections: list[Section] = [
        *layer_tables(inspection),
        Chart("Energy relative to random neurons", factors, caption),
        Tabs("Angles between neurons", [_angles(layer) for layer in drawn]),
        _table("Extreme pairs", inspection, ["layer", "nearest pairs", "most opposite pairs"], about),
    ]
    lead = f"{len(inspection.layers)} layers, {sum(layer.neurons for layer in inspection.layers)} neurons."
    return Page(f"Neurons of {source}", lead, sections, {"source": source})


def angle_chart(inspection: Inspection) -> Any:
    """Return one histogram of the angles between neurons per layer, next to each other, as an Altair chart."""
    panels = []
    for layer in inspection.layers:
        title = {"text": layer.name, "subtitle": f"{layer.neurons} × {layer.length}"}
        panel = _angles(layer).chart.properties(title=title, width=220, height=130)
        panel.usermeta = altair().Undefined  # used only by pages
        panels.append(panel)
    return altair().concat(*panels, columns=4)


NORMS = ("mean norm", "smallest norm", "largest norm")
ANGLES = ("nearest", "covering", "largest hole")
FORMATS = {"energy": ".4f", "half-space energy": ".4f", "rank": ".1f", **dict.fromkeys(ANGLES, ".1f")}


def _table(title: str, inspection: Inspection, names: Sequence[str], caption: str) -> Table:
    """Return a table with one row per layer and the named columns."""
    columns = [Column(name, None, FORMATS.get(name, ".3f"), "°" if name in ANGLES else "") for name in names]
    rows = [[cells[name] for name in names] for cells in map(_cells, inspection.layers)]
    return Table(title, columns, rows, caption)


def _cells(layer: LayerInspection) -> dict[str, Cell]:
    """Return the cells of all possible columns for a layer, by name of the column."""
    full, half = layer.energy(), layer.energy(half_space=True)
    radii = {"nearest": layer.separation, "covering": layer.covering_radius, "largest hole": layer.hole_radius}
    return {
        "layer": layer.name,
        "neurons": f"{layer.neurons}×{layer.length}{'*' * (layer.sampled < layer.neurons)}",
        "verdict": verdict(layer),
        "energy": full.value,
        "energy factor": full.excess,
        "half-space energy": half.value,
        "half-space factor": half.excess,
        **{name: None if radius is None else math.degrees(radius) for name, radius in radii.items()},
        "orthogonality error": layer.orthogonality_error,
        "rank": layer.effective_rank,
        **dict(zip(NORMS, dataclasses.astuple(layer.norms), strict=True)),
        "nearest pairs": _pairs(layer.nearest),
        "most opposite pairs": _pairs(layer.most_opposite),
    }


def _caption(inspection: Inspection) -> str:
    lines = [
        "Energies are means over pairs with s = 2; factors are energies divided by those of random neurons. "
        f"The verdict compares half-space energies: redundant or diverse means more than {CLEAR:g} standard deviations "
        f"of random neurons and {LARGE:.0%} above or below their mean, duplicated that two neurons are within 1° "
        "of the same or opposite direction. Nearest is the smallest angle between two neurons. Rank is the effective "
        "number of dimensions of the neurons, largest if they are spread evenly."
    ]
    if any(not math.isfinite(layer.energy().random_mean) for layer in inspection.layers):
        lines.append("In 3 dimensions or fewer the energy of random neurons has no finite mean.")
    if any(layer.sampled < layer.neurons for layer in inspection.layers):
        lines.append("* Computed from a sample of the neurons.")
    zeros = [f"{one.name} ({one.zero_neurons} of {one.neurons})" for one in inspection.layers if one.zero_neurons]
    if zeros:
        lines.append(f"Zero neurons, which count as orthogonal to all others and lower the energy: {', '.join(zeros)}.")
    return " ".join([*lines, *[f"Skipped: {'; '.join(inspection.skipped)}."] * bool(inspection.skipped)])


def _angles(layer: LayerInspection) -> Chart:
    bins = len(layer.angle_counts)
    theta, share = angle_density(layer.length)
    expected = torch.zeros(bins, dtype=share.dtype).index_add_(0, (theta / math.pi * bins).long(), share)
    observed = torch.tensor(layer.angle_counts)
    counts = {"these neurons": observed, "random neurons": expected * observed.sum()}
    edges = [180 / bins * edge for edge in range(bins + 1)]
    return Chart(layer.name, charts.histogram(counts, edges=edges, counts=True, x_name="angle in degrees"))


def _pairs(pairs: Sequence[Pair]) -> str:
    gap = "\N{NO-BREAK SPACE}"  # a line may end between two pairs, not within one
    return ", ".join(f"{pair.first}{gap}&{gap}{pair.second}:{gap}{math.degrees(pair.angle):.1f}°" for pair in pairs)
