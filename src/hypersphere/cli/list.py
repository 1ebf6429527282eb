"""`hypersphere list`: the menus, read from their dictionaries, and the options of each entry."""

from __future__ import annotations

import json as json_module
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hypersphere._validation import nearest_name, require
from hypersphere.cli.menus import TITLES, description_lines, entry_options, find_title, shown, summary
from hypersphere.cli.output import printable

__all__ = ["list_menus"]

RECORDS = ("results", "runs")  # folders with records of recipes


def list_menus(
    menu: Annotated[str | None, typer.Argument(help="Show only this menu, for example heads or data-sets.")] = None,
    entry: Annotated[str | None, typer.Argument(help="Show only this entry of the menu, with its options.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of the entries of the menu.")] = False,
) -> None:
    """List the available heads, networks, data sets, recipes and so on, or show one entry with its options."""
    from rich.console import Console

    require(not json or menu is not None, "--json", "given with a menu", "--json alone")
    titles = list(TITLES) if menu is None else [find_title(menu)]
    entries = {title: TITLES[title][0] for title in titles}
    if entry is not None and entry not in entries[titles[0]]:
        near = nearest_name(entry, entries[titles[0]], entries[titles[0]].synonyms)
        raise ValueError(f"entry must be one of {', '.join(entries[titles[0]])}, not {entry!r}{near}")
    if json:
        chosen = [entry] if entry is not None else list(entries[titles[0]])
        print(json_module.dumps([_description(titles[0], name) for name in chosen], indent=1, default=shown))
        return
    console = Console(highlight=False, soft_wrap=True)
    if entry is not None:
        _print_entry(console, titles[0], entry)
        return
    for title, one in entries.items():
        console.print(title, style="bold")
        # "none", the default of some menus, is not listed.
        _print_pairs(console, {name: summary(made) for name, made in one.items() if name != "none"})


def _description(title: str, name: str) -> dict[str, Any]:
    """Return an entry as plain data."""
    made: Any = TITLES[title][0][name]
    if title == "recipes":
        return {**made.description(), "records": _records(name)}
    return {"name": name, "summary": summary(made), "options": entry_options(title, name)}


def _records(name: str) -> list[str]:
    """Return the records of a recipe below the folders results and runs of the current folder."""
    folders = [folder for root in RECORDS for folder in (Path(root) / name, *Path(root).glob(f"{name}@*"))]
    return sorted(str(path) for folder in folders for path in folder.glob("*/seed-*.json"))


def _print_entry(console: Any, title: str, name: str) -> None:
    menu, setting = TITLES[title]
    made: Any = menu[name]
    called = f"hypersphere reproduce {name}" if title == "recipes" else f"--{setting} {name}" if setting else ""
    console.print(f"{name} ({title}){f': {called}' if called else ''}", style="bold", markup=False)
    for line in "\n".join(description_lines(made)).strip().splitlines():
        for part in textwrap.wrap(line, 116) if title == "recipes" else [line]:
            console.print(f"  {part}".rstrip(), markup=False)
    if title == "recipes":
        console.print("rows", style="bold")
        _print_pairs(console, {row.name: shown(row.patch) for row in made.rows})
    options = entry_options(title, name)
    if options:
        # An item of a list of components is addressed by its name.
        path = (
            f"{setting}.{name}"
            if setting in ("augment", "regularizers", "trackers", "validation.protocols")
            else setting
        )
        form = "--set {}=" if title == "recipes" else f"--{path}.{{}}" if setting else "{}"
        console.print("options and their defaults", style="bold")
        _print_pairs(console, {form.format(key): shown(default) for key, default in options.items()})


def _print_pairs(console: Any, pairs: Mapping[str, str]) -> None:
    width = max(map(len, pairs), default=0)
    for name, words in pairs.items():
        console.print(printable(f"  {name:<{width}}  {words}").rstrip(), markup=False)
