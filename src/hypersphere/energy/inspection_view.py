"""An inspection as a table and as a figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypersphere.energy.uniform import angle_density

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from hypersphere.energy.inspection import Energy, Inspection

__all__ = ["figure_of", "table_of"]


def table_of(inspection: Inspection) -> Table:
    """Return one line a layer: energies beside those of random neurons, angles in degrees."""
    from rich.table import Table

    table = Table(title="Hyperspherical energy of the neurons", caption=_caption(inspection))
    for heading in (
        "layer",
        "neurons",
        "energy (s=2)",
        "random",
        "half space",
        "random",
        "nearest",
        "covering",
        "rank",
    ):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in inspection.layers:
        full, half = layer.energy(), layer.energy(half_space=True)
        table.add_row(
            layer.name,
            f"{layer.neurons} x {layer.length}" + ("*" if layer.sampled < layer.neurons else ""),
            f"{full.value:.4g}",
            _random(full),
            f"{half.value:.4g}",
            _random(half),
            f"{math.degrees(layer.separation):.1f}°",
            f"{math.degrees(layer.covering_radius):.1f}°",
            f"{layer.effective_rank:.1f}",
        )
    return table


def _random(energy: Energy) -> str:
    if math.isinf(energy.random_mean):
        return "∞"
    deviation = "∞" if math.isinf(energy.random_deviation) else f"{energy.random_deviation:.2g}"
    return f"{energy.random_mean:.4g} ± {deviation}"


def _caption(inspection: Inspection) -> str | None:
    lines = []
    if any(layer.sampled < layer.neurons for layer in inspection.layers):
        lines.append("* pairs are of a sample of the neurons")
    if inspection.skipped:
        lines.append(f"left out: {'; '.join(inspection.skipped)}")
    return "\n".join(lines) or None


def figure_of(inspection: Inspection) -> Figure:
    """Return one histogram of angles a layer, with the density for random neurons as a line."""
    from matplotlib.figure import Figure

    layers = inspection.layers
    columns = min(len(layers), 4)
    lines = math.ceil(len(layers) / columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * lines), layout="constrained")
    for at, layer in enumerate(layers):
        axes = figure.add_subplot(lines, columns, at + 1)
        bins = len(layer.angle_counts)
        width = 180 / bins
        total = max(sum(layer.angle_counts), 1)
        heights = [count / total / width for count in layer.angle_counts]
        axes.bar([width * (k + 0.5) for k in range(bins)], heights, width, color="#9bb7d4", label="neurons")
        theta, share = angle_density(layer.length, 720)
        axes.plot(theta.rad2deg().tolist(), (share * 4).tolist(), color="#b3372f", linewidth=1, label="random")
        axes.set_title(f"{layer.name}  {layer.neurons} x {layer.length}", fontsize=8)
        axes.set_xlim(0, 180)
        axes.set_xticks([0, 45, 90, 135, 180])
        axes.tick_params(labelsize=7)
        axes.set_yticks([])
        if at == 0:
            axes.legend(fontsize=7)
    figure.supxlabel("angle between neurons, degrees", fontsize=8)
    return figure
