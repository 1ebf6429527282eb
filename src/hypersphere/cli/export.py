"""`hypersphere export`: write the network and head of a run as ONNX or as a torch.export program, after a check.

The graph maps inputs (N, …) with variable N to two outputs, `features` (N, d) and `scores` (N, C) without margin. The
normalisation of the run is part of the graph. Rotations are folded first. The graph computes in float32 even if the run
was trained in bfloat16. A JSON card next to the file describes inputs, preprocessing, outputs and classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import check_target, print_line, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from hypersphere.cli.opening import Opened

__all__ = ["export"]

INPUTS = ("float32", "uint8")


def export(
    folder: options.RunFolder,
    to: Annotated[str, typer.Option(help="Format: onnx, or torch for a torch.export program.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write, .onnx or .pt2; default: RUN/model.onnx or RUN/model.pt2.")
    ] = None,
    inputs: Annotated[
        str, typer.Option("--input", help="Images as float32 in [0, 1], or as uint8 pixels in 0..255.")
    ] = "float32",
    step: options.Step = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Export the network and head to ONNX or torch.export, and check that the outputs are the same."""
    from hypersphere import rotation
    from hypersphere.cli.opening import open_run, probe_inputs
    from hypersphere.models.export import SUFFIXES, FeaturesAndScores, export_module

    require(to in SUFFIXES, "--to", f"one of {', '.join(SUFFIXES)}", to)
    require(inputs in INPUTS, "--input", f"one of {', '.join(INPUTS)}", inputs)
    target = out or folder / f"model{SUFFIXES[to]}"
    card = target.with_name(f"{target.name}.json")
    check_target("--out", target, [SUFFIXES[to]], companion=card)
    opened = open_run(folder, data_root, step=step, device="cpu", with_data=False, trust_code=trust_code)
    experiment = opened.experiment
    if experiment.data.graph is not None:
        raise ValueError("export needs a run on images or points; a run on a graph has no separate inputs")
    batches = probe_inputs(experiment, as_bytes=inputs == "uint8")
    if inputs == "uint8":
        opened.require_images("--input uint8")
    model = FeaturesAndScores(experiment.network, experiment.head).eval()
    expected = model.outputs(batches)
    rotation.fold_(model)
    difference = export_module(model, batches, target, form=to, outputs=["features", "scores"], expected=expected)
    write_json(card, _card(opened, target, batches[0], expected[0], difference))
    shape = " x ".join(map(str, batches[0].shape[1:]))
    kind = "" if experiment.config.precision == "float32" else ", in float32"
    agreed = f"relative difference to the run {difference:.1e}{kind}"
    print_line(f"{target}: inputs N x {shape} to features and scores, {agreed}; described in {card.name}")


def _card(
    opened: Opened, target: Path, inputs: Tensor, outputs: tuple[Tensor, ...], difference: float
) -> dict[str, Any]:
    """Return what a program needs to know to use the file."""
    config, shape = opened.run.config, list(inputs.shape[1:])
    is_image = len(shape) == 3
    description: dict[str, Any] = {"name": "inputs", "shape": ["N", *shape]}
    description["dtype"] = str(inputs.dtype).removeprefix("torch.")
    if is_image:
        description["range"] = [0, 255] if description["dtype"] == "uint8" else [0, 1]
        description["channels"] = {1: "grey", 3: "RGB"}.get(shape[0])
        description["resize"] = shape[1:]
    return {
        "file": target.name,
        "input": description,
        "in_the_graph": {"normalize": config.normalize.name},
        "outputs": [
            {"name": "features", "shape": ["N", outputs[0].shape[1]], "compare_by": "cosine"},
            {"name": "scores", "shape": ["N", outputs[1].shape[1]]},
        ],
        "classes": list(opened.experiment.data.classes),
        "run": {"folder": str(opened.run.folder), "step": opened.step, **opened.run.made_with},
        "difference": difference,
    }
