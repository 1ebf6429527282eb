"""Check an experiment before it is trained: the model fits the data, metrics exist, packages are installed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require, require_package
from hypersphere.data import BrokenSample, Source
from hypersphere.optim.schedules import Plateau
from hypersphere.training.build import Experiment
from hypersphere.training.validation import Accuracy, VerificationProtocol

__all__ = ["check_experiment"]


def check_experiment(experiment: Experiment, *, on_message: Callable[[str], None] = warnings.warn) -> None:
    """Find problems before training: check the settings of validation, and pass two examples through the model.

    Args:
        experiment: the experiment.
        on_message: called with advice about settings that work but are slow.

    Raises:
        ValueError: if the model does not fit the data, or a metric that a setting names is not measured.
        ImportError: if the package of a tracker is not installed.
    """
    config, split = experiment.config, experiment.data
    for tracker in config.trackers:
        if tracker.name in ("tensorboard", "wandb"):
            require_package(tracker.name, tracker.name, "track")
    _check_validation(experiment)
    inputs = _first_inputs(split.train, skip_broken=config.broken_files == "skip").to(experiment.device)
    if inputs.shape[1:] != experiment.input_shape and split.graph is None:
        inputs = inputs.new_zeros(len(inputs), *experiment.input_shape)  # an augmentation changes the shape
    objective: Any = experiment.objective
    try:
        with torch.no_grad(), evaluation_mode(objective):
            features = objective.features(inputs)
            if hasattr(objective.head, "scores"):
                objective.head.scores(features)
    except (TypeError, RuntimeError, IndexError) as error:
        shape, reason = tuple(inputs.shape[1:]), str(error).strip().partition("\n")[0]
        raise ValueError(f"the model {config.model.name} does not fit inputs of shape {shape}: {reason}") from error
    if split.graph is None and min(len(split.train), config.batch_size) == 1:
        try:  # BatchNorm, for example, cannot train on a batch of one example
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                copy.deepcopy(experiment.network).train()(inputs[:1])
        except ValueError as error:
            raise ValueError(f"this model needs batches of at least two examples, not one: {error}") from None
    on_cpu = experiment.device.type == "cpu"
    if config.precision == "bfloat16" and on_cpu and not torch.cpu._is_avx512_bf16_supported():
        on_message("this processor has no bfloat16 instructions; float32 is probably faster")


def _check_validation(experiment: Experiment) -> None:
    """Raise the errors of settings, head and pairs that would otherwise occur at the first validation."""
    config, schedule = experiment.config, experiment.scheduler.schedule
    by_epochs = config.validation.every_unit == "epochs"
    # Validation after a number of steps measures no loss: only the line of a complete epoch has one.
    names = ["loss"] * by_epochs + experiment.validation.metric_names()
    metrics = {"validation.best": config.validation.best}
    metrics |= {"schedule.metric": schedule.metric} if isinstance(schedule, Plateau) else {}
    for setting, metric in metrics.items():
        # A protocol outside the library may compute any metric.
        fits = metric is None or metric in names or f"{metric.rpartition('.')[0]}.*" in names
        reason = "" if by_epochs else " (and loss, if validation.every_unit is epochs)"
        require(fits, setting, f"one of {', '.join(names)}{reason}", metric)
    for name, protocol, split in experiment.validation.protocols():
        if isinstance(protocol, Accuracy):
            accepted = f"a head with a method scores(features), which {name} needs"
            require(hasattr(experiment.head, "scores"), "head", accepted, config.head.name)
        if isinstance(protocol, VerificationProtocol):
            assert split.validation is not None
            if protocol.draws_pairs(split) and len(split.validation.labels.unique()) < 2:
                change = "raise selection" if config.selection else "set data.held_out to 2 or more"
                raise ValueError(f"{name} needs 2 held-out classes" + f"; {change}" * split.open_set)
            # Raises if the file of pairs is invalid, or if there are too few pairs.
            protocol.chosen_pairs(split.validation.labels, split)


def _first_inputs(source: Source, *, skip_broken: bool) -> Tensor:
    """Return the first two inputs, or the first two readable ones if broken files are skipped."""
    inputs: list[Tensor] = []
    for index in range(len(source)):
        try:
            inputs.append(source[index])
        except BrokenSample:
            if not skip_broken:
                raise
        if len(inputs) == 2:
            break
    if not inputs:
        raise ValueError("data must have at least one readable training example, but none can be read")
    return torch.stack(inputs)
