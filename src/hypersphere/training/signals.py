"""Interrupts during training: the first one stops training after the current step, the second one immediately."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "interrupts"]

ECHO_SECONDS = 5.0  # torchrun may forward a signal that its workers have already received; such copies are ignored


class Interrupts:
    """Signal handler that records the first interrupt while `deferred` is True.

    All other interrupts raise `KeyboardInterrupt`.

    Args:
        echo: seconds after the first signal in which further ones are ignored as copies of it.

    Attributes:
        deferred: set it to True when training can stop after a step.
        received: whether a deferred interrupt was received.
    """

    def __init__(self, echo: float = 0.0) -> None:
        self.echo, self.deferred = echo, False
        self._received_at: float | None = None

    @property
    def received(self) -> bool:
        """Whether a deferred interrupt was received."""
        return self._received_at is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self._received_at is not None and now < self._received_at + self.echo:
            return
        if self._received_at is not None or not self.deferred:
            raise KeyboardInterrupt
        self._received_at = now


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle SIGINT and SIGTERM within the context, so that a `Trainer` can save before it stops.

    Example:
        >>> with interrupts() as signals:
        ...     signals.deferred = True  # from here on, `Trainer(…, stop=lambda: signals.received)` can save
        ...     signal.raise_signal(signal.SIGTERM)
        >>> signals.received
        True
    """
    handler = Interrupts(ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield handler
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)
