"""A run: a folder with the config of an experiment, its metrics, and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hypersphere import data
from hypersphere._files import creating, locking, replacing, strict_json
from hypersphere._provenance import made_with
from hypersphere._validation import is_integer, is_number, require
from hypersphere.data.splits import is_outline
from hypersphere.training.build import Experiment, build
from hypersphere.training.calibration import RunCalibration
from hypersphere.training.checkpoint import Checkpoint, Checkpoints, DamagedCheckpoint
from hypersphere.training.components import complete_settings, require_trust
from hypersphere.training.config import CONFIG, Config, absolute_path
from hypersphere.training.trackers import TENSORBOARD, WANDB_ID

__all__ = ["Run", "read_weights", "run_without_checkpoint"]

FORMAT = 2
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
LOCK = ".lock"  # a file of its own, because the config is replaced when it changes
KINDS = ("step", "epoch", "validation")  # of logged lines


@dataclass(frozen=True)
class Run:
    """The folder of a training run and its config.

    Attributes:
        folder: folder with `config.json`, `metrics.jsonl` and `checkpoints/`.
        config: the config in `config.json`.
        made_with: versions, machine and commit with which the run was created.
        weights: the run or file with the initial weights, None for random initialisation.
        outline: shape, dtype and classes of the data, so that the network can be built without the data.
        fingerprint: checksums of names, labels, sizes and contents of the data, compared whenever the data are read.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> run = Run.create(folder.name, Config.of({"epochs": 2}))
        >>> run.log({"kind": "epoch", "epoch": 1, "loss": 0.5})
        >>> Run.open(folder.name).config.epochs, run.metrics()
        (2, [{'kind': 'epoch', 'epoch': 1, 'loss': 0.5}])
        >>> folder.cleanup()
    """

    folder: Path
    config: Config
    made_with: dict[str, Any] = field(default_factory=made_with)
    weights: str | None = None
    outline: dict[str, Any] | None = None
    fingerprint: dict[str, Any] | None = None

    # --- the config

    @classmethod
    def create(
        cls,
        folder: str | Path,
        config: Config,
        *,
        weights: str | None = None,
        outline: dict[str, Any] | None = None,
        fingerprint: dict[str, Any] | None = None,
    ) -> Run:
        """Create the folder if needed and write the config.

        Raises:
            ValueError: if the folder holds a run, or checkpoints or metrics of one, or cannot be written.
        """
        refuse_existing(Path(folder))
        source = None if weights is None else absolute_path(weights)
        run = cls(Path(folder), config, weights=source, outline=outline, fingerprint=fingerprint)
        try:
            with creating(run.path) as draft:
                draft.write_text(run._content(), encoding="utf-8")
        except OSError as error:
            refuse_existing(run.folder)
            raise ValueError(f"{folder} must be a writable folder: {error.strerror or error}") from None
        return run

    @classmethod
    def of(cls, folder: str | Path, experiment: Experiment, *, weights: str | None = None) -> Run:
        """Create the run of an experiment, with the outline and the fingerprint of its data."""
        outline, fingerprint = experiment.outline, experiment.data.fingerprint()
        return cls.create(folder, experiment.config, weights=weights, outline=outline, fingerprint=fingerprint)

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Return the run of a folder, without importing code that its config names.

        Raises:
            ValueError: if there is none, or it was written by another version.
            DamagedCheckpoint: if its config cannot be read.
        """
        path = Path(folder) / CONFIG
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{folder} is not the folder of a run: {CONFIG}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
        version = content.get("format") if isinstance(content, dict) else None
        if version is None:
            raise DamagedCheckpoint(f"{path} is damaged, or not the file of a run: it has no format number")
        if version == 1:
            raise ValueError(f"{folder} was trained with hypersphere 0.1; open it with that version")
        if version != FORMAT:
            raise ValueError(f"{path} must have format {FORMAT}, not {version!r}")
        try:
            versions, weights, about_data = content["made_with"], content["weights"], content["data"]
            outline, fingerprint = about_data["outline"], about_data["fingerprint"]
            is_valid = isinstance(versions, dict) and isinstance(weights, str | None) and is_outline(outline)
            if not is_valid or not isinstance(fingerprint, dict | None):
                raise ValueError("made_with, weights or data have invalid values")
            return cls(Path(folder), Config.of(content["config"]), versions, weights, outline, fingerprint)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from None

    @property
    def path(self) -> Path:
        """Path of the config."""
        return self.folder / CONFIG

    def __repr__(self) -> str:
        config, steps = self.config, self.checkpoints().steps()
        saved = f"last checkpoint: step {steps[-1]}" if steps else "no checkpoint yet"
        return f"Run({str(self.folder)!r}: {config.model.name} with {config.head.name} on {config.data.name}; {saved})"

    def _content(self) -> str:
        content = {
            "format": FORMAT,
            "config": self.config.settings(),
            "made_with": self.made_with,
            "weights": self.weights,
            "data": {"outline": self.outline, "fingerprint": self.fingerprint},
            "complete": complete_settings(self.config),  # with all defaults, for people; `open` does not read it
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def with_config(self, config: Config) -> Run:
        """Write another config and return the run with it, for example to extend a finished run by more epochs.

        Raises:
            ValueError: if settings differ that a resumed run must not change.
        """
        fixed = [setting.name for setting in dataclasses.fields(Config) if not setting.metadata["may_change"]]
        old, new = self.config.settings(), config.settings()
        changes = [f"{name} was {old[name]!r} and is {new[name]!r}" for name in fixed if old[name] != new[name]]
        if changes:
            reason = f"holds a run with different settings: {'; '.join(changes)}; choose another folder"
            raise ValueError(f"{self.folder} {reason}")
        run = replace(self, config=config)
        if old != new:
            with replacing(self.path) as draft:
                draft.write_text(run._content(), encoding="utf-8")
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes within the context; the system releases the lock of a killed process.

        On Windows and on file systems without locks, this has no effect.

        Raises:
            ValueError: if another process is training in it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locking(self.folder / LOCK))
            except BlockingIOError:
                reason = "is in use by another training process; wait until it ends, or choose another folder"
                raise ValueError(f"{self.folder} {reason}") from None
            yield

    def discard(self) -> None:
        """Delete config, metrics, TensorBoard events and `wandb.id`, so that the folder can hold another run.

        Nothing else is deleted.

        Raises:
            ValueError: if the run has a checkpoint.
        """
        if _has_checkpoints(self.folder):
            refuse_existing(self.folder)
        # The config is deleted last: while it exists, the folder is a run.
        events = (self.folder / TENSORBOARD).glob("events.out.tfevents.*")
        for path in (*events, *(self.folder / name for name in (METRICS, WANDB_ID, CONFIG))):
            path.unlink(missing_ok=True)

    # --- metrics

    def metrics(self, *, on_damage: Callable[[str], None] = warnings.warn) -> list[dict[str, Any]]:
        """Read all logged lines. An incomplete last line is ignored; damaged ones are reported to `on_damage`."""
        path = self.folder / METRICS
        if not path.exists():
            return []
        *complete, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
        lines = []
        for number, text in enumerate(complete, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if _is_line(line):
                lines.append(line)
            else:
                on_damage(f"line {number} of {path} is damaged and ignored")
        return lines

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line of metrics; non-finite numbers become null."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(strict_json(line) + "\n")

    def rewind(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove the logged lines for which `keep` is false, before training resumes from a checkpoint."""
        lines = [json.dumps(line) + "\n" for line in self.metrics() if keep(line)]
        if (self.folder / METRICS).exists():
            with replacing(self.folder / METRICS) as draft:
                draft.write_text("".join(lines), encoding="utf-8")

    # --- checkpoints

    def checkpoints(self, keep: int = 3, *, on_damage: Callable[[str], None] = warnings.warn) -> Checkpoints:
        """Return the checkpoints of the run; `on_damage` gets a message for each damaged one that is skipped."""
        return Checkpoints(self.folder / CHECKPOINTS, keep, on_damage=on_damage)

    def checkpoint(
        self, step: int | str | None = None, *, on_damage: Callable[[str], None] = warnings.warn
    ) -> Checkpoint:
        """Return the last intact checkpoint, the "best" one, or the one of a step.

        Raises:
            ValueError: if there is no such checkpoint.
            DamagedCheckpoint: if it is damaged.
        """
        require(step in (None, "best") or is_integer(step, 0), "step", "None, 'best' or an integer >= 0", step)
        checkpoints = self.checkpoints(on_damage=on_damage)
        if is_integer(step, 0) and checkpoints.steps():
            return checkpoints.at(int(step))  # type: ignore[arg-type]
        checkpoint = checkpoints.latest()
        if checkpoint is None:
            raise ValueError(f"{self.folder} has no checkpoint yet")
        if step is None:
            return checkpoint
        best = checkpoint.state("best").get("best", {}).get("step")  # a folded run has no state
        if best is None:
            raise ValueError(f"{self.folder} has no best checkpoint; set validation.best to a metric before training")
        return checkpoints.at(best)

    def calibration(self) -> RunCalibration | None:
        """Return the calibration that `hypersphere evaluate --calibrate` has stored, or None if there is none.

        Raises:
            DamagedCheckpoint: if it cannot be read.
        """
        return RunCalibration.load(self.folder)

    # --- the experiment

    def build(
        self,
        data_root: Path | None = None,
        *,
        with_data: bool = True,
        device: torch.device | str | None = None,
        trust_code: bool = False,
    ) -> Experiment:
        """Build the experiment with random weights, and compare its data with those of the run.

        Args:
            data_root: folder of the data sets.
            with_data: read the data; if False, random data of the same shape replace them.
            device: device of the experiment.
            trust_code: import code that the config names; nothing is imported otherwise.

        Raises:
            ValueError: if the data have changed, or the config names code that is not trusted.
        """
        require_trust(self.config, trust_code, self.folder)
        outline = None if with_data else self.outline
        experiment = build(self.config, data_root=data_root, outline=outline, device=device)
        if outline is None:
            self.require_same_data(experiment.data)
        return experiment

    def experiment(
        self,
        data_root: Path | None = None,
        *,
        step: int | str | Checkpoint | None = None,
        with_data: bool = True,
        device: torch.device | str | None = None,
        trust_code: bool = False,
    ) -> Experiment:
        """Build the experiment with the weights of a checkpoint (the averaged ones with `ema`), in evaluation mode.

        Args:
            step: None for the last intact checkpoint, "best", a number of steps, or a checkpoint of the run.
            data_root, with_data, device, trust_code: see `build`.
        """
        checkpoint = step if isinstance(step, Checkpoint) else self.checkpoint(step)
        experiment = self.build(data_root, with_data=with_data, device=device, trust_code=trust_code)
        checkpoint.restore_({"ema" if experiment.ema is not None else "objective": experiment.objective})
        experiment.objective.eval()
        return experiment

    def require_same_data(self, split: data.DataSplit) -> None:
        """Raise a `ValueError` that says what has changed if the data are not those that the run was created with."""
        if self.fingerprint is None:
            return
        classes = (self.outline or {}).get("classes", list(split.classes))
        reason = None
        if list(split.classes) != classes:
            names = zip(classes, split.classes, strict=False)
            renamed = next((f"class {old!r} is now {new!r}" for old, new in names if old != new), None)
            reason = renamed or f"the number of classes changed from {len(classes)} to {len(split.classes)}"
        reason = reason or data.fingerprint_difference(self.fingerprint, split.fingerprint())
        if reason:
            raise ValueError(f"the data have changed since {self.folder} was created: {reason}")


def read_weights(source: str | Path, *, on_damage: Callable[[str], None] = warnings.warn) -> dict[str, Any]:
    """Return initial weights by name, from the last intact checkpoint of a run or from a .safetensors file.

    Raises:
        ValueError: if `source` is neither.
        DamagedCheckpoint: if it cannot be read.
    """
    path = Path(source)
    if (path / CONFIG).is_file():
        return Run.open(path).checkpoint(on_damage=on_damage).weights()["objective"]
    is_file = path.suffix == ".safetensors" and path.is_file()
    require(is_file, "source", "the folder of a run or an existing .safetensors file", str(source))
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is not a valid safetensors file: {error}") from None


def refuse_existing(folder: Path) -> None:
    """Raise a `ValueError` if a folder already holds a run, or what is left of a run whose config is missing."""
    if (folder / CONFIG).exists():
        raise ValueError(f"{folder} already holds a run; resume it, or choose another folder")
    # With another config, checkpoints would be evaluated and resumed, and lines of metrics added, as if they belonged
    # to it.
    parts = ["checkpoints"] * _has_checkpoints(folder) + [METRICS] * (folder / METRICS).exists()
    if parts:
        raise ValueError(f"{folder} holds {' and '.join(parts)} of a run without its {CONFIG}; choose another folder")


def _has_checkpoints(folder: Path) -> bool:
    """Return True if there is any checkpoint, also a damaged one; unfinished ones have hidden names."""
    return any(not path.name.startswith(".") for path in (folder / CHECKPOINTS).glob("*"))


def run_without_checkpoint(folder: Path) -> Run | None:
    """Return the run in a folder, or None if there is none. It has no checkpoint, so it can be started again.

    Raises:
        ValueError: if the folder holds a run with a checkpoint, or one that cannot be opened.
    """
    try:
        run = Run.open(folder) if (folder / CONFIG).exists() else None
    except ValueError:  # damaged, of another version, or not a file of this library
        run = None
    if run is None or _has_checkpoints(folder):
        refuse_existing(folder)
    return run


def _is_line(value: Any) -> bool:
    """Return True for a valid line: integer steps and epochs, energies by layer, other values numbers or null."""
    if not isinstance(value, dict):
        return False
    kind = value.get("kind")
    has_counts = all(is_integer(value[name], 0) for name in ("step", "epoch") if name in value)
    has_kind = (kind is None or kind in KINDS) and (kind not in ("step", "epoch") or kind in value)
    energies = value.get("energy", {})
    if not (has_counts and has_kind and isinstance(energies, dict)):
        return False
    numbers = [*(item for name, item in value.items() if name not in ("kind", "energy")), *energies.values()]
    return all(item is None or is_number(item, -math.inf) for item in numbers)
