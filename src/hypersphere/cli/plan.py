"""What an experiment is, before it is trained: a check with a few examples, `train --dry-run`, and the first line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require, require_package
from hypersphere.data import BrokenSample, Source
from hypersphere.heads._collectives import Processes
from hypersphere.training import Config, Experiment, build_experiment

__all__ = ["checked_experiment", "plan", "start_line"]


def checked_experiment(
    config: Config,
    data_root: Path | None,
    device: torch.device,
    weights: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> Experiment:
    """Build an experiment and check it with a forward pass on two examples; warn about slow settings."""
    for tracker in config.trackers:
        if tracker.name in ("tensorboard", "wandb"):
            require_package(tracker.name, tracker.name, "track")
    try:
        experiment = build_experiment(config, data_root=data_root, weights=weights, device=device)
    except (TypeError, RuntimeError) as error:  # raised by torch and Python for options that do not fit
        raise ValueError(f"the experiment cannot be built: {_line(error)}") from error
    chosen, split = experiment.config, experiment.data
    if Processes().size > 1:
        if split.graph is not None:
            reason = "is a single graph, which cannot be divided among processes; start one process"
            raise ValueError(f"data {chosen.data.name} {reason}")
        require(
            not (chosen.clip and chosen.head.options.get("sharded")), "clip", "unset with head.sharded", chosen.clip
        )
    inputs = _first_inputs(split.train, skips=chosen.broken_files == "skip").to(device)
    objective: Any = experiment.objective
    try:
        with torch.no_grad(), evaluation_mode(objective):
            objective.head.scores(objective.features(inputs))
    except (TypeError, RuntimeError, IndexError) as error:
        message = (
            f"the model {chosen.model.name} does not fit inputs of shape {tuple(inputs.shape[1:])}: {_line(error)}"
        )
        raise ValueError(message) from error
    if split.graph is None and min(len(split.train), chosen.batch_size) == 1:
        try:  # BatchNorm, for example, cannot train on a batch of one example
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                copy.deepcopy(experiment.network).train()(inputs[:1])
        except ValueError as error:
            raise ValueError(f"this model needs batches of at least two examples, not one: {_line(error)}") from None
    if chosen.precision == "bfloat16" and device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        say("this processor has no bfloat16 instructions; float32 is probably faster")
    return experiment


def plan(experiment: Experiment, out: Path, step: int | None) -> str:
    """Return resolved settings as JSON and sizes as comments, so that the text is also valid YAML.

    Args:
        experiment: the experiment.
        out: folder of the run.
        step: step from which training would continue, None for a new run.
    """
    split = experiment.data
    shape = "×".join(map(str, _first_inputs(split.train, skips=True)[0].shape)) or "scalar"
    held_out = 0 if split.validation is None else len(split.validation)
    kind = " of other classes" if split.open_set else ""
    lines = [
        f"{len(split.train):,} training examples of shape {shape}, {held_out:,} test examples{kind}, "
        f"{len(split.classes):,} classes",
        f"{experiment.steps_per_epoch:,} steps per epoch, {experiment.steps:,} in total",
        f"network: {_sizes(experiment.network)}, {experiment.network.feature_dim:,} features",
        f"head: {_sizes(experiment.head)}",
        f"{experiment.device}, processes: {Processes().size}, threads: {torch.get_num_threads()}",
        f"{out}: {'a new run' if step is None else f'would continue from step {step:,}'}",
    ]
    return "\n".join([json.dumps(experiment.config.settings(), indent=1), *(f"# {line}" for line in lines)])


def start_line(experiment: Experiment) -> str:
    """Return one line about model, data and length of training."""
    config, split = experiment.config, experiment.data
    size = sum(parameter.numel() for parameter in experiment.network.parameters())
    model = f"{config.model.name} with {experiment.network.feature_dim} features and {size:,} parameters"
    data = f"{len(split.train):,} examples of {len(split.classes):,} classes"
    return f"{model}, {config.head.name}, {data}, {experiment.steps:,} steps on {experiment.device}"


def _sizes(module: nn.Module) -> str:
    """Return the number of parameters and how many of them are trained.

    >>> _sizes(nn.Linear(3, 2).requires_grad_(False))
    '8 parameters, 0 trained'
    """
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{sum(parameter.numel() for parameter in parameters):,} parameters, {trained:,} trained"


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _first_inputs(source: Source, *, skips: bool) -> Tensor:
    """Return the first two inputs, or the first two readable ones if broken files are skipped."""
    inputs: list[Tensor] = []
    for index in range(len(source)):
        try:
            inputs.append(source[index])
        except BrokenSample:
            if not skips:
                raise
        if len(inputs) == 2:
            break
    require(bool(inputs), "data", "at least one readable training example", "none")
    return torch.stack(inputs)
