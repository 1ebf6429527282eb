"""`hypersphere list`: the menus, read from their dictionaries, and the options of each entry."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from hypersphere import layers
from hypersphere._validation import require
from hypersphere.cli.words import words_of
from hypersphere.functions.angular import ANGULARS
from hypersphere.functions.kernel import KERNELS
from hypersphere.functions.magnitude import MAGNITUDES, WEIGHTINGS
from hypersphere.functions.margin import MARGINS
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.functions.projection import PROJECTIONS
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.heads import PRESETS, AngularHead, HeadOptions
from hypersphere.recipes import RECIPES, Recipe
from hypersphere.robustness import ATTACKS
from hypersphere.training.job import REGULARIZERS
from hypersphere.training.network import NETWORKS, OPERATORS
from hypersphere.training.optimizers import OPTIMIZERS
from hypersphere.training.rotating import ROTATIONS
from hypersphere.training.schedule import SCHEDULES
from hypersphere.training.task import TASKS

__all__ = ["MENUS", "Menu", "options_of", "print_catalogue", "resolved", "summary"]

NEEDED = inspect.Parameter.empty
OF_DATA = "from the data"


def _defaults(maker: Callable[..., Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the parameters of a callable with their defaults: all of them, or only those in `names`."""
    parameters = inspect.signature(maker).parameters
    named = {
        key: one.default for key, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    return named if names is None else {key: named[key] for key in names}


@dataclass(frozen=True)
class Menu:
    """A menu of named entries.

    Attributes:
        entries: the entries by name.
        option: the option of `train` that selects an entry, empty if there is none.
        given: parameters that the library passes; users cannot set them.
        more: returns additional options of an entry with their defaults.
    """

    entries: Mapping[str, Any]
    option: str = ""
    given: Sequence[str] = ()
    more: Callable[[str], Mapping[str, Any]] = field(default=lambda name: {})


def _of_heads(name: str) -> dict[str, Any]:
    takes_more = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(PRESETS[name]).parameters.values())
    return {**(_defaults(AngularHead, HeadOptions.__annotations__) if takes_more else {}), "sharded": False}


def _conversion(name: str) -> dict[str, Any]:
    if name not in MAGNITUDES:
        return {}
    names = ("angular", "weighting", "learn_k", "learn_radius", "momentum")
    options = {option: value for option, value in layers.DEFAULT_OPTIONS.items() if option in names}
    return {**options, "layers": "convolutions", "project_every": None, "weighted_gradients": False}


def _turning(name: str) -> dict[str, Any]:
    entry = {**ORTHOGONALS, **TRANSFORMS}.get(name)
    return {} if entry is None else _defaults(entry)


def _of_data(name: str) -> dict[str, Any]:
    sizes = [key for key in _defaults(NETWORKS[name]) if key in ("in_channels", "image_size", "in_features")]
    return {**dict.fromkeys(sizes, OF_DATA), "standardize": OF_DATA, "init": None, "init_mean": 0.0}


# Menus whose entries are plain names in training, without a docstring to show.
AUGMENTATIONS = {
    "shift": "Shift each image by up to this number of pixels in each direction; zeros fill the gap.",
    "mirror": "Mirror each image with probability 1/2.",
}
INITIALS = {
    "normal": "Standard normal distribution.",
    "xavier": "Uniform distribution with variance 2/(fan in + fan out) (Glorot and Bengio 2010).",
    "he": "Normal distribution with variance 2/fan in (He et al. 2015).",
}

MENUS: dict[str, Menu] = {
    "heads": Menu(PRESETS, "head", ("in_features", "num_classes"), _of_heads),
    "margins": Menu(MARGINS),
    "operators": Menu(OPERATORS, "operator", ("layer",), _conversion),
    "angular activations": Menu(ANGULARS),
    "weightings": Menu(WEIGHTINGS),
    "regularisers": Menu(REGULARIZERS, "regularizer", ("model", "modules", "where")),
    "energy kernels": Menu(KERNELS),
    "projections": Menu(PROJECTIONS),
    "rotations": Menu(ROTATIONS, "rotation", ("modules",), _turning),
    "networks": Menu(NETWORKS, "model", ("conv", "linear", "num_classes"), _of_data),
    "initialisations": Menu(INITIALS, "model.init"),
    "optimisers": Menu(
        OPTIMIZERS,
        "optimizer",
        ("groups",),
        lambda name: {"weight_decay": 0.0, "decay_everything": False, "clip": None, "rotation_lr": None},
    ),
    "schedules": Menu(SCHEDULES, "schedule"),
    "augmentations": Menu(AUGMENTATIONS, "augment"),
    "attacks": Menu(ATTACKS),
    "data sets": Menu(TASKS, "data", ("root",)),
    "recipes": Menu(RECIPES),
}


def print_catalogue(menu: str | None = None, entry: str | None = None) -> None:
    """Print all menus or one menu with one line per entry, or one entry with its description and options.

    The entry "none", the default of some menus, is not listed.
    """
    console = Console(highlight=False, soft_wrap=True)
    chosen = MENUS if menu is None else {_title(menu): MENUS[_title(menu)]}
    if entry is not None:
        (title,) = chosen
        _print_entry(console, title, entry)
        return
    for title, one in chosen.items():
        console.print(title, style="bold")
        _print_pairs(console, {name: summary(made) for name, made in one.entries.items() if name != "none"})


