"""Recipes as data: a base config, and patches for its scales and for the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import Tensor

from hypersphere._validation import nearest_name, require
from hypersphere.recipes.sources import PARTS, printed_number
from hypersphere.training.components import check_components
from hypersphere.training.config import Config, merge, set_path

__all__ = ["SCALES", "Axis", "Claim", "Method", "Metric", "Outcome", "Recipe", "Row", "Tuning", "cells", "table_rows"]

SCALES = ("paper", "cpu", "smoke")
Patch = Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]  # values by dotted path
Place = tuple[str, str] | tuple[str, str, str]  # a cell of a source: table, row, and column unless there is only one


@dataclass(frozen=True)
class Metric:
    """A column of the table: its key in the outcome, heading, number format, and the better direction, if any."""

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
        printed: where the source prints the number of a metric: table, row, and column unless there is only one.
        at: further patches by scale, such as the width of a small network.
        grid: settings that are tuned for this row instead of those of the recipe, see `Tuning`.
        baseline: name of the row that this one is compared with; by default that of the recipe.
    """

    name: str
    patch: Patch = field(default_factory=dict)
    printed: Mapping[str, Place | float] = field(default_factory=dict)
    at: Mapping[str, Patch] = field(default_factory=dict)
    grid: Grid | None = None
    baseline: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.name.strip(". ")), "name", "text other than dots and spaces", self.name)

    def printed_numbers(self) -> dict[str, float]:
        """Return the numbers that the source prints, by metric."""
        numbers = {
            metric: printed_number(*place) if isinstance(place, tuple) else place
            for metric, place in self.printed.items()
        }
        return {metric: number for metric, number in numbers.items() if number is not None}


@dataclass(frozen=True)
class Method:
    """A line of a table as settings.

    Attributes:
        patch: its settings, for a regulariser with the weight of the source.
        grid: the settings that are tuned for it; None for those of the recipe.
        paper: further settings at the scale of the source.
    """

    patch: Patch = field(default_factory=dict)
    grid: Grid | None = None
    paper: Patch = field(default_factory=dict)


def table_rows(
    source: str,
    lines: Mapping[str, Patch | Method],
    columns: Mapping[str, Patch] | None = None,
    *,
    metric: str = "error",
    baseline: str | None = None,
    at: Mapping[str, Mapping[str, Patch]] | None = None,
    in_source: Mapping[str, str] | None = None,
) -> tuple[Row, ...]:
    """Return one row per line and column of a printed table, named "line, column", column by column.

    Args:
        source: the table, such as "T5.1".
        lines: settings by line of the table.
        columns: settings by column; None for a table with one column, whose rows have the names of the lines.
        metric: the metric of the numbers in the table.
        baseline: the line that the other lines are compared with in each column.
        at: further settings by column and scale.
        in_source: names of lines and columns in the source where they differ; "" for a line that is not in the source.

    Example:
        >>> rows = table_rows("T5.1", {"MHE": {"regularizers": ["mhe"]}}, {"CIFAR-10 s=2": {"data": "cifar10"}})
        >>> rows[0].name, rows[0].printed_numbers()
        ('MHE, CIFAR-10 s=2', {'error': 6.22})
    """
    rows = []
    for column, shared in (columns or {"": {}}).items():
        by_scale = (at or {}).get(column, {})
        suffix = f", {column}" if columns else ""
        for line, settings in lines.items():
            method = settings if isinstance(settings, Method) else Method(settings)
            paper = {"paper": merge(by_scale.get("paper", {}), method.paper)} if method.paper else {}
            first, second = ((in_source or {}).get(name, name) for name in (line, column))
            place: Place = (source, first, second) if columns else (source, first)
            row = Row(
                f"{line}{suffix}",
                merge(shared, method.patch),
                {metric: place} if first else {},
                {**by_scale, **paper},
                method.grid,
                None if baseline in (None, line) else f"{baseline}{suffix}",
            )
            rows.append(row)
    return tuple(rows)


def cells(lines: Iterable[str], columns: Iterable[str]) -> list[str]:
    """Return the names of the rows of some lines and columns of a table.

    >>> cells(["MHE", "SRIP"], ["t=1"])
    ['MHE, t=1', 'SRIP, t=1']
    """
    return [f"{line}, {column}" for line, column in product(lines, columns)]


