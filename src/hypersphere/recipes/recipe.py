"""What a recipe is: the rows of a table as data, and one function that runs a row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hypersphere._validation import require

__all__ = ["Metric", "Outcome", "Recipe", "Row", "Trial"]


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

    def __post_init__(self) -> None:
        require(bool(self.name.strip(". ")), "name", "words, not only dots", self.name)


@dataclass(frozen=True)
class Trial:
    """What a run is given beside its settings: the seed, whom to tell the part done (0…1), and where data lies."""

    seed: int
    tell: Callable[[float], None] = lambda part: None
    data_root: Path | None = None


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
        settings: what all rows have in common (the schedule, the size), as JSON can write it.
        rows: what differs.
        seeds: run by default.
        metrics: the columns, in order.
        run: one row with its settings, as a `Trial`.
        note: what to know when reading the table: the scale, and how it differs from the source.
        figures: the curves of the outcomes that are worth a picture beside the table, as ("error", "energy").
    """

    name: str
    title: str
    reference: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    run: Callable[[Mapping[str, Any], Trial], Outcome]
    note: str = ""
    figures: tuple[str, ...] = ()

    def settings_of(self, row: Row, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's settings, changed by the row's and by the overrides, as JSON would give them back.

        A value has the type of the recipe's own; a whole number does for a fraction, and anything for None. What makes
        a row is the row's alone: overriding it would give one row another's numbers.
        """
        own = ", ".join(key for key in overrides if key in row.settings)
        require(not own, "overrides", f"settings that row {row.name!r} does not set itself", own)
        settings = dict(self.settings)
        for key, value in [*row.settings.items(), *overrides.items()]:
            require(key in settings, "overrides", f"settings of {self.name}: {', '.join(settings)}", key)
            try:
                settings[key] = _like(self.settings[key], value)
            except (TypeError, OverflowError):
                raise ValueError(f"{key} must be a value like {self.settings[key]!r}, not {value!r}") from None
        try:
            return json.loads(json.dumps(settings, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings of {row.name!r} must be what JSON can write: {error}") from None


def _like(default: Any, value: Any) -> Any:
    """Return the value in the default's type; raise a `TypeError` if it has another."""
    if default is None:
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        item = default[0] if len({type(part) for part in default}) == 1 else None
        return [_like(item, part) for part in value]
    if type(value) is not type(default) or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError
    return value
