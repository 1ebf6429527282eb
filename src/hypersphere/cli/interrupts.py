"""Interrupts while training: the first is kept until it suits, the second ends the program at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "interrupts"]

ECHO = 5.0  # seconds within which torchrun passes on to its workers a signal that they may have got themselves


class Interrupts:
    """Whether an interrupt came; one that comes while not deferred, or a second one, raises `KeyboardInterrupt`.

    Args:
        echo: seconds within which a second one counts as the first.
    """

    def __init__(self, echo: float = 0.0) -> None:
        self.echo, self.deferred = echo, False
        self.at: float | None = None

    @property
    def came(self) -> bool:
        """Whether one came that was deferred."""
        return self.at is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.at is not None and now < self.at + self.echo:
            return
        if self.at is not None or not self.deferred:
            raise KeyboardInterrupt
        self.at = now


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle SIGINT and SIGTERM meanwhile."""
    found = Interrupts(ECHO if "TORCHELASTIC_RUN_ID" in os.environ else 0.0)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, found) for number in numbers]
    try:
        yield found
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
