"""Group the rows of a long table so that each group fits into one chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["MOST_ROWS", "group_rows"]

MOST_ROWS = 12  # curves that can be distinguished in one chart
FEWEST_ROWS = 3  # smaller groups are merged

# Ways to split the comma-separated parts of a name into a part shared with other names and the rest.
CUTS: tuple[Callable[[list[str]], tuple[list[str], list[str]]], ...] = (
    lambda parts: (parts[-1:], parts[:-1]),
    lambda parts: (parts[1:], parts[:1]),
    lambda parts: (parts[:1], parts[1:]),
)


def group_rows(names: Sequence[str], most: int = MOST_ROWS) -> dict[str, dict[str, str]]:
    """Return groups by title; each maps names to shorter names without the words of the title.

    If there are few rows, there is one group without a title. Otherwise rows are grouped by the part of the name after
    the last comma, after the first comma, or before the first comma; if no such grouping fits, by their order.

    >>> group_rows(["a, cold", "b, cold", "a, hot", "b, hot", "c, cold", "c, hot"], most=4)
    {'cold': {'a, cold': 'a', 'b, cold': 'b', 'c, cold': 'c'}, 'hot': {'a, hot': 'a', 'b, hot': 'b', 'c, hot': 'c'}}
    >>> group_rows(["one", "two", "three"], most=2)
    {'one … two': {'one': 'one', 'two': 'two'}, 'three': {'three': 'three'}}
    """
    if len(names) <= most:
        return {"": {name: name for name in names}}
    candidates = [_cut(names, cut) for cut in CUTS]
    fitting = [groups for groups in candidates if len(groups) > 1 and max(map(len, groups)) <= most]
    chosen = min(fitting, key=len) if fitting else _runs(names, most)
    return {_title(group): group for group in chosen}


def _cut(names: Sequence[str], cut: Callable[[list[str]], tuple[list[str], list[str]]]) -> list[dict[str, str]]:
    """Return groups of names that share a part; groups with few names are merged into one, with their full names."""
    shared: dict[str, dict[str, str]] = {}
    for name in names:
        common, rest = cut(name.split(", ")) if ", " in name else ([], [name])
        shared.setdefault(", ".join(common), {})[name] = ", ".join(rest)
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
    """Return the part that the names share, or the first and the last name."""
    (first, short), *_ = group.items()
    if first != short:
        return first.removeprefix(short).removesuffix(short).strip(", ")
    return first if len(group) == 1 else f"{first} … {list(group)[-1]}"
