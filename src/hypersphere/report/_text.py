"""Format settings, facts, ranges and names as text for tables and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from hypersphere._validation import printable

__all__ = [
    "common_prefix",
    "format_range",
    "format_setting",
    "join_words",
    "joined_facts",
    "pluralize",
    "printable_data",
    "short_names",
]


def printable_data(data: Any) -> Any:
    """Return nested lists and dictionaries in which all strings are printable."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {printable(str(key)): printable_data(value) for key, value in data.items()}
    return [printable_data(value) for value in data] if isinstance(data, (list, tuple)) else data


def pluralize(count: int, noun: str) -> str:
    """Return a number and its noun, in the plural if the number is not 1.

    >>> pluralize(1, "value"), pluralize(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_range(values: Iterable[float], form: str = ",") -> str:
    """Format the smallest and the largest of some numbers, or a single number if they are equal.

    >>> format_range([300, 1500, 300]), format_range([0.5], ".0%")
    ('300 to 1,500', '50%')
    """
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (ordered[0], ordered[-1])))


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Shorten names to at most `most` characters: remove the words that all begin with, then cut in the middle.

    >>> short_names(["Alphabet_of_the_Magi/character01", "Alphabet_of_the_Magi/character17"], 12)
    ['character01', 'character17']
    >>> short_names(["Arnold_Schwarzenegger", "Serena_Williams", "Pele"], 12)
    ['Arnol…negger', 'Seren…lliams', 'Pele']
    """
    if max(map(len, names), default=0) > most and len(names) > 1:
        shared = common_prefix(names)
        prefix = shared[: max(shared.rfind(end) for end in "/_- .") + 1]
        names = [name.removeprefix(prefix) for name in names]
    half = most // 2
    return [name if len(name) <= most else f"{name[: most - half - 1]}…{name[-half:]}" for name in names]


def common_prefix(names: Sequence[str]) -> str:
    """Return the longest prefix that all names share."""
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in shared)


def format_setting(value: Any) -> str:
    """Format a setting; a component is shown as its name and its options.

    >>> format_setting({"name": "sgd", "lr": 0.1, "nesterov": True}), format_setting([8, 16])
    ('sgd (lr 0.1, nesterov yes)', '[8, 16]')
    """
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} {format_setting(item)}" for key, item in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name} ({options})" if name and options else name or options or "none"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_setting, value))}]"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def joined_facts(each: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Merge mappings: each key gets its distinct values, in order of appearance.

    >>> joined_facts([{"torch": "2.9", "threads": 1}, {"torch": "2.10", "threads": 1}])
    {'torch': '2.9, 2.10', 'threads': '1'}
    """
    merged: dict[str, dict[str, None]] = {}
    for facts in each:
        for key, value in facts.items():
            merged.setdefault(key, {})[str(value)] = None
    return {key: ", ".join(values) for key, values in merged.items()}


def join_words(names: Sequence[str]) -> str:
    """Join names with commas and "and".

    >>> join_words(["a", "b", "c"]), join_words(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [names[-1]])
