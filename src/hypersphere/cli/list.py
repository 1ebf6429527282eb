"""`hypersphere list`: the menus, read from their dictionaries, and the options of each entry."""

from __future__ import annotations

import inspect
import json as json_module
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere._validation import nearest_name, require
from hypersphere.cli.output import printable
from hypersphere.training.components import MENUS, Menu
from hypersphere.training.config import merge

__all__ = ["TITLES", "list_menus", "summary"]

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

RECORDS = ("results", "runs")
LISTS = ("augment", "regularizers", "trackers", "validation.protocols")


def list_menus(
    menu: Annotated[str | None, typer.Argument(help="Show only this menu, for example heads or data-sets.")] = None,
    entry: Annotated[str | None, typer.Argument(help="Show only this entry of the menu, with its options.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of the entries of the menu.")] = False,
) -> None:
    """List the available heads, networks, data sets, recipes and so on, or show one entry with its options."""
    from rich.console import Console

    require(not json or menu is not None, "--json", "given with a menu", "--json alone")
    titles = list(TITLES) if menu is None else [_title(menu)]
    entries = {title: TITLES[title][0] for title in titles}
    if entry is not None and entry not in entries[titles[0]]:
        near = nearest_name(entry, entries[titles[0]], entries[titles[0]].synonyms)
        raise ValueError(f"entry must be one of {', '.join(entries[titles[0]])}, not {entry!r}{near}")
    if json:
        chosen = [entry] if entry is not None else list(entries[titles[0]])
        print(json_module.dumps([_description(titles[0], name) for name in chosen], indent=1, default=_shown))
        return
    console = Console(highlight=False, soft_wrap=True)
    if entry is not None:
        _print_entry(console, titles[0], entry)
        return
    for title, one in entries.items():
        console.print(title, style="bold")
        # "none", the default of some menus, is not listed.
        _print_pairs(console, {name: summary(made) for name, made in one.items() if name != "none"})


def _title(menu: str) -> str:
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


def _options(title: str, name: str) -> dict[str, Any]:
    """Return the options of an entry with their defaults; for a recipe, its settings at the scale cpu.

    >>> _options("schedules", "cosine")
    {'warmup': 0.0, 'end': 0.0}
    """
    menu, _ = TITLES[title]
    if title == "recipes":
        recipe: Any = menu[name]
        return merge(recipe.base, recipe.scales.get("cpu", {}))
    return menu.options(name) if callable(menu[name]) else {}


def _description(title: str, name: str) -> dict[str, Any]:
    """Return an entry as plain data."""
    made: Any = TITLES[title][0][name]
    if title == "recipes":
        return {**made.description(), "records": _records(name)}
    return {"name": name, "summary": summary(made), "options": _options(title, name)}


def _records(name: str) -> list[str]:
    """Return the records of a recipe below the folders results and runs of the current folder."""
    folders = [folder for root in RECORDS for folder in (Path(root) / name, *Path(root).glob(f"{name}@*"))]
    return sorted(str(path) for folder in folders for path in folder.glob("*/seed-*.json"))


def _print_entry(console: Any, title: str, name: str) -> None:
    menu, setting = TITLES[title]
    made: Any = menu[name]
    called = f"hypersphere reproduce {name}" if title == "recipes" else f"--{setting} {name}" if setting else ""
    console.print(f"{name} ({title}){f': {called}' if called else ''}", style="bold", markup=False)
    for line in "\n".join(_words(made)).strip().splitlines():
        for part in textwrap.wrap(line, 116) if title == "recipes" else [line]:
            console.print(f"  {part}".rstrip(), markup=False)
    if title == "recipes":
        console.print("rows", style="bold")
        _print_pairs(console, {row.name: _shown(row.patch) for row in made.rows})
    options = _options(title, name)
    if options:
        # An item of a list of components is addressed by its name.
        path = (
            f"{setting}.{name}"
            if setting in ("augment", "regularizers", "trackers", "validation.protocols")
            else setting
        )
        form = "--set {}=" if title == "recipes" else f"--{path}.{{}}" if setting else "{}"
        console.print("options and their defaults", style="bold")
        _print_pairs(console, {form.format(key): _shown(default) for key, default in options.items()})


def summary(entry: Any) -> str:
    """Return the one-line description of an entry; for a network, its class and arguments.

    >>> summary(MENUS["model"]["sphereface4"])
    'SphereFaceNet with units=(0, 0, 0, 0)'
    """
    if isinstance(entry, partial):
        sizes = (f"{key}={getattr(value, '__name__', value)}" for key, value in entry.keywords.items())
        return f"{entry.func.__name__} with {', '.join(sizes)}"
    return next(_words(entry), "")


def _words(entry: Any) -> Iterator[str]:
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


def _shown(default: Any) -> str:
    """Format a default as on the command line: JSON, or plain text."""
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, str):
        return default
    if callable(default):
        return getattr(default, "__name__", repr(default))
    return json_module.dumps(default, default=str)


def _print_pairs(console: Any, pairs: Mapping[str, str]) -> None:
    width = max(map(len, pairs), default=0)
    for name, words in pairs.items():
        console.print(printable(f"  {name:<{width}}  {words}").rstrip(), markup=False)
