"""The page of one or several runs: tabs for training, features, verification, class vectors, layers and landscape."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hypersphere import energy, evaluation, sphere
from hypersphere._numerics import evenly_spaced
from hypersphere.report import _sections, charts
from hypersphere.report._text import common_prefix, format_range, format_setting, join_words, joined_facts, pluralize
from hypersphere.report.charts import Series
from hypersphere.report.images import Images
from hypersphere.report.neurons import layer_tables
from hypersphere.report.page import Chart, Page, Section, SideBySide, Stack, Tabs
from hypersphere.report.spheres import Sphere, project
from hypersphere.report.tables import Column, Table

__all__ = ["RunResult", "run_page"]

MOST_COMPARED = 1500  # largest number of test examples of which all pairs are compared
MOST_CLASSES, SHOWN_CLASSES = 20, 10  # up to 20 classes have one colour each; of more classes, 10 are shown
MOST_VECTORS = 400  # class vectors in a map of angles
MOST_BARS = 180
MOST_LINES = 16  # layers that are drawn as curves; more are drawn as a map
DEPTH = 20  # ranks of a CMC curve

COLUMNS = {
    "accuracy": Column("test accuracy %", True, ".2f"),
    "loss": Column("training loss", None, ".3f"),
    "fisher": Column("Fisher score", False, ".4f"),
    "eer": Column("EER %", False, ".2f"),
    "tar": Column("TAR % at FAR 1 %", True, ".1f"),
    "rank1": Column("rank-1 %", True, ".2f"),
    "separation": Column("min angle °", True, ".1f"),
    "energy": Column("hidden energy", None, ".4f"),
    "seconds": Column("seconds", None, ".1f"),
}
METRICS = {  # names of logged metrics; {} is a number at the end of the key
    "eer": "equal error rate",
    "auc": "area under the ROC curve",
    "map_at_r": "mean average precision at R",
    "top": "top-{} accuracy",
    "rank": "accuracy at rank {}",
    "recall": "recall at {}",
}
UNITS = {"epoch": "epoch", "step": "step", "validation": "step"}  # of the horizontal axis, by the kind of logged lines
Groups: TypeAlias = "Mapping[str, Sequence[RunResult]]"  # by name: runs that differ only in their seed, ordered by seed


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run and the measurements at one of its checkpoints, as plain data.

    Attributes:
        name: the name of its folder.
        settings: the settings of the experiment, `{"data": {"name": …}, "head": …, "seed": 0, …}`.
        metrics: the lines of metrics.jsonl, with `kind` "step", "epoch" or "validation".
        classes: names of the classes of the test data.
        features, labels: features (N, d) and labels (N,) of the test data.
        examples: number of training examples.
        accuracy: test accuracy, or None if the test classes are not those of training.
        class_vectors: class vectors (C, d) of the test classes, or None if they are not those of training.
        layers: inspection of the layers of the network and the head.
        facts: versions, machine and commit, for the footer.
        filters: filters (N, 1 or 3, H, W) of the first layer if they can be shown as images.
        learned: the learned values of all layers, under "k" and "radius_factor".
        starts: the initial value of each kind, if all layers share it.
        landscape: loss and error around the trained weights.
        training_classes: number of classes of the training data; None if they are those of the test data.
        step: the step of the checkpoint; None for the last checkpoint.

    With the setting `selection`, a part of the training data takes the place of the test data.
    """

    name: str
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    classes: Sequence[str]
    features: Tensor
    labels: Tensor
    examples: int
    accuracy: float | None = None
    class_vectors: Tensor | None = None
    layers: energy.Inspection | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    filters: Tensor | None = None
    learned: Mapping[str, Tensor] = field(default_factory=dict)
    starts: Mapping[str, float] = field(default_factory=dict)
    landscape: evaluation.Landscape | None = None
    training_classes: int | None = None
    step: int | None = None

    def _repr_html_(self) -> str:
        return run_page([self])._repr_html_()

    def __repr__(self) -> str:
        measured = f"{pluralize(len(self.labels), 'example')} of {len(self.classes):,} classes"
        return f"RunResult({self.name!r}: {self.setting('head')} on {self.setting('data')}, {measured})"

    def metric_by_step(self, kind: str, key: str) -> dict[float, Any]:
        """Return the values of a metric from the lines of a kind: by epoch for "epoch", else by step.

        With the kind "validation", the lines of epochs are included, because an epoch can end with a validation.
        """
        kinds, unit = ("validation", "epoch") if kind == "validation" else (kind,), UNITS[kind]
        lines = [line for line in self.metrics if line.get("kind", "step") in kinds and key in line and unit in line]
        return {line[unit]: line[key] for line in lines}

    def setting(self, part: str) -> str:
        """Return the name of the chosen data, model or head."""
        setting = self.settings.get(part, "")
        return str(setting.get("name", "") if isinstance(setting, Mapping) else setting)

    def _precedes_checkpoint(self, line: Mapping[str, Any]) -> bool:
        """Return True if a line was logged before the checkpoint was saved."""
        return self.step is None or line.get("step", 0) <= self.step

    @property
    def settings_but_seed(self) -> dict[str, Any]:
        """The settings without the seed."""
        return {key: value for key, value in self.settings.items() if key != "seed"}

    @cached_property
    def sample(self) -> Tensor:
        """Indices of the test examples that are compared with each other."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        return order[:MOST_COMPARED].sort().values

    @cached_property
    def verified(self) -> Verified | None:
        """Verification on all pairs of the sample; None unless there are both positive and negative pairs."""
        x, y = self.features[self.sample], self.labels[self.sample]
        counts = y.bincount()
        if len(counts.nonzero()) < 2 or int(counts.max()) < 2:
            return None
        first, second = torch.triu_indices(len(x), len(x), 1)
        roc = evaluation.roc(sphere.cosines(x.double(), x.double())[first, second], y[first] == y[second])
        return Verified(evaluation.class_angles(x, y, bins=90), roc, evaluation.identify_by_first(x, y))

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The numbers of the summary table by key; missing and non-finite ones are omitted."""
        numbers: dict[str, float | None] = {"accuracy": None if self.accuracy is None else 100 * self.accuracy}
        for key in ("loss", "seconds"):
            lines = [line for line in self.metrics if line.get("kind") == "epoch" and self._precedes_checkpoint(line)]
            logged = [line[key] for line in lines if line.get(key) is not None]
            numbers[key] = logged[-1] if logged else None
        if 1 < len(self.labels.unique()) < len(self.labels):
            numbers["fisher"] = evaluation.angular_fisher_score(self.features, self.labels)
        if self.verified is not None:
            roc, point = self.verified.roc, self.verified.roc.at(0.01)
            numbers |= {"eer": 100 * roc.eer, "tar": 100 * point.true_rate if point.resolved else None}
            numbers["rank1"] = 100 * self.verified.identified.accuracy_at(1)
        if self.class_vectors is not None and len(self.class_vectors) > 1:
            numbers["separation"] = math.degrees(evaluation.smallest_angle(self.class_vectors))
        layers = () if self.layers is None else self.layers.layers
        hidden = [layer.energy(half_space=True).value for layer in layers if layer.name != "head"]
        numbers["energy"] = sum(hidden) / len(hidden) if hidden else None
        return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, eq=False)
