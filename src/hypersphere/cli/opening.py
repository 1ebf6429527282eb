"""Open a run: rebuild its components with the weights of one checkpoint, on one device, in the precision of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hypersphere._validation import require
from hypersphere.evaluation import mirrored_features
from hypersphere.training import Assembly, Batches, Checkpoint, DamagedCheckpoint, Objective
from hypersphere.training.checkpoint import read_checkpoint
from hypersphere.training.job_run import CHECKPOINTS, Run

__all__ = ["Opened", "RunNetwork", "device_of", "open_run"]


@dataclass(frozen=True, eq=False)
class Opened:
    """A run, its components in evaluation mode, the step of their weights, and their device."""

    run: Run
    assembly: Assembly
    step: int
    device: torch.device

    @torch.no_grad()
    def features(self, inputs: Tensor, *, mirror: bool = False, batch: int = 500) -> Tensor:
        """Return the features (N, d) of inputs of the task, or (N, 2d) with those of the mirrored images.

        They are computed in the precision of the run, as in training, and returned on the CPU.
        """
        if mirror:
            self.require_images("--mirror")
            return mirrored_features(self._features, inputs, batch=batch)
        size = len(inputs) if self.assembly.task.graph is not None else batch
        return torch.cat([self._features(x) for x, _ in Batches(inputs, torch.zeros(len(inputs)), size)])

    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """Return the class with the largest score (without margin) for each feature."""
        scores: Tensor = self.assembly.objective.head.scores(features.to(self.device))  # type: ignore[operator]
        return scores.argmax(1).cpu()

    @property
    def class_vectors(self) -> Tensor:
        """The class vectors (C, d) of the head."""
        return self.assembly.head.weight.detach().cpu()

    def require_images(self, what: str) -> None:
        """Raise a `ValueError` that names `what` if the run was trained on points or on nodes of a graph."""
        if self.assembly.task.inputs.ndim != 4:
            raise ValueError(f"{what} needs a run on images, not on {self.run.job.data['name']}")

    def _features(self, x: Tensor) -> Tensor:
        return self.assembly.objective.features(x.to(self.device)).cpu()


class RunNetwork(nn.Module):
    """The map from inputs to features as one module, in the precision of the run."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (B, d)."""
        return self.objective.features(inputs)


def open_run(
    folder: Path,
    data_root: Path | None = None,
    *,
    step: int | None = None,
    device: torch.device | None = None,
    data: bool = True,
) -> Opened:
    """Build the job of a run and load a checkpoint: that of `step`, or the last intact one.

    With `data=False` the data of the run are not read and may be missing.

    Raises:
        ValueError: if there is no run or no such checkpoint.
        DamagedCheckpoint: if the requested checkpoint, or every checkpoint, is damaged.
    """
    run = Run.open(folder)
    checkpoint = _last(run) if step is None else _of_step(run, step)
    assembly = run.build(data_root, data=data)
    checkpoint.restore_({"objective": assembly.objective})
    where = device or torch.get_default_device()
    assembly.objective.eval().to(where)
    return Opened(run, assembly, checkpoint.step, where)


def device_of(name: str | None) -> torch.device:
    """Return the device named by `--device`, or by default an accelerator if there is one.

    >>> device_of("cpu")
    device(type='cpu')
    >>> device_of("toaster")
    Traceback (most recent call last):
    ValueError: --device toaster cannot be used: ...
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) if name is None else None
    try:
        chosen = torch.device(name) if name is not None else accelerator or torch.get_default_device()
        torch.zeros((), device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used: {reason}") from None
    return chosen


def _last(run: Run) -> Checkpoint:
    checkpoint = run.checkpoints().latest()
    if checkpoint is None:
        raise ValueError(f"{run.folder} has no checkpoint yet")
    return checkpoint


def _of_step(run: Run, step: int) -> Checkpoint:
    """Return the checkpoint of a step; if the step was saved several times, the last intact one."""
    steps = run.checkpoints().steps()
    if not steps:
        raise ValueError(f"{run.folder} has no checkpoint yet")
    require(step in steps, "--step", f"one of {', '.join(map(str, dict.fromkeys(steps)))}", step)
    name, damage = f"step-{step:08d}", ""
    saved = [path for path in (run.folder / CHECKPOINTS).glob(f"{name}*") if path.stem == name]
    for path in sorted(saved, key=lambda path: int(path.suffix[1:] or 0), reverse=True):
        try:
            return read_checkpoint(path, step)
        except DamagedCheckpoint as error:
            damage = damage or f"{path} is damaged: {error}"
    raise DamagedCheckpoint(damage)
