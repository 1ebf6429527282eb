"""The settings of an experiment, the objects that are built from them, the training loop, and run folders.

Modules are imported at their first use, so that the command line can read the declarations in `config` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypersphere.data import Batches
    from hypersphere.training.build import Experiment, build_experiment
    from hypersphere.training.calibration import RunCalibration
    from hypersphere.training.check import check_experiment
    from hypersphere.training.checkpoint import Checkpoint, Checkpoints, DamagedCheckpoint
    from hypersphere.training.config import Component, Config
    from hypersphere.training.gan import GanLosses, discriminator_loss, generate, generator_loss, train_gan
    from hypersphere.training.loop import Epoch, Progress, embed, fit, minimize, predict
    from hypersphere.training.objective import Objective
    from hypersphere.training.processes import process_group
    from hypersphere.training.random_state import RandomState
    from hypersphere.training.run import Run, read_weights
    from hypersphere.training.signals import interrupts
    from hypersphere.training.trainer import Trainer

_MODULES = {
    "build": ("Experiment", "build_experiment"),
    "calibration": ("RunCalibration",),
    "check": ("check_experiment",),
    "checkpoint": ("Checkpoint", "Checkpoints", "DamagedCheckpoint"),
    "config": ("Component", "Config"),
    "gan": ("GanLosses", "discriminator_loss", "generate", "generator_loss", "train_gan"),
    "loop": ("Epoch", "Progress", "embed", "fit", "minimize", "predict"),
    "objective": ("Objective",),
    "processes": ("process_group",),
    "random_state": ("RandomState",),
    "run": ("Run", "read_weights"),
    "signals": ("interrupts",),
    "trainer": ("Trainer",),
}

__all__ = [
    "Batches",
    "Checkpoint",
    "Checkpoints",
    "Component",
    "Config",
    "DamagedCheckpoint",
    "Epoch",
    "Experiment",
    "GanLosses",
    "Objective",
    "Progress",
    "RandomState",
    "Run",
    "RunCalibration",
    "Trainer",
    "build_experiment",
    "check_experiment",
    "discriminator_loss",
    "embed",
    "fit",
    "generate",
    "generator_loss",
    "interrupts",
    "minimize",
    "predict",
    "process_group",
    "read_weights",
    "train_gan",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use."""
    if name == "Batches":
        return importlib.import_module("hypersphere.data").Batches
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if name in ("Assembly", "Job", "Session", "Task", "load_task"):
        use = "Config, build_experiment, Experiment, Trainer and hypersphere.data.DATA"
        raise AttributeError(f"{__name__}.{name} of version 0.1 was removed; use {use}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
