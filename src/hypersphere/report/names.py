"""Shorten names for labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

DIGITS = "0123456789"


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Return names of at most `most` letters, without parts that all names share.

    If a name is too long, the words that all names begin with are removed. If it is still too long, its middle is
    replaced by an ellipsis, preferably the letters that all names have before their numbers.

    >>> short_names(["Alphabet_of_the_Magi/character01", "Alphabet_of_the_Magi/character17"], 12)
    ['character01', 'character17']
    >>> short_names(["Alphabet_of_the_Magi/character01", "Greek/character17"], 12)
    ['Alphabet_…01', 'Greek…17']
    >>> short_names(["Arnold_Schwarzenegger", "Serena_Williams", "Pele"], 12)
    ['Arnol…negger', 'Seren…lliams', 'Pele']
    """
    if max(map(len, names), default=0) <= most:
        return list(names)
    if len(names) > 1:
        prefix = re.sub(r"[^\W_]+$", "", _beginning(names))
        names = [name.removeprefix(prefix) or name for name in names]
    shared = _beginning([name.rstrip(DIGITS)[::-1] for name in names])[::-1] if len(names) > 1 else ""
    return [name if len(name) <= most else _cut(name, shared, most) for name in names]


def _beginning(names: Sequence[str]) -> str:
    """Return the common prefix of the names."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike)


def _cut(name: str, shared: str, most: int) -> str:
    stem = name.rstrip(DIGITS)
    number = name[len(stem) :]
    tail = number if len(shared) > 1 and len(number) < most - 1 else name[-(most // 2) :]
    head = stem.removesuffix(shared) if tail == number else name
    return f"{head[: most - 1 - len(tail)]}…{tail}"
