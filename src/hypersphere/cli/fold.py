"""`hypersphere fold`: a run whose layers are plain, with the same outputs as the rotated or converted one.

Rotated layers become plain ones exactly. Of the decoupled ones only those can whose response is an inner product:
`inner_product`, and `linear` with or without weighting, under the cosine. All others look at the norm of every patch,
which no plain layer does; they stay as they are, and the command says so. A run has one operator, so its decoupled
layers become plain all together or not at all.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from hypersphere import layers, rotation
from hypersphere._validation import require
from hypersphere.cli.compare import Probe, largest_difference
from hypersphere.cli.opening import open_run
from hypersphere.functions.angular import Cosine
from hypersphere.functions.magnitude import InnerProduct, Linear
from hypersphere.sphere import normalize
from hypersphere.training.job import Assembly, Job
from hypersphere.training.run import Run

__all__ = ["fold", "fold_operator_", "plain_weight"]

TOLERANCE = 1e-4  # of the largest output


def fold(folder: Path, out: Path | None, *, step: int | None, data_root: Path | None) -> None:
    """Write the plain run, with its weights as one safetensors file too; refuse if outputs are not the same."""
    target = out or folder / "folded"
    taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    require(not taken, "--out", "a folder that is not there yet, or is empty", str(target))
    opened = open_run(folder, data_root, step=step, data=False)
    assembly, job = opened.assembly, opened.run.job
    probe = Probe.of(assembly)
    before = probe.outputs(assembly)
    rotated = [name for name, _, _ in rotation.rotated_layers(assembly.objective)]
    rotation.fold_(nn.ModuleDict({"network": assembly.network, "head": assembly.head}))
    folds_operator = fold_operator_(assembly.network)
    kept = sum(isinstance(module, layers.DecoupledLayer) for module in assembly.network.modules())
    why = _why(job.operator["name"], kept)
    if not rotated and not folds_operator:
        raise ValueError(f"{folder} has nothing to fold: {why}")
    plain = _plain_assembly(job, assembly, folds_operator)
    difference = largest_difference(before, probe.outputs(plain))
    require(difference <= TOLERANCE, "folded outputs", f"within {TOLERANCE:g} of those before", difference)
    _write(target, plain, opened.step)
    print(f"{len(rotated)} rotated and {folds_operator} decoupled layers are plain now: {target}")
    if kept:
        print(f"kept: {why}")
    print(f"outputs differ by at most {difference:.1e} of the largest")


def fold_operator_(network: nn.Module) -> int:
    """Make all decoupled layers plain, in place, if every one is an inner product; return how many, or 0 if not."""
    chosen = {module: plain_weight(module) for module in network.modules() if isinstance(module, layers.DecoupledLayer)}
    if not chosen or any(weight is None for weight in chosen.values()):
        return 0
    for module, weight in chosen.items():
        assert weight is not None
        with torch.no_grad():
            module.weight.copy_(weight)
    layers.revert_(network)
    return len(chosen)


def plain_weight(layer: layers.DecoupledLayer) -> Tensor | None:
    """Return the weight with which a plain layer responds as this one does; None if no plain layer does.

    >>> layer = layers.DecoupledLinear(2, 1, magnitude="linear")
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> plain_weight(layer), plain_weight(layers.DecoupledLinear(2, 1, magnitude="tanh"))
    (tensor([[0.6000, 0.8000]]), None)
    """
    weight, magnitude = layer.weight.detach(), layer.magnitude
    if not isinstance(layer.angular, Cosine):
        return None
    if isinstance(magnitude, InnerProduct):
        return weight
    if isinstance(magnitude, Linear):
        return magnitude.alpha * (
            weight if layer.weighting == "linear" else normalize(weight.flatten(1)).view_as(weight)
        )
    return None


def _plain_assembly(job: Job, folded: Assembly, folds_operator: int) -> Assembly:
    """The assembly of the job without what was folded, with the weights of the folded one."""
    operator = {"name": "none"} if folds_operator else job.operator
    plain = Assembly(replace(job, rotation={"name": "none"}, operator=operator), folded.task)
    plain.network.load_state_dict(folded.network.state_dict())
    plain.head.load_state_dict(folded.head.state_dict())
    plain.objective.eval()
    return plain


def _write(target: Path, plain: Assembly, step: int) -> None:
    """Write the run aside and give it its name when it is whole."""
    modules = nn.ModuleDict({"network": plain.network, "head": plain.head})
    state = modules.state_dict().items()
    weights = {name: value.detach().clone().contiguous() for name, value in state if isinstance(value, Tensor)}
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        written = Run.create(draft, plain.job, outline=plain.task.outline())
        (draft / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
        written.checkpoints().save(step, {"objective": plain.objective})
        draft.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _why(operator: str, kept: int) -> str:
    if not kept:
        return "its layers are plain"
    return f"{kept} layers respond by {operator!r}, which looks at the norm of every patch, as no plain layer does"
