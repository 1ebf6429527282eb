"""The settings of an experiment as typed dataclasses, each setting declared once.

A field declares name, type, default, help text and accepted values. Command-line options, the reader of settings files,
`--set`, `hypersphere list`, `--dry-run` and the documentation are derived from them.

A `Config` has two equivalent forms: the dataclass, and a tree of plain mappings, lists and numbers that can be written
as JSON. Patches (settings files, command-line options, rows of a recipe) are partial trees; `merge` applies them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypersphere._validation import nearest_name, require
from hypersphere.training.settings_file import is_config_of_run, read_settings

__all__ = ["Component", "Config", "Embedding", "Validation", "merge", "parse_value", "set_path", "settings_of"]


@dataclass(frozen=True)
class Component:
    """A part of an experiment that is chosen by name.

    As plain data it is written `{"name": …, **options}`, or as the name alone if there are no options.

    Attributes:
        name: an entry of the menu of its setting, or an import path `package.module:callable`.
        options: arguments of the entry, as numbers, text, lists and mappings.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_import_path(self) -> bool:
        """True if the name is an import path such as `my_package.encoders:build`."""
        module, colon, attribute = self.name.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        return bool(colon) and module not in LIBRARIES and all(part.isidentifier() for part in parts)


CONFIG = "config.json"  # the file with the settings in the folder of a run
MAX_PATH_DEPTH = 8  # largest number of names in a dotted path
FLOAT32_MAX = 3.4028234663852886e38  # `torch.finfo(torch.float32).max`, without importing torch
_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<": operator.lt}
LIBRARIES = ("timm", "torchvision", "hf")  # prefixes such as `timm:` choose a library, not a module to import
# Options of data sets that are paths, in addition to `path` and `pairs`.
DATA_PATHS = {"image_list": ("images", "validation"), "shards": ("validation",)}


