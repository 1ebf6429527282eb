"""`hypersphere export`: write the network and head of a run as ONNX or as a torch.export program, after a check.

The graph maps inputs (N, …) with variable N to two outputs, `features` (N, d) and `scores` (N, C) without margin.
Images have values in [0, 1]; standardisation is part of the graph. Rotations are folded first. The graph computes in
float32 even if the run was trained in bfloat16.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hypersphere import rotation
from hypersphere._files import replacing
from hypersphere._validation import require, require_package
from hypersphere.cli.compare import FeaturesAndScores, Probe, largest_difference
from hypersphere.cli.opening import open_run
from hypersphere.cli.target import check_target

__all__ = ["FORMS", "export"]

TOLERANCE = 1e-4  # relative to the largest output
Outputs = tuple[Tensor, ...]
NAMES = ["features", "scores"]


def export(folder: Path, to: str, out: Path | None, *, step: int | None, data_root: Path | None) -> None:
    """Write the file if its outputs agree with those of the run, and print its name."""
    require(to in FORMS, "--to", f"one of {', '.join(FORMS)}", to)
    suffix, write, reader = FORMS[to]
    target = out or folder / f"model{suffix}"
    check_target("--out", target, [suffix])
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require_package(package, package, "onnx")
    assembly = open_run(folder, data_root, step=step, data=False).assembly
    if assembly.task.graph is not None:
        raise ValueError("export needs a run on images or points; a run on a graph has no separate inputs")
    probe = Probe.of(assembly)
    expected = probe.outputs(assembly)
    rotation.fold_(nn.ModuleDict({"network": assembly.network, "head": assembly.head}))
    model = FeaturesAndScores(assembly.objective).eval()
    with replacing(target) as draft:
        try:
            with _quiet():
                write(model, probe.batches[0], draft)
                run = reader(draft)
                difference = largest_difference(expected, [run(batch) for batch in probe.batches])
        except OSError:
            raise
        except Exception as error:  # exporters raise many kinds of errors
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"{folder} cannot be exported to {to}: {reason}") from error
        accepted = f"within {TOLERANCE:g} of those of the run"
        require(difference <= TOLERANCE, "exported outputs", accepted, difference)
    shape = " x ".join(map(str, probe.batches[0].shape[1:]))
    kind = "" if assembly.job.precision == "float32" else ", in float32"
    agreed = f"relative difference to the run {difference:.1e}{kind}"
    print(f"{target}: inputs N x {shape} to features and scores, {agreed}")


def _write_onnx(model: nn.Module, example: Tensor, path: Path) -> None:
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["inputs"],
        output_names=NAMES,
        verbose=False,
    )
    assert program is not None
    program.save(path, external_data=False)


def _onnx_reader(path: Path) -> Callable[[Tensor], Outputs]:
    runtime = require_package("onnxruntime", "onnxruntime", "onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda batch: tuple(map(torch.from_numpy, session.run(NAMES, {"inputs": batch.numpy()})))


def _write_program(model: nn.Module, example: Tensor, path: Path) -> None:
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getvalue())


def _program_reader(path: Path) -> Callable[[Tensor], Outputs]:
    return torch.export.load(io.BytesIO(path.read_bytes())).module()


FORMS: dict[
    str, tuple[str, Callable[[nn.Module, Tensor, Path], None], Callable[[Path], Callable[[Tensor], Outputs]]]
] = {
    "onnx": (".onnx", _write_onnx, _onnx_reader),
    "torch": (".pt2", _write_program, _program_reader),
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs and warnings of the exporters; errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
