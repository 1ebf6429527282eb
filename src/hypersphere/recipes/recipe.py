"""The data model of recipes: the rows of a table as data, and one function that runs a row."""

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
    """A column of the table: its key in the outcome, its heading, its number format and whether higher is better."""

    key: str
    heading: str
    format: str = ".2f"
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table: the settings that differ from the recipe, and the numbers that the source prints."""

    name: str
    settings: Mapping[str, Any]
    paper: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.name.strip(". ")), "name", "text other than dots and spaces", self.name)


@dataclass(frozen=True)
class Trial:
    """What a run receives next to its settings: the seed, a callback for progress in [0, 1], and the data folder."""

    seed: int
    tell: Callable[[float], None] = lambda fraction: None
    data_root: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of one run: numbers and curves for the record, and tensors for pictures."""

    metrics: Mapping[str, float]
    curves: Mapping[str, list[float]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the sources as one command.

    Args:
        name: name on the command line.
        title: one line that says what the table shows.
        reference: where the source prints it.
        settings: settings that all rows share, such as schedule and size, as JSON values.
        rows: the rows of the table.
        seeds: seeds that run by default.
        metrics: the columns, in order.
        run: function that runs one row from its settings and a `Trial`.
        note: what a reader of the table has to know: the scale, and the differences from the source.
        figures: curves of the outcomes that are drawn next to the table, such as ("error", "energy").
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
        """Return the settings of the recipe, changed by those of the row and by the overrides, as JSON values.

        A value must have the type of the default. An int is accepted for a float, and anything for None. Settings of
        the row cannot be overridden, because its numbers would then belong to another row.
        """
        fixed = ", ".join(key for key in overrides if key in row.settings)
        require(not fixed, "overrides", f"settings that row {row.name!r} does not set itself", fixed)
        settings = dict(self.settings)
        for key, value in [*row.settings.items(), *overrides.items()]:
            require(key in settings, "overrides", f"settings of {self.name}: {', '.join(settings)}", key)
            try:
                settings[key] = _convert_like(self.settings[key], value)
            except (TypeError, OverflowError):
                raise ValueError(f"{key} must be a value like {self.settings[key]!r}, not {value!r}") from None
        try:
            # Tuples become lists and keys become strings, as they will be in the record.
            return json.loads(json.dumps(settings, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings of {row.name!r} must be JSON values: {error}") from None


def _convert_like(default: Any, value: Any) -> Any:
    """Return the value converted to the type of the default; raise a `TypeError` if it has another type."""
    if default is None:
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        # A list of one type, such as widths, accepts any number of items of that type; a mixed list accepts anything.
        item_default = default[0] if len({type(item) for item in default}) == 1 else None
        return [_convert_like(item_default, item) for item in value]
    # `type` instead of `isinstance`, because True is an int.
    if type(value) is not type(default) or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError
    return value
