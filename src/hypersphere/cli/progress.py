"""How a training session is shown: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hypersphere.training.measure import mean_energy
from hypersphere.training.session import Session

__all__ = ["View"]


class View:
    """Shows loss, accuracy, energy, examples a second and the time left; called after each step and each epoch.

    Args:
        console: a terminal gets a bar, anything else a line now and then and one after each epoch.
        every: seconds between lines.
    """

    def __init__(self, console: Console, every: float = 5.0) -> None:
        self.console = console
        self.every = 0.2 if console.is_terminal else every
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self.began, self.due = time.perf_counter(), 0.0
        self.first: int | None = None  # the step that it was first called after
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
        """Show how far a session is, if it is time."""
        now = time.perf_counter()
        if self.first is None:
            self.began, self.first = now, session.progress.step
        ended = session.measured.get("epoch", 0)
        new_epoch = self.shown_epoch is not None and self.shown_epoch < ended
        if now < self.due and not new_epoch:
            return
        self.due, self.shown_epoch = now + self.every, ended
        epochs = session.run.job.epochs
        if self.console.is_terminal:
            epoch = f"{min(session.progress.epoch + 1, epochs)}/{epochs}"
            numbers = self.numbers(session)
            self.bar.update(
                self.task, total=session.steps, completed=session.progress.step, epoch=epoch, numbers=numbers
            )
        else:
            epoch = f"{ended}/{epochs} done" if new_epoch else f"{session.progress.epoch + 1}/{epochs}"
            print(f"epoch {epoch}  step {session.progress.step}/{session.steps}  {self.numbers(session)}", flush=True)

    def numbers(self, session: Session) -> str:
        """The numbers in words."""
        measured = session.measured
        parts = [f"loss {session.progress.loss:.4f}"]
        if measured:
            parts += [f"accuracy {measured['test_accuracy']:.4f}", f"energy {mean_energy(measured['energy']):.4f}"]
        if math.isfinite(session.speed):
            parts.append(f"{session.speed:,.0f} examples/s")
        done = session.progress.step - (self.first or 0)
        if done > 0:
            left = (time.perf_counter() - self.began) / done * (session.steps - session.progress.step)
            parts.append(f"ETA {_clock(left)}")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(3723.4)
    '1:02:03'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
