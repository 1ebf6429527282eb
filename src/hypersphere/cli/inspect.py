"""`hypersphere inspect`: show how redundant the neurons of each layer are, as a table and as a page."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.opening import device_of, open_run
from hypersphere.cli.target import check_target, write_json
from hypersphere.data import DamagedData, MissingData
from hypersphere.energy.inspect import Inspection, UnreadableWeights
from hypersphere.energy.inspect import inspect as inspect_neurons
from hypersphere.training.job_run import CONFIG

__all__ = ["inspect"]


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
        report.write_page(html, report.inspection_page(inspection, source.name or str(source)))
    report.print_table(report.layer_table(inspection))
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
