"""`hypersphere list`: show the menus of components, and the options of each entry."""

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

__all__ = ["list_menus"]

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
LISTS = ("augment", "regularizers", "trackers", "validation.protocols")  # settings that are lists of components
RECORDS = ("results", "runs")  # folders with records of recipes
SHOWN_TABLES = 2  # number of tables and figures that are shown in the line of a recipe


def list_menus(
    menu: Annotated[str | None, typer.Argument(help="Show only this menu, for example heads or data-sets.")] = None,
    entry: Annotated[
        str | None,
        typer.Argument(
            help="Show only this entry of the menu, with its options. A recipe may be named by a table, such as T6.1."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of the entries of the menu.")] = False,
) -> None:
    """List the available heads, networks, data sets, recipes and so on, or show one entry with its options."""
    from rich.console import Console

    if json and menu is None:
        raise ValueError("--json needs the name of a menu, such as heads")
    title = None if menu is None else find_title(menu)
    if title is not None and entry is not None:
        entry = _find_entry(title, entry)
    console = Console(highlight=False, soft_wrap=True)
    if title is not None and json:
        entries = [_description(title, name) for name in ([entry] if entry else TITLES[title][0])]
        print(json_module.dumps(entries, indent=1, default=_shown))
    elif title is not None and entry is not None:
        _print_entry(console, title, entry)
    else:
        for shown in TITLES if title is None else [title]:
            console.print(shown, style="bold")
            # "none", the default of some menus, is not listed.
            summaries = {name: _summary(factory) for name, factory in TITLES[shown][0].items() if name != "none"}
            _print_pairs(console, _with_tables(summaries) if shown == "recipes" else summaries)


def find_title(menu: str) -> str:
    """Return the title of a menu; spellings such as "data-sets", "optimizers" and "head" are accepted."""
    _require_plain_name("menu", menu)
    titles = {_normalized(title): title for title in TITLES}
    titles |= {setting: title for title, (_, setting) in TITLES.items() if setting}
    title = titles.get(menu) or titles.get(_normalized(menu))
    if title is not None:
        return title
    # `menu` may be an entry: `list arcface` instead of `list heads arcface`.
    for other, (entries, _) in TITLES.items():
        require(menu not in entries, "menu", f"given before the entry (`list {other.replace(' ', '-')} {menu}`)", menu)
    raise ValueError(f"menu must be one of {', '.join(title.replace(' ', '-') for title in TITLES)}, not {menu!r}")


def _normalized(text: str) -> str:
    """Return a title without differences of case, dashes, British or American spelling, and number."""
    return text.lower().replace("-", " ").replace("_", " ").replace("iz", "is").removesuffix("s")


def _find_entry(title: str, entry: str) -> str:
    """Return the name of an entry; a recipe is also found by a table that it covers, such as T6.1."""
    menu, _ = TITLES[title]
    _require_plain_name("entry", entry)
    if title == "recipes":
        from hypersphere.recipes import find_recipe

        return find_recipe(entry).name
    if entry not in menu:
        longer = [name for name in menu if name.startswith(entry)]
        near = f"; did you mean {' or '.join(longer)}?" if longer else nearest_name(entry, menu, menu.synonyms)
        raise ValueError(f"entry must be one of {', '.join(menu)}, not {entry!r}{near}")
    return entry


def _with_tables(summaries: Mapping[str, str]) -> dict[str, str]:
    """Return the summaries of recipes, each after the tables and figures that it covers."""
    recipes: Mapping[str, Any] = TITLES["recipes"][0]
    covered = {}
    for name in summaries:
        ids = recipes[name].covers
        covered[name] = ", ".join(ids[:SHOWN_TABLES]) + ", …" * (len(ids) > SHOWN_TABLES)
    width = max(map(len, covered.values()))
    return {name: f"{covered[name]:<{width}}  {summary}" for name, summary in summaries.items()}


def _require_plain_name(argument: str, name: str) -> None:
    """Raise a `ValueError` that says how to use a name such as `hf:vit` or `my_module:Net`, which no menu lists."""
    if ":" in name:
        accepted = "a name of this library, for example `list networks resnet18`"
        use = (
            f"a model from elsewhere is used directly: `train --model {name}`, with its arguments as --model.NAME=VALUE"
        )
        raise ValueError(f"{argument} must be {accepted}, not {name!r}; {use}")


def entry_options(title: str, name: str) -> dict[str, Any]:
    """Return the options of an entry with their defaults; for a recipe, its settings at the scale cpu.

    >>> entry_options("angular activations", "sigmoid")
    {'k': 0.5}
    """
    menu, _ = TITLES[title]
    if title == "recipes":
        recipe: Any = menu[name]
        return merge(recipe.base, recipe.scales.get("cpu", {}))
    return menu.options(name)


def _description(title: str, name: str) -> dict[str, Any]:
    """Return an entry as plain data."""
    entry: Any = TITLES[title][0][name]
    if title != "recipes":
        return {"name": name, "summary": _summary(entry), "options": entry_options(title, name)}
    folders = [folder for root in RECORDS for folder in (Path(root) / name, *Path(root).glob(f"{name}@*"))]
    records = sorted(str(path) for folder in folders for path in folder.glob("*/seed-*.json"))
    return {**entry.description(), "records": records}


def _print_entry(console: Any, title: str, name: str) -> None:
    menu, setting = TITLES[title]
    entry: Any = menu[name]
    usage = f": --{setting} {name}" if setting else ""
    # The form of an option on the command line. An item of a list of components is addressed by its name.
    form = f"--{setting}.{name}.{{}}" if setting in LISTS else f"--{setting}.{{}}" if setting else "{}"
    if title == "recipes":
        usage, form = f": hypersphere reproduce {name}", "--set {}="
    console.print(f"{name} ({title}){usage}", style="bold", markup=False)
    for line in "\n".join(_description_lines(entry)).strip().splitlines():
        for part in textwrap.wrap(line, 116) if title == "recipes" else [line]:
            console.print(f"  {part}".rstrip(), markup=False)
    if title == "recipes":
        if entry.covers:
            console.print(f"  Tables and figures: {', '.join(entry.covers)}.", markup=False)
        console.print("rows", style="bold")
        _print_pairs(console, {row.name: _shown(row.patch) for row in entry.rows})
    options = entry_options(title, name)
    if options:
        console.print("options and their defaults", style="bold")
        _print_pairs(console, {form.format(key): _shown(default) for key, default in options.items()})


def _print_pairs(console: Any, pairs: Mapping[str, str]) -> None:
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        console.print(printable(f"  {name:<{width}}  {text}").rstrip(), markup=False)


def _summary(entry: Any) -> str:
    """Return the one-line description of an entry; for a network, its class and arguments.

    >>> _summary(MENUS["model"]["sphereface4"])
    'SphereFaceNet with units=(0, 0, 0, 0)'
    """
    if isinstance(entry, partial):
        sizes = (f"{key}={getattr(value, '__name__', value)}" for key, value in entry.keywords.items())
        return f"{entry.func.__name__} with {', '.join(sizes)}"
    return next(_description_lines(entry), "")


def _description_lines(entry: Any) -> Iterator[str]:
    """Yield the docstring of an entry up to its examples, line by line, or title, source and note of a recipe."""
    if hasattr(entry, "reference"):
        yield from (f"{entry.title}.", f"Source: {entry.reference}.", entry.note)
        return
    if isinstance(entry, partial):
        yield _summary(entry)
    text = inspect.getdoc(getattr(entry, "func", entry)) or ""
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
    return getattr(default, "__name__", repr(default)) if callable(default) else json_module.dumps(default, default=str)
