"""`hypersphere inspect`: show how redundant the neurons of each layer are, as a table and as an HTML page."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import check_target, print_line, write_json

if TYPE_CHECKING:
    from torch import nn

    from hypersphere.energy.inspect import Inspection

__all__ = ["inspect"]


def inspect(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run, .safetensors file or folder of them (also of Hugging Face), or file of torch.save.",
        ),
    ],
    html: Annotated[Path | None, typer.Option(help="Write a report with histograms to this .html file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this .json file.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Number of closest and most opposite pairs to list per layer.")] = 5,
    most: Annotated[int, typer.Option(min=2, help="Sample this number of neurons from larger layers.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the random directions of the covering radius.")] = 0,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Show how redundant the neurons of each layer are compared with random ones."""
    from hypersphere import report

    check_target("--html", html, [".html"])
    check_target("--json", json, [".json"])
    model = _load_model(source, step, device, data_root, trust_code)
    inspection = _inspect(model, pairs=pairs, most=most, seed=seed)
    if json is not None:
        write_json(json, _json_content(inspection, source))
    if html is not None:
        report.write_page(html, report.inspection_page(inspection, source.name or str(source)))
    report.print_table(report.layer_table(inspection))
    if html is not None:
        print_line(f"\nReport: {html}")


def _load_model(
    source: Path, step: str | None, device: str | None, data_root: Path | None, trust_code: bool
) -> nn.Module | Path:
    """Return the network and head of a run, or the path itself if it is not a run."""
    from torch import nn

    from hypersphere.cli.opening import open_run

    if options.is_run(source):
        opened = open_run(source, data_root, step=step, device=device, with_data=False, trust_code=trust_code)
        return nn.ModuleDict({"network": opened.experiment.network.body, "head": opened.experiment.head})
    has_weights = any(source.glob("*.safetensors")) if source.is_dir() else source.is_file()
    if not has_weights:
        options.check_run(source, also=", .safetensors files or a file of torch.save")
    for option, value in (("--step", step), ("--device", device)):
        require(value is None, option, "omitted unless RUN is the folder of a run", value)
    return source


def _inspect(model: nn.Module | Path, *, pairs: int, most: int, seed: int) -> Inspection:
    """Return the inspection; warnings are added to the reasons why layers were skipped."""
    from hypersphere.data import DamagedData
    from hypersphere.energy.inspect import UnreadableWeights, inspect

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inspection = inspect(model, pairs=pairs, max_neurons=most, seed=seed)
    except UnreadableWeights as error:
        raise DamagedData(str(error)) from None
    return dataclasses.replace(inspection, skipped=(*inspection.skipped, *(str(warning.message) for warning in caught)))


def _json_content(inspection: Inspection, source: Path) -> dict[str, Any]:
    """Return the content of the JSON file."""
    layers = []
    for layer in inspection.layers:
        energies = [
            {"power": power, "distance": distance, "half_space": half, **dataclasses.asdict(energy)}
            for (power, distance, half), energy in layer.energies.items()
        ]
        layers.append({**dataclasses.asdict(layer), "energies": energies})
    return {"source": str(source), "layers": layers, "skipped": inspection.skipped}
