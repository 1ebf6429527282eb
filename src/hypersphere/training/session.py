"""One stretch of a run's training: from its last checkpoint to the end, or until it is asked to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hypersphere.heads import ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training.checkpoint import Checkpoint
from hypersphere.training.job import Assembly
from hypersphere.training.loop import ADVICE, Epoch, Progress, minimize
from hypersphere.training.measure import accuracy, class_vectors, layer_energies
from hypersphere.training.parallel import Parallel, WholeObjective, WholeOptimizer
from hypersphere.training.random_state import RandomState
from hypersphere.training.run import Run

__all__ = ["Session"]

SAVING_SHARE = 0.02  # of the time, at most, goes into the saves at ends of epochs


class Session:
    """Trains a run: measures after each epoch, logs, saves, and stops between two steps when asked.

    In several processes all make the same session; the first writes.

    Args:
        run: the folder.
        assembly: what its job builds.
        device: where to compute; where the assembly is if None.
        save_every: seconds between checkpoints. There is one at the end of an epoch too, unless saving would take more
            than a fiftieth of the time, and one at the end and when stopped always.
        keep: how many of the last checkpoints stay.
        log_every: steps between lines of numbers.
        stop: asked after each step.
        log: told each line of numbers, in the first process; the run's own `log` if None.
        on_step: called after each step with the session.
        on_damage: told of damaged checkpoints.

    Attributes:
        progress: how far training is.
        steps: how many steps there are in all.
        saved: the step of the last checkpoint that was made or gone on from, None before.
        measured: the last epoch's line, empty before.
        speed: examples a second, measured between two lines.
        finished: whether the end was reached.
    """

    def __init__(
        self,
        run: Run,
        assembly: Assembly,
        *,
        device: torch.device | None = None,
        save_every: float = 60.0,
        keep: int = 3,
        log_every: int = 10,
        stop: Callable[[], bool] = lambda: False,
        log: Callable[[Mapping[str, Any]], None] | None = None,
        on_step: Callable[[Session], None] | None = None,
        on_damage: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.run, self.assembly = run, assembly
        self.save_every, self.log_every = save_every, log_every
        self.stop, self.on_step, self.log = stop, on_step, log or run.log
        self.processes = Processes()
        self.checkpoints = run.checkpoints(keep, on_damage=on_damage)
        self.progress = Progress()
        self.steps = run.job.epochs * len(assembly.batches)
        self.saved: int | None = None
        self.measured: Mapping[str, Any] = {}
        self.speed = math.nan
        self.finished = False
        objective = assembly.objective
        if device is not None:
            objective.to(device)
        self.device = next(objective.parameters()).device
        if run.job.compile:
            assembly.network.compile()  # in place: names in checkpoints stay
        self._modules: dict[str, Any] = {"objective": objective}
        optimizer: Any = assembly.optimizer
        if isinstance(assembly.head, ShardedHead):
            self._modules = {"objective": WholeObjective(objective)}
            optimizer = WholeOptimizer(assembly.optimizer, assembly.head)
        self._state: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": assembly.scheduler,
            "batches": assembly.batches,
            "random": RandomState(),
            "stochastic": assembly.turning.stochastic,
        }
        self._before = 0.0  # seconds of earlier stretches
        self._began = self._saved_at = time.perf_counter()
        self._cost = 0.0  # seconds that the last save took
        self._rate = self._next_rate()

    def resume(self) -> Checkpoint | None:
        """Go on from the last good checkpoint, if there is one, and forget the numbers that came after it."""
        checkpoint = self.checkpoints.latest()
        if checkpoint is not None:
            checkpoint.restore_(self._modules, self._state)
            saved = checkpoint.state()
            self.saved = checkpoint.step
            self.progress, self._before = Progress(**saved["progress"]), saved["seconds"]
            self._rate = self._next_rate()
        if self.processes.rank == 0:
            self.run.rewind(self._is_past)
            for line in self.run.metrics():
                self.measured = line if line.get("kind") == "epoch" else self.measured
        return checkpoint

    def train(self) -> bool:
        """Train until the end, or until stopped; say whether the end was reached."""
        objective = self.assembly.objective
        objective.train()
        self._began = self._saved_at = time.perf_counter()
        self._mark(self.seen)
        try:
            minimize(
                objective if self.processes.size == 1 else Parallel(objective),
                self._data(),
                epochs=self.run.job.epochs,
                optimizer=self.assembly.optimizer,
                scheduler=self.assembly.scheduler,
                on_step=self._after_step,
                on_epoch=self._after_epoch,
                progress=self.progress,
            )
        except _Stopped:
            return False
        self.finished = True
        return True

    @property
    def seen(self) -> int:
        """How many examples were trained on."""
        return self.progress.epoch * len(self.assembly.task.inputs) + self.progress.seen

    @property
    def seconds(self) -> float:
        """How long this run has been trained, earlier stretches included."""
        return self._before + time.perf_counter() - self._began

    def _data(self) -> Any:
        alone = self.processes.size == 1  # several processes take their parts first
        return _Moved(self.assembly.batches, self.device) if alone and self._is_elsewhere() else self.assembly.batches

    def _is_elsewhere(self) -> bool:
        return self.assembly.task.inputs.device != self.device

    def _after_step(self, progress: Progress) -> None:
        self.assembly.after_step(progress.step)
        within = progress.step % len(self.assembly.batches) != 0  # else the end of the epoch saves
        stop, due = self._agreed(self.stop(), within and self._is_due())
        if progress.step % self.log_every == 0 or progress.step == 1:
            self._log_step()
        self._rate = self._next_rate()
        if self.on_step is not None:
            self.on_step(self)
        if stop or due:
            self._save()
        if stop:
            self._agreed(True)  # nobody ends while the first is saving: torchrun would end it too
            raise _Stopped

    def _log_step(self) -> None:
        since, seen = self._window
        elapsed = time.perf_counter() - since
        self.speed = (self.seen - seen) / elapsed if elapsed > 0 else math.nan
        self._log(
            {
                "kind": "step",
                "step": self.progress.step,
                "epoch": self.progress.epoch,
                "seconds": round(self.seconds, 3),
                "loss": self.progress.loss,
                "rate": self._rate,
                "examples_per_second": round(self.speed, 1),
            }
        )
        self._mark(self.seen)

    def _after_epoch(self, epoch: Epoch) -> None:
        self._require_finite()
        self._same_buffers()
        line: dict[str, Any] = {
            "kind": "epoch",
            "epoch": epoch.number,
            "step": self.progress.step,
            "loss": epoch.loss,
            "test_accuracy": accuracy(self.assembly.objective, self.assembly.test_batches()),
            "energy": self._energies(),
            "seconds": round(self.seconds, 3),
        }
        self.measured = line
        self._log(line)
        if self.on_step is not None:
            self.on_step(self)
        (due,) = self._agreed(epoch.number == self.run.job.epochs or self._is_due(self._cost / SAVING_SHARE))
        if due:
            self._save()
        self._mark(self.seen)

    def _is_due(self, patience: float = math.inf) -> bool:
        """Whether the first process, whose clock counts, has not saved for so long."""
        waited = time.perf_counter() - self._saved_at
        return self.processes.rank == 0 and waited >= min(self.save_every, patience)

    def _save(self) -> None:
        began = time.perf_counter()
        self._require_finite()
        modules, state = self._modules, self._state
        if isinstance(self.assembly.head, ShardedHead):  # all take part in gathering it
            modules = {name: _Snapshot(module.state_dict()) for name, module in modules.items()}
            state = {**state, "optimizer": state["optimizer"].state_dict()}
        if self.processes.rank == 0:
            numbers = {"progress": asdict(self.progress), "seconds": self.seconds}
            self.checkpoints.save(self.progress.step, modules, {**state, **numbers})
        self.saved, self._saved_at = self.progress.step, time.perf_counter()
        self._cost = self._saved_at - began
        self._mark(self.seen)

    def _require_finite(self) -> None:
        sound = all(bool(torch.isfinite(p).all()) for p in self.assembly.objective.parameters())
        (broken,) = self._agreed(not sound)
        if broken:
            raise FloatingPointError(f"training diverged before step {self.progress.step + 1}; {ADVICE}")

    def _same_buffers(self) -> None:
        """Give all processes the buffers of the first, which are those that are saved."""
        if self.processes.size > 1:
            for buffer in self.assembly.objective.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _energies(self) -> dict[str, float]:
        """The energies of all layers, in the first process."""
        vectors = class_vectors(self.assembly.head)  # all take part in gathering them
        return {} if vectors is None else layer_energies(self.assembly.network.body, vectors)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Which flags any process raised."""
        if self.processes.size == 1:
            return list(flags)
        raised = self.processes.add_(torch.tensor(flags, dtype=torch.float32, device=self.device))
        return [bool(number) for number in raised.tolist()]

    def _log(self, line: Mapping[str, Any]) -> None:
        if self.processes.rank == 0:
            self.log(line)

    def _mark(self, seen: int) -> None:
        self._window = time.perf_counter(), seen

    def _next_rate(self) -> float:
        return float(self.assembly.optimizer.optimizers[0].param_groups[0]["lr"])

    def _is_past(self, line: Mapping[str, Any]) -> bool:
        """Whether a line is of what the progress has behind it."""
        if line.get("kind") == "epoch":
            return bool(line["epoch"] <= self.progress.epoch)
        return bool(line.get("step", 0) <= self.progress.step)


class _Stopped(Exception):
    """Training was asked to stop, and has saved."""


class _Snapshot:
    """A state that was taken already."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


class _Moved:
    """Batches on another device."""

    def __init__(self, batches: Any, device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.batches:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
