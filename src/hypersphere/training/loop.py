"""The training loop: batches to losses to gradients to steps, for `fit` and for the `Trainer`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require
from hypersphere.heads import NonFiniteScoresError
from hypersphere.robustness import Attack, adversarial_loss

__all__ = ["Epoch", "Objective", "Progress", "Steppable", "embed", "fit", "minimize", "predict"]

ADVICE = "a smaller learning rate may help"
SMALLEST_SCALE = 1e-3  # of the loss in float16; the scale starts at 65,536 and is halved at each skipped step


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
    """The state of training. Losses stay on the device until somebody reads them.

    Attributes:
        epoch: number of completed epochs.
        step: number of optimiser steps.
        total: sum of the losses over the examples of the current epoch.
        seen: number of examples in the current epoch so far.
        batches: number of batches in the current epoch so far.
        loss: loss of the last step.
    """

    epoch: int = 0
    step: int = 0
    total: float | Tensor = 0.0
    seen: int = 0
    batches: int = 0
    loss: float | Tensor = math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        numbers = {"total": float(self.total), "loss": float(self.loss)}
        return {"epoch": self.epoch, "step": self.step, "seen": self.seen, "batches": self.batches, **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        for name in ("epoch", "step", "seen", "batches", "total", "loss"):
            setattr(self, name, state[name])


class Objective(nn.Module):
    """Map inputs and labels to the loss of a head on the features of a network, plus regularisers.

    As a single module it can be passed to DDP, `torch.compile` and hooks.

    Args:
        network: maps inputs to features.
        head: maps features and labels to a scalar loss.
        regularizers: modules or functions without arguments.
        precision: autocast dtype of the network; losses and regularisers are computed in float32.
        attack: attack for adversarial training, None without.
        attack_weight: weight of the attacked inputs in the loss, see `hypersphere.robustness.adversarial_loss`.
    """

    def __init__(
        self,
        network: nn.Module,
        head: nn.Module,
        regularizers: Sequence[Callable[[], Tensor]] = (),
        *,
        precision: torch.dtype = torch.float32,
        attack: Attack | None = None,
        attack_weight: float = 0.5,
    ) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.regularizers = nn.ModuleList([r for r in regularizers if isinstance(r, nn.Module)])
        self.penalties = [r for r in regularizers if not isinstance(r, nn.Module)]
        self.precision = precision
        self.attack, self.attack_weight = attack, attack_weight

    def features(self, inputs: Tensor) -> Tensor:
        """Map inputs to features, in float32."""
        with self._autocast(inputs):
            features = self.network(inputs)
        if not isinstance(features, Tensor):
            advice = "wrap it in hypersphere.models.Embedder, or select one of its outputs"
            raise TypeError(f"the model must return a tensor of features, not {type(features).__name__}; {advice}")
        return features if self.precision == torch.float32 else features.float()

    def forward(
        self, inputs: Tensor, labels: Tensor, share: float | Tensor | None = None, regularize: bool = True
    ) -> Tensor:
        """Return the loss.

        Args:
            inputs, labels: a batch.
            share: factor of the loss of the head, if the batch is a part of a larger one.
            regularize: add the regularisers.
        """
        if self.attack is None or not self.training:
            loss = self.head(self.features(inputs), labels)
        else:
            with self._autocast(inputs):
                options: dict[str, Any] = {"attack": self.attack, "weight": self.attack_weight}
                loss = adversarial_loss(self.network, inputs, labels, loss=self.head, **options)
        loss = loss if share is None else loss * share
        for regularizer in (*self.regularizers, *self.penalties) if regularize else ():
            term = regularizer()
            require(isinstance(term, Tensor | float | int), "regularizers", "functions that return a number", term)
            loss = loss + term
        return loss

    def weight(self, labels: Tensor) -> float | Tensor:
        """Return the denominator of the mean loss of a batch: its number of rows, or the sum of their class weights."""
        head: Any = self.head
        if getattr(head, "reduction", "mean") == "sum":
            return 1.0
        class_weights = getattr(head, "class_weights", None)
        counted = labels != getattr(head, "ignore_index", -100)
        return counted.sum() if class_weights is None else class_weights[labels[counted].to(class_weights.device)].sum()

    def _autocast(self, inputs: Tensor) -> AbstractContextManager[Any]:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(inputs.device.type, self.precision)


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
        data: a data loader, or `Batches`; iterated once per epoch. Batches are moved to the device of the model.
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
        ValueError: if an epoch has no batch, for example because an iterator was exhausted by the first epoch, or if
            the optimiser does not have the parameters of the head.
    """
    _require_parameters(optimizer, head)
    model.train()
    head.train()
    parameter = next(model.parameters(), None)
    return minimize(
        Objective(model, head, regularizers),
        data if parameter is None else _Moved(data, parameter.device),
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
    optimizer: Any,
    epochs: int | None = None,
    steps: int | None = None,
    scheduler: Any = None,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    check_every: int = 1,
    batch_sizes: Sequence[int] | None = None,
    on_step: Callable[[Progress], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    progress: Progress | None = None,
) -> list[Epoch]:
    """Train any module that maps inputs and labels to a loss; `fit` calls this for a model and its head.

    Args:
        objective: an `Objective`, possibly wrapped in `Parallel` or DDP, or compiled. If it defines `features`,
            non-finite features are reported as divergence rather than as invalid input.
        data: iterated once per epoch.
        optimizer: a `Steppable`.
        epochs: number of epochs; None if `steps` ends training.
        steps: number of optimiser steps.
        scheduler: stepped once per optimiser step.
        accumulate: batches per optimiser step. The objective must then accept `share` and `regularize`, see
            `Objective.forward`: the gradient is that of one large batch.
        clip: largest norm of the gradient of all parameters.
        scaler: loss scaling for float16. Steps with non-finite gradients are skipped.
        check_every: steps between checks that the loss is finite. Each check waits for the device.
        batch_sizes: rows of each batch of an epoch over all processes; by default the labels are counted.
        on_step: called with the state of training after each step.
        on_epoch: called after each epoch, and when `steps` ends training within one.
        progress: state from which to continue; the first pass over `data` must then yield the rest of the current
            epoch.
    """
    at = progress or Progress()
    resumed = at.step > 0
    history: list[Epoch] = []
    while (epochs is None or at.epoch < epochs) and (steps is None or at.step < steps):
        began, steps_before = time.perf_counter(), at.step
        batches = iter(data)
        while (steps is None or at.step < steps) and (group := _next_group(batches, data, at, accumulate)):
            check = at.step == 0 or (at.step + 1) % check_every == 0
            optimizer.zero_grad(set_to_none=True)
            loss = _backward(objective, group, scaler, at.epoch + 1, check=check)
            at.loss = float(loss) if check else loss
            _step(optimizer, clip, scaler)
            if check and scaler is not None and scaler.get_scale() < SMALLEST_SCALE:
                reason = "the gradients overflow in float16 at every step, so none was taken"
                raise FloatingPointError(f"training diverged in epoch {at.epoch + 1}: {reason}; {ADVICE}")
            if scheduler is not None:
                scheduler.step()
            sizes = [len(labels) for _, labels in group] if batch_sizes is None else batch_sizes[at.batches :]
            rows = sum(sizes[: len(group)])
            at.step, at.batches, at.seen = at.step + 1, at.batches + len(group), at.seen + rows
            at.total = at.total + _wide(at.loss) * rows
            resumed = False
            if on_step is not None:
                on_step(at)
        if at.step == steps_before and not at.seen:
            if resumed:  # the last pass had ended with the last step before training stopped
                resumed = False
                continue
            raise ValueError(f"data must yield batches again every epoch, but epoch {at.epoch + 1} had none")
        at.epoch += 1
        history.append(Epoch(at.epoch, float(at.total) / max(at.seen, 1), time.perf_counter() - began))
        at.total, at.seen, at.batches = 0.0, 0, 0
        if on_epoch is not None:
            on_epoch(history[-1])
    return history


def _next_group(batches: Iterator[Any], data: Any, at: Progress, accumulate: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of the next step, none at the end of an epoch.

    A last group that is incomplete must not ask for another batch: the data would then forget, before the step is
    taken and perhaps saved, that they are within an epoch.
    """
    left = len(data) - at.batches if accumulate > 1 and hasattr(data, "__len__") else 0
    return list(itertools.islice(batches, min(accumulate, left) if left > 0 else accumulate))


def _backward(
    objective: nn.Module,
    group: Sequence[tuple[Tensor, Tensor]],
    scaler: torch.amp.GradScaler | None,
    epoch: int,
    *,
    check: bool,
) -> Tensor:
    """Add the gradients of the mean loss over a group of batches, and return this loss without waiting for it."""
    total = torch.zeros(())
    weights = [objective.weight(y) for _, y in group] if len(group) > 1 else [1.0]  # type: ignore[operator]
    for place, (x, y) in enumerate(group):
        try:
            if len(group) == 1:
                loss = objective(x, y)
            else:  # regularisers do not depend on the batch: once per step
                loss = objective(x, y, share=weights[place] / sum(weights), regularize=place == 0)
        except ValueError as error:
            # Scores overflow when training diverges, also while features and parameters are still finite.
            overflowed = isinstance(error, NonFiniteScoresError) and _finite(x)
            if not overflowed and (not _finite(x) or _healthy(objective, x)):
                raise
            raise FloatingPointError(f"training diverged in epoch {epoch}: {error}; {ADVICE}") from None
        require(loss.ndim == 0, "head", "one that returns a scalar loss, with reduction 'mean' or 'sum'", loss.shape)
        if check and not math.isfinite(loss.detach()):
            raise FloatingPointError(f"the loss became {float(loss.detach())} in epoch {epoch}; {ADVICE}")
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = loss.detach() if place == 0 else total + loss.detach()
    return total


def _step(optimizer: Any, clip: float | None, scaler: torch.amp.GradScaler | None) -> None:
    """Scale gradients back, clip them, and update the parameters."""
    optimizers = getattr(optimizer, "optimizers", [optimizer])
    if scaler is not None:
        for one in optimizers:
            scaler.unscale_(one)
    if clip is not None:
        nn.utils.clip_grad_norm_([p for one in optimizers for group in one.param_groups for p in group["params"]], clip)
    if scaler is None:
        optimizer.step()
    else:
        for one in optimizers:
            scaler.step(one)
        scaler.update()


def _wide(loss: float | Tensor) -> float | Tensor:
    """Return a loss in float64, in which the losses of an epoch are summed."""
    return loss.double() if isinstance(loss, Tensor) and loss.device.type != "mps" else loss


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


class _Moved:
    """Batches that are moved to a device."""

    def __init__(self, data: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> None:
        self.data, self.device = data, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.data:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


def _require_parameters(optimizer: Any, head: nn.Module) -> None:
    """Raise a `ValueError` if an optimiser lacks parameters of the head, which would then never learn."""
    optimizers = getattr(optimizer, "optimizers", [optimizer])
    if all(hasattr(one, "param_groups") for one in optimizers):
        updated = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        missing = [name for name, p in head.named_parameters() if p.requires_grad and id(p) not in updated]
        advice = "one with the parameters of model and head, or with a frozen head"
        require(not missing, "optimizer", advice, f"one without {', '.join(missing)} of the head")


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@torch.no_grad()
def _healthy(objective: nn.Module, x: Tensor) -> bool:
    """Return True if the parameters, and the features if the objective defines them, are finite."""
    inner = objective.module if isinstance(objective, DistributedDataParallel) else objective
    of_inputs = getattr(inner, "features", None)
    return _finite(*objective.parameters(), *([] if of_inputs is None else [of_inputs(x)]))
