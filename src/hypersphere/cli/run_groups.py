"""Group runs that differ only in their seed into one row of a table, and show how the groups differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from hypersphere import report
from hypersphere.cli.figures import settings_table
from hypersphere.cli.run_study import MOST_COMPARED, Study
from hypersphere.cli.words import mean_and_spread, words_of
from hypersphere.recipes import Metric

__all__ = ["Group", "better_way", "common_settings", "differences", "grouped", "run_table"]

METRICS = (
    Metric("accuracy", "test accuracy %", ".2f", True),
    Metric("loss", "training loss", ".3f", None),
    Metric("fisher", "Fisher score", ".4f", False),
    Metric("eer", "EER %", ".2f", False),
    Metric("rank1", "rank-1 %", ".2f", True),
    Metric("separation", "min angle °", ".1f", True),
    Metric("energy", "hidden energy", ".4f", False),
    Metric("seconds", "seconds", ".1f", None),
)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed, ordered by seed; figures show the first."""

    name: str
    studies: Sequence[Study]

    @property
    def first(self) -> Study:
        """The run with the smallest seed."""
        return self.studies[0]


def grouped(studies: Sequence[Study]) -> list[Group]:
    """Group the runs that differ only in their seed, in the given order, under unique names."""
    by_settings: dict[str, list[Study]] = {}
    for study in studies:
        by_settings.setdefault(json.dumps(_settings(study), sort_keys=True), []).append(study)
    groups = [sorted(group, key=lambda study: study.run.job.seed) for group in by_settings.values()]
    names = [folder_name([study.run.folder.resolve().name for study in group]) for group in groups]
    if "" in names or len(set(names)) < len(names):
        names = [f"{name or 'run'} {number}" for number, name in enumerate(names, 1)]
    return [Group(name, group) for name, group in zip(names, groups, strict=True)]


def folder_name(names: Sequence[str]) -> str:
    """Return a common name for the folders of one group.

    >>> folder_name(["arcface"]), folder_name(["softmax-seed0", "softmax-seed1"]), folder_name(["a", "b"])
    ('arcface', 'softmax', '')
    """
    if len(names) == 1:
        return names[0]
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in shared)
    return prefix.rstrip("0123456789").rstrip("-_. ").removesuffix("seed").rstrip("-_. ")


def better_way(groups: Sequence[Group], way: bool | None) -> bool | None:
    """Return `way` if the groups were tested on the same examples, else None because they cannot be compared."""
    first = groups[0].first
    same = all(
        group.first.run.job.data["name"] == first.run.job.data["name"]
        and group.first.task.classes == first.task.classes
        and torch.equal(group.first.labels, first.labels)
        for group in groups
    )
    return way if same else None


def run_table(groups: Sequence[Group]) -> report.Table:
    """Return the summary: one row per group, mean ± s.d. over its seeds."""
    shapes = {tuple((layer.neurons, layer.length) for layer in group.first.layers.layers) for group in groups}
    metrics = [metric for metric in METRICS if any(metric.key in s.numbers for group in groups for s in group.studies)]
    counts = {len(group.studies) for group in groups}
    columns = [report.Column("run")]
    if len(counts) > 1:
        columns.append(report.Column("seeds", None, ".0f"))
    for metric in metrics:
        way = None if metric.key == "energy" and len(shapes) > 1 else better_way(groups, metric.higher_is_better)
        columns.append(report.Column(metric.heading, way, metric.format))
    rows: list[list[Any]] = []
    for group in groups:
        cells: list[Any] = [group.name] if len(counts) == 1 else [group.name, len(group.studies)]
        for metric in metrics:
            values = [study.numbers[metric.key] for study in group.studies if metric.key in study.numbers]
            cells.append(mean_and_spread(values))
        rows.append(cells)
    caption = (
        "Last checkpoint, test data. Fisher score, EER and rank-1 compare test features with each other, EER and "
        f"rank-1 for up to {MOST_COMPARED:,} examples; the smallest angle is that between class vectors."
    )
    if better_way(groups, True) is None:
        caption += " The runs were tested on different examples, so no best run is marked."
    elif len(shapes) > 1:
        caption += " The networks differ, so no best hidden energy is marked."
    return report.Table("Summary", columns, rows, caption=caption)


def differences(groups: Sequence[Group]) -> report.Table | None:
    """Return the settings in which the groups differ, or None for a single group."""
    settings = [_settings(group.first) for group in groups]
    keys = [key for key in settings[0] if len({json.dumps(one[key], sort_keys=True) for one in settings}) > 1]
    if not keys:
        return None
    rows = [[group.name, *(words_of(one[key]) for key in keys)] for group, one in zip(groups, settings, strict=True)]
    return report.Table("Different settings", [report.Column("run"), *map(report.Column, keys)], rows)


def common_settings(groups: Sequence[Group]) -> report.Table:
    """Return the settings that all groups share, one row per setting."""
    settings = [_settings(group.first) for group in groups]
    shared = {key: value for key, value in settings[0].items() if all(one[key] == value for one in settings)}
    seeds = sorted({study.run.job.seed for group in groups for study in group.studies})
    seeded = {"seeds" if len(seeds) > 1 else "seed": ", ".join(map(str, seeds))}
    return settings_table({**shared, **seeded}, "" if len(groups) == 1 else "Settings that all runs share.")


def _settings(study: Study) -> dict[str, Any]:
    return {key: value for key, value in study.run.job.settings().items() if key != "seed"}
