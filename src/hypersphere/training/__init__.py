"""The training loop, its components, and training jobs as plain data."""

from hypersphere.training.batches import Batches
from hypersphere.training.checkpoint import Checkpoint, DamagedCheckpoint
from hypersphere.training.checkpoints import Checkpoints
from hypersphere.training.job import Assembly, Job
from hypersphere.training.loop import Epoch, Progress, embed, fit, minimize, predict
from hypersphere.training.objective import Objective
from hypersphere.training.random_state import RandomState
from hypersphere.training.run import Run
from hypersphere.training.session import Session
from hypersphere.training.task import Task, load_task

__all__ = [
    "Assembly",
    "Batches",
    "Checkpoint",
    "Checkpoints",
    "DamagedCheckpoint",
    "Epoch",
    "Job",
    "Objective",
    "Progress",
    "RandomState",
    "Run",
    "Session",
    "Task",
    "embed",
    "fit",
    "load_task",
    "minimize",
    "predict",
]