class Verified:
    """Verification and identification of test examples: angles of all pairs, ROC curve, and search in a gallery."""

    angles: evaluation.AngleHistograms
    roc: evaluation.Roc
    identified: evaluation.Identification

    @property
    def threshold(self) -> float:
        """The angle in degrees at which the false reject rate equals the false accept rate."""
        index = int((self.roc.far >= 1 - self.roc.tar).nonzero()[0])
        return math.degrees(float(sphere.angle(self.roc.thresholds[index])))


def run_page(runs: Sequence[RunResult]) -> Page:
    """Return the page of these runs. Runs that differ only in their seed share a row, a curve and a colour.

    Figures that cannot be averaged, such as features and maps of angles, show the smallest seed.
    """
    groups = grouped(runs)
    first = {name: seeds[0] for name, seeds in groups.items()}
    tabs = [
        _training_tab(groups),
        _feature_tab(first),
        _verification_tab(groups),
        _class_vector_tab(first),
        _layer_tab(groups),
        _landscape_tab(first),
    ]
    seeds = sorted({run.settings.get("seed", 0) for run in runs})
    seeded = {"seeds" if len(seeds) > 1 else "seed": ", ".join(map(str, seeds))}
    settings = [{**run.settings_but_seed, **seeded} for run in first.values()]
    sections: list[Section] = [
        run_table(groups),
        *_differences(first),
        Tabs("Measurements", [tab for tab in tabs if tab.sections]),
        _sections.settings_table(settings, "Settings that all runs share." * (len(groups) > 1)),
    ]
    facts = [{key: value for key, value in run.facts.items() if value is not None} for run in runs]
    data = " and ".join(sorted({run.setting("data") for run in runs}))
    what = join_words(list(groups)) if len(groups) <= 4 else f"{len(groups)} kinds of runs"
    title = f"{runs[0].setting('head') if len(groups) == 1 else what} on {data}"
    return Page(title, _lead(runs), sections, {**joined_facts(facts), "runs": ", ".join(run.name for run in runs)})


