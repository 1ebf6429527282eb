"""The training loop: batches to losses to gradients to steps.

`minimize` is the loop. `fit` calls it for a model and a head, the `Trainer` for an experiment.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require
from hypersphere.heads import NonFiniteScoresError
from hypersphere.training.objective import Objective

__all__ = ["Epoch", "Progress", "embed", "fit", "minimize", "predict"]

ADVICE = "a smaller learning rate may help"
FIRST_ADVICE = "no step was taken yet, so check the inputs and the options of head and regularisers"
# Training has diverged if the loss scale of float16 is below this. It starts at 65,536; each skipped step halves it.
SMALLEST_SCALE = 1e-3

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Epoch:
    """The result of one epoch: its number, the mean loss including regularisers, and its duration in seconds."""

    number: int
    loss: float
    seconds: float


@dataclass
class Progress:
    """The state of training. Losses stay on the device until they are read.

    Attributes:
        epoch: number of completed epochs.
        step: number of optimiser steps.
        total: sum of the losses over the examples of the current epoch.
        seen: number of examples in the current epoch so far.
        batches: number of batches in the current epoch so far.
        position: number of batches in the current pass over the data so far. It differs from `batches` if `steps` ended
            training within a pass, which ends the epoch, and training was then continued.
        loss: loss of the last step.
    """

    epoch: int = 0
    step: int = 0
    total: float | Tensor = 0.0
    seen: int = 0
    batches: int = 0
    position: int = 0
    loss: float | Tensor = math.nan

    def count_step(self, loss: float | Tensor, batches: int, rows: int) -> None:
        """Count a step whose batches have `rows` examples in total."""
        # The losses of an epoch are summed in float64, which MPS does not have.
        double = loss.double() if isinstance(loss, Tensor) and loss.device.type != "mps" else loss
        self.loss, self.total = loss, self.total + double * rows
        self.step, self.seen = self.step + 1, self.seen + rows
        self.batches, self.position = self.batches + batches, self.position + batches

    def end_epoch(self, seconds: float) -> Epoch:
        """Count an epoch and return its result."""
        self.epoch += 1
        result = Epoch(self.epoch, float(self.total) / max(self.seen, 1), seconds)
        self.total, self.seen, self.batches = 0.0, 0, 0
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {**vars(self), "total": float(self.total), "loss": float(self.loss)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        complete = {"position": state["batches"], **state}  # older checkpoints have no position
        for name in list(vars(self)):
            setattr(self, name, complete[name])


def fit(
    model: nn.Module,
    head: nn.Module,
    data: Iterable[Batch],
    *,
    epochs: int,
    optimizer: Any,
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
        optimizer: optimiser of the parameters of the model and the head, or `hypersphere.optim.Optimizers`.
        scheduler: a torch learning-rate scheduler, stepped once per batch.
        regularizers: functions without arguments; their results are added to every loss.
        on_step: called after each optimiser step with the number of steps so far.
        on_epoch: called after each epoch.

    Returns:
        One `Epoch` per pass over the data.

    Raises:
        FloatingPointError: if the loss is not finite; the parameters are those before that step.
        ValueError: if a batch is not a pair, if an epoch has no batch, for example because an iterator was exhausted by
            the first epoch, or if the optimiser does not have the parameters of the head.
    """
    _require_parameters(optimizer, head)
    model.train()
    head.train()
    parameter = next(model.parameters(), None)
    device = None if parameter is None else parameter.device
    return minimize(
        Objective(model, head, regularizers),
        data,
        epochs=epochs,
        optimizer=optimizer,
        scheduler=scheduler,
        prepare=lambda x, y: (x.to(device, non_blocking=True), y.to(device, non_blocking=True)),
        on_step=None if on_step is None else lambda progress: on_step(progress.step),
        on_epoch=on_epoch,
    )