def _setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    may_change: bool = False,
    menu: str | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: default value; a component may be given by its name.
        help: one sentence for `--help`, `hypersphere list` and the documentation.
        choices: accepted texts.
        least: smallest accepted number.
        above, below: exclusive bounds of accepted numbers.
        may_change: True if a resumed run may change the setting, because it has no effect on the steps already taken.
        menu: name of the menu of a component, see `hypersphere.training.components.MENUS`.
    """
    bounds = {sign: bound for sign, bound in ((">=", least), (">", above), ("<", below)) if bound is not None}
    metadata = {"help": help, "choices": tuple(choices), "bounds": bounds, "may_change": may_change, "menu": menu}
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _component(name: str, help: str, menu: str, **options: Any) -> Any:
    return _setting(Component(name, options), help, menu=menu)


@dataclass(frozen=True)
class Embedding:
    """How the output of the model becomes an embedding (`hypersphere.models.Embedder`)."""

    dim: int | None = _setting(None, "Dimension of the embedding; by default that of the model.", least=1)
    pool: str | None = _setting(
        None,
        "Pooling of feature maps or tokens; by default the model's.",
        choices=("mean", "max", "gem", "first", "none"),
    )
    neck: str = _setting(
        "auto",
        "Layers after the pooling; auto is linear if dim is set, else none.",
        choices=("auto", "none", "linear", "batch_norm", "linear_batch_norm"),
    )
    dropout: float = _setting(0.0, "Dropout probability before the linear layer of the neck.", least=0, below=1)


@dataclass(frozen=True)
class Validation:
    """What is measured during training, how often, and what follows from it."""

    protocols: tuple[Component, ...] = _setting(
        (),
        "Protocols on held-out data; by default accuracy if the classes are those of training, else verification.",
        menu="validation",
        may_change=True,
    )
    every: int = _setting(
        1, "Validate after this many epochs, or steps with every_unit=steps.", least=1, may_change=True
    )
    every_unit: str = _setting("epochs", "Unit of `every`.", choices=("epochs", "steps"), may_change=True)
    best: str | None = _setting(
        None, "Metric that selects the `best` checkpoint, for example verification.accuracy.", may_change=True
    )
    patience: int | None = _setting(
        None,
        "Stop after this many validations without a better `best` metric, which must be set.",
        least=1,
        may_change=True,
    )
    energy: bool = _setting(True, "Also record the hyperspherical energy of each layer.", may_change=True)
    batch_size: int | None = _setting(
        None, "Examples per validation batch; by default that of training.", least=1, may_change=True
    )

    def __post_init__(self) -> None:
        accepted = "unset without validation.best, the metric that has to improve"
        require(self.patience is None or self.best is not None, "validation.patience", accepted, self.patience)


@dataclass(frozen=True)
class Config:
    """All settings of one experiment.

    Example:
        >>> config = Config.of({"head": {"name": "arcface", "m": 0.4}, "epochs": 2})
        >>> config.head, config.epochs
        (Component(name='arcface', options={'m': 0.4}), 2)
        >>> Config.of({"epoch": 2})
        Traceback (most recent call last):
        ValueError: epoch is not a setting; did you mean epochs?
    """

    # The data.
    data: Component = _component("digits", "Training and validation data.", "data")
    selection: float = _setting(
        0.0,
        "Fraction of the training data held out to choose settings; the test data are then not read.",
        least=0,
        below=1,
    )
    sampler: Component = _component("shuffled", "Order of the training examples.", "sampler")
    augment: tuple[Component, ...] = _setting(
        (), "Augmentations of training batches, applied in order.", menu="augment"
    )
    normalize: Component = _component("auto", "Normalisation of the inputs, part of the network.", "normalize")
    workers: int = _setting(0, "Worker processes that read and decode data.", least=0, may_change=True)
    broken_files: str = _setting("error", "What to do with a file that cannot be decoded.", choices=("error", "skip"))

    # The model and the loss.
    model: Component = _component("auto", "Model that maps inputs to features; auto fits the data.", "model")
    embedding: Embedding = _setting(Embedding(), "How features become an embedding.")
    init: Component = _component("default", "Initialisation of linear and convolution layers.", "init")
    freeze: tuple[str, ...] = _setting((), "Patterns of the names of parameters to freeze, such as `body.stem.*`.")
    operator: Component = _component("none", "Operator of the layers: decoupled, SphereNorm or none.", "operator")
    head: Component = _component("softmax", "Loss and classifier.", "head")
    regularizers: tuple[Component, ...] = _setting((), "Terms added to the loss.", menu="regularizer")
    rotation: Component = _component("none", "Rotations that are trained in place of the weights.", "rotation")
    adversarial: Component = _component("none", "Attack of adversarial training.", "adversarial")

    # The training.
    optimizer: Component = _component("adamw", "Optimiser.", "optimizer", lr=3e-3, weight_decay=1e-4)
    schedule: Component = _component("one_cycle", "Schedule of the learning rate.", "schedule")
    epochs: int | None = _setting(
        None, "Passes over the training data; 10 if steps is not set.", least=1, may_change=True
    )
    steps: int | None = _setting(None, "Optimiser steps, instead of epochs.", least=1, may_change=True)
    batch_size: int = _setting(64, "Examples per batch, over all processes.", least=1)
    accumulate: int = _setting(1, "Batches per optimiser step.", least=1)
    precision: str = _setting("float32", "Precision of the model.", choices=("float32", "bfloat16", "float16"))
    clip: float | None = _setting(None, "Largest norm of the gradient; a larger one is scaled down.", above=0)
    ema: float | None = _setting(
        None, "Decay of the exponential moving average of the weights, such as 0.999.", least=0, below=1
    )
    compile: bool = _setting(False, "Compile the model with torch.compile.", may_change=True)
    channels_last: bool = _setting(
        False, "Store convolutions and images with the channels last, which is faster on many devices."
    )
    checkpoint_activations: bool = _setting(False, "Recompute activations in the backward pass to save memory.")
    parallel: str = _setting("ddp", "How several processes share the model.", choices=("ddp", "fsdp"), may_change=True)
    sync_batch_norm: bool = _setting(False, "Compute BatchNorm statistics over all processes.")
    seed: int = _setting(0, "Seed for all random number generators.", least=0)

    # Measurements and files.
    validation: Validation = _setting(Validation(), "Validation during training.", may_change=True)
    trackers: tuple[Component, ...] = _setting(
        (), "Also send metrics to tensorboard or wandb.", menu="tracker", may_change=True
    )
    log_every: int = _setting(10, "Steps between two logged lines.", least=1, may_change=True)
    save_every: float = _setting(60.0, "Seconds between two checkpoints within an epoch.", least=0, may_change=True)
    keep: int = _setting(3, "Number of checkpoints to keep, apart from the best one.", least=1, may_change=True)

    def __post_init__(self) -> None:
        require(self.epochs is None or self.steps is None, "steps", "unset if epochs is set", self.steps)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Config:
        """Return the config with these settings, given as plain data; the others have their defaults.

        A component without a name changes the options of the default one. A component with a name has only the given
        options, so that `of` is the inverse of `settings`; use `Config().patched(…)` to keep the default options too.

        >>> Config.of({"optimizer": {"lr": 5e-4}}).optimizer
        Component(name='adamw', options={'lr': 0.0005, 'weight_decay': 0.0001})
        >>> Config.of({"optimizer": {"name": "adamw", "lr": 5e-4}}).optimizer
        Component(name='adamw', options={'lr': 0.0005})
        """
        return _dataclass_of(cls, settings, "")

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Return the config with the settings in a YAML or JSON file, or in the `config.json` of a run.

        A file changes the defaults, as in `hypersphere train --config`: a component that has the name of the default
        one, or no name, changes the options of the default one (`Config().patched(…)`). The `config.json` of a run is
        complete and read by `of`.
        """
        settings = read_settings(path)
        try:
            config = cls.of(settings)  # its errors name the setting
            return config if is_config_of_run(path) else cls().patched(settings)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def settings(self) -> dict[str, Any]:
        """Return all settings as plain data that can be written as JSON; `Config.of` is the inverse."""
        return settings_of(self)

    def changes(self) -> dict[str, Any]:
        """Return only the settings that differ from the defaults, as plain data; `Config.of` is the inverse.

        >>> Config.of({"epochs": 2, "seed": 0, "validation": {"every": 3}}).changes()
        {'epochs': 2, 'validation': {'every': 3}}
        """
        return _changes(self, Config())

    def __repr__(self) -> str:
        return f"Config.of({self.changes()})"

    def patched(self, *patches: Mapping[str, Any]) -> Config:
        """Return the config with patches applied in order, see `merge`."""
        return Config.of(merge(self.settings(), *patches))


