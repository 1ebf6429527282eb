"""`hypersphere fold`: write a run of plain layers with the same outputs as a rotated or converted run.

Rotated layers can always be replaced by plain ones. Decoupled layers can only if their response is an inner product:
`inner_product`, and `linear` with or without weighting, with the cosine. All others depend on the norm of each patch,
which a plain layer does not compute; they are not folded, and the command says so. A run has one operator, so either
all or none of its decoupled layers become plain.
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
from hypersphere.training.job_run import Run

__all__ = ["fold", "fold_operator_", "plain_weight"]

TOLERANCE = 1e-4  # relative to the largest output


def fold(folder: Path, out: Path | None, *, step: int | None, data_root: Path | None) -> None:
    """Write the folded run and its weights as one safetensors file; raise a `ValueError` if the outputs differ."""
    target = out or folder / "folded"
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    require(not occupied, "--out", "a new or an empty folder", str(target))
    opened = open_run(folder, data_root, step=step, data=False)
    assembly, job = opened.assembly, opened.run.job
    probe = Probe.of(assembly)
    before = probe.outputs(assembly)
    rotated = [name for name, _, _ in rotation.rotated_layers(assembly.objective)]
    rotation.fold_(nn.ModuleDict({"network": assembly.network, "head": assembly.head}))
    folds_operator = fold_operator_(assembly.network)
    remaining = sum(isinstance(module, layers.DecoupledLayer) for module in assembly.network.modules())
    why = _why(job.operator["name"], remaining)
    if not rotated and not folds_operator:
        raise ValueError(f"{folder} has nothing to fold: {why}")
    plain = _plain_assembly(job, assembly, folds_operator)
    difference = largest_difference(before, probe.outputs(plain))
    require(difference <= TOLERANCE, "folded outputs", f"within {TOLERANCE:g} of those before", difference)
    _write(target, plain, opened.step)
    print(f"folded {len(rotated)} rotated and {folds_operator} decoupled layers: {target}")
    if remaining:
        print(f"not folded: {why}")
    print(f"largest relative difference of the outputs: {difference:.1e}")


def fold_operator_(network: nn.Module) -> int:
    """Replace all decoupled layers by plain ones in place if each is an inner product; return their number, or 0."""
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
    """Return the weight of the plain layer with the same response, or None if there is no such layer.

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
    """Return the components of the job without rotation (and operator, if folded), with the folded weights."""
    operator = {"name": "none"} if folds_operator else job.operator
    plain = Assembly(replace(job, rotation={"name": "none"}, operator=operator), folded.task)
    plain.network.load_state_dict(folded.network.state_dict())
    plain.head.load_state_dict(folded.head.state_dict())
    plain.objective.eval()
    return plain


def _write(target: Path, plain: Assembly, step: int) -> None:
    """Write the run under a temporary name and rename it when it is complete."""
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


def _why(operator: str, remaining: int) -> str:
    if not remaining:
        return "all its layers are plain"
    reason = "which depends on the norm of each patch and has no plain equivalent"
    return f"{remaining} layers with the operator {operator!r}, {reason}"