def _title(menu: str) -> str:
    """Return the title of a menu; spellings such as "data-sets", "optimizers" and "head" are accepted."""
    plain = {_folded(title): title for title in MENUS} | {one.option: title for title, one in MENUS.items()}
    title = plain.get(menu) or plain.get(_folded(menu))
    spellings = {title: title.replace(" ", "-") for title in MENUS}
    if menu and title is None:
        # `list arcface` instead of `list heads arcface`
        for other, one in MENUS.items():
            require(menu not in one.entries, "menu", f"given before the entry (`list {spellings[other]} {menu}`)", menu)
    require(bool(menu) and title is not None, "menu", f"one of {', '.join(spellings.values())}", menu)
    return str(title)


def _folded(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ").replace("iz", "is").removesuffix("s")


def _print_entry(console: Console, title: str, name: str) -> None:
    menu = MENUS[title]
    require(name in menu.entries, "entry", f"one of {', '.join(menu.entries)}", name)
    made, options = menu.entries[name], options_of(title, name)
    called = {"augment": f"--augment.{name} VALUE", "": ""}.get(menu.option, f"--{menu.option} {name}")
    if title == "recipes":
        called = f"hypersphere reproduce {name}"
    console.print(f"{name} ({title}){f': {called}' if called else ''}", style="bold", markup=False)
    for line in "\n".join(_words(made)).strip().splitlines():
        wrapped = textwrap.wrap(line, 116) if isinstance(made, Recipe) else [line]
        for part in wrapped or [""]:
            console.print(f"  {part}".rstrip(), markup=False)
    if isinstance(made, Recipe):
        console.print("rows", style="bold")
        _print_pairs(console, {row.name: words_of(row.settings) for row in made.rows})
    if options:
        form = "--set {}=" if title == "recipes" else f"--{menu.option}.{{}}" if menu.option else "{}"
        console.print("options and their defaults", style="bold")
        _print_pairs(console, {form.format(key): _shown(default) for key, default in options.items()})


def options_of(title: str, name: str) -> dict[str, Any]:
    """Return the options of an entry with their defaults, NEEDED where there is none; for a recipe, its settings.

    >>> options_of("schedules", "steps")
    {'warmup': 0.0, 'at': (0.5, 0.75), 'factor': 0.1}
    """
    menu = MENUS[title]
    made = menu.entries[name]
    if isinstance(made, Recipe):
        return dict(made.settings)
    options = _defaults(made) if callable(made) else {}
    return {key: default for key, default in {**options, **menu.more(name)}.items() if key not in menu.given}


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a job, completed by the defaults of all options of its components.

    >>> resolved({"schedule": {"name": "steps", "factor": 0.5}, "epochs": 3})
    {'schedule': {'name': 'steps', 'warmup': 0.0, 'at': [0.5, 0.75], 'factor': 0.5}, 'epochs': 3}
    """
    titles = {menu.option: title for title, menu in MENUS.items()}
    complete: dict[str, Any] = {}
    for key, value in settings.items():
        named = key in titles and isinstance(value, Mapping) and "name" in value
        options = options_of(titles[key], value["name"]) if named else {}
        defaults = {option: default for option, default in options.items() if default is not NEEDED}
        plain = json.loads(json.dumps(defaults, default=_shown))
        complete[key] = {"name": value["name"], **plain, **value} if named else value
    return complete


def summary(entry: Any) -> str:
    """Return the one-line description of an entry; for a network, its class and arguments.

    >>> summary(NETWORKS["sphereface4"])
    'SphereFaceNet with units=(0, 0, 0, 0)'
    """
    if isinstance(entry, partial):
        sizes = (f"{key}={getattr(value, '__name__', value)}" for key, value in entry.keywords.items())
        return f"{entry.func.__name__} with {', '.join(sizes)}"
    if isinstance(entry, Recipe):
        return entry.title
    return next(_words(entry), "")


def _words(entry: Any) -> Iterator[str]:
    """Yield the lines of the docstring of an entry up to its examples."""
    if isinstance(entry, Recipe):
        yield from (f"{entry.title}.", f"Source: {entry.reference}.", entry.note)
        return
    if isinstance(entry, partial):
        yield summary(entry)
    text = entry if isinstance(entry, str) else inspect.getdoc(getattr(entry, "func", entry)) or ""
    for line in text.splitlines():
        if line.startswith((">>>", "Example")):
            return
        yield line


def _shown(default: Any) -> str:
    """Format a default as on the command line: JSON, or plain text."""
    if default is NEEDED:
        return "required"
    if isinstance(default, str):
        return default
    if callable(default):
        return getattr(default, "__name__", repr(default))
    return json.dumps(default, default=str)


def _print_pairs(console: Console, pairs: Mapping[str, str]) -> None:
    width = max(map(len, pairs), default=0)
    for name, words in pairs.items():
        console.print(f"  {name:<{width}}  {words}".rstrip(), markup=False)
