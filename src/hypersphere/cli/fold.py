"""`hypersphere fold`: write a run of plain layers with the same outputs as a rotated or converted run.

Rotated layers can always be replaced by plain ones. Decoupled layers can only be if their response is an inner product,
see `hypersphere.layers.fold_operator_`. A run has one operator, so either all or none of its decoupled layers become
plain; the command reports those that are not folded.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import print_line

if TYPE_CHECKING:
    from hypersphere.cli.opening import LoadedRun
    from hypersphere.training import Experiment

__all__ = ["fold"]

TOLERANCE = 1e-4  # relative to the largest output


def fold(
    folder: options.RunFolder,
    out: Annotated[Path | None, typer.Option(help="Folder to write the folded run to; default: RUN/folded.")] = None,
    step: options.Step = None,
    data_root: options.DataRoot = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Fold rotations and operators into plain layers with the same outputs, and write the weights to one file."""
    from hypersphere import layers, rotation
    from hypersphere.cli.opening import open_run, probe_inputs
    from hypersphere.models.export import FeaturesAndScores, largest_difference

    target = out or folder / "folded"
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    require(not occupied, "--out", "a new or an empty folder", str(target))
    # The complete run takes the place of the folder, so a shell that is in it would be left without one.
    require(target.resolve() != Path.cwd(), "--out", "another folder than the current one", str(target))
    opened = open_run(folder, data_root, step=step, device="cpu", with_data=False, trust_code=trust_code)
    experiment, config = opened.experiment, opened.run.config
    batches = probe_inputs(experiment)
    model = FeaturesAndScores(experiment.network, experiment.head)
    before = model.outputs(batches)
    rotated = [name for name, _, _ in rotation.rotated_layers(experiment.objective)]
    rotation.fold_(model)
    operators = layers.fold_operator_(experiment.network)
    remaining = sum(isinstance(module, layers.DecoupledLayer) for module in experiment.network.modules())
    reason = "which depends on the norm of each patch and has no plain equivalent"
    unfolded = f"{remaining} layers with the operator {config.operator.name!r}, {reason}"
    if not rotated and not operators:
        raise ValueError(f"{folder} cannot be folded: {unfolded if remaining else 'all its layers are plain'}")
    plain = _plain_experiment(opened, keep_operator=not operators, trust_code=trust_code)
    folded = FeaturesAndScores(plain.network, plain.head)
    difference = largest_difference(before, folded.outputs(batches))
    require(difference <= TOLERANCE, "folded outputs", f"within {TOLERANCE:g} of those before", difference)
    _write(target, plain, folded.state_dict(), opened)
    print_line(f"folded {len(rotated)} rotated and {operators} decoupled layers: {target}")
    if remaining:
        print_line(f"not folded: {unfolded}")
    print_line(f"largest relative difference of the outputs: {difference:.1e}")


def _plain_experiment(opened: LoadedRun, *, keep_operator: bool, trust_code: bool) -> Experiment:
    """Return a new experiment with the folded weights, without rotation, and without operator unless it is kept."""
    from hypersphere.training import build_experiment

    folded = opened.experiment
    # With a moving average, its weights were loaded and folded, so the new experiment needs none.
    patch = {"rotation": "none", "ema": None} | ({} if keep_operator else {"operator": "none"})
    plain = build_experiment(folded.config.patched(patch), split=folded.data, trust_code=trust_code)
    plain.network.load_state_dict(folded.network.state_dict())
    plain.head.load_state_dict(folded.head.state_dict())
    plain.objective.eval()
    return plain


def _write(target: Path, plain: Experiment, state: Mapping[str, Any], opened: LoadedRun) -> None:
    """Write the run and its weights under a temporary name, and rename the folder when it is complete."""
    from safetensors.torch import save
    from torch import Tensor

    from hypersphere.training import Run

    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    draft, run = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp"), opened.run
    try:
        written = Run.create(draft, plain.config, outline=run.outline, fingerprint=run.fingerprint)
        (draft / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
        written.checkpoints().save(opened.step, {"objective": plain.objective})
        draft.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
