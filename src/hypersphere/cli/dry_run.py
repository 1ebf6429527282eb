"""The output of `train --dry-run`: resolved settings as JSON and sizes as comments, so that it is also valid YAML."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from hypersphere.heads._collectives import Processes
from hypersphere.training import Assembly

__all__ = ["plan"]


def plan(assembly: Assembly, out: Path, device: torch.device, step: int | None) -> str:
    """Format the settings and sizes of a job.

    Args:
        assembly: the components of the job.
        out: folder of the run.
        device: device that would be used.
        step: step from which training would continue, None for a new run.
    """
    task, steps = assembly.task, assembly.job.epochs * len(assembly.batches)
    shape = "×".join(map(str, task.inputs.shape[1:])) or "scalar"
    lines = [
        f"{len(task.inputs):,} training examples of shape {shape}, {len(task.test_inputs):,} test examples, "
        f"{len(task.classes):,} classes",
        f"{len(assembly.batches):,} steps per epoch, {steps:,} in total",
        f"network: {_sizes(assembly.network)}, {assembly.network.feature_dim:,} features",
        f"head: {_sizes(assembly.head)}",
        f"{device}, processes: {Processes().size}, threads: {torch.get_num_threads()}",
        f"{out}: {'a new run' if step is None else f'would continue from step {step:,}'}",
    ]
    return "\n".join([json.dumps(assembly.job.settings(), indent=1), *(f"# {line}" for line in lines)])


def _sizes(module: nn.Module) -> str:
    """Return the number of parameters and how many of them are trained.

    >>> _sizes(nn.Linear(3, 2).requires_grad_(False))
    '8 parameters, 0 trained'
    """
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{sum(parameter.numel() for parameter in parameters):,} parameters, {trained:,} trained"
