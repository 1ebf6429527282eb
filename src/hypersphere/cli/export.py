"""`hypersphere export`: write the network and head of a run as ONNX or as a torch.export program, and check it.

The graph maps inputs (N, …) with variable N to two outputs, `features` (N, d) and `scores` (N, C) without margin. The
normalisation of the run is part of the graph. Rotations are folded first. The graph computes in float32 even if the run
was trained in bfloat16. A JSON card next to the file describes inputs, preprocessing, outputs and classes.

The calibration of a run is written as a second, small graph, because embeddings are computed once and compared often.
It maps two matrices of embeddings, `first` and `second`, to `cosine`, `llr` and `probability` of each pair of rows.
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

    from hypersphere.cli.opening import LoadedRun
    from hypersphere.training import RunCalibration

__all__ = ["export"]

INPUTS = ("float32", "uint8")
PAIR_INPUTS, PAIR_OUTPUTS = ("first", "second"), ("cosine", "llr", "probability")


def export(
    folder: options.RunFolder,
    to: Annotated[str, typer.Option(help="Format: onnx, or torch for a torch.export program.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write, .onnx or .pt2; default: RUN/model.onnx or RUN/model.pt2.")
    ] = None,
    inputs: Annotated[
        str, typer.Option("--input", help="Images as float32 in [0, 1], or as uint8 pixels in 0..255.")
    ] = "float32",
    calibration: Annotated[
        bool, typer.Option(help="Also write the calibration of the run, if it has one, as a graph that scores pairs.")
    ] = True,
    step: options.Step = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Export the network and head to ONNX or torch.export, and check that the outputs are the same."""
    from hypersphere import rotation
    from hypersphere.cli.opening import open_run, probe_inputs
    from hypersphere.models.export import SUFFIXES, FeaturesAndScores, PairScores, export_module

    require(to in SUFFIXES, "--to", f"one of {', '.join(SUFFIXES)}", to)
    require(inputs in INPUTS, "--input", f"one of {', '.join(INPUTS)}", inputs)
    target = out or folder / f"model{SUFFIXES[to]}"
    card = target.with_name(f"{target.name}.json")
    pair_target = target.with_name(f"{target.stem}.pair{target.suffix}")
    check_target("--out", target, [SUFFIXES[to]], companion=card)
    opened = open_run(folder, data_root, step=step, device="cpu", with_data=False, trust_code=trust_code)
    experiment = opened.experiment
    if experiment.data.graph is not None:
        raise ValueError("export needs a run on images or points; a run on a graph has no separate inputs")
    calibrated = _calibration(opened) if calibration else None
    # The card of an earlier export names its pair graph. A file that no card names is not overwritten.
    is_named = card.is_file() and f'"{pair_target.name}"' in card.read_text(encoding="utf-8")
    if calibrated is not None and not is_named:
        check_target("--out", pair_target, [SUFFIXES[to]])
    batches = probe_inputs(experiment, as_bytes=inputs == "uint8")
    if inputs == "uint8":
        opened.require_images("--input uint8")
    model = FeaturesAndScores(experiment.network, experiment.head).eval()
    expected = model.outputs(batches)
    rotation.fold_(model)
    difference = export_module(model, batches, target, form=to, outputs=["features", "scores"], expected=expected)
    content = _card(opened, target, batches[0], expected[0], difference)
    if is_named:  # the run may have no calibration any more
        pair_target.unlink(missing_ok=True)
    if calibrated is not None:
        pairs = [(features, features.flip(0)) for features, _ in expected]
        scores = PairScores(calibrated.calibration).eval()
        export_module(scores, pairs, pair_target, form=to, outputs=PAIR_OUTPUTS, inputs=PAIR_INPUTS)
        names = {"file": pair_target.name, "inputs": PAIR_INPUTS, "outputs": PAIR_OUTPUTS}
        content["calibration"] = {**names, **calibrated.description()}
    write_json(card, content)
    shape = " x ".join(map(str, batches[0].shape[1:]))
    dtype = "" if experiment.config.precision == "float32" else ", in float32"
    agreement = f"relative difference to the run {difference:.1e}{dtype}"
    print_line(f"{target}: inputs N x {shape} to features and scores, {agreement}; described in {card.name}")
    if calibrated is not None:
        print_line(f"{pair_target}: two matrices of features to {', '.join(PAIR_OUTPUTS)} of each pair of rows")


def _calibration(opened: LoadedRun) -> RunCalibration | None:
    """Return the calibration of the run, or None; raise a `ValueError` if it was fitted to other weights."""
    stored = opened.run.calibration()
    if stored is not None and (reason := opened.refusal(stored)):
        advice = (
            f"run `hypersphere evaluate {opened.run.folder} --calibrate` for these weights, or use --no-calibration"
        )
        raise ValueError(f"{reason}; {advice}")
    return stored


def _card(
    opened: LoadedRun, target: Path, inputs: Tensor, outputs: tuple[Tensor, ...], difference: float
) -> dict[str, Any]:
    """Return the content of the JSON card: what a program needs to know to use the file."""
    config, shape = opened.run.config, list(inputs.shape[1:])
    is_image = len(shape) == 3
    description: dict[str, Any] = {"name": "inputs", "shape": ["N", *shape]}
    description["dtype"] = str(inputs.dtype).removeprefix("torch.")
    if is_image:
        description["range"] = [0, 255] if description["dtype"] == "uint8" else [0, 1]
        description["channels"] = {1: "grey", 3: "RGB"}.get(shape[0])
        description |= {"resize": shape[1:], "fit": opened.fit}
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
