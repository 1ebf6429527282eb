"""A run: the folder that holds the settings of a job, the numbers it gave, and its checkpoints."""

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
from hypersphere.training.checkpoint import DamagedCheckpoint
from hypersphere.training.checkpoints import Checkpoints
from hypersphere.training.job import Assembly, Job
from hypersphere.training.lock import locked
from hypersphere.training.origin import made_with
from hypersphere.training.task import Task

__all__ = ["Run", "refuse_existing"]

FORMAT = 1
CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


@dataclass(frozen=True)
class Run:
    """A folder and the job that is trained in it.

    Attributes:
        folder: with `config.json`, `metrics.jsonl` and `checkpoints/`.
        job: what the settings in `config.json` describe.
        made_with: versions, machine and commit that the run was begun with.
        start: the run or the file whose weights it began with, None for weights as drawn.
        outline: shape, type and classes of its data, with which the network is built where the data are not at hand.

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
        """Make the folder, if need be, and write the settings; refuse one that has a run already.

        What is `resolved`, the settings with all defaults, is written for the reader alone.

        Raises:
            ValueError: there is a run, or the folder cannot be written.
        """
        run = cls(Path(folder), job, made_with(), start, outline)
        content = {"format": FORMAT, "settings": job.settings(), "made_with": run.made_with, "start": start}
        content |= {"data": outline, "resolved": resolved}
        try:
            with creating(run.path) as draft:
                draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            refuse_existing(run.folder)
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
        start, outline = content.get("start"), content.get("data")
        if not (isinstance(origin, dict) and isinstance(start, str | None) and _is_outline(outline)):
            raise DamagedCheckpoint(f"{path} is damaged: made_with, start or data is not what it was")
        try:
            return cls(Path(folder), Job.of(settings), origin, start, outline)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from None

    @property
    def path(self) -> Path:
        """The file of the settings."""
        return self.folder / CONFIG

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the folder to oneself meanwhile, to train in it.

        Raises:
            ValueError: another process is training in it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError:
                words = "is being trained by another process; wait for it to end, or choose another folder"
                raise ValueError(f"{self.folder} {words}") from None
            yield

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
            if not _is_line(found[-1]):
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

    def checkpoints(self, keep: int = 3, *, on_damage: Callable[[str], None] = warnings.warn) -> Checkpoints:
        """Return the run's checkpoints, of which `keep` stay; `on_damage` is told of each that is passed over."""
        return Checkpoints(self.folder / CHECKPOINTS, keep, on_damage=on_damage)

    def build(self, data_root: Path | None = None, *, data: bool = True) -> Assembly:
        """Make the parts of the job, with weights as drawn; without its data, noise stands for them."""
        if data or self.outline is None:
            return self.job.build(data_root)
        return Assembly(self.job, Task.blank(self.outline))

    def assembly(self, data_root: Path | None = None, *, data: bool = True) -> Assembly:
        """Build the job and give it the weights of the last good checkpoint, in evaluation mode.

        Args:
            data_root: where data sets lie.
            data: whether to read the data; False for the network and the head alone, which need none.

        Raises:
            ValueError: there is no checkpoint yet.
            DamagedCheckpoint: all checkpoints are damaged.
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
    """Whether a line of numbers is one: counted by whole numbers, energies by layer, numbers or null elsewhere."""
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
    """Raise a `ValueError` if a folder has a run."""
    if (folder / CONFIG).exists():
        raise ValueError(f"{folder} has a run already; go on with --resume auto, or choose another folder")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
