"""A run: the folder that holds the settings of a job, the numbers it gave, and its checkpoints."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypersphere.report.draft import replacing
from hypersphere.training.checkpoint import DamagedCheckpoint
from hypersphere.training.checkpoints import Checkpoints
from hypersphere.training.job import Assembly, Job
from hypersphere.training.origin import made_with

__all__ = ["Run"]

FORMAT = 1
CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


@dataclass(frozen=True)
class Run:
    """A folder and the job that is trained in it.

    Attributes:
        folder: with `config.json`, `metrics.jsonl` and `checkpoints/`.
        job: what the settings in `config.json` describe.
        made_with: versions, machine and commit that the run was begun with.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> run = Run.create(folder.name, Job(epochs=2))
        >>> run.log({"kind": "epoch", "epoch": 1, "loss": 0.5})
        >>> Run.open(folder.name).job.epochs, run.metrics()
        (2, [{'kind': 'epoch', 'epoch': 1, 'loss': 0.5}])
        >>> folder.cleanup()
    """

    folder: Path
    job: Job
    made_with: dict[str, Any]

    @classmethod
    def create(cls, folder: str | Path, job: Job) -> Run:
        """Make the folder, if need be, and write the settings; refuse one that has a run already.

        Raises:
            ValueError: there is a run, or the folder cannot be written.
        """
        run = cls(Path(folder), job, made_with())
        content = {"format": FORMAT, "settings": job.settings(), "made_with": run.made_with}
        try:
            if run.path.exists():
                raise ValueError(f"{folder} has a run already; go on with --resume auto, or choose another folder")
            with replacing(run.path) as draft:
                draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{folder} must be a folder that can be written: {error.strerror or error}") from None
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Return the run of a folder.

        Raises:
            ValueError: there is none.
            DamagedCheckpoint: there is one whose settings cannot be read.
        """
        path = Path(folder) / CONFIG
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            known, settings, origin = content["format"] == FORMAT, content["settings"], content["made_with"]
        except OSError as error:
            raise ValueError(f"{folder} is no run of `hypersphere train`: {CONFIG}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error!r}") from None
        if not known:
            raise ValueError(f"{path} must be of format {FORMAT}, not {content['format']!r}")
        return cls(Path(folder), Job.of(settings), origin)

    @property
    def path(self) -> Path:
        """The file of the settings."""
        return self.folder / CONFIG

    def metrics(self) -> list[dict[str, Any]]:
        """Read all numbers so far, without a last line that is cut off or still being written.

        Raises:
            DamagedCheckpoint: another line is no JSON object.
        """
        path = self.folder / METRICS
        if not path.exists():
            return []
        *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
        found = []
        for number, line in enumerate(whole, 1):
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append(None)
            if not isinstance(found[-1], dict):
                raise DamagedCheckpoint(f"line {number} of {path} is damaged")
        return found

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Add a line to the numbers; what is not finite becomes null."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(numbers), allow_nan=False) + "\n")

    def rewind(self, kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Leave only those lines of numbers for which `kept` is true, before training goes on from a checkpoint."""
        lines: Iterable[str] = (json.dumps(line) + "\n" for line in self.metrics() if kept(line))
        if (self.folder / METRICS).exists():
            with replacing(self.folder / METRICS) as draft:
                draft.write_text("".join(lines), encoding="utf-8")

    def checkpoints(self, *, on_damage: Callable[[str], None] = warnings.warn) -> Checkpoints:
        """Return the run's checkpoints; `on_damage` is told of each that is passed over."""
        return Checkpoints(self.folder / CHECKPOINTS, on_damage=on_damage)

    def assembly(self, data_root: Path | None = None) -> Assembly:
        """Build the job and give it the weights of the last good checkpoint, in evaluation mode.

        Raises:
            ValueError: there is no checkpoint yet.
            DamagedCheckpoint: all checkpoints are damaged.
        """
        checkpoint = self.checkpoints().latest()
        if checkpoint is None:
            raise ValueError(f"{self.folder} has no checkpoint yet")
        assembly = self.job.build(data_root)
        checkpoint.restore_({"objective": assembly.objective})
        assembly.objective.eval()
        return assembly


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
