"""Train a run from its last checkpoint to the end, or until it is asked to stop."""

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
from hypersphere.training.job_run import Run
from hypersphere.training.loop import ADVICE, Epoch, Progress, minimize
from hypersphere.training.measure import accuracy, class_vectors, layer_energies
from hypersphere.training.parallel import Parallel, WholeObjective, WholeOptimizer
from hypersphere.training.random_state import RandomState

__all__ = ["Session"]

SAVING_SHARE = 0.02  # largest fraction of the time that may be spent on saving at the end of epochs


class Session:
    """Train a run with evaluation after each epoch, logging and checkpoints; it can stop between two steps.

    With several processes, each creates the same session; only the first one writes files.

    Args:
        run: the run.
        assembly: the components of its job.
        device: device for training; by default that of the assembly.
        save_every: seconds between checkpoints within an epoch. A checkpoint is also saved at the end of an epoch,
            unless saving would take more than 2 % of the time, and always at the end and when training stops.
        keep: number of checkpoints to keep.
        log_every: steps between two logged lines.
        stop: called after each step; training stops if it returns True.
        log: called with each line of metrics in the first process; by default `run.log`.
        on_step: called with the session after each step.
        on_damage: called with a message for each damaged checkpoint.

    Attributes:
        progress: state of training.
        steps: total number of steps.
        saved: step of the last checkpoint that was saved or resumed from, None before.
        measured: the logged line of the last epoch, empty before.
        speed: examples per second since the last logged line.
        finished: whether training has reached its end.
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
        on_damage: Callable[[str], None] = lambda message: None,
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
            assembly.network.compile()  # in place, so that names in checkpoints do not change
        self._modules: dict[str, Any] = {"objective": objective}
        optimizer: Any = assembly.optimizer
        if isinstance(assembly.head, ShardedHead):
            self._modules = {"objective": WholeObjective(objective)}
            optimizer = WholeOptimizer(
                assembly.optimizer,  # type: ignore[arg-type]
                assembly.head,
            )
        self._state: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": assembly.scheduler,
            "batches": assembly.batches,
            "random": RandomState(),
            "stochastic": assembly.turning.stochastic,
        }
        self._before = 0.0  # seconds of earlier sessions
        self._began = self._saved_at = time.perf_counter()
        self._cost = 0.0  # seconds of the last save
        self._rate = self._next_rate()

    def resume(self) -> Checkpoint | None:
        """Restore the last intact checkpoint, if there is one, and remove the lines that were logged after it."""
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
        """Train until the end or until stopped; return True if the end was reached."""
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
        """Number of examples so far."""
        return self.progress.epoch * len(self.assembly.task.inputs) + self.progress.seen

    @property
    def seconds(self) -> float:
        """Duration of training so far, including earlier sessions."""
        return self._before + time.perf_counter() - self._began

    def _data(self) -> Any:
        alone = self.processes.size == 1  # with several processes, each first takes its part of a batch
        return _Moved(self.assembly.batches, self.device) if alone and self._is_elsewhere() else self.assembly.batches

    def _is_elsewhere(self) -> bool:
        return self.assembly.task.inputs.device != self.device

    def _after_step(self, progress: Progress) -> None:
        self.assembly.after_step(progress.step)
        within = progress.step % len(self.assembly.batches) != 0  # otherwise the end of the epoch saves
        stop, due = self._agreed(self.stop(), within and self._is_due())
        if progress.step % self.log_every == 0 or progress.step == 1:
            self._log_step()
        self._rate = self._next_rate()
        if self.on_step is not None:
            self.on_step(self)
        if stop or due:
            self._save()
        if stop:
            self._agreed(True)  # wait for the first process to save, because torchrun stops all processes when one ends
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
        """Return True in the first process if the last save is at least `save_every` or `patience` seconds ago."""
        waited = time.perf_counter() - self._saved_at
        return self.processes.rank == 0 and waited >= min(self.save_every, patience)

    def _save(self) -> None:
        began = time.perf_counter()
        self._require_finite()
        modules, state = self._modules, self._state
        if isinstance(self.assembly.head, ShardedHead):  # collective operation
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
        """Copy the buffers of the first process, which are the saved ones, to all processes."""
        if self.processes.size > 1:
            for buffer in self.assembly.objective.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _energies(self) -> dict[str, float]:
        """Return the energies of all layers in the first process."""
        vectors = class_vectors(self.assembly.head)  # collective operation
        return {} if vectors is None else layer_energies(self.assembly.network.body, vectors)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether any process raised it."""
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
        """Return True if a line was logged up to the current step."""
        if line.get("kind") == "epoch":
            return bool(line["epoch"] <= self.progress.epoch)
        return bool(line.get("step", 0) <= self.progress.step)


class _Stopped(Exception):
    """Raised when training was asked to stop, after saving."""


class _Snapshot:
    """A stored state with the interface of a module."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


class _Moved:
    """Batches that are moved to a device."""

    def __init__(self, batches: Any, device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.batches:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
