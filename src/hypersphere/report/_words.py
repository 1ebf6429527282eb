"""Format settings, facts and measurements for tables and pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypersphere.report.tables import Cell, Column, Table

__all__ = ["joined_facts", "measured", "settings_table", "span", "words_of"]


def words_of(value: Any) -> str:
    """Format a setting; a component is shown as its name and its options.

    >>> words_of({"name": "sgd", "lr": 0.1, "momentum": 0.9}), words_of([8, 16]), words_of({"shift": 2})
    ('sgd (lr 0.1, momentum 0.9)', '[8, 16]', 'shift 2')
    """
    if isinstance(value, Mapping):
        options = ", ".join(f"{key} {words_of(item)}" for key, item in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name} ({options})" if name and options else name or options or "none"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(words_of, value))}]"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def joined_facts(each: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Merge several sets of facts: each key gets its distinct values, in order of appearance.

    >>> joined_facts([{"torch": "2.9", "threads": 1}, {"torch": "2.10", "threads": 1}])
    {'torch': '2.9, 2.10', 'threads': '1'}
    """
    merged: dict[str, dict[str, None]] = {}
    for facts in each:
        for key, value in facts.items():
            merged.setdefault(key, {})[str(value)] = None
    return {key: ", ".join(values) for key, values in merged.items()}


def measured(values: Iterable[float | None]) -> Cell:
    """Return the table cell for the values of all seeds: mean, standard deviation and number of the finite ones.

    >>> measured([1.0, 3.0, None]), measured([2.0]), measured([])
    ((2.0, 1.4142135623730951, 2), (2.0, nan, 1), None)
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    deviation = statistics.stdev(finite) if len(finite) > 1 else math.nan
    return (statistics.fmean(finite), deviation, len(finite)) if finite else None


def span(values: Iterable[float], form: str = ",") -> str:
    """Format the smallest and the largest of some numbers, or a single number if they are equal.

    >>> span([300, 1500, 300]), span([0.5], ".0%")
    ('300 to 1,500', '50%')
    """
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (ordered[0], ordered[-1])))


def settings_table(settings: Sequence[Mapping[str, Any]], caption: str = "") -> Table:
    """Return the settings that all of these share, one row per setting; `caption` explains them."""
    first, *others = settings
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    rows = [[key, words_of(value)] for key, value in shared.items()]
    return Table("Settings", [Column("setting"), Column("value")], rows, caption)
