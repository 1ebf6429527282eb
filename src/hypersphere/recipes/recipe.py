"""Recipes as data: a base config, and patches for its scales and for the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hypersphere._validation import nearest_name, require
from hypersphere.training.config import Config, merge, set_path

__all__ = ["SCALES", "Metric", "Outcome", "Recipe", "Row"]

SCALES = ("paper", "cpu", "smoke")
Patch = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """A column of the table: its key in the outcome, its heading, its number format and whether higher is better."""

    key: str
    heading: str
    format: str = ".2f"
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: name of the row.
        patch: settings that differ from those of the recipe.
        printed: numbers that the source prints, by metric.
        at: further patches by scale, such as learning rates that were chosen for small networks.
    """

    name: str
    patch: Patch = field(default_factory=dict)
    printed: Mapping[str, float] = field(default_factory=dict)
    at: Mapping[str, Patch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.name.strip(". ")), "name", "text other than dots and spaces", self.name)


@dataclass(frozen=True)
class Outcome:
    """The result of one run: numbers and curves for the record, and tensors for pictures."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, list[float]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the sources as one command.

    Patches are applied in this order: base, scale, row, row at this scale, overrides. All of them are merged deeply
    (`hypersphere.training.config.merge`), so that each one says only what differs.

    Attributes:
        name: name on the command line.
        title: one line that says what the table shows.
        reference: where the source prints it.
        base: settings that all rows and scales share. The mapping "measure" holds options of `measure`; all others are
            settings of `Config`.
        scales: a patch for each of "paper" (the protocol of the source), "cpu" (small networks, hours on two cores) and
            "smoke" (seconds, without files).
        rows: the rows of the table.
        seeds: seeds that run by default.
        metrics: the columns, in order.
        covers: identifiers of the tables and figures of the sources that the recipe reproduces, such as "T6.1".
        cost: rough number of core hours of all rows and default seeds, by scale.
        note: what a reader of the table has to know: the scale of the stored records, and differences from the source.
        figures: curves that are drawn next to the table, such as ("error", "energy").
        measure: called after training as `measure(experiment, run, **options)`; its outcome is added to that of
            training. A parameter `data_root` gets the folder of the data sets.
        compute: for a table that trains no network: called as `compute(seed, **options)` instead of training.
        seeded: dotted paths of the settings that are set to the seed, apart from those that a scale does not have.

    Example:
        >>> recipe = Recipe("toy", "Toy", "nowhere", {"head": "arcface"}, dict.fromkeys(SCALES, {}), (Row("row"),))
        >>> recipe.config("row", overrides={"head.m": 0.3}, seed=2).head.options
        {'m': 0.3}
    """

    name: str
    title: str
    reference: str
    base: Patch
    scales: Mapping[str, Patch]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = (0,)
    metrics: tuple[Metric, ...] = ()
    covers: tuple[str, ...] = ()
    cost: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    figures: tuple[str, ...] = ()
    measure: Callable[..., Outcome] | None = None
    compute: Callable[..., Outcome] | None = None
    seeded: tuple[str, ...] = ("seed",)

    def __post_init__(self) -> None:
        require(set(self.scales) <= set(SCALES), "scales", f"among {', '.join(SCALES)}", list(self.scales))
        names = [row.name for row in self.rows]
        require(len(set(names)) == len(names), "rows", "rows with different names", names)

    def row(self, name: str) -> Row:
        """Return a row by its name."""
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise ValueError(f"row must be one of {', '.join(rows)}, not {name!r}{nearest_name(name, rows)}")
        return rows[name]

    def settings(
        self, row: str | Row, scale: str = "cpu", overrides: Patch | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        """Return all settings of a row as plain data: those of `Config`, and the mapping "measure" if there are any.

        Args:
            row: a row or its name.
            scale: a scale of the recipe.
            overrides: settings by dotted path, such as {"optimizer.lr": 0.1}, or nested.
            seed: the seed; by default the first one of the recipe.

        Raises:
            ValueError: if a setting does not exist or has a value of the wrong type.
        """
        one = self.row(row) if isinstance(row, str) else row
        require(scale in self.scales, "scale", f"one of {', '.join(self.scales)}", scale)
        defaults = Config().settings() if self.compute is None else {"seed": 0}
        settings = merge(defaults, self.base, self.scales[scale], one.patch, one.at.get(scale, {}))
        options = settings.get("measure", {})
        for path in self.seeded:
            if _has(settings, path):
                settings = set_path(settings, path, self.seeds[0] if seed is None else seed)
        for path, value in (overrides or {}).items():
            settings = set_path(settings, path, value)
            # The duration is given in epochs or in steps.
            other = {"epochs": "steps", "steps": "epochs"}.get(path)
            if other is not None and value is not None and other not in (overrides or {}):
                settings[other] = None
        measured = settings.pop("measure", {})
        unknown = [key for key in measured if key not in options]
        if unknown:
            raise ValueError(f"measure.{unknown[0]} is not a setting of {self.name}{nearest_name(unknown[0], options)}")
        if self.compute is None:
            settings = Config.of(settings).settings()
        else:
            require(
                set(settings) <= {"seed"}, "settings", "among seed and measure, because nothing is trained", settings
            )
        return {**settings, "measure": measured} if measured else settings

    def config(
        self, row: str | Row, scale: str = "cpu", overrides: Patch | None = None, seed: int | None = None
    ) -> Config:
        """Return the config of a row, see `settings`."""
        settings = self.settings(row, scale, overrides, seed)
        settings.pop("measure", None)
        return Config.of(settings)

    @property
    def printed(self) -> dict[str, Mapping[str, float]]:
        """The numbers that the source prints, by row and metric."""
        return {row.name: row.printed for row in self.rows}

    def description(self) -> dict[str, Any]:
        """Return what there is to know before running the recipe, as plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "reference": self.reference,
            "covers": list(self.covers),
            "scales": list(self.scales),
            "cost": dict(self.cost),
            "rows": [row.name for row in self.rows],
            "seeds": list(self.seeds),
        }


def _has(settings: Mapping[str, Any], path: str) -> bool:
    place: Any = settings
    for key in path.split("."):
        if not isinstance(place, Mapping) or key not in place:
            return False
        place = place[key]
    return True
