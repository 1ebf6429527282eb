"""What a recipe is: the rows of a table as data, and one function that runs a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Metric", "Outcome", "Recipe", "Row"]


@dataclass(frozen=True)
class Metric:
    """A column of the table: its key in the outcome, its heading, how it is written and which end is better."""

    key: str
    heading: str
    format: str = ".2f"
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class Row:
    """What differs from the other rows, and what the source printed for it."""

    name: str
    settings: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What one run gave: numbers for the record, and tensors for pictures."""

    metrics: Mapping[str, float]
    curves: Mapping[str, list[float]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the sources as one command.

    Args:
        name: what it is called on the command line.
        title: one line that says what it shows.
        reference: where the source prints it.
        settings: what all rows have in common (the schedule, the size).
        rows: what differs.
        seeds: run by default.
        metrics: the columns, in order.
        run: one row with its settings, a seed and a function to tell progress (0…1) to.
        note: what to know when reading the table: the scale, and how it differs from the source.
    """

    name: str
    title: str
    reference: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    run: Callable[[Mapping[str, Any], int, Callable[[float], None]], Outcome]
    note: str = ""
