"""The training loop, to be read in one sitting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hypersphere.functions.menu import require

__all__ = ["Epoch", "embed", "fit", "predict"]


ADVICE = "a smaller learning rate may help"


class Scorer(Protocol):
    """Anything with plain scores (B, C): a head, or a sharded or wrapped one."""

    def scores(self, x: Tensor, /) -> Tensor:
        """Return the plain scores of features."""


@dataclass(frozen=True)
class Epoch:
    """What one pass over the data gave: the mean loss, regularisers included, and the seconds it took."""

    number: int
    loss: float
    seconds: float


def fit(
    model: nn.Module,
    head: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]],
    *,
    epochs: int,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    regularizers: Sequence[Callable[[], Tensor]] = (),
    on_step: Callable[[int], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train a model and its head on anything that yields (inputs, labels).

    Args:
        model: inputs to features (B, d).
        head: features and labels to a scalar loss.
        data: a data loader, or `Batches`; gone through once an epoch.
        epochs: how many times.
        optimizer: over the parameters of the model and the head.
        scheduler: a torch learning-rate scheduler, stepped once a batch.
        regularizers: functions without arguments; what they return is added to every loss.
        on_step: called after each step of the optimizer with its number, 1 for the first of the first epoch.
        on_epoch: called after each epoch.

    Returns:
        One `Epoch` a pass.

    Raises:
        FloatingPointError: the loss is no longer finite; the parameters are those before that step.
        ValueError: an epoch without a batch, as of an iterator that is used up after one pass.
    """
    model.train()
    head.train()
    history, step = [], 0
    for number in range(1, epochs + 1):
        began, total, seen, steps_before = time.perf_counter(), 0.0, 0, step
        for x, y in data:
            features = model(x)
            try:
                loss = head(features, y)
                for regularizer in regularizers:
                    loss = loss + regularizer()
            except ValueError as error:
                if not _finite(x) or _finite(features, *model.parameters(), *head.parameters()):
                    raise
                raise FloatingPointError(f"training diverged in epoch {number}: {error}; {ADVICE}") from None
            value = float(loss.detach())
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss became {value} in epoch {number}; {ADVICE}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            if on_step is not None:
                on_step(step)
            if scheduler is not None:
                scheduler.step()
            total, seen = total + value * len(y), seen + len(y)
        if step == steps_before:
            raise ValueError(f"data must yield batches anew every epoch, but epoch {number} had none")
        history.append(Epoch(number, total / max(seen, 1), time.perf_counter() - began))
        if on_epoch is not None:
            on_epoch(history[-1])
    return history


@torch.no_grad()
def embed(model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the features (N, d) and labels (N,) of all data, with the model in evaluation mode meanwhile."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        parts = [(model(x), y) for x, y in data]
    finally:
        for module, mode in modes:  # one by one: some may have been frozen in evaluation mode
            module.training = mode
    require(bool(parts), "data", "something that yields at least one batch", data)
    return torch.cat([features for features, _ in parts]), torch.cat([labels for _, labels in parts])


@torch.no_grad()
def predict(head: Scorer, features: Tensor) -> Tensor:
    """Return the class with the largest plain score for each feature."""
    return head.scores(features).argmax(1)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