def minimize(
    objective: nn.Module,
    data: Iterable[Batch],
    *,
    optimizer: Any,
    epochs: int | None = None,
    steps: int | None = None,
    scheduler: Any = None,
    prepare: Callable[[Tensor, Tensor], Batch] = lambda x, y: (x, y),
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
        data: yields (inputs, labels); iterated once per epoch.
        optimizer: an optimiser, or several that step together (`hypersphere.optim.Optimizers`).
        epochs: number of epochs; None if `steps` ends training.
        steps: number of optimiser steps.
        scheduler: stepped once per optimiser step.
        prepare: maps each batch to the one that is used, for example on another device.
        accumulate: batches per optimiser step. The gradient is that of one large batch. The objective must have a
            method `loss_denominator` and accept `share` and `regularize`, as `Objective` and `NextToken` do.
        clip: largest norm of the gradient of all parameters.
        scaler: loss scaling for float16. Steps with non-finite gradients are skipped.
        check_every: steps between checks that the loss is finite. Each check waits for the device.
        batch_sizes: rows of each batch of an epoch over all processes; by default the labels are counted.
        on_step: called with the state of training after each step.
        on_epoch: called after each epoch, and when `steps` ends training within one.
        progress: state from which to continue; the first pass over `data` must then yield the rest of the current
            epoch.

    Returns:
        One `Epoch` per epoch that ended in this call.

    Raises:
        FloatingPointError, ValueError: as `fit`, apart from the check of the parameters of the head.
    """
    progress = progress or Progress()
    # If `steps` ended training with the last batch of an epoch, the first pass after resuming has no batches left.
    may_be_empty = progress.step > 0
    history: list[Epoch] = []

    def end_epoch(began: float) -> None:
        history.append(progress.end_epoch(time.perf_counter() - began))
        if on_epoch is not None:
            on_epoch(history[-1])

    if progress.step == steps and progress.batches > 0:
        end_epoch(time.perf_counter())  # training was stopped between the last step and the end of its epoch
    while (epochs is None or progress.epoch < epochs) and (steps is None or progress.step < steps):
        began = time.perf_counter()
        for group in _groups(data, accumulate, progress.position):
            check = progress.step == 0 or (progress.step + 1) % check_every == 0
            batches = [prepare(*_pair(batch)) for batch in group]
            optimizer.zero_grad(set_to_none=True)
            loss = _backward(objective, batches, scaler, progress, check=check)
            _step(optimizer, clip, scaler)
            if check and scaler is not None and scaler.get_scale() < SMALLEST_SCALE:
                reason = "the gradients overflow in float16 at every step, so no step is taken"
                raise FloatingPointError(f"training diverged in epoch {progress.epoch + 1}: {reason}; {ADVICE}")
            if scheduler is not None:
                scheduler.step()
            sizes = [len(labels) for _, labels in group] if batch_sizes is None else batch_sizes[progress.position :]
            progress.count_step(float(loss) if check else loss, len(group), sum(sizes[: len(group)]))
            if on_step is not None:
                on_step(progress)
            if progress.step == steps:
                break  # before another batch is read, so that `data` can continue from here
        else:
            progress.position = 0  # the next pass starts from the beginning
        if progress.batches > 0:
            end_epoch(began)
        elif not may_be_empty:
            raise ValueError(f"data must yield batches again every epoch, but epoch {progress.epoch + 1} had none")
        may_be_empty = False
    return history


def _groups(data: Any, accumulate: int, done: int) -> Iterator[list[Batch]]:
    """Yield the batches of each step of a pass over the data, of which `done` batches were used before.

    The last group may be incomplete. It must not request another batch: a request past the end resets the position of
    the loader, and the checkpoint after the step would have the wrong position.
    """
    batches = iter(data)
    left = len(data) - done if accumulate > 1 and hasattr(data, "__len__") else 0
    while group := list(itertools.islice(batches, min(accumulate, left) if left > 0 else accumulate)):
        left -= len(group)
        yield group


def _pair(batch: Any) -> Batch:
    """Return a batch; raise a `ValueError` unless it is a pair of inputs and labels.

    Unpacking alone would also accept a tensor with two rows.
    """
    is_sequence = isinstance(batch, (tuple, list))
    if is_sequence and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    kinds = ", ".join(type(item).__name__ for item in batch[:3]) if is_sequence else ""
    received = f"a {type(batch).__name__}" + (f" of length {len(batch)} ({kinds})" if is_sequence else "")
    raise ValueError(f"data must yield (inputs, labels) with labels as a tensor, not {received}")


def _backward(
    objective: nn.Module,
    batches: Sequence[Batch],
    scaler: torch.amp.GradScaler | None,
    progress: Progress,
    *,
    check: bool,
) -> Tensor:
    """Accumulate the gradients of one optimiser step and return its mean loss as a device tensor."""
    epoch, advice = progress.epoch + 1, ADVICE if progress.step > 0 else FIRST_ADVICE
    total = torch.zeros(())
    unwrapped: Any = _unwrapped(objective)
    denominators = [unwrapped.loss_denominator(y) for _, y in batches] if len(batches) > 1 else []
    for index, (x, y) in enumerate(batches):
        try:
            if len(batches) == 1:
                loss = objective(x, y)
            else:  # regularisers do not depend on the batch, so they are added once per step
                loss = objective(x, y, share=denominators[index] / sum(denominators), regularize=index == 0)
        except ValueError as error:
            # Scores may overflow although features and parameters are still finite. Other errors are divergence only if
            # the inputs are finite, but not the features or parameters.
            overflowed = isinstance(error, NonFiniteScoresError) and _finite(x)
            if not overflowed and (not _finite(x) or _is_finite_on(objective, x)):
                raise
            raise FloatingPointError(f"training diverged in epoch {epoch}: {error}; {advice}") from None
        require(loss.ndim == 0, "head", "one that returns a scalar loss, with reduction 'mean' or 'sum'", loss.shape)
        if check and not math.isfinite(loss.detach()):
            raise FloatingPointError(f"the loss became {float(loss.detach())} in epoch {epoch}; {advice}")
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = loss.detach() if index == 0 else total + loss.detach()
    return total


def _step(optimizer: Any, clip: float | None, scaler: torch.amp.GradScaler | None) -> None:
    """Unscale the gradients, clip them, and update the parameters."""
    optimizers = _optimizers(optimizer)
    if scaler is not None:
        for opt in optimizers:
            scaler.unscale_(opt)  # before clipping, which needs the true norm
    if clip is not None:
        parameters = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_([_with_dense_gradient(p) for p in parameters], clip)
    if scaler is None:
        optimizer.step()
    else:
        for opt in optimizers:
            scaler.step(opt)
        scaler.update()


def _with_dense_gradient(p: Tensor) -> Tensor:
    """Return `p`, or a stand-in whose gradient is the rows of the sparse gradient of `p`, in the same memory."""
    if p.grad is None or not p.grad.is_sparse:
        return p
    p.grad = p.grad.coalesce()
    rows = p.grad.values()
    stand_in = rows.new_empty(()).expand_as(rows)  # one number in memory
    stand_in.grad = rows
    return stand_in


def _optimizers(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "optimizers", [optimizer])


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _unwrapped(objective: nn.Module) -> nn.Module:
    """Return the module inside DDP, which hides its methods."""
    return objective.module if isinstance(objective, DistributedDataParallel) else objective


@torch.no_grad()
def _is_finite_on(objective: nn.Module, x: Tensor) -> bool:
    """Return True if the parameters, and the features of a batch if the objective defines them, are finite."""
    features = getattr(_unwrapped(objective), "features", None)
    return _finite(*objective.parameters(), *([] if features is None else [features(x)]))


def _require_parameters(optimizer: Any, head: nn.Module) -> None:
    """Raise a `ValueError` if an optimiser lacks parameters of the head, which would then never learn."""
    optimizers = _optimizers(optimizer)
    if all(hasattr(opt, "param_groups") for opt in optimizers):
        updated = {id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
        missing = [name for name, p in head.named_parameters() if p.requires_grad and id(p) not in updated]
        if missing:
            names = ", ".join(missing)
            raise ValueError(f"optimizer must have all parameters of the head that are not frozen, but lacks {names}")


@torch.no_grad()
def embed(
    model: Callable[[Tensor], Tensor], data: Iterable[Batch]
) -> tuple[Float[Tensor, " samples *dim"], Shaped[Tensor, " samples"]]:
    """Return the features (N, d) and labels (N,) of all batches, computed with the model in evaluation mode."""
    with evaluation_mode(model), parametrize.cached():
        parts = [(model(x), y) for x, y in map(_pair, data)]
    require(bool(parts), "data", "an iterable with at least one batch", data)
    for features, labels in parts:
        accepted = f"as many as the {len(features)} features of their batch"
        require(len(features) == len(labels), "labels", accepted, len(labels))
    return torch.cat([features for features, _ in parts]), torch.cat([labels for _, labels in parts])


@torch.no_grad()
def predict(head: Any, features: Float[Tensor, "samples dim"]) -> Int[Tensor, " samples"]:
    """Return the class with the largest score (without margin) for each feature; `head` has a method `scores`."""
    return head.scores(features).argmax(1)
