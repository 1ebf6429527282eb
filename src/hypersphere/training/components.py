"""Create the components of an experiment from their names and options.

A component is named by an entry of the menu of its setting, or by an import path `package.module:callable`. Its options
are the parameters of that callable. Their names, and values of plain types, are checked against its signature first.
Menus are imported when they are first used, so that importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from inspect import Parameter
from typing import Any, Union, get_args, get_origin

from hypersphere._signatures import named_parameters
from hypersphere._validation import nearest_name, require
from hypersphere.training.config import LIBRARIES, Component, Config, Validation, menus_of

__all__ = ["MENUS", "Menu", "check_components", "complete_settings", "create", "foreign_code", "require_trust"]

Factory = Callable[..., Any]
FROM_DATA = "from the data"  # shown as the default of a size that follows from the data


class Menu(Mapping[str, Factory]):
    """A menu of factories by name, imported when it is first read.

    Args:
        sources: import paths of dictionaries of factories, or of single callables, listed by their lower-case name.
        reserved: parameters that the library passes to the factories; users cannot set them.
        inferred_from_data: parameters that follow from the data unless the user sets them.
        shared_options: import path of a dataclass of options that every entry has and that the library handles.
        synonyms: import path of a dictionary from other names to entries. These names are accepted, but not listed.
        option_synonyms: import path of a dictionary from names of options elsewhere to names here, for error messages.
        library: import path of a function that loads `timm:NAME` and similar names.

    Example:
        >>> menu = Menu("hypersphere.functions.angular:ANGULARS")
        >>> sorted(menu)[:2], menu.options("sigmoid")
        (['cosine', 'linear'], {'k': 0.5})
    """

    def __init__(
        self,
        *sources: str,
        reserved: Iterable[str] = (),
        inferred_from_data: Iterable[str] = (),
        shared_options: str | None = None,
        synonyms: str | None = None,
        option_synonyms: str | None = None,
        library: str | None = None,
    ) -> None:
        self.sources, self.library = sources, library
        self.reserved, self.inferred_from_data = tuple(reserved), tuple(inferred_from_data)
        self._shared_options, self._synonyms, self._option_synonyms = shared_options, synonyms, option_synonyms

    @cached_property
    def entries(self) -> Mapping[str, Factory]:
        """The factories by name."""
        sources = map(_load, self.sources)
        # `ChainMap` refers to the dictionaries, so that entries that are added to them later are found.
        return ChainMap(
            *(source if isinstance(source, dict) else {source.__name__.lower(): source} for source in sources)
        )

    @property
    def synonyms(self) -> Mapping[str, str]:
        """Names that are common elsewhere, with the entry that each stands for."""
        return {} if self._synonyms is None else _load(self._synonyms)

    @property
    def option_synonyms(self) -> Mapping[str, str]:
        """Names of options that are common elsewhere, with the option that each stands for."""
        return {} if self._option_synonyms is None else _load(self._option_synonyms)

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options that every entry has and that the library handles, with their defaults."""
        fields = () if self._shared_options is None else dataclasses.fields(_load(self._shared_options))
        return {field.name: field.default for field in fields}

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of an entry with their defaults, `inspect.Parameter.empty` where there is none."""
        parameters = _parameters(self[name]).items()
        options = {key: parameter.default for key, parameter in parameters if key not in self.reserved}
        from_data = dict.fromkeys((key for key in self.inferred_from_data if key in options), FROM_DATA)
        return {**options, **from_data, **self.shared_options}

    def split(self, component: Component) -> tuple[Component, Any]:
        """Return a component without the options that the library handles, and an object with those options."""
        assert self._shared_options is not None
        shared = {key: value for key, value in component.options.items() if key in self.shared_options}
        options = {key: value for key, value in component.options.items() if key not in shared}
        return Component(component.name, options), _load(self._shared_options)(**shared)

    def __getitem__(self, name: str) -> Factory:
        return self.entries[name if name in self.entries else self.synonyms.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


MENUS: dict[str, Menu] = {
    "data": Menu("hypersphere.data:DATA", reserved=["root"]),
    "sampler": Menu("hypersphere.data:SAMPLERS", reserved=["labels", "seed"]),
    "augment": Menu("hypersphere.data:AUGMENTATIONS"),
    "normalize": Menu("hypersphere.data:NORMALIZATIONS", reserved=["source"]),
    "model": Menu(
        "hypersphere.training.network:NETWORKS",
        reserved=["conv", "linear", "num_classes"],
        inferred_from_data=["in_channels", "image_size", "in_features"],
        library="hypersphere.models:load_encoder",
    ),
    "init": Menu("hypersphere.models:INITIALIZATIONS", reserved=["modules"]),
    "operator": Menu(
        "hypersphere.training.network:OPERATORS",
        reserved=["body"],
        shared_options="hypersphere.training.network:OperatorOptions",
    ),
    "head": Menu(
        "hypersphere.heads:fixed",
        "hypersphere.heads:BASELINES",
        "hypersphere.heads:PRESETS",
        reserved=["in_features", "num_classes"],
        shared_options="hypersphere.training.build:HeadTrainingOptions",
        synonyms="hypersphere.heads:PRESET_ALIASES",
        option_synonyms="hypersphere.heads.presets:OPTION_SYNONYMS",
    ),
    "regularizer": Menu("hypersphere.training.build:REGULARIZERS", reserved=["model", "modules", "where"]),
    "rotation": Menu("hypersphere.training.rotations:ROTATIONS", reserved=["modules"]),
    "adversarial": Menu(
        "hypersphere.training.build:ADVERSARIES", shared_options="hypersphere.training.build:AdversarialOptions"
    ),
    "optimizer": Menu(
        "hypersphere.optim:OPTIMIZERS",
        reserved=["params"],
        shared_options="hypersphere.training.optimizers:GroupOptions",
    ),
    "schedule": Menu("hypersphere.optim:SCHEDULES"),
    "validation": Menu("hypersphere.training.validation:PROTOCOLS"),
    "tracker": Menu("hypersphere.training.trackers:TRACKERS"),
}

# Options that are components themselves, given by a mapping with a name and options. The name may be left out if the
# menu has a single entry.
NESTED: dict[str, Menu] = {
    "angular": Menu("hypersphere.functions.angular:ANGULARS"),
    "magnitude": Menu("hypersphere.functions.magnitude:MAGNITUDES"),
    "projection": Menu("hypersphere.functions.projection:PROJECTIONS"),
    "method": Menu("hypersphere.functions.orthogonal:ORTHOGONALS", "hypersphere.functions.transform:TRANSFORMS"),
    "annealing": Menu("hypersphere.heads:Annealing"),
    "ramp": Menu("hypersphere.heads:Ramp"),
}


def create(
    component: Component,
    menu: str | Menu,
    *arguments: Any,
    context: Mapping[str, Any] | None = None,
    setting: str | None = None,
) -> Any:
    """Return the object that a component describes: `factory(*arguments, **options)`.

    Args:
        component: name and options.
        menu: a menu, or its name in `MENUS`.
        arguments: the leading arguments of every factory of this menu.
        context: values for parameters that the user did not set, such as sizes that follow from the data; those that
            the factory does not take are ignored.
        setting: name of the setting for messages, by default that of the menu.

    Raises:
        ValueError: if the name or an option is unknown (the message suggests the most similar one), or an option is
            missing or has a wrong type.

    Example:
        >>> create(Component("sigmoid", {"k": 0.5}), NESTED["angular"], setting="angular")
        Sigmoid(k=0.5)
        >>> create(Component("sigmoid", {"K": 0.5}), NESTED["angular"], setting="angular")
        Traceback (most recent call last):
        ValueError: angular.K is not an option of sigmoid; did you mean k? Options: k
    """
    chosen = MENUS[menu] if isinstance(menu, str) else menu
    setting = setting or (menu if isinstance(menu, str) else "component")
    name, context = component.name, dict(context or {})
    if chosen.library is not None and name.partition(":")[0] in LIBRARIES:
        sizes = {key: context[key] for key in ("in_channels", "image_size") if key in context}
        return _load(chosen.library)(name, dict(component.options), **sizes)
    factory = find_factory(component, chosen, setting)
    parameters = dict(list(_parameters(factory).items())[len(arguments) :])
    options = _checked_options(component, factory, parameters, chosen, setting)
    keywords = {key: value for key, value in context.items() if key in parameters} | options
    _require_complete(name, parameters, keywords, setting)
    if component.is_import_path:
        return factory(*arguments, **keywords)  # an error in foreign code keeps its traceback
    try:
        return factory(*arguments, **keywords)
    except TypeError as error:
        raise ValueError(f"{setting} {name!r} does not accept {options}: {error}") from error


def check_components(config: Config) -> None:
    """Check names and options of all components of a config against their signatures, without building anything.

    Foreign code and models of other libraries are not imported. Values that are not of plain types are checked when the
    components are created.

    Raises:
        ValueError: as `create`.

    Example:
        >>> check_components(Config.of({"head": {"name": "arcface", "q": 3}}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: head.q is not an option of arcface. Options: ...
    """
    for prefix, part in (("", config), ("validation.", config.validation)):
        for key, name in menus_of(type(part)).items():
            value = getattr(part, key)
            for index, component in enumerate(value if isinstance(value, tuple) else [value]):
                setting = f"{prefix}{key}.{index}" if isinstance(value, tuple) else f"{prefix}{key}"
                _check_component(component, MENUS[name], setting)


def _check_component(component: Component, menu: Menu, setting: str) -> None:
    is_from_library = menu.library is not None and component.name.partition(":")[0] in LIBRARIES
    # `build.resolve` replaces the model "auto" by one that fits the data, and refuses options for it.
    if is_from_library or component.is_import_path or component.name == "auto":
        return
    if menu.shared_options:
        component, _ = menu.split(component)
    factory = find_factory(component, menu, setting)
    parameters = {key: value for key, value in _parameters(factory).items() if key not in menu.reserved}
    options = _checked_options(component, factory, parameters, menu, setting)
    _require_complete(component.name, parameters, {**dict.fromkeys(menu.inferred_from_data), **options}, setting)


def _checked_options(
    component: Component, factory: Factory, parameters: Mapping[str, Parameter], menu: Menu, setting: str
) -> dict[str, Any]:
    """Return the options of a component as the objects that its factory takes; see `create` for errors."""
    takes_any = component.is_import_path and _takes_any_option(factory)
    options = {}
    for key, value in component.options.items():
        if key in menu.reserved or not (key in parameters or takes_any):
            accepted = [name for name in parameters if name not in menu.reserved]
            raise ValueError(_unknown_option(setting, key, component.name, [*accepted, *menu.shared_options], menu))
        annotation = parameters[key].annotation if key in parameters else Parameter.empty
        nested = NESTED.get(key) if isinstance(value, Mapping) else None
        # Foreign code may have an option of the same name that is a plain mapping.
        if nested is not None and component.is_import_path and not _names_entry(value, nested):
            nested = None
        options[key] = _converted_value(f"{setting}.{key}", value, annotation, nested)
    return options


def _names_entry(value: Mapping[str, Any], menu: Menu) -> bool:
    """Return True if a mapping has the name of an entry of a menu, or an import path."""
    name = value.get("name")
    return isinstance(name, str) and (name in menu or Component(name).is_import_path)


def _require_complete(name: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any], setting: str) -> None:
    """Raise a `ValueError` that names the first parameter without a value or default."""
    for key, parameter in parameters.items():
        if parameter.default is Parameter.empty and key not in given:
            raise ValueError(f"{setting}.{key} is required for {name}")


def find_factory(component: Component, menu: Menu, setting: str) -> Factory:
    """Return the factory that a component names, from the menu or imported; errors as in `create`."""
    name = component.name
    if not component.is_import_path:
        if name not in menu:
            accepted = f"one of {', '.join(menu)}, or an import path package.module:callable"
            near = nearest_name(name, menu, menu.synonyms)
            raise ValueError(f"{setting}.name must be {accepted}, not {name!r}{near}")
        return menu[name]
    # Modules in the current folder can be imported, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, attribute = name.partition(":")
    try:
        scope = importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        advice = f"run the command in the folder of {module.partition('.')[0]!r} or set PYTHONPATH"
        raise ValueError(f"{setting} {name!r} cannot be imported: {error}; {advice}") from error
    first = attribute.partition(".")[0]
    if not hasattr(scope, first):
        near = nearest_name(first, [key for key, value in vars(scope).items() if callable(value)])
        raise ValueError(f"{setting} {name!r} cannot be imported: {module} has no {first!r}{near}")
    try:
        factory = _load(name)
    except AttributeError as error:  # of a longer path, such as `module:Class.method`
        raise ValueError(f"{setting} {name!r} cannot be imported: {error}") from error
    require(callable(factory), setting, "an import path of a callable", name)
    return factory


def foreign_code(config: Config) -> list[str]:
    """Return the settings that name an import path. A run with such settings is opened only with `trust_code`.

    >>> foreign_code(Config.of({"model": "my_module:Net", "head": "arcface"}))
    ['model my_module:Net']
    """

    def walk(path: str, value: Any) -> Iterator[str]:
        name = value.get("name") if isinstance(value, Mapping) else None
        if isinstance(name, str) and Component(name).is_import_path:
            yield f"{path} {name}"
        parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, part in parts:
            yield from walk(f"{path}.{key}" if path else str(key), part)

    return list(walk("", config.settings()))


def require_trust(config: Config, trust_code: bool, owner: object) -> None:
    """Raise a `ValueError` if a config names import paths and `trust_code` is False, before anything is imported."""
    foreign = foreign_code(config)
    if foreign and not trust_code:
        reason = "which is imported only with trust_code=True"
        raise ValueError(f"{owner} names code outside hypersphere ({', '.join(foreign)}), {reason}")


def complete_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a config, with the defaults of all options of its components filled in.

    >>> settings = complete_settings(Config.of({"schedule": {"name": "steps", "factor": 0.5}}))
    >>> settings["schedule"]["factor"], settings["schedule"]["warmup"]
    (0.5, 0.0)
    """

    def complete(value: Any, menu: str) -> Any:
        if isinstance(value, list):
            return [complete(item, menu) for item in value]
        if value["name"] not in MENUS[menu]:
            return value  # foreign code and other libraries' models are not imported to look at their defaults
        options = MENUS[menu].options(value["name"])
        defaults = {
            key: default for key, default in options.items() if default is not Parameter.empty and default != FROM_DATA
        }
        return {"name": value["name"], **json.loads(json.dumps(defaults, default=_text_of)), **value}

    settings = config.settings()
    for group, values in ((Config, settings), (Validation, settings["validation"])):
        for key, menu in menus_of(group).items():
            values[key] = complete(values[key], menu)
    return settings


def _load(path: str) -> Any:
    """Import the object at `package.module:attribute`."""
    module, _, attribute = path.partition(":")
    value: Any = importlib.import_module(module)
    for name in attribute.split("."):
        value = getattr(value, name)
    return value


def _parameters(factory: Factory) -> dict[str, Parameter]:
    """Return the named parameters of a factory, including the options of presets of heads."""
    named = named_parameters(factory)
    if any(value.annotation == "Unpack[HeadOptions]" for value in inspect.signature(factory).parameters.values()):
        heads: Any = importlib.import_module("hypersphere.heads")
        head_parameters = inspect.signature(heads.AngularHead).parameters
        named |= {key: head_parameters[key] for key in heads.HeadOptions.__annotations__}
    return named


def _takes_any_option(factory: Factory) -> bool:
    """Return True if a factory has a parameter `**options`."""
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(factory).parameters.values())


def _unknown_option(setting: str, option: str, name: str, accepted: list[str], menu: Menu) -> str:
    """Return the message about an unknown option of the entry `name`."""
    if not accepted:
        return f"{setting}.{option} is not an option of {name}, which takes no options"
    accepted = list(dict.fromkeys(accepted))
    near = nearest_name(option, accepted, menu.option_synonyms) or "."
    return f"{setting}.{option} is not an option of {name}{near} Options: {', '.join(accepted)}"


_PLAIN_TYPES = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "text", "None": "null"}


