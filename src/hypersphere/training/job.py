"""A training job as plain data, each component given by name and options; and the objects that are built from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import energy, heads, optim
from hypersphere._validation import require
from hypersphere.data.batches import Batches
from hypersphere.heads._collectives import Processes
from hypersphere.training.augment import Augmented
from hypersphere.training.job_network import OPERATORS, Network, build_network, initialize_
from hypersphere.training.job_optimizers import Together, build_optimizer
from hypersphere.training.job_rotating import Turning, turn_
from hypersphere.training.job_schedule import SCHEDULES, Scheduler
from hypersphere.training.objective import Objective
from hypersphere.training.parts import make, nearest, split_spec, truth, unknown_option
from hypersphere.training.taking import Taken, take_
from hypersphere.training.task import Task, load_task

__all__ = ["PRECISIONS", "REGULARIZERS", "Assembly", "Job"]

AUGMENTATIONS = ("shift", "mirror")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _no_regularizer(modules: nn.Module) -> None:
    """No regulariser."""


REGULARIZERS: dict[str, Callable[..., nn.Module | None]] = {"none": _no_regularizer, **energy.REGULARIZERS}


@dataclass(frozen=True)
class Job:
    """The settings of a training job. A component is {"name": …, **options}.

    Attributes:
        data: a name of TASKS with options.
        model: a network; sizes that follow from the data are filled in. Further options: `standardize` the inputs,
            `init` ("normal", "xavier" or "he") and `init_mean`.
        operator: "none", "sphere_norm" or a magnitude, with an angular activation and the options of `convert_`.
            `project_every` and `weighted_gradients` remove the effect of the norms of the filters.
        head: a preset of `hypersphere.heads`; `sharded` divides its classes among the processes.
        regularizer: an energy or an orthogonality regulariser.
        rotation: "none", an orthogonal map, "descent", "penalized" or "stochastic".
        optimizer: `weight_decay` skips biases, norms and similar parameters unless `decay_everything` is set.
        schedule: schedule of the learning rate.
        augment: `shift` in pixels, and `mirror`.
        epochs: number of epochs.
        batch_size: examples per step, summed over processes.
        seed: seed for all random number generators.
        precision: precision of the network, "float32" or "bfloat16".
        compile: compile the network with `torch.compile`.

    Example:
        >>> job = Job.of({"head": {"name": "a_softmax", "m": 3}, "epochs": 2})
        >>> job.head["m"], job.data["name"]
        (3, 'digits')
        >>> Job.of({"epoch": 2})
        Traceback (most recent call last):
        ValueError: epoch is not a setting of a job; did you mean epochs?
    """

    data: dict[str, Any] = field(default_factory=lambda: {"name": "digits"})
    model: dict[str, Any] = field(default_factory=lambda: {"name": "toy_cnn"})
    operator: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    head: dict[str, Any] = field(default_factory=lambda: {"name": "softmax"})
    regularizer: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    rotation: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4})
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "one_cycle"})
    augment: dict[str, Any] = field(default_factory=dict)
    epochs: int = 10
    batch_size: int = 64
    seed: int = 0
    precision: str = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, name, "an integer >= 1", value)
        require(type(self.seed) is int and self.seed >= 0, "seed", "an integer >= 0", self.seed)
        require(self.precision in PRECISIONS, "precision", f"one of {', '.join(PRECISIONS)}", self.precision)
        require(type(self.compile) is bool, "compile", "true or false", self.compile)
        for one in fields(self):
            named = "name" in getattr(self, one.name) if _is_part(one) and one.name != "augment" else True
            require(named, one.name, "a mapping with a name and options", getattr(self, one.name))
        for key in self.augment:
            if key not in AUGMENTATIONS:
                raise ValueError(unknown_option("augment", key, "augment", AUGMENTATIONS))
        shift, mirror = self.augment.get("shift", 0), self.augment.get("mirror", False)
        require(type(shift) is int and shift >= 0, "augment.shift", "an integer >= 0", shift)
        require(type(mirror) is bool, "augment.mirror", "true or false", mirror)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Job:
        """Return the job with these settings; a component may be given by its name alone."""
        declared = {one.name: one for one in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in settings.items():
            if key not in declared:
                raise ValueError(f"{key} is not a setting of a job{nearest(key, declared)}".removesuffix("."))
            is_part = _is_part(declared[key])
            values[key] = {"name": value} if is_part and isinstance(value, str) else value
            mapping = isinstance(values[key], Mapping)
            require(mapping == is_part, key, "a mapping with a name and options" if is_part else "a plain value", value)
        try:
            return cls(**json.loads(json.dumps(values)))
        except TypeError as error:
            raise ValueError(f"settings must consist of numbers, text, lists and mappings: {error}") from None

    def settings(self) -> dict[str, Any]:
        """Return the settings as a mapping; `Job.of` is the inverse."""
        return asdict(self)

    def build(self, data_root: Path | None = None, start: Mapping[str, Any] | None = None) -> Assembly:
        """Read the data and build all components with the seed of the job; `start` holds initial weights, if any."""
        return Assembly(self, load_task(self.data, data_root), start)


class Assembly:
    """The objects of a job, ready for `fit` or for another training loop.

    Attributes:
        task: the data.
        network: maps inputs to features.
        head: maps features and labels to a loss.
        objective: network, head and regularisers.
        batches: the batches of one epoch.
        optimizer, scheduler: optimiser and learning-rate scheduler of all trained parameters.
        taken: which of the initial weights were loaded, if any were given. Rotations are applied to them.
    """

    def __init__(self, job: Job, task: Task, start: Mapping[str, Any] | None = None) -> None:
        torch.manual_seed(job.seed)
        self.job, self.task = job, task
        operator = dict(job.operator)
        self.project_every: int | None = operator.pop("project_every", None)
        every = self.project_every
        is_valid = every is None or (type(every) is int and every >= 1)
        require(is_valid, "operator.project_every", "None or an integer >= 1", every)
        weighted = truth("operator.weighted_gradients", operator.pop("weighted_gradients", False))
        name, choices = split_spec("operator", OPERATORS, operator)
        if name == "none" and choices:
            raise ValueError(unknown_option("operator", next(iter(choices)), "none", ()))
        model = dict(job.model)
        init, mean = model.pop("init", None), model.pop("init_mean", 0.0)
        self.network: Network = build_network(model, operator, task)
        options = dict(job.head)
        sharded = truth("head.sharded", options.pop("sharded", False)) and Processes().size > 1
        sizes = self.network.feature_dim, len(task.classes)
        head: heads.AngularHead = make(
            "head", heads.PRESETS, options, None, *sizes, more=heads.HeadOptions.__annotations__, handled=["sharded"]
        )
        require(head.reduction != "none", "head.reduction", "'mean' or 'sum'", head.reduction)
        modules = nn.ModuleDict({"network": self.network.body, "head": head})
        if init is not None:
            initialize_(modules, init, mean)
        self.taken: Taken | None = None if start is None else take_(self.network, head, start)
        self.turning: Turning = turn_(modules, job.rotation)
        regularizer = make("regularizer", REGULARIZERS, job.regularizer, None, modules)
        if sharded and regularizer is not None:
            reason = "needs all class vectors in one process, but head.sharded divides them; remove one of the two"
            raise ValueError(f"regularizer {job.regularizer['name']} {reason}")
        with torch.random.fork_rng(devices=[]):  # later random numbers do not depend on the number of processes
            self.head: heads.AngularHead | heads.ShardedHead = heads.ShardedHead(head) if sharded else head
        if weighted:
            optim.WeightedGradients(self.network)
        self.objective = Objective(
            self.network,
            self.head,
            [part for part in (regularizer, self.turning.penalty) if part is not None],
            precision=PRECISIONS[job.precision],
        )
        self.generator = torch.Generator().manual_seed(job.seed)
        self.batches = self._batches(task)
        self.optimizer: Together = build_optimizer(self.objective, self.turning.on_group, job.optimizer)
        schedule = make("schedule", SCHEDULES, job.schedule)
        self.scheduler = Scheduler(self.optimizer.optimizers, schedule, job.epochs * len(self.batches))

    def _batches(self, task: Task) -> Batches | Augmented:
        size = len(task.inputs) if task.graph is not None else self.job.batch_size
        batches = Batches(task.inputs, task.labels, size, self.generator)
        return Augmented(batches, self.generator, **self.job.augment) if self.job.augment else batches

    def test_batches(self, size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an iterator over the test data, in order."""
        if self.task.graph is not None:
            size = len(self.task.test_inputs)
        return iter(Batches(self.task.test_inputs, self.task.test_labels, size))

    def after_step(self, step: int) -> None:
        """Run the actions of the job that follow each optimiser step."""
        if self.turning.stochastic is not None:
            self.turning.stochastic.step(self.optimizer.optimizers[0])
        if self.project_every is not None and step % self.project_every == 0:
            optim.project_weights_(self.network)


def _is_part(one: Field[Any]) -> bool:
    """Return True if a setting is a component; only these have default factories."""
    return one.default_factory is not MISSING
