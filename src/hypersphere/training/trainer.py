"""Train a run from its last checkpoint to the end, or until it is asked to stop."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from hypersphere._collectives import Processes
from hypersphere._validation import require
from hypersphere.optim.schedules import is_better
from hypersphere.training.build import Experiment
from hypersphere.training.checkpoint import Checkpoint, DamagedCheckpoint
from hypersphere.training.components import create
from hypersphere.training.distributed import Parallel, local_tensor
from hypersphere.training.loop import ADVICE, Epoch, Progress, minimize
from hypersphere.training.random_state import RandomState
from hypersphere.training.run import Run
from hypersphere.training.trackers import Tracker

__all__ = ["Trainer"]

SAVING_SHARE = 0.02  # largest fraction of the time that may be spent on saving at the end of epochs


class Trainer:
    """Train a run with validation, logging and checkpoints; it can stop between two steps.

    A checkpoint is saved every `save_every` seconds within an epoch; at the end of an epoch, unless saving would take
    more than 2 % of the time; when the metric `validation.best` improves; and always at the end and when training
    stops. With several processes, each creates the same trainer; only the first one writes files.

    Args:
        experiment: the objects to train.
        run: the run; None to train without files.
        stop: called after each step; training stops if it returns True.
        on_step: called with the trainer after each step and each epoch.
        on_message: called with messages for the user, such as those about damaged checkpoints that are skipped.

    Attributes:
        progress: state of training.
        steps: number of optimiser steps at the end of training.
        saved: step of the last checkpoint that was saved or resumed from, None before.
        metrics: the logged line of the last validation, empty before.
        history: the logged lines of the epochs that this process trained.
        best: with `validation.best`, the value and step of the best validation, and the number of worse ones since.
        speed: examples per second since the last logged line.
        finished: whether training has reached its end, by steps or by early stopping.
    """

    def __init__(
        self,
        experiment: Experiment,
        run: Run | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[Trainer], None] | None = None,
        on_message: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.experiment, self.run, self.config = experiment, run, experiment.config
        self.stop, self.on_step = stop, on_step
        self.processes = Processes()
        self.checkpoints = run.checkpoints(self.config.keep, on_damage=on_message) if run is not None else None
        self.progress = Progress()
        self.steps = experiment.steps
        self.saved: int | None = None
        self.metrics: Mapping[str, Any] = {}
        self.history: list[Mapping[str, Any]] = []
        self.best: dict[str, Any] = {"value": None, "step": None, "bad": 0}  # bad: validations since the best one
        self.speed = math.nan
        self.finished = False
        experiment.validation.metric_names()  # opens files of protocols: a missing one is reported before training
        if self.config.compile:
            experiment.network.compile()  # in place, so that names in checkpoints do not change
        modules = {"objective": experiment.objective, "ema": experiment.ema}
        state = {
            "optimizer": experiment.optimizer,
            "scheduler": experiment.scheduler,
            "loader": experiment.loader,
            "random": RandomState(),
            "stochastic": experiment.rotation.periodic_fold,
            "scaler": experiment.scaler,
            "progress": self.progress,
        }
        # A checkpoint holds these objects. They are restored in this order, which draws no random numbers.
        self._modules: dict[str, Any] = {name: value for name, value in modules.items() if value is not None}
        self._state: dict[str, Any] = {name: value for name, value in state.items() if value is not None}
        self._trackers: list[Tracker] = []
        self._earlier_seconds = 0.0  # training time of earlier processes
        self._began = self._saved_at = time.perf_counter()
        self._save_seconds = 0.0  # duration of the last save
        # The learning rate of the next step: when that is logged, the scheduler has already changed the optimiser.
        self._next_rate = self._learning_rate()
        self._start_window()

    def __repr__(self) -> str:
        folder = "without files" if self.run is None else repr(str(self.run.folder))
        return f"Trainer({folder}, step {self.progress.step} of {self.steps}: {self.experiment})"

    def resume(self) -> Checkpoint | None:
        """Restore the last intact checkpoint, if there is one, and remove the lines that were logged after it.

        Raises:
            ValueError: if the data are not those of the run.
        """
        if self.run is None or self.checkpoints is None:
            raise ValueError("a Trainer without a run has nothing to resume")
        self.run.require_same_data(self.experiment.data)
        checkpoint = self.checkpoints.latest()
        if checkpoint is not None:
            try:
                checkpoint.restore_(self._modules, self._state)
                saved = checkpoint.state("seconds", "best")
                self._earlier_seconds, self.best = float(saved["seconds"]), {**self.best, **saved["best"]}
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise DamagedCheckpoint(
                    f"{checkpoint.path} is damaged: its state is not that of a Trainer: {error!r}"
                ) from None
            if self.progress.step != checkpoint.step:
                raise DamagedCheckpoint(
                    f"{checkpoint.path} is damaged: its state is not that of step {checkpoint.step}"
                )
            self.saved = checkpoint.step
            self._next_rate = self._learning_rate()
        if self.processes.rank == 0:
            self.run.rewind(self._is_past)
            for line in self.run.metrics():
                self.metrics = line if line.get("kind") in ("epoch", "validation") else self.metrics
        return checkpoint

    def train(self) -> bool:
        """Train until the end or until `stop` returns True; return True if the end was reached."""
        experiment, config = self.experiment, self.config
        experiment.train_mode()
        self._began = self._saved_at = time.perf_counter()
        self._start_window()
        self._start_trackers()
        objective = experiment.objective if self.processes.size == 1 else Parallel(experiment.objective)
        try:
            if self._should_continue():
                minimize(
                    objective,
                    experiment.loader,
                    epochs=config.epochs if config.steps is None else None,
                    steps=config.steps,
                    optimizer=experiment.optimizer,
                    scheduler=experiment.scheduler,
                    prepare=experiment.prepare,
                    accumulate=config.accumulate,
                    clip=config.clip,
                    scaler=experiment.scaler,
                    check_every=config.log_every,
                    batch_sizes=experiment.loader.batch_sizes,
                    on_step=self._after_step,
                    on_epoch=self._after_epoch,
                    progress=self.progress,
                )
        except _Stopped:
            return False
        except _Finished:
            pass
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}; {self._last_good_checkpoint()}") from None
        finally:
            for tracker in self._trackers:
                tracker.finish()
        self.finished = True
        return True

    @property
    def seen(self) -> int:
        """Number of examples that were trained on so far."""
        return self.progress.epoch * len(self.experiment.data.train) + self.progress.seen

    @property
    def seconds(self) -> float:
        """Duration of training so far, including earlier processes."""
        return self._earlier_seconds + time.perf_counter() - self._began

    # --- after each step and each epoch

    def _after_step(self, progress: Progress) -> None:
        config, validation = self.config, self.config.validation
        # First everything that changes weights, so that validation and checkpoints see the weights of the next step.
        self.experiment.after_step(progress.step)
        if progress.step % config.log_every == 0 or progress.step == 1:
            self._log_step()
        self._next_rate = self._learning_rate()
        improved = False
        if validation.every_unit == "steps" and progress.step % validation.every == 0 and progress.step < self.steps:
            improved = self._validate({"kind": "validation", "epoch": progress.epoch, "step": progress.step})
        if self.on_step is not None:
            self.on_step(self)
        is_within_epoch = progress.step % self.experiment.steps_per_epoch != 0  # at its end, `_after_epoch` saves
        ended = not self._should_continue()
        stop, save = self._any(self.stop(), ended or improved or (is_within_epoch and self._is_due()))
        if stop or save:
            self._save()
        if stop:
            self._any(True)  # wait until the first process has saved: torchrun stops all processes when one ends
            raise _Stopped
        if ended:
            raise _Finished

    def _after_epoch(self, epoch: Epoch) -> None:
        validation, ended = self.config.validation, self.progress.step >= self.steps
        line: dict[str, Any] = {"kind": "epoch", "epoch": epoch.number, "step": self.progress.step, "loss": epoch.loss}
        is_due = ended or (validation.every_unit == "epochs" and self._is_scheduled())
        improved = self._validate(line, measure=is_due)
        self.history.append(line)
        if self.on_step is not None:
            self.on_step(self)
        ended = ended or not self._should_continue()
        (save,) = self._any(ended or improved or self._is_due(self._save_seconds / SAVING_SHARE))
        if save:
            self._save()
        self._start_window()
        if ended:
            raise _Finished

    def _validate(self, line: dict[str, Any], *, measure: bool = True) -> bool:
        """Log a line, with metrics if `measure`; return True if the metric `validation.best` improved."""
        self._require_finite()
        self._share_buffers()  # each process measures a part of the data, so all need the same BatchNorm statistics
        experiment, improved = self.experiment, False
        if measure:
            with nullcontext() if experiment.ema is None else experiment.ema.applied():
                line |= experiment.validation(experiment.objective)
            experiment.scheduler.observe(line)
            improved = self._update_best(line)
        line["seconds"] = round(self.seconds, 3)
        self.metrics = line if measure else self.metrics
        self._log(line)
        return improved

    def _update_best(self, line: Mapping[str, Any]) -> bool:
        """Compare the metric `validation.best` with `best`, update that, and return True if the metric improved."""
        metric = self.config.validation.best
        if metric is None:
            return False
        if metric not in line:
            self._save()  # so that the epochs so far are not lost
        names = ", ".join(name for name, value in line.items() if isinstance(value, float))
        require(metric in line, "validation.best", f"one of {names}", metric)
        improved = is_better(metric, line[metric], self.best["value"])
        if improved:
            self.best = {"value": line[metric], "step": self.progress.step, "bad": 0}
        elif self._is_scheduled():
            self.best = {**self.best, "bad": self.best["bad"] + 1}
        return improved

    def _is_scheduled(self) -> bool:
        """Return True after a number of steps or passes over the data that is a multiple of `validation.every`.

        Other validations, at the end of training, do not count against `patience`, so that an extended run stops where
        a longer run would. Steps are counted instead of epochs, because a run that ended within a pass over the data,
        and was then extended, has counted an additional epoch.
        """
        validation = self.config.validation
        if validation.every_unit == "steps":
            return self.progress.step % validation.every == 0
        return self.progress.step % (validation.every * self.experiment.steps_per_epoch) == 0

    def _should_continue(self) -> bool:
        """Return False if `validation.patience` ends training."""
        patience = self.config.validation.patience
        return patience is None or self.best["bad"] < patience

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
                "loss": float(self.progress.loss),
                "rate": self._next_rate,
                "examples_per_second": round(self.speed, 1),
            }
        )
        self._start_window()

    def _start_window(self) -> None:
        """Start a new window for the measurement of speed."""
        self._window = time.perf_counter(), self.seen

    def _learning_rate(self) -> float:
        return float(self.experiment.optimizer.param_groups[0]["lr"])

    # --- checkpoints

    def _is_due(self, interval: float = math.inf) -> bool:
        """Return True in the first process if the last save is at least `save_every` or `interval` seconds ago."""
        waited = time.perf_counter() - self._saved_at
        return self.processes.rank == 0 and waited >= min(self.config.save_every, interval)

    def _save(self) -> None:
        self._require_finite()
        if self.checkpoints is None:
            return
        began = time.perf_counter()
        self.checkpoints.protected = self.best["step"]  # before saving, which removes old checkpoints
        state = {**self._state, "seconds": self.seconds, "best": self.best}
        self.checkpoints.save(self.progress.step, self._modules, state)
        self.saved, self._saved_at = self.progress.step, time.perf_counter()
        self._save_seconds = self._saved_at - began
        self._start_window()

    def _require_finite(self) -> None:
        """Raise a `FloatingPointError` rather than save or measure weights that are not finite."""
        parameters = [local_tensor(p.detach()) for p in self.experiment.objective.parameters()]
        is_finite = bool(torch.stack([torch.isfinite(p).all() for p in parameters]).all())
        if self._any(not is_finite)[0]:
            raise FloatingPointError(f"the weights are not finite after step {self.progress.step}; {ADVICE}")

    def _last_good_checkpoint(self) -> str:
        """Return which checkpoint to continue from, for the message about divergence."""
        if self.saved is None or self.run is None:
            return "no checkpoint was saved before"
        return f"the last good checkpoint is that of step {self.saved} in {self.run.folder}"

    def _is_past(self, line: Mapping[str, Any]) -> bool:
        """Return True for lines up to the current step; later ones will be logged again."""
        if line.get("kind") == "epoch":
            return bool(line["epoch"] <= self.progress.epoch)
        return bool(line.get("step", 0) <= self.progress.step)

    # --- processes and trackers

    def _share_buffers(self) -> None:
        """Copy the buffers of the first process to all others. They are also the ones that are saved."""
        if self.processes.size > 1:
            for buffer in self.experiment.objective.buffers():
                torch.distributed.broadcast(buffer, 0)

    def _any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is True in any process, so that all processes take the same decision."""
        if self.processes.size == 1:
            return list(flags)
        raised = self.processes.all_reduce_(torch.tensor(flags, dtype=torch.float32, device=self.experiment.device))
        return [bool(number) for number in raised.tolist()]

    def _start_trackers(self) -> None:
        if self.processes.rank == 0 and self.run is not None:
            components = enumerate(self.config.trackers)
            self._trackers = [create(part, "tracker", setting=f"trackers.{index}") for index, part in components]
            for tracker in self._trackers:
                tracker.start(self.run, self.config)

    def _log(self, line: Mapping[str, Any]) -> None:
        if self.processes.rank == 0 and self.run is not None:
            self.run.log(line)
            for tracker in self._trackers:
                tracker.log(line)


class _Stopped(Exception):
    """Raised when training was asked to stop, after saving."""


class _Finished(Exception):
    """Raised when training has reached its end."""
