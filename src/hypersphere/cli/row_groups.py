"""Rows of a long table in groups that one chart can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["MOST_ROWS", "group_rows"]

MOST_ROWS = 12  # curves that can be told apart in one chart
FEWEST_ROWS = 3  # that make a group of their own

# parts of a name between commas -> what it may share with others, and what is left of it
CUTS: tuple[Callable[[list[str]], tuple[list[str], list[str]]], ...] = (
    lambda parts: (parts[-1:], parts[:-1]),
    lambda parts: (parts[1:], parts[:1]),
    lambda parts: (parts[:1], parts[1:]),
)


def group_rows(names: Sequence[str], most: int = MOST_ROWS) -> dict[str, dict[str, str]]:
    """Return groups by their titles, each a mapping of names to shorter ones: without what the title says.

    One group without a title where it is large enough. Else rows are grouped by what follows the last or the first
    comma of their names, or comes before it; and in the order of the table where that does not do.

    >>> group_rows(["a, cold", "b, cold", "a, hot", "b, hot", "c, cold", "c, hot"], most=4)
    {'cold': {'a, cold': 'a', 'b, cold': 'b', 'c, cold': 'c'}, 'hot': {'a, hot': 'a', 'b, hot': 'b', 'c, hot': 'c'}}
    >>> group_rows(["one", "two", "three"], most=2)
    {'one … two': {'one': 'one', 'two': 'two'}, 'three': {'three': 'three'}}
    """
    if len(names) <= most:
        return {"": {name: name for name in names}}
    found = [_cut(names, cut) for cut in CUTS]
    fitting = [groups for groups in found if len(groups) > 1 and max(map(len, groups)) <= most]
    chosen = min(fitting, key=len) if fitting else _runs(names, most)
    return {_title(group): group for group in chosen}


def _cut(names: Sequence[str], cut: Callable[[list[str]], tuple[list[str], list[str]]]) -> list[dict[str, str]]:
    """Groups of names that share a part; those with few of their kind are one group, under their whole names."""
    shared: dict[str, dict[str, str]] = {}
    for name in names:
        common, own = cut(name.split(", ")) if ", " in name else ([], [name])
        shared.setdefault(", ".join(common), {})[name] = ", ".join(own)
    few = {key for key, group in shared.items() if len(group) < FEWEST_ROWS or not key}
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        key = next(key for key, group in shared.items() if name in group)
        groups.setdefault("" if key in few else key, {})[name] = name if key in few else shared[key][name]
    return list(groups.values())


def _runs(names: Sequence[str], most: int) -> list[dict[str, str]]:
    size = math.ceil(len(names) / math.ceil(len(names) / most))
    return [{name: name for name in names[start : start + size]} for start in range(0, len(names), size)]


def _title(group: dict[str, str]) -> str:
    """What the names share, or the first and the last of them."""
    (first, short), *_ = group.items()
    if first != short:
        return first.removeprefix(short).removesuffix(short).strip(", ")
    return first if len(group) == 1 else f"{first} … {list(group)[-1]}"
