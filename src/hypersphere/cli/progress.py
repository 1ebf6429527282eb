"""Show the progress of training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from hypersphere.training.measure import mean_energy
from hypersphere.training.session import Session

__all__ = ["View"]

WIDE = 78  # minimum width of a terminal, in columns, for the bar to include the speed


class View:
    """Shows loss, accuracy, energy, examples per second and remaining time. Call it after each step and each epoch.

    Args:
        console: gets one line after each epoch. In addition, a terminal shows a bar, and other outputs get a line
            every few seconds.
        every: seconds between those lines.
    """

    def __init__(self, console: Console, every: float = 5.0) -> None:
        self.console = console
        self.every = 0.2 if console.is_terminal else every
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self.began, self.due = time.perf_counter(), 0.0
        self.first: int | None = None  # the step of the first call
        self.shown_epoch: int | None = None

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self.bar.start()
            self.task = self.bar.add_task("", total=None, epoch="", numbers="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def __call__(self, session: Session) -> None:
        """Show the progress of a session if an update is due."""
        now = time.perf_counter()
        if self.first is None:
            self.began, self.first = now, session.progress.step
        ended = session.measured.get("epoch", 0)
        new_epoch = self.shown_epoch is not None and self.shown_epoch < ended
        if now < self.due and not new_epoch:
            return
        self.due, self.shown_epoch = now + self.every, ended
        progress, epochs = session.progress, session.run.job.epochs
        if new_epoch:
            parts = [f"epoch {ended}/{epochs} done", f"step {progress.step}/{session.steps}"]
            pace = [] if self.console.is_terminal else self.pace(session)  # on a terminal the bar shows it
            self._line([*parts, *self.measured(session), *pace])
        epoch = f"{min(progress.epoch + 1, epochs)}/{epochs}"
        if self.console.is_terminal:
            numbers = [f"loss {progress.loss:.4f}", *self.pace(session)[-2 if self.console.width >= WIDE else -1 :]]
            self.bar.update(
                self.task, total=session.steps, completed=progress.step, epoch=epoch, numbers="  ".join(numbers)
            )
        elif not new_epoch:
            parts = [f"epoch {epoch}", f"step {progress.step}/{session.steps}", f"loss {progress.loss:.4f}"]
            self._line([*parts, *self.measured(session)[1:], *self.pace(session)])

    def measured(self, session: Session) -> list[str]:
        """Return the metrics of the last epoch: mean loss with regularisers, accuracy, energy of the hidden layers."""
        line = session.measured
        if not line:
            return []
        energy = mean_energy(line["energy"])
        return [f"loss {line['loss']:.4f}", f"accuracy {line['test_accuracy']:.4f}", f"energy {energy:.4f}"]

    def pace(self, session: Session) -> list[str]:
        """Return the speed and the estimated remaining time."""
        parts = [f"{session.speed:,.0f} examples/s"] if math.isfinite(session.speed) else []
        done = session.progress.step - (self.first or 0)
        if done > 0:
            left = (time.perf_counter() - self.began) / done * (session.steps - session.progress.step)
            parts.append(f"ETA {_clock(left)}")
        return parts

    def _line(self, parts: list[str]) -> None:
        words = "  ".join(parts)
        if self.console.is_terminal:
            self.bar.console.print(words, markup=False, highlight=False)
        else:
            print(words, flush=True)


def _clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> _clock(3723.4)
    '1:02:03'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
