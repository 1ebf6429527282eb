"""Remember the state of recent forward passes, because activation checkpointing repeats some of them."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hypersphere import _numerics
from hypersphere._validation import warn_user

__all__ = ["REMEMBERED_PASSES", "PassHistory"]

REMEMBERED_PASSES = 8
"""Number of forward passes per module whose state is remembered."""

State = tuple[Tensor | None, ...]


class PassHistory:
    """The state that a module used in each of its last forward passes.

    Activation checkpointing computes a forward pass again during backward. A module whose state changes in each
    training pass, such as a step counter or a running mean, must then use the state of the first computation. Torch
    does not report which pass is repeated. But a repeated pass has the same inputs, and therefore any function of them
    has the same value, bit for bit. The module computes such a fingerprint in each pass and records it with its state.

    If several passes have the same fingerprint, the newest is the repeated one, because older ones belong to earlier
    steps. If one batch is passed twice before one backward pass, both repetitions use the state of the second.

    A copy of the module has a copy of the history. The history is not part of the state dict.

    Args:
        fallback: the state that a repeated pass uses if it is not remembered, in words, for a warning.

    Example:
        >>> history = PassHistory("the current mean")
        >>> for batch, mean in ((1.0, 0.1), (2.0, 0.2)):
        ...     history.record([torch.tensor(batch)], (torch.tensor(mean),))
        >>> history.recall([torch.tensor(1.0)], (torch.tensor(0.2),))
        (tensor(0.1000),)
    """

    def __init__(self, fallback: str) -> None:
        self.fallback = fallback
        self._passes: deque[tuple[Sequence[Tensor], State]] = deque(maxlen=REMEMBERED_PASSES)
        self._has_warned = False

    @property
    def newest(self) -> State | None:
        """The state of the last recorded pass, or None if there is none."""
        return self._passes[-1][1] if self._passes else None

    def record(self, fingerprint: Sequence[Tensor], state: State) -> None:
        """Remember the state that a pass uses. Compiled code is not recorded: its compiler handles recomputation."""
        if not torch.compiler.is_compiling():
            self._passes.append((fingerprint, state))

    def recall(self, fingerprint: Sequence[Tensor], otherwise: State, *, warn: bool = True) -> State:
        """Return the state of the newest pass with this fingerprint, or `otherwise`.

        Args:
            fingerprint: of the repeated pass.
            otherwise: the state to use if the pass is not remembered, with tensors of the same shapes.
            warn: whether to warn if the pass is not remembered. A module warns at most once.
        """
        state, matches = otherwise, []
        # Oldest first, so that the newest match remains. `torch.where` instead of branches, so that the host does not
        # wait for the device.
        for recorded, candidate in self._passes:
            is_same = _equal(recorded, fingerprint)
            if is_same is not None:
                matches.append(is_same)
                state = tuple(
                    None if new is None or old is None else torch.where(is_same, new, old)
                    for new, old in zip(candidate, state, strict=True)
                )
        if warn and not self._has_warned:
            self._warn_unless(matches, fingerprint[0])
        return state

    def clear(self) -> None:
        """Forget all passes."""
        self._passes.clear()

    def _warn_unless(self, matches: list[Tensor], like: Tensor) -> None:
        """Warn if no pass matches, because the gradient is then inexact."""
        # This waits for the device, but only in passes that activation checkpointing repeats. Capturing a CUDA graph
        # does not allow it.
        is_captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured or not _numerics.values_readable(like):
            return
        if matches and bool(functools.reduce(operator.or_, matches)):
            return
        self._has_warned = True
        warn_user(
            "a forward pass that activation checkpointing repeats was not recognised by its input, so its gradient "
            f"uses {self.fallback}: the last {REMEMBERED_PASSES} passes of a module are remembered, and a repeated "
            "pass must have the same input"
        )


def _equal(recorded: Sequence[Tensor], fingerprint: Sequence[Tensor]) -> Tensor | None:
    """Return a boolean scalar, or None if the tensors differ in shape, dtype or device. NaN equals NaN."""
    pairs = list(zip(recorded, fingerprint, strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype or a.device != b.device for a, b in pairs):
        return None
    return torch.stack([((a == b) | ((a != a) & (b != b))).all() for a, b in pairs]).all()
