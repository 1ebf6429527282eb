"""What the API pages are made of: docstrings as Markdown, and of every room the names that say something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1 *\S.*)*", re.M)
FORMULA = re.compile(r"^( *)\.\. math:: (.*(?:\n\1 +\S.*)*)", re.M)
SHARED = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {5,}\S.*)*)", re.M)
UNSAID = ("__post_init__", "extra_repr")


def as_markdown(text: str) -> str:
    """Put examples and formulas in a fence, which Markdown leaves as it is; give `first, second: …` a line each."""
    text = SHARED.sub(lambda found: "\n".join(f"    {name}: {found[2]}" for name in found[1].split(", ")), text)
    text = EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
    return FORMULA.sub(_formula, text)


def _formula(found: re.Match[str]) -> str:
    indent = found[1]
    lines = [f"{indent}{line.strip()}" for line in found[2].splitlines()]
    return "\n".join([f"{indent}```latex", *lines, f"{indent}```"])


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member


class Docstrings(griffe.Extension):
    """Rewrites docstrings, leaves out attributes without one, and shows the function `data.digits`, not its file."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Decide what is shown, now that all of the package is there."""
        for owner in _classes(pkg):
            for name, member in list(owner.members.items()):
                if name != "__init__" and (name in UNSAID or not member.docstring):
                    del owner.members[name]
        loader.resolve_aliases()
        for room in pkg.modules.values():
            for name in map(str, room.exports or ()):
                file = room.members.get(name)
                if file is not None and file.is_module and name in file.members:
                    room.members[name] = griffe.Alias(name, file.members[name], parent=room)
