"""Open a run: rebuild its experiment with the weights of one checkpoint, on one device, in the precision of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere.cli.output import warn
from hypersphere.data import Mirrored, Source
from hypersphere.training import Experiment, Run

__all__ = ["Opened", "device_of", "open_run"]


@dataclass(frozen=True, eq=False)
class Opened:
    """A run, its experiment in evaluation mode, and the step of the weights."""

    run: Run
    experiment: Experiment
    step: int

    @property
    def held_out(self) -> Source:
        """The held-out data of the run."""
        source = self.experiment.data.validation
        if source is None:
            raise ValueError(f"{self.run.folder} has no held-out data")
        return source

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.experiment.data.train[0].shape)

    def embed(self, source: Source, *, mirror: bool = False, batch: int = 500) -> tuple[Tensor, Tensor]:
        """Return features (N, d), or (N, 2d) with those of the mirrored images, and labels (N,)."""
        features, labels = self.experiment.embed(source, batch_size=batch)
        if mirror:
            self.require_images("--mirror")
            mirrored, _ = self.experiment.embed(Mirrored(source), batch_size=batch)
            features = torch.cat([features, mirrored], dim=1)
        return features, labels

    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """Return the class with the largest score (without margin) for each feature."""
        head: Any = self.experiment.head
        return head.scores(features.to(self.experiment.device)).argmax(1).cpu()

    @property
    def class_vectors(self) -> Tensor:
        """The class vectors (C, d) of the head."""
        head: Any = self.experiment.head
        return head.weight.detach().cpu()

    def require_images(self, what: str) -> None:
        """Raise a `ValueError` that names `what` if the run was trained on points or on nodes of a graph."""
        if self.experiment.data.graph is not None or len(self.shape) != 3:
            raise ValueError(f"{what} needs a run on images, not on {self.run.config.data.name}")


def open_run(
    folder: Path,
    data_root: Path | None = None,
    *,
    step: int | str | None = None,
    device: str | None = None,
    with_data: bool = True,
    trust_code: bool = False,
) -> Opened:
    """Build the experiment of a run and load a checkpoint: that of `step`, the "best", or the last intact one.

    With `with_data=False` the data of the run are not read and may be missing.

    Raises:
        ValueError: if there is no run or no such checkpoint, its data have changed, or it names code that is not
            trusted.
        DamagedCheckpoint: if the requested checkpoint, or every checkpoint, is damaged.
    """
    run = Run.open(folder)
    where = device_of(device)
    if not run.checkpoints().steps():
        raise ValueError(f"{folder} has no checkpoint yet")
    checkpoint = run.checkpoint(step, on_damage=warn)
    experiment = run.build(data_root, with_data=with_data, device=where, trust_code=trust_code)
    # Averaged weights are those that were validated.
    checkpoint.restore_({"objective" if experiment.ema is None else "ema": experiment.objective})
    experiment.objective.eval()
    return Opened(run, experiment, checkpoint.step)


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
