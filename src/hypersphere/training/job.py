"""A training job as plain data: every part by name, with its options; and the objects that it stands for."""

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
from hypersphere.heads._collectives import Processes
from hypersphere.training.augment import Augmented
from hypersphere.training.batches import Batches
from hypersphere.training.network import OPERATORS, Network, build_network, initialize_
from hypersphere.training.objective import Objective
from hypersphere.training.optimizers import Together, build_optimizer
from hypersphere.training.parts import make, nearest, split_spec, truth
from hypersphere.training.rotating import Turning, turn_
from hypersphere.training.schedule import SCHEDULES, Scheduler
from hypersphere.training.taking import Taken, take_
from hypersphere.training.task import Task, load_task

__all__ = ["PRECISIONS", "REGULARIZERS", "Assembly", "Job"]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _no_regularizer(modules: nn.Module) -> None:
    """Nothing but the loss."""


REGULARIZERS: dict[str, Callable[..., nn.Module | None]] = {
    "none": _no_regularizer,
    "mhe": energy.MHE,
    "comhe": energy.CoMHE,
    "orthonormal": energy.Orthonormal,
    "orthogonal": energy.Orthogonal,
    "srip": energy.SRIP,
}


@dataclass(frozen=True)
class Job:
    """What to train, and how. A part is {"name": …, **options}.

    Attributes:
        data: a name of TASKS.
        model: one of the networks; sizes that the data fixes are filled in; `standardize` inputs, `init` "normal",
            "xavier" or "he" with an `init_mean`.
        operator: "none", "sphere_norm" or a magnitude, with an angular activation and what `convert_` takes;
            `project_every` and `weighted_gradients` keep the norms of its filters from mattering.
        head: a preset of `hypersphere.heads`; `sharded` spreads its classes over the processes, if there are several.
        regularizer: an energy or an orthogonality.
        rotation: "none", a method, "descent", "penalized" or "stochastic".
        optimizer: its `weight_decay` leaves out what decay would harm; `decay_everything` also decays biases and norms.
        schedule: of the learning rate.
        augment: `shift` in pixels and `mirror`.
        epochs, batch_size, seed: as they say.
        precision: what the network computes in, "float32" or "bfloat16".
        compile: whether the network goes through `torch.compile`.

    Example:
        >>> job = Job.of({"head": {"name": "a_softmax", "m": 3}, "epochs": 2})
        >>> job.head["m"], job.data["name"]
        (3, 'digits')
        >>> Job.of({"epoch": 2})
        Traceback (most recent call last):
        ValueError: epoch is no setting of a job; did you mean epochs?
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
            require(type(value) is int and value >= 1, name, "a whole number >= 1", value)
        require(type(self.seed) is int and self.seed >= 0, "seed", "a whole number >= 0", self.seed)
        require(self.precision in PRECISIONS, "precision", f"one of {', '.join(PRECISIONS)}", self.precision)
        require(type(self.compile) is bool, "compile", "true or false", self.compile)
        for one in fields(self):
            named = "name" in getattr(self, one.name) if _is_part(one) and one.name != "augment" else True
            require(named, one.name, "a mapping with a name and options", getattr(self, one.name))
        known = ["shift", "mirror"]
        for key in self.augment:
            if key not in known:
                raise ValueError(f"augment.{key} is no option{nearest(key, known)} It has {', '.join(known)}")
        shift, mirror = self.augment.get("shift", 0), self.augment.get("mirror", False)
        require(type(shift) is int and shift >= 0, "augment.shift", "a whole number >= 0", shift)
        require(type(mirror) is bool, "augment.mirror", "true or false", mirror)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Job:
        """Return the job that settings describe; a part given by its name alone has no options."""
        known = {one.name: one for one in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in settings.items():
            if key not in known:
                raise ValueError(f"{key} is no setting of a job{nearest(key, known)}".removesuffix("."))
            is_part = _is_part(known[key])
            values[key] = {"name": value} if is_part and isinstance(value, str) else value
            mapping = isinstance(values[key], Mapping)
            require(mapping == is_part, key, "a mapping with a name and options" if is_part else "a plain value", value)
        try:
            return cls(**json.loads(json.dumps(values)))
        except TypeError as error:
            raise ValueError(f"settings must be plain numbers, text and lists and mappings of them: {error}") from None

    def settings(self) -> dict[str, Any]:
        """What `of` makes this job of."""
        return asdict(self)

    def build(self, data_root: Path | None = None, start: Mapping[str, Any] | None = None) -> Assembly:
        """Read the data and make every part, all random numbers from the seed; begin with weights that are given."""
        return Assembly(self, load_task(self.data, data_root), start)


class Assembly:
    """The objects of a job, ready for `fit` or for a loop of your own.

    Attributes:
        task: the data.
        network: inputs to features.
        head: features and labels to a loss.
        objective: both, with the regularisers.
        batches: what an epoch goes through.
        optimizer, scheduler: of all that is trained.
        taken: what became of the weights to begin with, if any were given; rotations turn them.
    """

    def __init__(self, job: Job, task: Task, start: Mapping[str, Any] | None = None) -> None:
        torch.manual_seed(job.seed)
        self.job, self.task = job, task
        operator = dict(job.operator)
        self.project_every: int | None = operator.pop("project_every", None)
        every = self.project_every
        whole = every is None or (type(every) is int and every >= 1)
        require(whole, "operator.project_every", "None or a whole number >= 1", every)
        weighted = truth("operator.weighted_gradients", operator.pop("weighted_gradients", False))
        name, choices = split_spec("operator", OPERATORS, operator)
        if name == "none" and choices:
            raise ValueError(f"operator.{next(iter(choices))} is no option of none. It has none")
        model = dict(job.model)
        init, mean = model.pop("init", None), model.pop("init_mean", 0.0)
        self.network: Network = build_network(model, operator, task)
        options = dict(job.head)
        sharded = truth("head.sharded", options.pop("sharded", False)) and Processes().size > 1
        sizes = self.network.feature_dim, len(task.classes)
        head: heads.AngularHead = make(
            "head", heads.PRESETS, options, None, *sizes, more=heads.HeadOptions.__annotations__, beside=["sharded"]
        )
        require(head.reduction != "none", "head.reduction", "'mean' or 'sum'", head.reduction)
        modules = nn.ModuleDict({"network": self.network.body, "head": head})
        if init is not None:
            initialize_(modules, init, mean)
        self.taken: Taken | None = None if start is None else take_(self.network, head, start)
        self.turning: Turning = turn_(modules, job.rotation)
        regularizer = make("regularizer", REGULARIZERS, job.regularizer, None, modules)
        if sharded and regularizer is not None:
            spread = "needs all class vectors in one process, but head.sharded spreads them"
            raise ValueError(f"regularizer {job.regularizer['name']} {spread}; leave one of the two out")
        with torch.random.fork_rng(devices=[]):  # so that all that follows draws as without processes
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
        """Go through the test data once, in order."""
        if self.task.graph is not None:
            size = len(self.task.test_inputs)
        return iter(Batches(self.task.test_inputs, self.task.test_labels, size))

    def after_step(self, step: int) -> None:
        """Do what the job wants done after each step of the optimiser."""
        if self.turning.stochastic is not None:
            self.turning.stochastic.step(self.optimizer.optimizers[0])
        if self.project_every is not None and step % self.project_every == 0:
            optim.project_weights_(self.network)


def _is_part(one: Field[Any]) -> bool:
    """Whether a setting is a mapping, which alone have factories of their defaults."""
    return one.default_factory is not MISSING
