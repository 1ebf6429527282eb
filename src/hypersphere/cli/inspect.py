"""`hypersphere inspect`: show how redundant the neurons of each layer are, as a table and as a page."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.opening import device_of, open_run
from hypersphere.cli.target import check_target, write_json
from hypersphere.data import DamagedData, MissingData
from hypersphere.energy.inspect import Inspection, LayerInspection, Pair, UnreadableWeights, angle_density
from hypersphere.energy.inspect import inspect as inspect_neurons
from hypersphere.training.job_run import CONFIG

__all__ = ["inspect", "layer_table", "layer_tables"]

MOST_DRAWN = 60  # layers with a histogram
ABOUT_ANGLES = (
    "Nearest is the smallest angle between two neurons. Covering is the largest angle between a direction and its "
    "nearest neuron. Rank is the effective number of dimensions of the neurons, largest if they are spread evenly."
)


def inspect(
    source: Path,
    *,
    pairs: int,
    most: int,
    seed: int,
    html: Path | None,
    json_file: Path | None,
    device: str | None,
    data_root: Path | None,
) -> None:
    """Inspect a run, a file of weights or a folder of them; print one line per layer and write the requested files."""
    check_target("--html", html, [".html"])
    check_target("--json", json_file, [".json"])
    inspection = _inspection(_opened(source, device, data_root), pairs=pairs, most=most, seed=seed)
    if json_file is not None:
        write_json(json_file, _plain(inspection, source))
    if html is not None:
        write_inspection(html, inspection, source)
    report.print_table(layer_table(inspection))
    if html is not None:
        print(f"\nReport: {html}")


def _opened(source: Path, device: str | None, data_root: Path | None) -> nn.Module | Path:
    """Return the network and head of a run, or the path itself if it is not a run."""
    if not source.exists():
        raise MissingData(f"{source} not found")
    if not (source / CONFIG).is_file():
        require(device is None, "--device", "omitted unless the source is a run", device)
        return source
    assembly = open_run(source, data_root, device=device_of(device), data=False).assembly
    return nn.ModuleDict({"network": assembly.network.body, "head": assembly.head})


def _inspection(model: nn.Module | Path, *, pairs: int, most: int, seed: int) -> Inspection:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inspection = inspect_neurons(model, pairs=pairs, most=most, seed=seed)
    except UnreadableWeights as error:
        raise DamagedData(str(error)) from None
    return dataclasses.replace(inspection, skipped=(*inspection.skipped, *(str(warning.message) for warning in caught)))


def layer_table(inspection: Inspection) -> report.Table:
    """Return one row per layer, narrow enough for a terminal: energies relative to random neurons, angles, rank."""
    columns = [
        report.Column("layer"),
        report.Column("neurons"),
        report.Column("energy factor", format=".3f"),
        report.Column("half-space factor", format=".3f"),
        report.Column("nearest", format=".1f", unit="°"),
        report.Column("covering", format=".1f", unit="°"),
        report.Column("rank", format=".1f"),
    ]
    rows: list[list[Any]] = [
        [
            layer.name,
            _size(layer),
            layer.energy().excess,
            layer.energy(half_space=True).excess,
            math.degrees(layer.separation),
            math.degrees(layer.covering_radius),
            layer.effective_rank,
        ]
        for layer in inspection.layers
    ]
    return report.Table("Neurons per layer", columns, rows, f"{_caption(inspection)} {ABOUT_ANGLES}")


def layer_tables(inspection: Inspection) -> list[report.Table]:
    """Return two tables with one row per layer: energies, and angles and norms."""
    return [_energy_table(inspection), _angle_table(inspection)]


def _energy_table(inspection: Inspection) -> report.Table:
    columns = [report.Column("layer"), report.Column("neurons")]
    for kind in ("energy", "half-space energy"):
        columns += [report.Column(kind, format=".4f"), report.Column(f"{kind} of random neurons", format=".4f")]
        columns.append(report.Column(f"{kind.removesuffix(' energy')} factor", format=".3f"))
    rows: list[list[Any]] = []
    for layer in inspection.layers:
        cells: list[Any] = [layer.name, _size(layer)]
        for half_space in (False, True):
            energy = layer.energy(half_space=half_space)
            finite = math.isfinite(energy.random_mean)
            cells += [energy.value, energy.random_mean if finite else None, energy.excess]
        rows.append(cells)
    return report.Table("Energy per layer", columns, rows, _caption(inspection))


def _angle_table(inspection: Inspection) -> report.Table:
    columns = [
        report.Column("layer"),
        report.Column("nearest pair", format=".1f", unit="°"),
        report.Column("covering radius", format=".1f", unit="°"),
        report.Column("largest hole", format=".1f", unit="°"),
        report.Column("orthogonality error", format=".3f"),
        report.Column("effective rank", format=".1f"),
        *(report.Column(f"{what} norm", format=".3f") for what in ("mean", "smallest", "largest")),
    ]
    rows: list[list[Any]] = [
        [
            layer.name,
            math.degrees(layer.separation),
            math.degrees(layer.covering_radius),
            None if layer.hole_radius is None else math.degrees(layer.hole_radius),
            layer.orthogonality_error,
            layer.effective_rank,
            *dataclasses.astuple(layer.norms),
        ]
        for layer in inspection.layers
    ]
    caption = (
        f"{ABOUT_ANGLES} The covering radius is a lower bound; the largest hole is exact, for few neurons in 3 "
        "dimensions or fewer. The orthogonality error is the root mean square of the cosines of pairs."
    )
    if all(row[3] is None for row in rows):
        columns, rows = [columns[at] for at in range(len(columns)) if at != 3], [row[:3] + row[4:] for row in rows]
        caption = caption.replace("; the largest hole is exact, for few neurons in 3 dimensions or fewer", "")
    return report.Table("Angles and norms per layer", columns, rows, caption)


def _size(layer: LayerInspection) -> str:
    return f"{layer.neurons}×{layer.length}{'*' if _is_sampled(layer) else ''}"


def _caption(inspection: Inspection) -> str:
    lines = ["Energies are means over pairs with s = 2; factors are energies divided by those of random neurons."]
    lines.append("A factor above 1 means more redundant than random neurons.")
    if any(not math.isfinite(layer.energy().random_mean) for layer in inspection.layers):
        lines.append("In 3 dimensions or fewer the energy of random neurons has no finite mean.")
    if any(map(_is_sampled, inspection.layers)):
        lines.append("* Computed from a sample of the neurons.")
    if inspection.skipped:
        lines.append(f"Skipped: {'; '.join(inspection.skipped)}.")
    return " ".join(lines)


def _is_sampled(layer: LayerInspection) -> bool:
    return layer.sampled < layer.neurons


def write_inspection(path: Path, inspection: Inspection, source: Path) -> Path:
    """Write the page: tables, energies relative to random neurons, histograms of angles, and the nearest pairs."""
    drawn = inspection.layers[:MOST_DRAWN]
    names = [layer.name for layer in drawn]
    factors = report.Bars(
        "Energy relative to random neurons",
        names,
        [
            report.Series("full space", [layer.energy().excess for layer in drawn]),
            report.Series("half space", [layer.energy(half_space=True).excess for layer in drawn]),
        ],
        value_name="factor",
        format=".3f",
        start=1.0,
        caption="Random directions have 1; larger values mean redundancy. s = 2, Euclidean distance.",
    )
    sections: list[Any] = [*layer_tables(inspection), factors]
    sections.append(report.Tabs("Angles between neurons", [_angles(layer) for layer in drawn]))
    sections.append(_pair_table(inspection))
    title = f"Neurons of {source.name or source}"
    lead = f"{len(inspection.layers)} layers, {sum(layer.neurons for layer in inspection.layers)} neurons."
    return report.write_page(path, title=title, lead=lead, sections=sections, meta={"source": str(source)})


def _angles(layer: LayerInspection) -> report.Histogram:
    bins = len(layer.angle_counts)
    width = 180 / bins
    theta, share = angle_density(layer.length)
    expected = torch.zeros(bins, dtype=share.dtype).index_add_(0, (theta / math.pi * bins).long(), share)
    return report.Histogram(
        layer.name,
        [
            report.Distribution("these neurons", counts=layer.angle_counts),
            report.Distribution("random neurons", counts=(expected * sum(layer.angle_counts)).tolist()),
        ],
        x_name="angle in degrees",
        edges=[width * edge for edge in range(bins + 1)],
    )


def _pair_table(inspection: Inspection) -> report.Table:
    columns = [report.Column(name) for name in ("layer", "nearest pairs", "most opposite pairs")]
    rows = [[layer.name, *map(_pairs, (layer.nearest, layer.most_opposite))] for layer in inspection.layers]
    return report.Table(
        "Extreme pairs", columns, rows, "Neurons are given by their row, counted from 0, with their angle."
    )


def _pairs(pairs: Sequence[Pair]) -> str:
    dash, gap = "\N{WORD JOINER}–\N{WORD JOINER}", "\N{NO-BREAK SPACE}"
    return ", ".join(f"{pair.first}{dash}{pair.second}:{gap}{math.degrees(pair.angle):.1f}°" for pair in pairs)


def _plain(inspection: Inspection, source: Path) -> Mapping[str, Any]:
    """Return the inspection in the form of the JSON file."""
    layers = []
    for layer in inspection.layers:
        content = dataclasses.asdict(layer)
        content["energies"] = [
            {"power": power, "distance": distance, "half_space": half, **dataclasses.asdict(energy)}
            for (power, distance, half), energy in layer.energies.items()
        ]
        layers.append(content)
    return {"source": str(source), "layers": layers, "skipped": inspection.skipped}
