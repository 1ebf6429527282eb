"""A run: a folder with the settings of a job, its metrics, and its checkpoints."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypersphere._files import creating, replacing
from hypersphere._validation import is_integer, is_number
from hypersphere.training.checkpoint import Checkpoints, DamagedCheckpoint
from hypersphere.training.job import Assembly, Job
from hypersphere.training.lock import locked
from hypersphere.training.origin import made_with
from hypersphere.training.task import Task

__all__ = ["Run", "refuse_existing"]

FORMAT = 1
CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


@dataclass(frozen=True)
class Run:
    """The folder of a training run and its job.

    Attributes:
        folder: folder with `config.json`, `metrics.jsonl` and `checkpoints/`.
        job: the job with the settings in `config.json`.
        made_with: versions, machine and commit with which the run was created.
        start: the run or file with the initial weights, None for random initialisation.
        outline: shape, dtype and classes of the data, so that the network can be built without the data.

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
    start: str | None = None
    outline: dict[str, Any] | None = None

    @classmethod
    def create(
        cls,
        folder: str | Path,
        job: Job,
        start: str | None = None,
        outline: dict[str, Any] | None = None,
        resolved: dict[str, Any] | None = None,
    ) -> Run:
        """Create the folder if needed and write the settings; raise a `ValueError` if it already holds a run.

        `resolved`, the settings with all defaults, is written for information only.

        Raises:
            ValueError: if the folder holds a run or cannot be written.
        """
        run = cls(Path(folder), job, made_with(), start, outline)
        content = {"format": FORMAT, "settings": job.settings(), "made_with": run.made_with, "start": start}
        content |= {"data": outline, "resolved": resolved}
        try:
            with creating(run.path) as draft:
                draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            refuse_existing(run.folder)
            raise ValueError(f"{folder} must be a writable folder: {error.strerror or error}") from None
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Return the run of a folder.

        Raises:
            ValueError: if there is none.
            DamagedCheckpoint: if its settings cannot be read.
        """
        path = Path(folder) / CONFIG
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            supported, settings, origin = content["format"] == FORMAT, content["settings"], content["made_with"]
        except OSError as error:
            raise ValueError(f"{folder} is not a run of `hypersphere train`: {CONFIG}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error!r}") from None
        if not supported:
            raise ValueError(f"{path} must have format {FORMAT}, not {content['format']!r}")
        start, outline = content.get("start"), content.get("data")
        if not (isinstance(origin, dict) and isinstance(start, str | None) and _is_outline(outline)):
            raise DamagedCheckpoint(f"{path} is damaged: made_with, start or data is not valid")
        try:
            return cls(Path(folder), Job.of(settings), origin, start, outline)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from None

    @property
    def path(self) -> Path:
        """Path of the settings."""
        return self.folder / CONFIG

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other processes within the context.

        Raises:
            ValueError: if another process is training in it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError:
                reason = "is in use by another training process; wait until it ends, or choose another folder"
                raise ValueError(f"{self.folder} {reason}") from None
            yield

    def metrics(self) -> list[dict[str, Any]]:
        """Read all logged lines; an incomplete last line is ignored.

        Raises:
            DamagedCheckpoint: if another line is not valid.
        """
        path = self.folder / METRICS
        if not path.exists():
            return []
        *complete, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
        lines = []
        for number, line in enumerate(complete, 1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                lines.append(None)
            if not _is_line(lines[-1]):
                raise DamagedCheckpoint(f"line {number} of {path} is damaged")
        return lines

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Append a line of metrics; non-finite numbers become null."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(numbers), allow_nan=False) + "\n")

    def rewind(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove the logged lines for which `keep` is false, before training resumes from a checkpoint."""
        lines: Iterable[str] = (json.dumps(line) + "\n" for line in self.metrics() if keep(line))
        if (self.folder / METRICS).exists():
            with replacing(self.folder / METRICS) as draft:
                draft.write_text("".join(lines), encoding="utf-8")

    def checkpoints(self, keep: int = 3, *, on_damage: Callable[[str], None] = warnings.warn) -> Checkpoints:
        """Return the checkpoints of the run; `on_damage` gets a message for each damaged one that is skipped."""
        return Checkpoints(self.folder / CHECKPOINTS, keep, on_damage=on_damage)

    def build(self, data_root: Path | None = None, *, data: bool = True) -> Assembly:
        """Build the components of the job with random weights; with `data=False`, noise replaces the data."""
        if data or self.outline is None:
            return self.job.build(data_root)
        return Assembly(self.job, Task.blank(self.outline))

    def assembly(self, data_root: Path | None = None, *, data: bool = True) -> Assembly:
        """Build the job with the weights of the last intact checkpoint, in evaluation mode.

        Args:
            data_root: folder of the data sets.
            data: read the data; False if only the network and the head are needed.

        Raises:
            ValueError: if there is no checkpoint yet.
            DamagedCheckpoint: if all checkpoints are damaged.
        """
        checkpoint = self.checkpoints().latest()
        if checkpoint is None:
            raise ValueError(f"{self.folder} has no checkpoint yet")
        assembly = self.build(data_root, data=data)
        checkpoint.restore_({"objective": assembly.objective})
        assembly.objective.eval()
        return assembly


def _is_outline(value: Any) -> bool:
    if value is None:
        return True
    fits = isinstance(value, dict) and set(value) == {"shape", "type", "classes"}
    lists = fits and isinstance(value["shape"], list) and isinstance(value["classes"], list) and bool(value["classes"])
    return lists and all(is_integer(n, 1) for n in value["shape"]) and all(isinstance(c, str) for c in value["classes"])


def _is_line(value: Any) -> bool:
    """Return True for a valid line: integer steps and epochs, energies by layer, all other values numbers or null."""
    if not isinstance(value, dict):
        return False
    kind = value.get("kind")
    counts = all(is_integer(value[name], 0) for name in ("step", "epoch") if name in value)
    counts = counts and (kind is None or (kind in ("step", "epoch") and kind in value))
    layers = value.get("energy", {})
    others = [item for name, item in value.items() if name not in ("kind", "energy")]
    numbers = [*others, *(layers.values() if isinstance(layers, dict) else ["none"])]
    return counts and all(item is None or is_number(item, -math.inf) for item in numbers)


def refuse_existing(folder: Path) -> None:
    """Raise a `ValueError` if a folder already holds a run."""
    if (folder / CONFIG).exists():
        raise ValueError(
            f"{folder} already holds a run; continue it with --resume auto, or choose another folder with --out"
        )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
