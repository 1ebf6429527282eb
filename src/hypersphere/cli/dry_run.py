"""What `train --dry-run` prints: the resolved settings as JSON, and sizes as comments, so that YAML reads it back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from hypersphere.heads._collectives import Processes
from hypersphere.training import Assembly

__all__ = ["plan"]


def plan(assembly: Assembly, out: Path, device: torch.device, step: int | None) -> str:
    """Return the settings and the sizes of a job.

    Args:
        assembly: what the job builds.
        out: where the run would be.
        device: where it would compute.
        step: from where it would go on, None from the beginning.
    """
    task, steps = assembly.task, assembly.job.epochs * len(assembly.batches)
    shape = "×".join(map(str, task.inputs.shape[1:])) or "one number"
    lines = [
        f"{len(task.inputs):,} examples of {shape} to train on, {len(task.test_inputs):,} to test on, "
        f"{len(task.classes):,} classes",
        f"{len(assembly.batches):,} steps an epoch, {steps:,} in all",
        f"network: {_sizes(assembly.network)}, features of {assembly.network.feature_dim:,}",
        f"head: {_sizes(assembly.head)}",
        f"{device}, processes: {Processes().size}, threads: {torch.get_num_threads()}",
        f"{out}: {'a new run' if step is None else f'would go on from step {step:,}'}",
    ]
    return "\n".join([json.dumps(assembly.job.settings(), indent=1), *(f"# {line}" for line in lines)])


def _sizes(module: nn.Module) -> str:
    """How many numbers there are and how many are trained.

    >>> _sizes(nn.Linear(3, 2).requires_grad_(False))
    '8 parameters, 0 trained'
    """
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{sum(parameter.numel() for parameter in parameters):,} parameters, {trained:,} trained"
