"""Build an experiment: the objects that a config describes, ready for the `Trainer` or for another loop."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn

from hypersphere import data, energy, heads, models, optim
from hypersphere._collectives import Processes
from hypersphere._modes import evaluation_mode
from hypersphere._validation import is_number, require
from hypersphere.data.images import as_floats
from hypersphere.robustness import ATTACKS, Attack
from hypersphere.training.components import MENUS, create, require_trust
from hypersphere.training.config import Component, Config, with_absolute_paths
from hypersphere.training.distributed import SharedGradScaler, shard_network_
from hypersphere.training.loop import embed
from hypersphere.training.network import Operator, build_body
from hypersphere.training.objective import Objective
from hypersphere.training.optimizers import build_optimizer
from hypersphere.training.rotations import TrainedRotation
from hypersphere.training.validation import Validator

__all__ = [
    "ADVERSARIES",
    "REGULARIZERS",
    "Experiment",
    "build",
    "build_experiment",
    "build_network_on_meta",
    "resolve",
]

META_HEAD_SIZE = 2**24  # `num_classes * dim` above which a sharded head is built on the meta device


# --- menus of components


def _no_regularizer(model: nn.Module) -> None:
    """No regulariser."""


def _t_net_penalty(model: nn.ModuleDict, weight: float = 0.001) -> Callable[[], Tensor]:
    """Weight times ½ Σ ‖I − AAᵀ‖² of the matrices A that the T-Nets of a PointNet predict (pointnet_transforms)."""
    body: Any = model["network"]
    require(hasattr(body, "penalty"), "regularizers", "without t_net unless the model is pointnet_transforms", "t_net")
    return lambda: weight * body.penalty()


REGULARIZERS: dict[str, Callable[..., Any]] = {
    "none": _no_regularizer,
    **energy.REGULARIZERS,
    "t_net": _t_net_penalty,
}


def _no_adversary() -> None:
    """Train on the inputs as they are."""


ADVERSARIES: dict[str, Callable[..., Attack | None]] = {"none": _no_adversary, **ATTACKS}


@dataclass(frozen=True)
class AdversarialOptions:
    """Options of every attack in adversarial training.

    Attributes:
        weight: weight of the attacked inputs in the loss.
    """

    weight: float = 0.5

    def __post_init__(self) -> None:
        require(is_number(self.weight, 0, 1), "adversarial.weight", "a number in [0, 1]", self.weight)


@dataclass(frozen=True)
class HeadTrainingOptions:
    """Options of every head that concern its training.

    Attributes:
        sharded: divide the classes among the processes.
        sample: fraction of the negative classes that each step trains.
        renormalize: rescale class vectors to norm 1 after each step.
    """

    sharded: bool = False
    sample: float | None = None
    renormalize: bool = False

    def __post_init__(self) -> None:
        for name in ("sharded", "renormalize"):
            require(isinstance(getattr(self, name), bool), f"head.{name}", "true or false", getattr(self, name))
        is_fraction = self.sample is None or (is_number(self.sample, 0, 1) and self.sample > 0)
        require(is_fraction, "head.sample", "null or a number in (0, 1]", self.sample)
        require(self.sample is None or self.sharded, "head.sample", "null without head.sharded", self.sample)

    @property
    def needs_sharded_head(self) -> bool:
        """True if the classes are divided among several processes, or sampled."""
        return self.sharded and (Processes().size > 1 or self.sample is not None)


# --- the experiment


class Experiment:
    """The objects of an experiment, built in the order in which they are listed here.

    Attributes:
        config: the settings, in which everything that depends on the data is resolved.
        data: the data; random data if the experiment was built from an outline.
        outline: shape, dtype and classes of the data, None for a graph.
        input_shape: shape of an input of the network, after augmentation; empty for a graph.
        augment: augmentations of float batches, applied in order.
        network: maps inputs to features.
        head: maps features and labels to a loss.
        loaded: which of the initial weights were loaded, if any were given.
        rotation: training by rotation.
        objective: network, head and regularisers.
        loader: the training batches.
        steps, steps_per_epoch: numbers of optimiser steps.
        optimizer, scheduler: optimisers and learning-rate schedule of all trained parameters.
        scaler: loss scaling for float16, None for other precisions.
        ema: moving average of the weights, or None.
        validation: computes the metrics.
    """

    def __init__(
        self,
        config: Config,
        split: data.DataSplit,
        *,
        weights: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.data, self.outline = split, split.outline()
        self.augment = _augmentations(config)
        self.input_shape = _input_shape(self.outline, self.augment)
        self.config = config = resolve(config, split, self.input_shape)
        torch.manual_seed(config.seed)
        random.seed(config.seed)  # only code outside the library draws from this generator and that of NumPy
        numpy.random.seed(config.seed % 2**32)  # noqa: NPY002
        self._build_objective(weights)
        self.objective.to(device)
        if Processes().size > 1:
            self._distribute_()  # before the optimiser is built, because it replaces parameters
        self._build_loader()
        self._build_optimizer()
        self._build_validation()

    def _build_objective(self, weights: Mapping[str, Any] | None) -> None:
        """Build network, head and regularisers.

        The order of the random draws is part of the results: network, head, initialisation, rotation, regularisers.
        """
        config, split = self.config, self.data
        operator_component, operator_options = MENUS["operator"].split(config.operator)
        operator = _operator(operator_component)
        body = build_body(config, operator, self.input_shape, split.graph)
        mean, deviation = create(config.normalize, "normalize", split.train) if split.graph is None else (None, None)
        self.network = models.Network(body, mean, deviation, split.graph)
        head_component, head_options = MENUS["head"].split(config.head)
        if not config.head.is_import_path:
            _require_two_classes(config, split)
        sizes = self.network.feature_dim, len(split.classes)
        needs_values = config.init.name != "default" or weights is not None
        on_meta = head_options.needs_sharded_head and not needs_values and _is_large_head(head_component, *sizes)
        with torch.device("meta") if on_meta else nullcontext():
            head: Any = create(head_component, "head", *sizes)
        reduction = getattr(head, "reduction", "mean")
        require(reduction != "none", "head.reduction", "'mean' or 'sum'", reduction)
        modules = nn.ModuleDict({"network": body, "head": head})
        create(config.init, "init", modules)
        self.loaded = None if weights is None else models.load_matching_weights_(self.network, head, weights)
        # Some networks, such as a normalised transformer, have unit vectors as weights. Initialisation and loading may
        # have changed their norms.
        self._unit_weight_modules = [module for module in body.modules() if hasattr(module, "normalize_weights_")]
        self._normalize_weights_()
        self.rotation: TrainedRotation = create(config.rotation, "rotation", modules)
        terms = [
            _regularizer(component, modules, f"regularizers.{index}", sharded=head_options.needs_sharded_head)
            for index, component in enumerate(config.regularizers)
        ]
        terms = [term for term in (*terms, self.rotation.penalty) if term is not None]
        with torch.random.fork_rng(devices=[]):  # later random numbers do not depend on the number of processes
            self.head: Any = (
                heads.ShardedHead(head, sample=head_options.sample) if head_options.needs_sharded_head else head
            )
        # The head, or the part of a sharded head in this process.
        self._local_head: nn.Module = self.head.head if head_options.needs_sharded_head else head
        self._sampled_vectors = cast(nn.Parameter, self.head.weight) if head_options.sample is not None else None
        if operator_options.weighted_gradients:
            optim.WeightedGradients(self.network)
        self._project_every, self._renormalize = operator_options.project_every, head_options.renormalize
        attack, adversarial_options = MENUS["adversarial"].split(config.adversarial)
        self.objective = Objective(
            self.network,
            self.head,
            terms,
            precision=getattr(torch, config.precision),
            attack=create(attack, "adversarial"),
            attack_weight=adversarial_options.weight,
        )
        if config.channels_last:
            # A convolution with channels-last filters also returns channels-last images.
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._frozen = _freeze_(self.network, self._local_head, config.freeze)
        if config.checkpoint_activations:
            models.checkpoint_activations_(body)

    def _distribute_(self) -> None:
        """Prepare the network for several processes; raise a `ValueError` if they cannot share the work."""
        config = self.config
        if self.data.graph is not None:
            reason = "is a single graph, which cannot be divided among processes; start one process"
            raise ValueError(f"data {config.data.name} {reason}")
        is_sharded = isinstance(self.head, heads.ShardedHead)
        require(not (config.clip and is_sharded), "clip", "unset with head.sharded in several processes", config.clip)
        if config.sync_batch_norm:
            models.sync_batch_norm_(self.network)
            self._frozen = _freeze_(self.network, self._local_head, config.freeze)  # BatchNorm layers were replaced
        if config.parallel == "fsdp":
            for name, used in (("regularizers", config.regularizers), ("rotation", config.rotation.name != "none")):
                require(not used, "parallel", f"ddp with {name}, because fsdp divides the weights", "fsdp")
            require(config.clip is None, "clip", "null with parallel fsdp", config.clip)
            is_scaled = config.precision == "float16"
            require(not is_scaled, "precision", "float32 or bfloat16 with parallel fsdp", config.precision)
            shard_network_(self.network)

    def _build_loader(self) -> None:
        config, split, processes = self.config, self.data, Processes()
        self.loader = data.Loader(
            split.train,
            batch_size=config.batch_size if split.graph is None else len(split.train),
            sampler=create(config.sampler, "sampler", split.train.labels, config.seed),
            workers=config.workers,
            broken=config.broken_files,
            rank=processes.rank,
            world=processes.size,
            pin=self.device.type == "cuda",
        )
        self.steps_per_epoch = -(-len(self.loader) // config.accumulate)
        self.steps: int = config.steps or (config.epochs or 1) * self.steps_per_epoch

    def _build_optimizer(self) -> None:
        config = self.config
        self.optimizer = build_optimizer(self.objective, config.optimizer, self.rotation, sampled=self._sampled_vectors)
        # Margin schedules count optimiser steps, not batches, and no step that loss scaling skips.
        if isinstance(self._local_head, heads.AngularHead):
            self._local_head.advance_with(self.optimizer.optimizers[0])
        schedule = create(config.schedule, "schedule")
        self.scheduler = optim.Scheduler(self.optimizer.optimizers, schedule, self.steps, self.steps_per_epoch)
        self.scaler = SharedGradScaler(self.device.type) if config.precision == "float16" else None
        self.ema: optim.MovingAverage | None = None
        if config.ema is not None:
            accepted = f"unset with the rotation {config.rotation.name}, which replaces weights"
            require(self.rotation.periodic_fold is None, "ema", accepted, config.ema)
            accepted = f"unset with {config.model.name}, because an average of unit vectors is not a unit vector"
            require(not self._unit_weight_modules, "ema", accepted, config.ema)
            self.ema = optim.MovingAverage(self.objective, config.ema)

    def _build_validation(self) -> None:
        config, settings = self.config, self.config.validation
        protocols: dict[str, Any] = {}
        for index, component in enumerate(settings.protocols):
            protocol = create(component, "validation", setting=f"validation.protocols.{index}")
            name = getattr(protocol, "label", component.name.rpartition(":")[2])
            require(name not in protocols, "validation.protocols", "different from each other", name)
            protocols[name] = protocol
        self.validation = Validator(
            self.data,
            protocols,
            # A training batch fits into memory, so the same number of examples without gradients does, too.
            batch_size=config.batch_size if settings.batch_size is None else settings.batch_size,
            broken=config.broken_files,
            workers=config.workers,
            energy=settings.energy,
        )

    def __str__(self) -> str:
        """Return one line about model, head, data and length of training."""
        size = sum(parameter.numel() for parameter in self.network.parameters())
        model = f"{self.config.model.name} with {self.network.feature_dim} features and {size:,} parameters"
        examples = f"{len(self.data.train):,} examples of {len(self.data.classes):,} classes"
        if self.data.validation is not None:
            classes = "other" if self.data.open_set else "the same"
            examples += f", {len(self.data.validation):,} validation examples of {classes} classes"
        length = f"{self.steps:,} step{'s' * (self.steps != 1)}"
        return f"{model}, {self.config.head.name}, {examples}, {length} on {self.device}"

    def __repr__(self) -> str:
        return f"Experiment({self.config.data.name}: {self})"

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.objective.parameters()).device

    def prepare(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return a training batch on the device, as floats in [0, 1] if it was uint8, and augmented."""
        inputs = as_floats(inputs.to(self.device, non_blocking=True))
        generator = self.loader.generator
        if self.augment and Processes().size > 1:
            # Parts of a batch differ in size and need different numbers of draws. Each process uses a generator of its
            # own for them, so that the one of the loader stays in the same state in all processes.
            seed = int(torch.randint(2**62, (), generator=generator))
            generator = torch.Generator(generator.device).manual_seed(seed + Processes().rank)
        for augment in self.augment:
            inputs = augment(inputs, generator)
        return inputs, labels.to(self.device, non_blocking=True)

    def train_mode(self) -> None:
        """Put the objective into training mode, except frozen modules, whose BatchNorm statistics must not change."""
        self.objective.train()
        for module in self._frozen:
            module.eval()

    def after_step(self, step: int) -> None:
        """Run the actions of the experiment that follow each optimiser step."""
        if self.rotation.periodic_fold is not None:
            self.rotation.periodic_fold.step(self.optimizer.optimizers[0])
        if self._project_every is not None and step % self._project_every == 0:
            optim.project_weights_(self.network)
        if self._renormalize:
            optim.project_weights_(self.head)
        self._normalize_weights_()
        if self.ema is not None:
            self.ema.update()

    def _normalize_weights_(self) -> None:
        for module in self._unit_weight_modules:
            module.normalize_weights_()  # type: ignore[operator]

    @torch.no_grad()
    def embed(self, source: data.Source | None = None, *, batch_size: int = 500) -> tuple[Tensor, Tensor]:
        """Return features (N, d) and labels (N,) of a source on the CPU, by default of the held-out data.

        Features are computed in evaluation mode, in the precision of training. If the setting `broken_files` is "skip",
        held-out files that cannot be decoded are left out; those of a given source raise an error, see `readable`.
        """
        chosen = self.data.validation if source is None else source
        require(chosen is not None, "source", "given, because the experiment has no held-out data", source)
        assert chosen is not None
        chosen = self.readable(chosen) if source is None else chosen
        size = batch_size if self.data.graph is None else len(chosen)  # a graph is one batch
        with evaluation_mode(self.objective):
            loader = self._sequential_loader(chosen, size, "error")
            return embed(lambda x: self.objective.features(x.to(self.device)).cpu(), loader)

    def readable(self, source: data.Source) -> data.Source:
        """Return a source without the files that cannot be decoded, if the setting `broken_files` is "skip".

        This decodes every file once. If no file fails, or the setting is "error", the source itself is returned.
        """
        if self.config.broken_files == "error" or isinstance(source, data.TensorSource):
            return source
        is_readable = torch.cat([labels >= 0 for _, labels in self._sequential_loader(source, 500, "skip")])
        return source if is_readable.all() else data.subset(source, is_readable)

    def _sequential_loader(self, source: data.Source, batch_size: int, broken: str) -> data.Loader:
        """Return the batches of a source in its order."""
        workers = self.config.workers if len(source) > batch_size else 0  # starting workers for one batch takes longer
        sampler = data.SAMPLERS["sequential"](source.labels, 0)
        return data.Loader(source, batch_size=batch_size, sampler=sampler, workers=workers, broken=broken)


