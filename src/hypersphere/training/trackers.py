"""Trackers, which receive the metrics of a run in addition to its file `metrics.jsonl`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from hypersphere._validation import require_package

__all__ = ["TRACKERS", "TensorBoard", "Tracker", "WeightsAndBiases", "flat"]

TENSORBOARD = "tensorboard"  # folder of TensorBoard events, in the folder of a run
WANDB_ID = "wandb.id"  # file with the run id of Weights & Biases, in the folder of a run


class Tracker(Protocol):
    """Receives the lines of metrics of a run. A class with these three methods can be named by its import path."""

    def start(self, run: Any, config: Any) -> None:
        """Begin or continue tracking a `Run` with a `Config`. Lines of earlier processes are in `run.metrics()`."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Record a line of metrics."""

    def finish(self) -> None:
        """Write what is left."""


def flat(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of the numbers in a line, except the step and the epoch.

    >>> dict(flat({"kind": "epoch", "step": 5, "epoch": 1, "loss": 0.5, "energy": {"head": 2.0}}))
    {'epoch/loss': 0.5, 'epoch/energy/head': 2.0}
    """
    for key, value in line.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for name, number in parts.items():
            if isinstance(number, int | float) and key not in ("step", "epoch"):
                yield "/".join(filter(None, (line["kind"], key, name))), number


class TensorBoard:
    """Write TensorBoard events to the folder `tensorboard` of the run."""

    def start(self, run: Any, config: Any) -> None:
        """Open the event file. Events after the last logged line are purged, because their steps are repeated."""
        require_package("tensorboard", "tensorboard", "track")
        from torch.utils.tensorboard import SummaryWriter

        step = max((line.get("step", 0) for line in run.metrics()), default=0)
        self.writer: Any = SummaryWriter(str(run.folder / TENSORBOARD), purge_step=step + 1 if step else None)

    def log(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line."""
        for name, number in flat(line):
            self.writer.add_scalar(name, number, line["step"])

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


class WeightsAndBiases:
    """Send metrics to Weights & Biases, or write them to the folder of the run with `mode="offline"`.

    Args:
        project: name of the project.
        mode: "online", "offline" or "disabled"; by default that of the environment.
    """

    def __init__(self, project: str = "hypersphere", mode: str | None = None) -> None:
        self.project, self.mode = project, mode

    def start(self, run: Any, config: Any) -> None:
        """Begin a run, or continue the one that this folder belongs to."""
        wandb = require_package("wandb", "wandb", "track")
        path: Path = run.folder / WANDB_ID
        if not path.exists():
            path.write_text(secrets.token_hex(4), encoding="utf-8")
        self.tracked: Any = wandb.init(
            project=self.project,
            name=run.folder.name,
            id=path.read_text(encoding="utf-8"),
            resume="allow",
            mode=self.mode,
            dir=str(run.folder),
            config=config.settings(),
        )

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line."""
        self.tracked.log({**dict(flat(line)), "epoch": line["epoch"]}, step=line["step"])

    def finish(self) -> None:
        """Send what is left."""
        self.tracked.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