def with_absolute_paths(config: Config, *, data: bool = True) -> Config:
    """Return the config with absolute paths, so that it is valid in every working directory.

    These are the paths of the data (unless `data` is False, because they are relative to a data root), the files of
    pairs of validation protocols, and the folder of a model `hf:FOLDER`. A text that is neither an existing path nor a
    path with wildcards, such as the name of a Hugging Face data set, is not changed.
    """
    keys = ("path", "pairs", *DATA_PATHS.get(config.data.name, ())) if data else ()
    protocols = tuple(_with_absolute(protocol, ("pairs",)) for protocol in config.validation.protocols)
    library, _, folder = config.model.name.partition(":")
    is_folder = library == "hf" and os.path.isdir(os.path.expanduser(folder))  # not a type such as `hf:vit`
    name = f"hf:{absolute_path(folder)}" if is_folder else config.model.name
    return dataclasses.replace(
        config,
        data=_with_absolute(config.data, keys, wildcards="*?{"),
        model=Component(name, config.model.options),
        validation=dataclasses.replace(config.validation, protocols=protocols),
    )


def _with_absolute(component: Component, keys: Sequence[str], *, wildcards: str = "") -> Component:
    """Return a component in which these options are absolute paths."""
    options = {
        key: absolute_path(value, wildcards) if key in keys and isinstance(value, str) else value
        for key, value in component.options.items()
    }
    return Component(component.name, options)


def absolute_path(text: str, wildcards: str = "") -> str:
    """Return the absolute path if it exists or contains one of the characters `wildcards`; otherwise the text.

    >>> absolute_path("/./"), absolute_path("no such file"), absolute_path("")
    ('/', 'no such file', '')
    """
    path = os.path.expanduser(text)
    is_path = os.path.exists(path) or any(character in path for character in wildcards)
    return os.path.realpath(path) if is_path else text