def grouped(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Group the runs that differ only in their seed, in the given order, under unique names."""
    by_settings: dict[str, list[RunResult]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(run.settings_but_seed, sort_keys=True), []).append(run)
    groups = [sorted(group, key=lambda run: run.settings.get("seed", 0)) for group in by_settings.values()]
    names = [shared_name([run.name for run in group]) for group in groups]
    if "" in names or len(set(names)) < len(names):
        names = [f"{name or 'run'} {number}" for number, name in enumerate(names, 1)]
    return dict(zip(names, groups, strict=True))


def shared_name(names: Sequence[str]) -> str:
    """Return a common name for the folders of one group.

    >>> shared_name(["arcface"]), shared_name(["softmax-seed0", "softmax-seed1"]), shared_name(["a", "b"])
    ('arcface', 'softmax', '')
    """
    if len(names) == 1:
        return names[0]
    return common_prefix(names).rstrip("0123456789").rstrip("-_. ").removesuffix("seed").rstrip("-_. ")


def held_out_kind(runs: Iterable[RunResult]) -> str:
    """Return what the runs were measured on: "test" or "selection" data, or "held-out" data if the runs differ."""
    kinds = {"selection" if run.settings.get("selection") else "test" for run in runs}
    return kinds.pop() if len(kinds) == 1 else "held-out"


def _checkpoint(runs: Sequence[RunResult]) -> str:
    """Return which checkpoints the runs were measured at."""
    if len({run.step for run in runs}) == 1:
        return "last checkpoint" if runs[0].step is None else f"checkpoint of step {runs[0].step:,}"
    names = {run.name: "last" if run.step is None else f"step {run.step:,}" for run in runs}
    return f"checkpoints {', '.join(f'{step} ({name})' for name, step in names.items())}"


def run_table(groups: Groups) -> Table:
    """Return the summary: one row per group, mean ± s.d. over its seeds."""
    numbers = {name: [run.numbers for run in runs] for name, runs in groups.items()}
    measured = {key for seeds in numbers.values() for metrics in seeds for key in metrics}
    same_data, kind = _same_data(groups), held_out_kind(runs[0] for runs in groups.values())
    columns = {
        key: column if same_data else replace(column, higher_is_better=None)
        for key, column in COLUMNS.items()
        if key in measured
    }
    if "accuracy" in columns:
        columns["accuracy"] = replace(columns["accuracy"], name=f"{kind} accuracy %")
    checkpoint = _checkpoint([run for runs in groups.values() for run in runs])
    angle = "; the smallest angle is that between class vectors" * ("separation" in columns)
    caption = (
        f"{checkpoint[0].upper()}{checkpoint[1:]}, {kind} data. Fisher score, EER, TAR and rank-1 compare {kind} "
        f"features with each other, the last three for up to {MOST_COMPARED:,} examples{angle}."
    )
    if not same_data:
        caption += " The runs were tested on different examples, so no best run is marked."
    elif len(groups) > 1 and min(map(len, numbers.values())) < 2:
        caption += " A run with one seed has unknown noise, so no best run is marked."
    return _sections.seed_table("Summary", "run", columns, numbers, caption)


def _same_data(groups: Groups) -> bool:
    """Return True if the groups were tested on the same examples."""
    runs = [seeds[0] for seeds in groups.values()]
    return all(
        (run.setting("data"), tuple(run.classes)) == (runs[0].setting("data"), tuple(runs[0].classes))
        and torch.equal(run.labels, runs[0].labels)
        for run in runs
    )


def _lead(runs: Sequence[RunResult]) -> str:
    """Return the first sentence of a page: networks, training data and accuracy."""
    data = sorted({format_setting(run.settings.get("data", "")) for run in runs})
    if len(data) > 1:
        return f"{pluralize(len(runs), 'run')} on {join_words(data)}."
    models = " and ".join(sorted({run.setting("model") for run in runs}))
    sizes = format_range(run.features.shape[1] for run in runs).replace(" to", "- to")
    epochs = format_range(
        max(run.metric_by_step("epoch", "epoch"), default=run.settings.get("epochs") or 0) for run in runs
    )
    rates = [run.accuracy for run in runs if run.accuracy is not None]
    kind, first = held_out_kind(runs), runs[0]
    training_classes = len(first.classes) if first.training_classes is None else first.training_classes
    if rates:
        outcome = f"{format_range(rates, '.1%')} accuracy on {len(first.labels):,} {kind} examples"
    else:
        selected = f"{kind} " * (kind != "test")
        outcome = f"validated on {len(first.labels):,} {selected}examples of {len(first.classes):,} other classes"
    outcome += f", {_checkpoint(runs)}" * any(run.step is not None for run in runs)
    return (
        f"{models} with {sizes}-d features, {epochs} {'epoch' if epochs == '1' else 'epochs'} on "
        f"{first.examples:,} examples of {training_classes:,} classes; {outcome}."
    )


def _differences(runs: Mapping[str, RunResult]) -> list[Table]:
    """Return a table of the settings in which the runs differ, if there are several."""
    settings = {name: run.settings_but_seed for name, run in runs.items()}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    differ = [key for key in keys if len({json.dumps(each.get(key), sort_keys=True) for each in settings.values()}) > 1]
    rows = [[name, *(format_setting(each.get(key)) for key in differ)] for name, each in settings.items()]
    return [Table("Different settings", [Column("run"), *map(Column, differ)], rows)] if differ else []


# Training ------------------------------------------------------------------------------------------------------------


def _training_tab(groups: Groups) -> Stack:
    """Return the curves of losses, metrics and the learning rate, and the energies during training."""
    lines = [line for runs in groups.values() for run in runs for line in run.metrics]
    logged = dict.fromkeys(
        key
        for line in lines
        if line.get("kind") == "epoch"
        for key, value in line.items()
        if isinstance(value, (int, float))
    )
    validated = [key for key in logged if key not in ("epoch", "step", "loss", "seconds", "rate", "kind")]
    # If there are validations within epochs, validation curves are drawn by step.
    kind = "validation" if any(line.get("kind") == "validation" for line in lines) else "epoch"
    accuracy = f"{held_out_kind(runs[0] for runs in groups.values())} accuracy"
    names = {"test_accuracy": accuracy, "accuracy": accuracy}
    curves = [
        _metric_chart(groups, "epoch", "loss", "training loss"),
        *(_metric_chart(groups, kind, key, names.get(key) or metric_name(key)) for key in validated),
        _metric_chart(groups, "step", "loss", "batch loss"),
        _metric_chart(groups, "step", "rate", "learning rate"),
    ]
    energies = [
        _energies(f"Hidden layers, {name}" if len(groups) > 1 else "Hidden layers", runs, kind)
        for name, runs in groups.items()
    ]
    heads = _sections.seed_curves(
        {name: [_energy_of(run, kind, "head") for run in runs] for name, runs in groups.items()}
    )
    if heads:
        chart = charts.lines(heads, x_name=UNITS[kind], y_name="energy", format=".4f")
        energies.append(Chart("Class vectors", chart))
    caption = "Mean over pairs of neurons, s = 2; hidden layers in half space. Lower is more evenly spread."
    rows = [
        SideBySide("By epoch and by step", [curve for curve in curves if curve]),
        SideBySide(f"Hyperspherical energy by {UNITS[kind]}", [chart for chart in energies if chart], caption),
    ]
    return Stack("Training", [row for row in rows if row.sections])


def metric_name(key: str) -> str:
    """Return the name of a logged metric, preceded by that of its protocol.

    >>> metric_name("verification.eer"), metric_name("identification.rank5"), metric_name("top5")
    ('verification: equal error rate', 'identification: accuracy at rank 5', 'top-5 accuracy')
    >>> metric_name("verification.lfw.auc"), metric_name("my_protocol.mean_angle")
    ('verification lfw: area under the ROC curve', 'my protocol: mean angle')
    """
    protocol, dot, metric = key.rpartition(".")
    counted_metric = re.fullmatch(r"(top|rank|recall)(\d+)", metric)
    if counted_metric:
        name = METRICS[counted_metric[1]].format(counted_metric[2])
    else:
        name = METRICS.get(metric, metric.replace("_", " "))
    return f"{protocol.replace('.', ' ').replace('_', ' ')}: {name}" if dot else name


def _metric_chart(groups: Groups, kind: str, key: str, name: str) -> Chart | None:
    """Return a chart with one curve per group over epochs or steps; None if no run logged the metric."""
    curves = _sections.seed_curves(
        {group: [run.metric_by_step(kind, key) for run in runs] for group, runs in groups.items()}
    )
    if not curves:
        return None
    is_loss, is_learning_rate = "loss" in key, key == "rate"
    values = torch.cat([torch.from_numpy(curve.mean) for curve in curves])
    is_share = not (is_loss or is_learning_rate) and bool(((values >= 0) & (values <= 1) | values.isnan()).all())
    better = not (is_loss or "eer" in key or "error" in key)
    chart = charts.lines(
        curves,
        x_name=UNITS[kind],
        y_name=name,
        format=".3g" if is_learning_rate else ".1%" if is_share else ".3f",
        limits=(0.0, 1.0) if is_share else None,
        higher_is_better=better if kind != "step" and _same_data(groups) else None,
    )
    return Chart(name[0].upper() + name[1:], chart)


def _energy_of(run: RunResult, kind: str, layer: str) -> dict[float, float | None]:
    by_place = run.metric_by_step(kind, "energy")
    return {place: by_layer[layer] for place, by_layer in by_place.items() if by_layer and layer in by_layer}


def _energies(title: str, runs: Sequence[RunResult], kind: str) -> Chart | None:
    """Return the energies of the hidden layers over training, in the order of the network."""
    logged = [by_layer for by_layer in runs[0].metric_by_step(kind, "energy").values() if by_layer]
    names = [name for name in dict.fromkeys(name for by_layer in logged for name in by_layer) if name != "head"]
    series = _sections.seed_curves({name: [_energy_of(run, kind, name) for run in runs] for name in names})
    if not series:
        return None
    if len(series) <= MOST_LINES:
        return Chart(title, charts.lines(series, x_name=UNITS[kind], y_name="energy", format=".4f", ordered=True))
    places = [f"{place:g}" for place in series[0].places]
    means = [curve.mean for curve in series]
    chart = charts.heat_map(means, names, places, column_name=UNITS[kind], value_name="energy", format=".4f")
    return Chart(title, chart)


# Features and verification -------------------------------------------------------------------------------------------


def _feature_tab(runs: Mapping[str, RunResult]) -> Stack:
    """Return the test features on spheres, 2-d features with their norms, and histograms of norms."""
    spheres = [_sphere(name, run) for name, run in runs.items() if run.features.shape[1] > 1]
    norms = {name: sphere.norm(run.features.double()).flatten() for name, run in runs.items()}
    histogram = Chart(f"Norms of {held_out_kind(runs.values())} features", charts.histogram(norms, x_name="norm"))
    return Stack("Features", [*_sections.feature_sections(spheres), histogram])


def _sphere(name: str, run: RunResult) -> Sphere:
    """Return the features of all or of a few classes on a sphere; features of more than 3 dimensions are projected."""
    # `position` maps a class to its index among the shown classes, and classes that are not shown to −1.
    shown, position = shown_classes(run), torch.full((len(run.classes),), -1)
    position[shown] = torch.arange(len(shown))
    is_shown = position[run.labels] >= 0
    points, labels, angles, notes = run.features[is_shown], position[run.labels][is_shown], None, []
    vectors = None if run.class_vectors is None else run.class_vectors[shown]
    if points.shape[1] > 3:
        view, size = project(points, vectors), points.shape[1]
        notes.append(
            f"{size}-d, projected to three directions with {view.kept:.0%} of the squared norm; angles are in {size}-d"
        )
        if vectors is not None:
            angles = sphere.angle(sphere.cosine(points.double(), vectors[labels].double())).rad2deg()
        points = torch.from_numpy(view.points)
        vectors = None if view.vectors is None else torch.from_numpy(view.vectors)
    if len(shown) < len(run.classes):
        notes.append(f"{len(shown)} of {len(run.classes):,} classes")
    if run.accuracy is not None:
        notes.append(f"accuracy {run.accuracy:.1%}")
    names = [run.classes[index] for index in shown.tolist()]
    return Sphere(name, points, labels, vectors, names, "; ".join(notes), angles)


def shown_classes(run: RunResult) -> Tensor:
    """Return the indices of all classes if there are few, else of those with the most test examples."""
    counts = run.labels.bincount(minlength=len(run.classes))
    if len(counts) <= MOST_CLASSES:
        return torch.arange(len(counts))
    # If counts are tied, this selects more than SHOWN_CLASSES classes.
    largest = (counts >= counts.sort(descending=True).values[SHOWN_CLASSES - 1]).nonzero().flatten()
    return largest[evenly_spaced(len(largest), SHOWN_CLASSES)]


def _verification_tab(groups: Groups) -> Stack:
    """Return angles of pairs, ROC and CMC on test examples; the tab is empty for runs without both kinds of pairs."""
    by_name = {name: [run.verified for run in runs if run.verified] for name, runs in groups.items()}
    verified = {name: seeds for name, seeds in by_name.items() if seeds}
    if not verified:
        return Stack("Verification", [])
    angles = {}
    for name, seeds in verified.items():
        counts = {kind: getattr(seeds[0].angles, kind).histogram for kind in ("positive", "negative")}
        angles[name] = charts.histogram(
            counts,
            edges=seeds[0].angles.edges.rad2deg(),
            counts=True,
            x_name="angle in degrees",
            format=".1f",
            marks={"equal error": seeds[0].threshold},
        )
    better = _same_data(groups) or None
    roc = _sections.roc_chart({name: [result.roc for result in seeds] for name, seeds in verified.items()}, better)
    identified = {name: [result.identified for result in seeds] for name, seeds in verified.items()}
    cmc = _sections.cmc_chart(identified, DEPTH, better)
    compared = format_range(len(runs[0].sample) for name, runs in groups.items() if name in verified)
    kind = held_out_kind(runs[0] for runs in groups.values())
    about = f"All pairs of {compared} {kind} examples, of the same class (positive) or of two classes (negative)."
    if all(runs[0].class_vectors is not None for runs in groups.values()):
        about += " Training has seen these classes, so this is not an open-set protocol."
    gallery = f"The gallery is the first {kind} example of each class; all other {kind} examples are probes."
    curves = SideBySide("ROC and CMC", [roc, replace(cmc, caption=gallery)])
    return Stack("Verification", [*_sections.lay_out({f"Angles of pairs of {kind} features": angles}, about), curves])


# Class vectors, layers, landscapes -----------------------------------------------------------------------------------


def _class_vector_tab(runs: Mapping[str, RunResult]) -> Stack:
    """Return the angles between class vectors, and between the features of each class and all class vectors."""
    between, to_features, shapes = {}, {}, set()
    for name, run in runs.items():
        if run.class_vectors is not None and len(run.class_vectors) > 1:
            vectors = run.class_vectors[:MOST_VECTORS].double()
            between[name] = sphere.angle(sphere.cosines(vectors, vectors)).rad2deg().fill_diagonal_(math.nan)
            to_features[name] = _mean_angles(run, vectors)
            shapes.add(tuple(run.class_vectors.shape))
    if not between:
        return Stack("Class vectors", [])
    mean = f"Mean angle of {held_out_kind(runs.values())} features to class vectors"
    maps = {
        "Angles between class vectors": _angle_maps(runs, between, "class vector"),
        mean: _angle_maps(runs, to_features, "features of"),
    }
    (classes, dim), *others = sorted(shapes, reverse=True)
    # The largest possible angle between C equally spaced vectors, arccos(−1/(C − 1)), needs d ≥ C − 1 dimensions.
    simplex = sphere.angle(torch.tensor(-1 / (classes - 1), dtype=torch.float64)).rad2deg()
    spread = charts.histogram(
        {name: angles[torch.ones_like(angles).triu(1).bool()] for name, angles in between.items()},
        x_name="angle in degrees",
        edges=range(0, 181, 10) if classes <= MOST_CLASSES else None,  # wide bins for few pairs
        format=".1f",
        marks={"regular simplex": float(simplex)} if classes <= dim + 1 and not others else {},
    )
    caption = f"The first {MOST_VECTORS} of {classes:,} classes." if classes > MOST_VECTORS else ""
    return Stack(
        "Class vectors", [*_sections.lay_out(maps, caption), Chart("All angles between class vectors", spread)]
    )


def _mean_angles(run: RunResult, vectors: Tensor) -> Tensor:
    """Return the mean angle between the test features of each class (rows) and each class vector (columns)."""
    inside = run.labels < len(vectors)
    labels = run.labels[inside]
    angles = sphere.angle(sphere.cosines(run.features[inside].double(), vectors)).rad2deg()
    sums = torch.zeros(len(vectors), len(vectors), dtype=torch.float64).index_add_(0, labels, angles)
    return sums / labels.bincount(minlength=len(vectors))[:, None]  # NaN for a class without test examples


def _angle_maps(runs: Mapping[str, RunResult], angles: Mapping[str, Tensor], rows: str) -> dict[str, Any]:
    """Return one map per group, on a common colour scale."""
    limits = _sections.shared_limits(angles.values())
    names = {"row_name": rows, "column_name": "class vector", "value_name": "angle in degrees"}
    return {
        name: charts.heat_map(values, runs[name].classes[: len(values)], **names, format=".0f", limits=limits)
        for name, values in angles.items()
    }


def _layer_tab(groups: Groups) -> Stack:
    """Return energies relative to random neurons, learned parameters, filters of the first layer, and layer tables."""
    learned = {name: [(run.learned, run.starts) for run in runs] for name, runs in groups.items()}
    parts: list[Section] = [*_excess(groups), *_sections.learned_charts(learned)]
    filters = {name: runs[0].filters for name, runs in groups.items()}
    images = [Images(name, weights) for name, weights in filters.items() if weights is not None]
    title = "Filters of the first layer"
    if images:
        parts.append(replace(images[0], title=title) if len(images) == 1 else SideBySide(title, images))
    inspections = [runs[0].layers for runs in groups.values() if runs[0].layers]
    if len(groups) == len(inspections) == 1:
        parts += layer_tables(inspections[0])
    return Stack("Layers", parts)


def _excess(groups: Groups) -> list[Chart]:
    """Return charts of energy relative to random neurons; groups with the same layers share a chart."""
    by_layers: dict[tuple[str, ...], dict[str, Sequence[RunResult]]] = {}
    for name, runs in groups.items():
        if runs[0].layers is not None:
            by_layers.setdefault(tuple(layer.name for layer in runs[0].layers.layers), {})[name] = runs
    caption = (
        "Mean over pairs, s = 2; hidden layers in half space, the head in full space. Below 0 is more evenly "
        "spread than random directions, whose mean is infinite in 3 dimensions or fewer."
    )
    excess_charts = []
    for layers, same_layers in by_layers.items():
        shown = layers[: MOST_BARS // len(same_layers)]
        series = [
            Series(name, [_above_random(run)[: len(shown)] for run in runs]) for name, runs in same_layers.items()
        ]
        labels = [layer.removeprefix("network.") for layer in shown]
        chart = charts.bars(labels, series, value_name="above random neurons", format="+.2%")
        names = "" if len(by_layers) == 1 else f": {', '.join(same_layers)}"
        excess_charts.append(Chart(f"Energy relative to random neurons{names}", chart, caption))
    return excess_charts


def _above_random(run: RunResult) -> list[float]:
    layers = run.layers.layers if run.layers else ()
    return [layer.energy(half_space=layer.name != "head").excess - 1 for layer in layers]


def _landscape_tab(runs: Mapping[str, RunResult]) -> Stack:
    """Return loss and error around the trained weights, if computed."""
    landscapes = {name: run.landscape for name, run in runs.items() if run.landscape is not None}
    grids = {key: {name: grid.values[key] for name, grid in landscapes.items()} for key in _sections.LANDSCAPES}
    maps = _sections.landscape_charts(grids, {name: grid.a for name, grid in landscapes.items()})
    about = f"{_sections.ABOUT_DIRECTIONS} The class vectors are fixed."
    return Stack("Landscape", _sections.lay_out(maps), about) if maps else Stack("Landscape", [])