def _converted_value(setting: str, value: Any, annotation: Any, nested: Menu | None = None) -> Any:
    """Convert a value of a config to what a parameter takes; check its type if the annotation is a plain type.

    Args:
        setting: its name, for messages.
        value: a number, text, list or mapping.
        annotation: the annotation of the parameter.
        nested: the menu of the object that a mapping describes.
    """
    if nested is not None:
        name = value.get("name", next(iter(nested)) if len(nested) == 1 else None)
        require(isinstance(name, str), setting, "a mapping with a name and options", value)
        options = {key: option for key, option in value.items() if key != "name"}
        return create(Component(name, options), nested, setting=setting)
    type_names = _type_names(annotation)
    if "Tensor" in type_names and (isinstance(value, list) or type_names <= {"Tensor", "None"}):
        return None if value is None else _tensor(setting, value)
    plain = [kind for kind in _PLAIN_TYPES if kind in type_names]
    if type_names and type_names <= {*_PLAIN_TYPES, "Tensor"}:
        if isinstance(value, bool) and "bool" not in type_names and "str" in type_names:
            return json.dumps(value)  # YAML and JSON read the text `true` as a boolean
        fits = type(value).__name__ in type_names or (value is None and "None" in type_names)
        fits |= type(value) is int and "float" in type_names
        require(fits, setting, " or ".join(_PLAIN_TYPES[kind] for kind in plain), value)
        too_large = type(value) is int and abs(value) >= 2**63
        require(not too_large, setting, "an integer of at most 64 bits", value)
    return tuple(value) if isinstance(value, list) else value


def _type_names(annotation: Any) -> set[str]:
    """Return the names of the types in an annotation, which may be text.

    >>> sorted(_type_names("float | None")), _type_names(int), sorted(_type_names(str | None))
    (['None', 'float'], {'int'}, ['None', 'str'])
    """
    if isinstance(annotation, str):
        return {part.strip() for part in annotation.split("|")}
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return {"None" if part is type(None) else getattr(part, "__name__", str(part)) for part in parts}


def _tensor(setting: str, value: Any) -> Any:
    import torch

    is_numbers = isinstance(value, list) and all(type(number) in (int, float) for number in value)
    require(is_numbers, setting, "a list of numbers", value)
    return torch.tensor(value, dtype=torch.float32)


def _text_of(value: Any) -> str:
    return getattr(value, "__name__", repr(value))