def build(
    config: Config,
    *,
    data_root: Path | None = None,
    weights: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    trust_code: bool = True,
    split: data.DataSplit | None = None,
    outline: Mapping[str, Any] | None = None,
) -> Experiment:
    """Read the data of a config and build its experiment, with the seed of the config.

    Args:
        config: the settings.
        data_root: folder of the data sets.
        weights: initial weights by name; rotations are applied to them.
        device: device for training.
        trust_code: allow import paths in the config.
        split: data, instead of those of the config.
        outline: `DataSplit.outline()` of the data. Network and head are then built for random data of this shape, and
            no data are read.

    Example:
        >>> experiment = build(Config.of({"data": {"name": "digits", "limit": 100}, "epochs": 1}))
        >>> experiment.config.model.name, experiment.network.feature_dim, experiment.steps
        ('embedding_cnn', 64, 2)
    """
    require(isinstance(config, Config), "config", "a Config, such as Config.of({...})", config)
    require_trust(config, trust_code, "the config")
    # Absolute paths are valid in every working directory. Paths below a data root stay relative to it.
    reads_data = split is None and outline is None
    config = with_absolute_paths(config, data=reads_data and data_root is None)
    if split is None and outline is not None:
        split = data.DataSplit.random_like(outline)
    if split is None:
        split = create(config.data, "data", data_root)
        if config.selection:
            split = data.selection_split(split, config.selection)
    return Experiment(config, split, weights=weights, device=None if device is None else torch.device(device))


