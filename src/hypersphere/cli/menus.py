"""All menus by title, with the options and the description of each entry."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from hypersphere._validation import require
from hypersphere.training.components import MENUS, Menu
from hypersphere.training.config import merge

__all__ = ["LISTS", "TITLES", "description_lines", "entry_options", "find_title", "shown", "summary"]

# The menus by title, and the setting of `train` that chooses an entry of each.
TITLES: dict[str, tuple[Menu, str]] = {
    "data sets": (MENUS["data"], "data"),
    "samplers": (MENUS["sampler"], "sampler"),
    "augmentations": (MENUS["augment"], "augment"),
    "normalisations": (MENUS["normalize"], "normalize"),
    "networks": (MENUS["model"], "model"),
    "initialisations": (MENUS["init"], "init"),
    "operators": (MENUS["operator"], "operator"),
    "heads": (MENUS["head"], "head"),
    "regularisers": (MENUS["regularizer"], "regularizers"),
    "rotations": (MENUS["rotation"], "rotation"),
    "adversaries": (MENUS["adversarial"], "adversarial"),
    "optimisers": (MENUS["optimizer"], "optimizer"),
    "schedules": (MENUS["schedule"], "schedule"),
    "protocols": (MENUS["validation"], "validation.protocols"),
    "trackers": (MENUS["tracker"], "trackers"),
    "margins": (Menu("hypersphere.functions.margin:MARGINS"), ""),
    "angular activations": (Menu("hypersphere.functions.angular:ANGULARS"), ""),
    "weightings": (Menu("hypersphere.functions.magnitude:WEIGHTINGS"), ""),
    "energy kernels": (Menu("hypersphere.functions.kernel:KERNELS"), ""),
    "projections": (Menu("hypersphere.functions.projection:PROJECTIONS"), ""),
    "attacks": (Menu("hypersphere.robustness:ATTACKS"), ""),
    "recipes": (Menu("hypersphere.recipes:RECIPES"), ""),
}

LISTS = ("augment", "regularizers", "trackers", "validation.protocols")


def find_title(menu: str) -> str:
    """Return the title of a menu; spellings such as "data-sets", "optimizers" and "head" are accepted."""
    plain = {_folded(title): title for title in TITLES} | {setting: title for title, (_, setting) in TITLES.items()}
    title = plain.get(menu) or plain.get(_folded(menu))
    spellings = {title: title.replace(" ", "-") for title in TITLES}
    if menu and title is None:
        # `list arcface` instead of `list heads arcface`
        for other, (one, _) in TITLES.items():
            require(menu not in one, "menu", f"given before the entry (`list {spellings[other]} {menu}`)", menu)
    require(bool(menu) and title is not None, "menu", f"one of {', '.join(spellings.values())}", menu)
    return str(title)


def _folded(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ").replace("iz", "is").removesuffix("s")


def entry_options(title: str, name: str) -> dict[str, Any]:
    """Return the options of an entry with their defaults; for a recipe, its settings at the scale cpu.

    >>> entry_options("angular activations", "sigmoid")
    {'k': 0.5}
    """
    menu, _ = TITLES[title]
    if title == "recipes":
        recipe: Any = menu[name]
        return merge(recipe.base, recipe.scales.get("cpu", {}))
    return menu.options(name) if callable(menu[name]) else {}


def summary(entry: Any) -> str:
    """Return the one-line description of an entry; for a network, its class and arguments.

    >>> summary(MENUS["model"]["sphereface4"])
    'SphereFaceNet with units=(0, 0, 0, 0)'
    """
    if isinstance(entry, partial):
        sizes = (f"{key}={getattr(value, '__name__', value)}" for key, value in entry.keywords.items())
        return f"{entry.func.__name__} with {', '.join(sizes)}"
    return next(description_lines(entry), "")


def description_lines(entry: Any) -> Iterator[str]:
    """Yield the lines of the docstring of an entry up to its examples, or of the title and note of a recipe."""
    if hasattr(entry, "reference"):
        yield from (f"{entry.title}.", f"Source: {entry.reference}.", entry.note)
        return
    if isinstance(entry, partial):
        yield summary(entry)
    text = entry if isinstance(entry, str) else inspect.getdoc(getattr(entry, "func", entry)) or ""
    if getattr(entry, "__module__", "").startswith("torch."):
        text = text.partition("\n")[0]  # the rest are formulas
    for line in text.splitlines():
        if line.startswith((">>>", "Example")):
            return
        yield line


def shown(default: Any) -> str:
    """Format a default as on the command line: JSON, or plain text."""
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, str):
        return default
    if callable(default):
        return getattr(default, "__name__", repr(default))
    return json.dumps(default, default=str)
