"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require
from hypersphere.heads import NonFiniteScoresError
from hypersphere.training.objective import Objective

__all__ = ["Epoch", "Progress", "Steppable", "embed", "fit", "minimize", "predict"]


ADVICE = "a smaller learning rate may help"


class Scorer(Protocol):
    """Anything that computes scores (B, C) without margin: a head, also sharded or wrapped."""

    def scores(self, x: Tensor, /) -> Tensor:
        """Return the scores of features."""


class Steppable(Protocol):
    """An optimiser, or several that step together."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""

    def step(self) -> Any:
        """Update the parameters."""


@dataclass(frozen=True)
class Epoch:
    """The result of one epoch: its number, the mean loss including regularisers, and its duration in seconds."""

    number: int
    loss: float
    seconds: float


@dataclass
class Progress:
    """The state of training.

    Attributes:
        epoch: number of completed epochs.
        step: total number of steps.
        total: sum of the losses over the examples of the current epoch.
        seen: number of examples in the current epoch so far.
        loss: loss of the last batch.
    """

    epoch: int = 0
    step: int = 0
    total: float = 0.0
    seen: int = 0
    loss: float = math.nan


def fit(
    model: nn.Module,
    head: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]],
    *,
    epochs: int,
    optimizer: Steppable,
    scheduler: Any = None,
    regularizers: Sequence[Callable[[], Tensor]] = (),
    on_step: Callable[[int], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train a model and its head on anything that yields (inputs, labels).

    Args:
        model: maps inputs to features (B, d).
        head: maps features and labels to a scalar loss.
        data: a data loader, or `Batches`; iterated once per epoch.
        epochs: number of epochs.
        optimizer: optimiser of the parameters of the model and the head.
        scheduler: a torch learning-rate scheduler, stepped once per batch.
        regularizers: functions without arguments; their results are added to every loss.
        on_step: called after each optimiser step with the number of steps so far.
        on_epoch: called after each epoch.

    Returns:
        One `Epoch` per pass over the data.

    Raises:
        FloatingPointError: if the loss is not finite; the parameters are those before that step.
        ValueError: if an epoch has no batch, for example because an iterator was exhausted by the first epoch.
    """
    model.train()
    head.train()
    return minimize(
        Objective(model, head, regularizers),
        data,
        epochs=epochs,
        optimizer=optimizer,
        scheduler=scheduler,
        on_step=None if on_step is None else lambda progress: on_step(progress.step),
        on_epoch=on_epoch,
    )


def minimize(
    objective: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]],
    *,
    epochs: int,
    optimizer: Steppable,
    scheduler: Any = None,
    on_step: Callable[[Progress], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    progress: Progress | None = None,
) -> list[Epoch]:
    """Train any module that maps inputs and labels to a loss; `fit` calls this for a model and its head.

    Args:
        objective: an `Objective`, possibly wrapped in `Parallel` or DDP, or compiled. If it defines `features`,
            non-finite features are reported as divergence rather than as invalid input.
        data, epochs, optimizer, scheduler, on_epoch: see `fit`.
        on_step: called with the state of training after each step.
        progress: state from which to continue; the first pass over `data` must then yield the rest of the current
            epoch.
    """
    at = progress or Progress()
    history: list[Epoch] = []
    while at.epoch < epochs:
        began, steps_before = time.perf_counter(), at.step
        for x, y in data:
            try:
                loss = objective(x, y)
            except ValueError as error:
                # Scores overflow when training diverges, also while features and parameters are still finite.
                overflowed = isinstance(error, NonFiniteScoresError) and _finite(x)
                if not overflowed and (not _finite(x) or _healthy(objective, x)):
                    raise
                raise FloatingPointError(f"training diverged in epoch {at.epoch + 1}: {error}; {ADVICE}") from None
            at.loss = float(loss.detach())
            if not math.isfinite(at.loss):
                raise FloatingPointError(f"the loss became {at.loss} in epoch {at.epoch + 1}; {ADVICE}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            at.step, at.total, at.seen = at.step + 1, at.total + at.loss * len(y), at.seen + len(y)
            if on_step is not None:
                on_step(at)
        if at.step == steps_before and not at.seen:
            raise ValueError(f"data must yield batches again every epoch, but epoch {at.epoch + 1} had none")
        at.epoch += 1
        history.append(Epoch(at.epoch, at.total / max(at.seen, 1), time.perf_counter() - began))
        at.total, at.seen = 0.0, 0
        if on_epoch is not None:
            on_epoch(history[-1])
    return history


@torch.no_grad()
def embed(model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the features (N, d) and labels (N,) of all data, computed with the model in evaluation mode."""
    with evaluation_mode(model):
        parts = [(model(x), y) for x, y in data]
    require(bool(parts), "data", "an iterable with at least one batch", data)
    return torch.cat([features for features, _ in parts]), torch.cat([labels for _, labels in parts])


@torch.no_grad()
def predict(head: Scorer, features: Tensor) -> Tensor:
    """Return the class with the largest score (without margin) for each feature."""
    return head.scores(features).argmax(1)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@torch.no_grad()
def _healthy(objective: nn.Module, x: Tensor) -> bool:
    """Return True if the parameters, and the features if the objective defines them, are finite."""
    inner = objective.module if isinstance(objective, DistributedDataParallel) else objective
    of_inputs = getattr(inner, "features", None)
    return _finite(*objective.parameters(), *([] if of_inputs is None else [of_inputs(x)]))