build_experiment = build  # the name in `hypersphere.training`, where `build` is this module


def build_network_on_meta(config: Config, split: data.DataSplit) -> nn.Module:
    """Return the model of a config on the meta device, which takes no memory, for example to count its parameters."""
    shape = _input_shape(split.outline(), _augmentations(config))
    operator, _ = MENUS["operator"].split(config.operator)
    with torch.device("meta"):
        return build_body(resolve(config, split, shape), _operator(operator), shape, split.graph)


def _augmentations(config: Config) -> list[Callable[..., Tensor]]:
    return [create(part, "augment", setting=f"augment.{index}") for index, part in enumerate(config.augment)]


def _input_shape(outline: Mapping[str, Any] | None, augmentations: Iterable[Any]) -> tuple[int, ...]:
    """Return the shape of an input of the network: that of the data, unless an augmentation changes it."""
    shape = () if outline is None else tuple(outline["shape"])
    for augment in augmentations:
        shape = augment.output_shape(shape) if hasattr(augment, "output_shape") else shape
    return shape


def resolve(config: Config, split: data.DataSplit, shape: tuple[int, ...]) -> Config:
    """Return a config with the choices that depend on the data: the model "auto", the protocols, the epochs.

    Args:
        config: the settings.
        split: the data.
        shape: shape of an input, empty for a graph.
    """
    if config.model.name == "auto":
        if config.model.options:
            raise ValueError(f"model 'auto' has no options, but got {', '.join(config.model.options)}; name a model")
        config = replace(
            config, model=Component(*models.auto_model(shape, len(split.classes), graph=split.graph is not None))
        )
    if config.epochs is None and config.steps is None:
        config = replace(config, epochs=10)
    protocols = config.validation.protocols
    if not protocols and split.validation is not None:
        protocols = (Component("verification" if split.open_set else "accuracy"),)
    has_known_classes = not split.open_set or all(protocol.name != "accuracy" for protocol in protocols)
    accepted = "without accuracy, because the classes of the held-out data are not those of training"
    require(has_known_classes, "validation.protocols", accepted, [protocol.name for protocol in protocols])
    return replace(config, validation=replace(config.validation, protocols=protocols))


