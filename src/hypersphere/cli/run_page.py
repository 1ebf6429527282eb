"""The page of one or several runs: tabs of training, features, verification, class vectors and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypersphere import report
from hypersphere._validation import require
from hypersphere.cli.run_features import class_vector_tab, feature_tab, verification_tab
from hypersphere.cli.run_groups import Group, better_way, common_settings, differences, grouped, run_table
from hypersphere.cli.run_layers import landscape_tab, layer_tab
from hypersphere.cli.run_study import Study
from hypersphere.cli.words import joined_facts, span, words_of
from hypersphere.report.curves import MOST_CURVES

__all__ = ["run_page"]

MOST_NAMED = 4  # groups that are named in the title
MOST_LINES = 16  # layers that are drawn as curves; more are drawn as a map


def run_page(studies: Sequence[Study]) -> report.Page:
    """Return the page of these runs; runs that differ only in their seed share a row, a curve and a colour."""
    groups = grouped(studies)
    require(len(groups) <= MOST_CURVES, "folders", f"at most {MOST_CURVES} runs with different settings", len(groups))
    makers = (_training_tab, feature_tab, verification_tab, class_vector_tab, layer_tab, landscape_tab)
    tabs = [tab for tab in (make(groups) for make in makers) if tab.sections]
    differ = differences(groups)
    sections: list[report.Section] = [run_table(groups), *([] if differ is None else [differ])]
    sections += [report.Tabs("Measurements", tabs), common_settings(groups)]
    return report.Page(_title(groups), _lead(groups), sections, _meta(studies))


def _title(groups: Sequence[Group]) -> str:
    jobs = [group.first.run.job for group in groups]
    data = " and ".join(sorted({job.data["name"] for job in jobs}))
    if len(groups) == 1:
        return f"{jobs[0].head['name']} on {data}"
    names = [group.name for group in groups]
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed if len(names) <= MOST_NAMED else f'{len(names)} kinds of runs'} on {data}"


def _lead(groups: Sequence[Group]) -> str:
    """Return one sentence per data set."""
    by_data: dict[str, list[Group]] = {}
    for group in groups:
        by_data.setdefault(words_of(group.first.run.job.data), []).append(group)
    several = len(by_data) > 1
    return " ".join(_sentence(of, f" of {name}" if several else "") for name, of in by_data.items())


def _sentence(groups: Sequence[Group], name: str) -> str:
    task, jobs = groups[0].first.task, [group.first.run.job for group in groups]
    models = " and ".join(sorted({job.model["name"] for job in jobs}))
    sizes = span(group.first.features.shape[1] for group in groups).replace(" to", "- to")
    epochs = span(job.epochs for job in jobs)
    reached = span((study.accuracy for group in groups for study in group.studies), ".1%")
    return (
        f"{models} with {sizes}-d features, {epochs} {'epoch' if epochs == '1' else 'epochs'} on "
        f"{len(task.inputs):,} examples of {len(task.classes):,} classes{name}; "
        f"{reached} accuracy on {len(task.test_inputs):,} test examples."
    )


def _meta(studies: Sequence[Study]) -> dict[str, str]:
    made = [{key: value for key, value in study.run.made_with.items() if value is not None} for study in studies]
    return {**joined_facts(made), "runs": ", ".join(study.run.folder.resolve().name for study in studies)}


def _training_tab(groups: Sequence[Group]) -> report.Stack:
    charts = [
        *_over(groups, "epoch", "loss", "training loss", ".3f", False),
        *_over(groups, "epoch", "test_accuracy", "test accuracy", ".1%", True),
        *_over(groups, "step", "loss", "batch loss", ".3f", None),
        *_over(groups, "step", "rate", "learning rate", ".3g", None),
    ]
    energies = [
        *(section for group in groups for section in _energy(group, alone=len(groups) == 1)),
        *_head_energy(groups),
    ]
    parts: list[report.Section] = []
    if charts:
        parts.append(report.SideBySide("By epoch and by step", charts))
    if energies:
        caption = "Mean over pairs of neurons, s = 2; hidden layers in half space. Lower is more evenly spread."
        parts.append(report.SideBySide("Hyperspherical energy by epoch", energies, caption=caption))
    return report.Stack("Training", parts)


def _over(
    groups: Sequence[Group], kind: str, key: str, name: str, form: str, better: bool | None
) -> list[report.Curves]:
    """Return a chart with one curve per group over epochs or steps; an empty list if no run logged the metric."""
    series = [
        one for group in groups for one in _series(group.name, [study.over(kind, key) for study in group.studies])
    ]
    if not series:
        return []
    title, limits = name[0].upper() + name[1:], (0.0, 1.0) if form.endswith("%") else None
    way = better_way(groups, better)
    return [report.Curves(title, series, x_name=kind, y_name=name, format=form, limits=limits, higher_is_better=way)]


def _series(name: str, seeds: Sequence[tuple[list[float], list[Any]]]) -> list[report.Series]:
    """Return the values of all seeds at the union of their steps or epochs."""
    by_place = [dict(zip(places, values, strict=True)) for places, values in seeds]
    places = sorted({place for of_seed in by_place for place in of_seed})
    if not places:
        return []
    return [report.Series(name, [[of_seed.get(place) for place in places] for of_seed in by_place], x=places)]


def _energy(group: Group, *, alone: bool) -> list[report.Section]:
    """Return the energies of the hidden layers of one group by epoch, in the order of the network."""
    energies = [study.energies for study in group.studies]
    names = [name for name in energies[0][1] if name != "head"]
    series = [
        one
        for name in names
        for one in _series(name, [(epochs, layers.get(name, [None] * len(epochs))) for epochs, layers in energies])
    ]
    if not series:
        return []
    title = "Hidden layers" if alone else f"Hidden layers, {group.name}"
    if len(series) <= MOST_LINES:
        return [report.Curves(title, series, y_name="energy", format=".4f", ordered=True)]
    epochs = [f"{place:g}" for place in series[0].places]
    values = [one.mean.tolist() for one in series]
    return [report.HeatMap(title, values, names, epochs, column_name="epoch", value_name="energy", format=".4f")]


def _head_energy(groups: Sequence[Group]) -> list[report.Section]:
    series = [
        one for group in groups for one in _series(group.name, [(e, layers["head"]) for e, layers in _with_head(group)])
    ]
    return [report.Curves("Class vectors", series, y_name="energy", format=".4f")] if series else []


def _with_head(group: Group) -> list[tuple[list[float], dict[str, list[Any]]]]:
    return [study.energies for study in group.studies if "head" in study.energies[1]]
