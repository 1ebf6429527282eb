"""The training loop, to be read in one sitting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.heads import AngularHead

__all__ = ["Epoch", "embed", "fit", "predict"]


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
        on_epoch: called after each epoch.

    Returns:
        One `Epoch` a pass.

    Raises:
        FloatingPointError: the loss is no longer finite; the parameters are those before that step.
    """
    model.train(), head.train()
    history = []
    for number in range(1, epochs + 1):
        began, total, seen = time.perf_counter(), 0.0, 0
        for x, y in data:
            loss = head(model(x), y)
            for regularizer in regularizers:
                loss = loss + regularizer()
            value = float(loss.detach())
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss became {value} in epoch {number}; a smaller learning rate may help")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            total, seen = total + value * len(y), seen + len(y)
        history.append(Epoch(number, total / max(seen, 1), time.perf_counter() - began))
        if on_epoch is not None:
            on_epoch(history[-1])
    return history


@torch.no_grad()
def embed(model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the features (N, d) and labels (N,) of all data, with the model in evaluation mode meanwhile."""
    was_training = model.training
    model.eval()
    try:
        parts = [(model(x), y) for x, y in data]
    finally:
        model.train(was_training)
    return torch.cat([features for features, _ in parts]), torch.cat([labels for _, labels in parts])


@torch.no_grad()
def predict(head: AngularHead, features: Tensor) -> Tensor:
    """Return the class with the largest plain score for each feature."""
    return head.scores(features).argmax(1)
