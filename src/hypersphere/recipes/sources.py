"""The tables and figures of the sources (the thesis and its papers), and the numbers that they print.

`sources.json` has one entry per table, figure and claim: the part of the library it belongs to, its kind, its columns,
and its rows with one cell per column. `scripts/collect_sources.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from hypersphere._validation import nearest_name

__all__ = ["PARTS", "SourceEntry", "printed_number", "source_entries"]

PARTS = ("objectives", "architectures", "energy", "rotation")


@dataclass(frozen=True)
class SourceEntry:
    """A table, figure or claim of the sources.

    Attributes:
        part: "objectives", "architectures", "energy" or "rotation".
        kind: "table", "figure", "function plot", "claim", "text claim" or "theory".
        metric: what its numbers are.
        columns: names of the columns; empty if there is only one.
        rows: cells by row, one per column; None where the source prints no number.
        same_as: identifiers of other entries that print the same experiment.
    """

    part: str
    kind: str
    metric: str = ""
    columns: Sequence[str] = ()
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    same_as: Sequence[str] = ()

    @property
    def needs_recipe(self) -> bool:
        """True for tables, figures and function plots; claims and theorems are checked by tests."""
        return self.kind in ("table", "figure", "function plot")


@cache
def source_entries() -> dict[str, SourceEntry]:
    """Return all entries by identifier, in the order of the sources."""
    text = (resources.files("hypersphere.recipes") / "sources.json").read_text(encoding="utf-8")
    return {name: SourceEntry(**entry) for name, entry in json.loads(text).items()}


def printed_number(source: str, row: str, column: str | None = None) -> float | None:
    """Return the number that a source prints in a row and column, or None if the cell has no number.

    Args:
        source: identifier of a table or figure, such as "T5.1".
        row: name of the row in the source.
        column: name of the column; not needed if there is only one.

    Example:
        >>> printed_number("T5.1", "MHE", "CIFAR-10 s=2")
        6.22
    """
    entry = _find(source, source_entries(), "source")
    cells = _find(row, entry.rows, f"row of {source}")
    if column is None and len(cells) == 1:
        return _number(cells[0])
    columns = dict(zip(entry.columns, cells, strict=True))
    return _number(_find("" if column is None else column, columns, f"column of {source}"))


def _find(name: str, entries: Mapping[str, Any], what: str) -> Any:
    """Return an entry by name; `what` names the kind of entry in the error message."""
    if name not in entries:
        raise ValueError(f"{what} must be one of {', '.join(entries)}, not {name!r}{nearest_name(name, entries)}")
    return entries[name]


def _number(cell: Any) -> float | None:
    """Return a cell as a number; None for text such as "7.5M" and for empty cells."""
    return float(cell) if isinstance(cell, (int, float)) else None
