"""Show the progress of `train` and `reproduce`: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hypersphere.energy import mean_energy
from hypersphere.training import Trainer

if TYPE_CHECKING:
    from hypersphere.recipes import Row

__all__ = ["TrainingProgress", "recipe_progress"]

WIDE = 78  # columns that a terminal needs for the bar to include the speed
NOT_METRICS = ("kind", "epoch", "step", "loss", "seconds", "energy")


class TrainingProgress:
    """Shows loss, metrics, energy, examples per second and remaining time. Call it after each step and each epoch.

    Args:
        console: gets one line after each validation. In addition, a terminal shows a bar, and other outputs get a line
            every five seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.every = 0.2 if console.is_terminal else 5.0  # seconds between updates
        self.bar = Progress(
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("", total=None, epoch="", numbers="")
        self.began, self.due = time.perf_counter(), 0.0
        self.first: int | None = None  # the step of the first call
        self.shown: int | None = None  # the step of the last validation that was shown

    def __enter__(self) -> TrainingProgress:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def __call__(self, trainer: Trainer) -> None:
        """Show the progress of a trainer if an update is due."""
        now, progress, line = time.perf_counter(), trainer.progress, trainer.metrics
        if self.first is None:
            self.began, self.first = now, progress.step
            # A resumed trainer has the line of an earlier validation, which is not shown. A line of this step is new.
            self.shown = line.get("step", 0) if line.get("step", 0) < progress.step else None
        validated = line.get("step", 0) != self.shown
        if now < self.due and not validated:
            return
        self.due, self.shown = now + self.every, line.get("step", 0)
        step = f"step {progress.step}/{trainer.steps}"
        if validated:
            epoch = f"{_epoch(trainer, line['epoch'])} done" if line["kind"] == "epoch" else "validation"
            pace = [] if self.console.is_terminal else self.pace(trainer)  # on a terminal the bar shows it
            self._print([epoch, step, *metric_texts(line), *pace])
        epoch, loss = _epoch(trainer, progress.epoch + 1), f"loss {float(progress.loss):.4f}"
        if self.console.is_terminal:
            numbers = [loss, *self.pace(trainer)[-2 if self.console.width >= WIDE else -1 :]]
            self.bar.update(
                self.task, total=trainer.steps, completed=progress.step, epoch=epoch, numbers="  ".join(numbers)
            )
        elif not validated:
            self._print([epoch, step, loss, *metric_texts(line)[1:], *self.pace(trainer)])

    def pace(self, trainer: Trainer) -> list[str]:
        """Return the speed and the estimated remaining time."""
        parts = [f"{trainer.speed:,.0f} examples/s"] if math.isfinite(trainer.speed) else []
        done = trainer.progress.step - (self.first or 0)
        if done > 0:
            remaining = (time.perf_counter() - self.began) / done * (trainer.steps - trainer.progress.step)
            parts.append(f"ETA {_clock(remaining)}")
        return parts

    def _print(self, parts: Sequence[str]) -> None:
        text = "  ".join(parts)
        if self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def metric_texts(line: Any) -> list[str]:
    """Return the loss, the metrics and the mean energy of a logged line as texts.

    >>> metric_texts({"kind": "epoch", "epoch": 1, "step": 9, "loss": 2.0, "accuracy": 0.5, "energy": {"head": 1.0}})
    ['loss 2.0000', 'accuracy 0.5000', 'energy 1.0000']
    """
    parts = [f"loss {line['loss']:.4f}"] if line.get("loss") is not None else []
    parts += [f"{key} {value:.4f}" for key, value in line.items() if key not in NOT_METRICS and value is not None]
    return [*parts, f"energy {mean_energy(line['energy']):.4f}"] if line.get("energy") else parts


def _epoch(trainer: Trainer, number: int) -> str:
    epochs = trainer.config.epochs
    return f"epoch {number}" if epochs is None else f"epoch {min(number, epochs)}/{epochs}"


def _clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> _clock(3723.4)
    '1:02:03'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def recipe_progress(console: Console, total: int) -> Iterator[Callable[[Row, int, float], None]]:
    """Yield a function that is called with a row, a seed and the fraction of them that is done, and shows the progress.

    A terminal shows a bar; other outputs get one line for each of the `total` pairs of row and seed. The line says
    "recorded" if the pair already had a record.
    """
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console)
    task, done = bar.add_task("", total=total), 0
    started: set[str] = set()  # rows and seeds that are run now; the others already had a record

    def update(row: Row, seed: int, fraction: float) -> None:
        nonlocal done
        label = f"{row.name}, seed {seed}"
        bar.update(task, description=label, completed=done + fraction)
        if fraction < 1:
            started.add(label)
        else:
            done += 1
            recorded = "" if label in started else ": recorded"
            if not console.is_terminal:
                print(f"[{done}/{total}] {label}{recorded}", file=sys.stderr, flush=True)

    with bar if console.is_terminal else nullcontext():
        yield update