def settings_of(value: Any) -> Any:
    """Return a config, or a part of it, as plain data."""
    if isinstance(value, Component):
        return {"name": value.name, **settings_of(value.options)}
    if dataclasses.is_dataclass(value):
        return {setting.name: settings_of(getattr(value, setting.name)) for setting in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: settings_of(item) for key, item in value.items()}
    return [settings_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def _changes(value: Any, default: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that differ from those of `default`, as plain data."""
    changed = {}
    for setting in dataclasses.fields(value):
        new, old = getattr(value, setting.name), getattr(default, setting.name)
        if new != old:
            is_group = isinstance(new, Embedding | Validation)
            changed[setting.name] = _changes(new, old) if is_group else settings_of(new)
    return changed


def menus_of(group: type) -> dict[str, str]:
    """Return the settings of a dataclass that are components, with the name of the menu of each."""
    return {setting.name: setting.metadata["menu"] for setting in dataclasses.fields(group) if setting.metadata["menu"]}


def merge(base: Mapping[str, Any], *patches: Mapping[str, Any]) -> dict[str, Any]:
    """Apply patches to settings, in order, without changing the arguments.

    Mappings are merged key by key; everything else is replaced. A component that gets another name loses the options of
    the old one, which do not apply to the new one. A component given as text is its name.

    Example:
        >>> base = {"head": {"name": "arcface", "m": 0.5}, "optimizer": {"name": "sgd", "lr": 0.1}}
        >>> merge(base, {"head": "cosface", "optimizer": {"lr": 0.2}})
        {'head': {'name': 'cosface'}, 'optimizer': {'name': 'sgd', 'lr': 0.2}}
    """
    merged: Any = _plain(base, "settings")
    for patch in patches:
        merged = _merge(merged, _plain(patch, "settings"))
    return merged


def set_path(settings: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the settings with one changed, addressed by a dotted path.

    Items of a list are addressed by their position or by the name of a component. A new name, or the position after the
    last one, adds an item.

    >>> set_path({"regularizers": [{"name": "mhe"}]}, "regularizers.mhe.power", 1)
    {'regularizers': [{'name': 'mhe', 'power': 1}]}
    """
    keys = path.split(".")
    require(
        all(keys) and len(keys) <= MAX_PATH_DEPTH,
        "path",
        f"at most {MAX_PATH_DEPTH} names separated by dots",
        path[:80],
    )
    return _set(_plain(settings, "settings"), keys, value, path)


def _set(settings: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Return `settings`, which may be any part of the tree, with the setting at `keys` replaced."""
    if not keys:
        return _merge(settings, value)
    key, *rest = keys
    if isinstance(settings, list):
        names = [item.get("name") if isinstance(item, dict) else item for item in settings]
        position = int(key) if key.isdecimal() else names.index(key) if key in names else len(settings)
        accepted = f"a path with a position of at most {len(settings)} in the list"
        require(position <= len(settings), path, accepted, key)
        item = settings[position] if position < len(settings) else {} if key.isdecimal() else {"name": key}
        # `--augment.mirror` without a value has the value true; it adds the component.
        changed = item if value is True and not rest else _set(item, rest, value, path)
        return [*settings[:position], changed, *settings[position + 1 :]]
    # A component may be given by its name. Other values that have no parts are replaced.
    mapping = {"name": settings} if isinstance(settings, str) else settings if isinstance(settings, dict) else {}
    return {**mapping, key: _set(mapping.get(key), rest, value, path)}


def parse_value(text: str) -> Any:
    """Parse a value as it is written on the command line: JSON, or the text itself if it is not JSON.

    >>> parse_value("[1, 2e-3]"), parse_value("true"), parse_value("arcface")
    ([1, 0.002], True, 'arcface')
    """
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def _merge(base: Any, patch: Any) -> Any:
    """Apply one patch to any part of the settings, see `merge`."""
    if isinstance(patch, str) and isinstance(base, dict) and "name" in base:
        patch = {"name": patch}
    if not (isinstance(base, dict) and isinstance(patch, dict)):
        return patch
    if "name" in base and patch.get("name", base["name"]) != base["name"]:
        return patch
    return {**base, **{key: _merge(base[key], value) if key in base else value for key, value in patch.items()}}


# `get_type_hints` evaluates annotations on every call, and a recipe checks hundreds of configs.
_types_of = functools.cache(get_type_hints)


def _dataclass_of(cls: Any, settings: Any, prefix: str) -> Any:
    """Return a dataclass of settings from plain data; `prefix` precedes the names of settings in messages."""
    require(isinstance(settings, Mapping), prefix.rstrip(".") or "settings", "a mapping of settings", settings)
    declared = {setting.name: setting for setting in dataclasses.fields(cls)}
    kinds = _types_of(cls)
    values = {}
    for key, value in settings.items():
        if key not in declared:
            raise ValueError(f"{prefix}{key} is not a setting{nearest_name(str(key), declared)}")
        if kinds[key] is Component and isinstance(value, Mapping) and "name" not in value:
            value = {**settings_of(getattr(cls(), key)), **value}
        values[key] = _value_of(kinds[key], value, f"{prefix}{key}", declared[key].metadata)
    return cls(**values)


def _value_of(kind: Any, value: Any, name: str, rules: Mapping[str, Any]) -> Any:
    """Return a value converted to the declared type of a setting; raise a `ValueError` that names the setting."""
    if kind is Component:
        return _component_of(value, name)
    if dataclasses.is_dataclass(kind):
        return _dataclass_of(kind, value, f"{name}.")
    if get_origin(kind) is tuple:
        # One component or pattern may be given without a list.
        items = value if isinstance(value, (list, tuple)) else [value]
        item_kind = get_args(kind)[0]
        return tuple(_value_of(item_kind, item, f"{name}.{index}", rules) for index, item in enumerate(items))
    optional = get_origin(kind) in (Union, types.UnionType)
    if optional and value is None:
        return None
    plain = next(part for part in get_args(kind) if part is not type(None)) if optional else kind
    accepted = _accepted(plain, rules) + (", or null" if optional else "")
    # YAML reads 1 as an integer. Integers that may overflow in `float` are not converted, so that `fits` is False.
    if plain is float and type(value) is int and abs(value) < 2**1023:
        value = float(value)
    fits = type(value) is plain
    fits = fits and (not rules["choices"] or value in rules["choices"])
    fits = fits and all(_COMPARISONS[sign](value, bound) for sign, bound in rules["bounds"].items())
    fits = fits and not (plain is float and not math.isfinite(value))
    fits = fits and not (plain is int and abs(value) >= 2**63)
    require(fits, name, accepted, value)
    return value


def _component_of(value: Any, name: str) -> Component:
    options = {"name": value} if isinstance(value, str) else value
    has_name = isinstance(options, Mapping) and isinstance(options.get("name"), str) and options["name"]
    require(bool(has_name), name, "a name, or a mapping with a name and options", value)
    plain = _plain(options, name)
    _require_float32(plain, name)
    return Component(plain.pop("name"), plain)


def _require_float32(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the option if a number in options of a component overflows in float32."""
    if isinstance(value, float):
        require(abs(value) <= FLOAT32_MAX, name, f"a number of at most {FLOAT32_MAX:g}, the largest of float32", value)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _require_float32(item, f"{name}.{key}")


def _accepted(kind: type, rules: Mapping[str, Any]) -> str:
    """Return the accepted values of a setting in words, such as "an integer >= 1"."""
    if rules["choices"]:
        return f"one of {', '.join(rules['choices'])}"
    noun = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]
    return " ".join([noun, " and ".join(f"{sign} {bound:g}" for sign, bound in rules["bounds"].items())]).strip()


def _plain(value: Any, name: str) -> Any:
    """Return a deep copy of settings as plain data; raise a `ValueError` if they cannot be written as JSON."""

    def plain(item: Any) -> Any:
        if dataclasses.is_dataclass(item):
            return settings_of(item)
        raise TypeError(f"{type(item).__name__} is not one of them")

    try:
        return json.loads(json.dumps(value, default=plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must consist of numbers, text, lists and mappings: {error}") from None
