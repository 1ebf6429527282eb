"""Tabs of the page of runs: neurons of each layer, learned parameters of operators, and landscapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hypersphere import report
from hypersphere.cli.figures import ABOUT_DIRECTIONS, LEARNED, landscape_maps, learned_histogram
from hypersphere.cli.inspect import layer_tables
from hypersphere.cli.run_groups import Group
from hypersphere.cli.run_study import LANDSCAPE_EXAMPLES, Study

__all__ = ["landscape_tab", "layer_tab"]

MOST_BARS = 180  # summed over groups


def layer_tab(groups: Sequence[Group]) -> report.Stack:
    """Return energies relative to random neurons, learned parameters, filters of the first layer, and layer tables."""
    parts: list[report.Section] = list(_excess(groups))
    for key in LEARNED:
        values = {
            group.name: torch.cat([study.learned[key] for study in group.studies])
            for group in groups
            if key in group.first.learned
        }
        starts = {group.first.starts.get(key) for group in groups if group.name in values}
        if values:
            parts.append(learned_histogram(key, values, starts.pop() if len(starts) == 1 else None))
    visible = [(group.name, group.first.filters) for group in groups if group.first.filters is not None]
    if len(visible) == 1:
        parts.append(report.Filters("Filters of the first layer", visible[0][1]))
    elif visible:
        parts.append(
            report.SideBySide("Filters of the first layer", [report.Filters(name, of) for name, of in visible])
        )
    if len(groups) == 1:
        parts += layer_tables(groups[0].first.layers)
    return report.Stack("Layers", parts)


def _excess(groups: Sequence[Group]) -> list[report.Bars]:
    """Return charts of energy minus that of random neurons; groups with the same layers share a chart."""
    by_names: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        by_names.setdefault(tuple(layer.name for layer in group.first.layers.layers), []).append(group)
    charts = []
    for names, alike in by_names.items():
        shown = names[: MOST_BARS // len(alike)]
        series = [
            report.Series(group.name, [_above_random(study)[: len(shown)] for study in group.studies])
            for group in alike
        ]
        whose = "" if len(by_names) == 1 else f": {', '.join(group.name for group in alike)}"
        charts.append(
            report.Bars(
                f"Energy relative to random neurons{whose}",
                [name.removeprefix("network.") for name in shown],
                series,
                value_name="above random neurons",
                format="+.2%",
                caption="Mean over pairs, s = 2; hidden layers in half space, the head in full space. Below 0 is more "
                "evenly spread than random directions, whose mean is infinite in 3 dimensions or fewer.",
            )
        )
    return charts


def _above_random(study: Study) -> list[float]:
    return [layer.energy(half_space=layer.name != "head").excess - 1 for layer in study.layers.layers]


def landscape_tab(groups: Sequence[Group]) -> report.Stack:
    """Return loss and error around the trained weights, if computed."""
    landscapes = {group.name: group.first.landscape for group in groups if group.first.landscape is not None}
    if not landscapes:
        return report.Stack("Landscape", [])
    places = {name: one.a for name, one in landscapes.items()}
    maps = {
        title: landscape_maps(key, {name: one.values[key] for name, one in landscapes.items()}, places)
        for title, key in (("Loss", "loss"), ("Test error", "error"))
    }
    parts = [report.SideBySide(title, pictures) for title, pictures in maps.items()]
    if len(landscapes) == 1:
        parts = [report.SideBySide("", [replace(pictures[0], title=title) for title, pictures in maps.items()])]
    caption = f"{ABOUT_DIRECTIONS} First {LANDSCAPE_EXAMPLES} test examples; the class vectors are fixed."
    return report.Stack("Landscape", parts, caption=caption)