def _require_two_classes(config: Config, split: data.DataSplit) -> None:
    """Raise an error that names the settings which hold out classes, if fewer than two remain for training."""
    if len(split.classes) < 2:
        advice = "; lower data.held_out or selection, which hold out classes" if split.open_set else ""
        raise ValueError(f"training needs at least 2 classes, not {len(split.classes)}{advice}")


def _is_large_head(component: Component, dim: int, num_classes: int) -> bool:
    """Return True if the class vectors of a sharded head may not fit in one process, so that each draws its own rows.

    Smaller heads are drawn completely, so that their class vectors do not depend on the number of processes. Heads with
    options per class are, too, because these values would be lost on the meta device.
    """
    has_options_per_class = any(isinstance(value, list) for value in component.options.values())
    return dim * num_classes > META_HEAD_SIZE and not has_options_per_class


def _operator(component: Component) -> Operator:
    """Return the operator of a config; an import path names a function that changes a model in place."""
    if component.is_import_path:
        return Operator(convert_=lambda body: create(component, "operator", body))
    return create(component, "operator")


def _regularizer(component: Component, modules: nn.ModuleDict, setting: str, *, sharded: bool) -> Any:
    """Return a regulariser of network and head, or of the network only if the head is sharded."""
    if sharded:
        output = component.options.get("output")
        accepted = "unset with head.sharded, because no process has the class vectors of all classes"
        require(not output, f"{setting}.output", accepted, output)
        component = Component(component.name, {"output_layer": None, **component.options})
        modules = nn.ModuleDict({"network": modules["network"]})
    return create(component, "regularizer", modules, setting=setting)


def _freeze_(network: nn.Module, head: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Freeze the parameters whose names match a pattern; return the modules of which all parameters are frozen."""
    named = dict(network.named_parameters()) | {f"head.{name}": p for name, p in head.named_parameters()}
    for pattern in patterns:
        matching = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        examples = ", ".join(list(named)[:3])
        require(bool(matching), "freeze", f"patterns of parameter names such as {examples}", pattern)
        for name in matching:
            named[name].requires_grad_(False)
    if not patterns:
        return []
    parameters = {module: list(module.parameters()) for module in (*network.modules(), *head.modules())}
    return [module for module, owned in parameters.items() if owned and not any(p.requires_grad for p in owned)]