@dataclass(frozen=True)
class Tuning:
    """How settings of a row are chosen before its seeds run.

    Each combination of the grid is one trial. A trial trains on a part of the training data and is measured on the
    rest: the fraction `held_out` of the samples, or of the classes for open-set data. The test data are not read. The
    best combination then trains on all training data, with the seeds of the recipe.

    Attributes:
        grid: values by dotted path. Rows with another grid must have the same number of combinations, so that every
            row has the same budget.
        metric: the metric that selects; its column says whether higher or lower is better.
        held_out: fraction of the training data that the trials are measured on.
        seeds: the seeds of the trials; the metric is averaged over them.
        scales: scales at which settings are tuned; the others use the settings of the recipe.
    """

    grid: Grid
    metric: str = "error"
    held_out: float = 0.1
    seeds: tuple[int, ...] = (100,)
    scales: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True)
class Claim:
    """A statement of the source that the records decide: one row is better than another.

    Attributes:
        text: the statement, as one sentence whose subject is the better row.
        better: name of the better row.
        than: name of the other row; by default the baseline of the better one.
        metric: the metric that is compared; its column says whether higher or lower is better. By default the first
            column of the recipe.
        source: the table or figure that makes the statement; by default the first one that the recipe covers.
    """

    text: str
    better: str
    than: str = ""
    metric: str = ""
    source: str = ""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a curve that is not drawn by epoch: evenly spaced values from `low` to `high`."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """The result of one run: numbers and curves for the record, and tensors for pictures."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, list[float]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the thesis or one of its papers, as one command.

    Patches are applied in this order: base, scale, row, row at this scale, overrides. All of them are merged deeply
    (`hypersphere.training.config.merge`), so that each one contains only what differs.

    Attributes:
        name: name on the command line.
        title: one line that says what the table shows.
        reference: where the source prints it.
        base: settings that all rows and scales share. The mapping "measure" holds options of `measure` or, under the
            same name, of `compute`; all others are settings of `Config`.
        scales: a patch for each of "paper" (the protocol of the source), "cpu" (small networks, hours on two cores) and
            "smoke" (seconds, without files).
        rows: the rows of the table.
        default_rows: by scale, names of the rows that run unless rows are chosen by name; by default all. A large table
            runs in full at "paper" only.
        seeds: seeds that run by default.
        metrics: the columns, in order.
        covers: identifiers of the tables and figures that the recipe reproduces, such as "T6.1".
        cost: rough number of core hours of all rows and default seeds, by scale.
        note: what a reader of the table has to know: the scale of the stored records, and differences from the source.
        figures: curves that are drawn next to the table, such as ("error", "energy").
        measure: called after training as `measure(experiment, run, **options)`; its outcome is added to that of
            training. A parameter `data_root` gets the folder of the data sets.
        compute: for a table that trains no classifier: called as `compute(seed, **options)` instead of training. A
            parameter `data_root` gets the folder of the data sets.
        seeded: dotted paths of the settings that are set to the seed. Settings that a scale does not have are skipped.
        part: part of the library, "objectives", "architectures", "energy" or "rotation".
        baseline: name of the row that the others are compared with.
        tuning: which settings are chosen on held-out training data, or None.
        claims: the statements of the source that the records decide.
        axes: horizontal axes of curves that are not drawn by epoch.

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
    part: str = "objectives"
    baseline: str | None = None
    tuning: Tuning | None = None
    claims: tuple[Claim, ...] = ()
    axes: Mapping[str, Axis] = field(default_factory=dict)
    default_rows: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(set(self.scales) <= set(SCALES), "scales", f"among {', '.join(SCALES)}", list(self.scales))
        require(self.part in PARTS, "part", f"one of {', '.join(PARTS)}", self.part)
        names = [row.name for row in self.rows]
        require(len(set(names)) == len(names), "rows", "rows with different names", names)
        require(set(self.default_rows) <= set(SCALES), "default_rows", f"among {', '.join(SCALES)}", self.default_rows)
        chosen = [name for names in self.default_rows.values() for name in names]
        for name in (self.baseline, *(row.baseline for row in self.rows), *chosen):
            if name is not None:
                self.row(name)
        object.__setattr__(self, "claims", tuple(map(self._completed, self.claims)))
        keys = {metric.key for metric in self.metrics}
        for claim in self.claims:
            require(claim.metric in keys, "metric of a claim", f"one of {', '.join(keys)}", claim.metric)
        if self.tuning is not None:
            require(self.tuning.metric in keys, "tuning.metric", f"one of {', '.join(keys)}", self.tuning.metric)
            tuned = [row for row in self.rows if any(self._runs(row, scale) for scale in self.tuning.scales)]
            budgets = {row.name: len(self.trials(row, self.tuning.scales[0])) for row in tuned}
            require(len(set(budgets.values())) == 1, "grids", "of the same number of combinations", budgets)

    def _completed(self, claim: Claim) -> Claim:
        """Fill in the defaults of a claim from this recipe; its rows must exist."""
        baseline = self.baseline_of(self.row(claim.better))
        than = claim.than or ("" if baseline is None else baseline.name)
        metric = claim.metric or (self.metrics[0].key if self.metrics else "")
        return Claim(claim.text, claim.better, self.row(than).name, metric, claim.source or next(iter(self.covers), ""))

    def rows_at(self, scale: str) -> tuple[Row, ...]:
        """Return the rows that run at a scale."""
        require(scale in self.scales, "scale", f"one of {', '.join(self.scales)}", scale)
        return tuple(row for row in self.rows if self._runs(row, scale))

    def _runs(self, row: Row, scale: str) -> bool:
        return scale not in self.default_rows or row.name in self.default_rows[scale]

    def selected(
        self, scale: str, rows: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> tuple[list[Row], list[int]]:
        """Return the rows and seeds to run: the given ones, by default those of the scale and of the recipe."""
        chosen = list(self.rows_at(scale)) if rows is None else [self.row(name) for name in dict.fromkeys(rows)]
        return chosen, [int(seed) for seed in (self.seeds if seeds is None else seeds)]

    def trials(self, row: Row, scale: str = "cpu") -> list[dict[str, Any]]:
        """Return the combinations of the settings that are tuned, as values by dotted path; empty without tuning."""
        if self.tuning is None or scale not in self.tuning.scales:
            return []
        grid = self.tuning.grid if row.grid is None else row.grid
        return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]

    def baseline_of(self, row: Row) -> Row | None:
        """Return the row that another one is compared with, or None for a baseline."""
        name = row.baseline or self.baseline
        return None if name in (None, row.name) else self.row(name)

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
        row = self.row(row) if isinstance(row, str) else row
        require(scale in self.scales, "scale", f"one of {', '.join(self.scales)}", scale)
        defaults = Config().settings() if self.compute is None else {"seed": 0}
        settings = merge(defaults, self.base, self.scales[scale], row.patch, row.at.get(scale, {}))
        options = settings.get("measure", {})
        for path in self.seeded:
            if _has(settings, path):
                settings = set_path(settings, path, self.seeds[0] if seed is None else seed)
        for path, value in (overrides or {}).items():
            settings = set_path(settings, path, value)
            # The duration is given in epochs or in steps, so overriding one unsets the other.
            other_unit = {"epochs": "steps", "steps": "epochs"}.get(path)
            if other_unit is not None and value is not None and other_unit not in (overrides or {}):
                settings[other_unit] = None
        measure_options = settings.pop("measure", {})
        unknown = [key for key in measure_options if key not in options]
        if unknown:
            raise ValueError(f"measure.{unknown[0]} is not a setting of {self.name}{nearest_name(unknown[0], options)}")
        if self.compute is None:
            settings = Config.of(settings).settings()
        else:
            require(
                set(settings) <= {"seed"}, "settings", "among seed and measure, because nothing is trained", settings
            )
        return {**settings, "measure": measure_options} if measure_options else settings

    def checked_settings(
        self, row: str | Row, scale: str = "cpu", overrides: Patch | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        """Return `settings` after checking the options of all components, without building them.

        Raises:
            ValueError: as `settings`, or if a component has no such option; the message names the row.
        """
        name = row if isinstance(row, str) else row.name
        settings = self.settings(row, scale, overrides, seed)
        if self.compute is None:
            try:
                check_components(config_of(settings))
            except ValueError as error:
                raise ValueError(f"row {name!r}: {error}") from None
        return settings

    def config(
        self, row: str | Row, scale: str = "cpu", overrides: Patch | None = None, seed: int | None = None
    ) -> Config:
        """Return the config of a row, see `settings`."""
        return config_of(self.settings(row, scale, overrides, seed))

    @property
    def printed(self) -> dict[str, dict[str, float]]:
        """The numbers that the source prints, by row and metric."""
        return {row.name: row.printed_numbers() for row in self.rows}

    def description(self) -> dict[str, Any]:
        """Return a summary for listings, as plain data."""
        return {
            "name": self.name,
            "part": self.part,
            "title": self.title,
            "reference": self.reference,
            "covers": list(self.covers),
            "scales": list(self.scales),
            "cost": dict(self.cost),
            "rows": [row.name for row in self.rows],
            "seeds": list(self.seeds),
        }


def config_of(settings: Mapping[str, Any]) -> Config:
    """Return the config of the settings of a row, which may also hold the options of `measure`."""
    return Config.of({key: value for key, value in settings.items() if key != "measure"})


def _has(settings: Mapping[str, Any], path: str) -> bool:
    """Return True if the settings have a value at a dotted path."""
    node: Any = settings
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return False
        node = node[key]
    return True
