"""A folder of checkpoints, saved such that a kill at any moment leaves an intact one, and verified by checksums."""

from __future__ import annotations

import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from hypersphere._files import flush, make_folder
from hypersphere._validation import require
from hypersphere.training.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    is_foreign,
    read_checkpoint,
    with_context,
    write_checkpoint,
)

__all__ = ["Checkpoints"]

DAMAGED = "damaged-"


class Checkpoints:
    """The last checkpoints of a run, each in a folder `step-00000123` (with `.1`, `.2`… if the step is saved again).

    A checkpoint is written under a temporary name and renamed when it is complete. Only one process at a time may save.
    A damaged checkpoint is renamed to `damaged-step-00000123` at the next save.

    Args:
        folder: folder of the checkpoints, created at the first save.
        keep: number of checkpoints to keep, and number of damaged ones to keep.
        on_damage: called with a message for each damaged checkpoint that `latest` skips.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> layer, folder = nn.Linear(2, 2), TemporaryDirectory()
        >>> checkpoints = Checkpoints(folder.name)
        >>> _ = checkpoints.save(10, {"layer": layer}, {"epoch": 1})
        >>> again = nn.Linear(2, 2)
        >>> checkpoint = checkpoints.latest()
        >>> checkpoint.restore_({"layer": again})
        >>> checkpoint.step, checkpoint.state(), bool((again.weight == layer.weight).all())
        (10, {'epoch': 1}, True)
        >>> folder.cleanup()
    """

    def __init__(self, folder: str | Path, keep: int = 3, *, on_damage: Callable[[str], None] = warnings.warn) -> None:
        require(keep >= 1, "keep", "a number >= 1", keep)
        self.folder, self.keep, self.on_damage = Path(folder), keep, on_damage
        self._damaged: set[Path] = set()  # skipped checkpoints; the next save renames them

    def save(self, step: int, modules: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint, remove all but the last `keep`, and return the folder of the new one.

        Args:
            step: number of steps so far.
            modules: everything with weights and buffers, by name: model, head, regularisers.
            state: everything else by name: objects with a `state_dict` (optimiser, schedule, gradient scaler,
                `Batches`, `RandomState`), or plain values.

        Raises:
            ValueError: if a value cannot be saved, or the folder has an intact checkpoint of a later step.
            OSError: if the disk is full or not writable; existing checkpoints are not changed.
        """
        require(step >= 0, "step", "a number >= 0", step)
        with self._naming(step):
            make_folder(self.folder)
            for leftover in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            self._refuse_later(step)
            self._set_damaged_aside()
            before = self._all()
            again = [attempt + 1 for at, attempt, _ in before if at == step]
            draft = self._aside(f"step-{step:08d}")
            try:
                draft.mkdir()
                write_checkpoint(draft, step, modules, state or {})
                path = draft.rename(self.folder / (f"step-{step:08d}" + (f".{max(again)}" if again else "")))
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            flush(self.folder)
            older = [old for at, _, old in before if at < step]
            remaining = older[max(len(older) - self.keep + 1, 0) :]
            for _, _, old in before:
                if old not in remaining and not is_foreign(old):
                    self._remove(old)
        return path

    def latest(self) -> Checkpoint | None:
        """Return the last intact checkpoint, or None if there are no checkpoints.

        Raises:
            DamagedCheckpoint: if all checkpoints are damaged.
            ValueError: if the last one has another format.
            OSError: if the disk or the system does not allow reading the last one.
        """
        damages = []
        for step, _, path in reversed(self._all()):
            try:
                checkpoint = read_checkpoint(path, step)
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                damages.append(f"{path.name} is damaged: {error}")
            else:
                for damage in damages:
                    self.on_damage(f"{damage}; using {path.name} instead")
                return checkpoint
        if damages:
            raise DamagedCheckpoint(f"no intact checkpoint in {self.folder}: {'; '.join(damages)}")
        return None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in increasing order, without verifying them."""
        return [step for step, _, _ in self._all()]

    def _all(self, prefix: str = "") -> list[tuple[int, int, Path]]:
        """Return step, attempt and folder of each checkpoint in increasing order."""
        entries = []
        for path in self.folder.glob(f"{prefix}step-*"):
            if match := re.fullmatch(rf"{prefix}step-(\d{{8,}})(?:\.(\d+))?", path.name):
                entries.append((int(match[1]), int(match[2] or 0), path))
        return sorted(entries)

    def _refuse_later(self, step: int) -> None:
        for later, _, path in self._all():
            if later > step and path not in self._damaged:
                try:
                    read_checkpoint(path, later)
                except DamagedCheckpoint:
                    self._damaged.add(path)
                    continue
                raise ValueError(f"step must be at least {later}, because {path} exists, not {step}")

    def _set_damaged_aside(self) -> None:
        """Rename the damaged checkpoints, so that they are neither counted nor used, and keep the last of them."""
        for path in sorted(self._damaged):
            name, again = f"{DAMAGED}{path.name.partition('.')[0]}", 0
            while (place := self.folder / (f"{name}.{again}" if again else name)).exists():
                again += 1
            if path.exists():
                path.rename(place)
        self._damaged.clear()
        for _, _, path in self._all(DAMAGED)[: -self.keep]:
            self._remove(path)

    def _aside(self, name: str) -> Path:
        return self.folder / f".{name}.{uuid.uuid4().hex}.tmp"

    def _remove(self, path: Path) -> None:
        """Rename the folder before deleting it, so that a kill leaves nothing that looks like a checkpoint."""
        shutil.rmtree(path.rename(self._aside(path.name)), ignore_errors=True)

    @contextmanager
    def _naming(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise with_context(error, f"the checkpoint of step {step} cannot be saved in {self.folder}") from error
