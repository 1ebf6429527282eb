"""The page of one or several runs: tabs of training, features, verification, class vectors and layers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hypersphere import energy, evaluation, sphere
from hypersphere.report import charts
from hypersphere.report._words import joined_facts, measured, settings_table, span, words_of
from hypersphere.report.charts import Series
from hypersphere.report.images import Images
from hypersphere.report.neurons import layer_tables
from hypersphere.report.page import Chart, Page, Section, SideBySide, Stack, Tabs
from hypersphere.report.spheres import Sphere, Spheres, common_prefix, project
from hypersphere.report.tables import Cell, Column, Table

__all__ = ["LEARNED", "RunResult", "landscape_charts", "run_page"]

MOST_COMPARED = 1500  # largest number of test examples of which all pairs are compared
MOST_CLASSES, SHOWN_CLASSES = 20, 10  # up to 20 classes have one colour each; of more classes, 10 are shown
MOST_VECTORS = 400  # class vectors in a map of angles
MOST_BARS = 180
MOST_LINES = 16  # layers that are drawn as curves; more are drawn as a map
RATES, DEPTH = 300, 20  # points of a ROC curve, ranks of a CMC curve
FARS = (0.1, 0.01, 0.001)
LEARNED = {"k": ("Learned k", "k"), "radius_factor": ("Learned factor of ρ", "factor of ρ")}
ABOUT_DIRECTIONS = (
    "Along two random directions, scaled so that each filter of a direction has the norm of the filter it is added to."
)

COLUMNS = {
    "accuracy": Column("test accuracy %", True, ".2f"),
    "loss": Column("training loss", None, ".3f"),
    "fisher": Column("Fisher score", False, ".4f"),
    "eer": Column("EER %", False, ".2f"),
    "rank1": Column("rank-1 %", True, ".2f"),
    "separation": Column("min angle °", True, ".1f"),
    "energy": Column("hidden energy", False, ".4f"),
    "seconds": Column("seconds", None, ".1f"),
}


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run and what was measured at one of its checkpoints, as plain data.

    Attributes:
        name: the name of its folder.
        settings: the settings of the experiment, `{"data": {"name": …}, "head": …, "seed": 0, …}`.
        metrics: the lines of metrics.jsonl, with `kind` "step" or "epoch".
        classes: names of the classes of the test data.
        features, labels: features (N, d) and labels (N,) of the test data.
        examples: number of training examples.
        accuracy: test accuracy, or None if the test classes are not those of training.
        class_vectors: class vectors (C, d) of the test classes, or None if they are not those of training.
        layers: inspection of the layers of the network and the head.
        facts: versions, machine and commit, for the footer.
        filters: filters (N, 1 or 3, H, W) of the first layer if they can be shown as images.
        learned: all learned k and factors of ρ, under "k" and "radius_factor"; `starts` their initial values.
        landscape: loss and error around the trained weights.
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

    def over(self, kind: str, key: str) -> dict[float, Any]:
        """Return the values of a metric by step or epoch, according to `kind`."""
        lines = [line for line in self.metrics if line.get("kind", "step") == kind and key in line and kind in line]
        return {line[kind]: line[key] for line in lines}

    @cached_property
    def sample(self) -> Tensor:
        """Indices of the test examples that are compared with each other."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        return order[:MOST_COMPARED].sort().values

    @cached_property
    def verified(self) -> Verified | None:
        """Verification on all pairs of the sample; None if there are not both kinds of pairs."""
        x, y = self.features[self.sample], self.labels[self.sample]
        counts = y.bincount()
        if len(counts.nonzero()) < 2 or int(counts.max()) < 2:
            return None
        first, second = torch.triu_indices(len(x), len(x), 1)
        roc = evaluation.roc(sphere.cosines(x.double(), x.double())[first, second], y[first] == y[second])
        gallery = evaluation.first_of_each(y)
        identified = evaluation.identify(x[~gallery], y[~gallery], x[gallery], y[gallery])
        return Verified(evaluation.class_angles(x, y, bins=90), roc, identified)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The numbers of the summary table by key; those that are not available are omitted."""
        numbers: dict[str, float | None] = {"accuracy": None if self.accuracy is None else 100 * self.accuracy}
        for key in ("loss", "seconds"):
            numbers[key] = next(
                (value for value in reversed(self.over("epoch", key).values()) if value is not None), None
            )
        if 1 < len(self.labels.unique()) < len(self.labels):
            numbers["fisher"] = evaluation.angular_fisher_score(self.features, self.labels)
        if self.verified is not None:
            numbers |= {"eer": 100 * self.verified.roc.eer, "rank1": 100 * self.verified.identified.accuracy_at(1)}
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
        at = int((self.roc.far >= 1 - self.roc.tar).nonzero()[0])
        return math.degrees(float(sphere.angle(self.roc.thresholds[at])))


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed, ordered by seed; figures of single runs show the first."""

    name: str
    runs: Sequence[RunResult]

    @property
    def first(self) -> RunResult:
        """The run with the smallest seed."""
        return self.runs[0]


def run_page(runs: Sequence[RunResult]) -> Page:
    """Return the page of these runs; runs that differ only in their seed share a row, a curve and a colour."""
    groups = grouped(runs)
    makers = (_training_tab, _feature_tab, _verification_tab, _class_vector_tab, _layer_tab, _landscape_tab)
    tabs = [tab for tab in (make(groups) for make in makers) if tab.sections]
    sections: list[Section] = [run_table(groups), *_differences(groups), Tabs("Measurements", tabs)]
    seeds = sorted({run.settings.get("seed", 0) for run in runs})
    seeded = {"seeds" if len(seeds) > 1 else "seed": ", ".join(map(str, seeds))}
    settings = [{**_settings(group.first), **seeded} for group in groups]
    sections.append(settings_table(settings, "" if len(groups) == 1 else "Settings that all runs share."))
    made = [{key: value for key, value in run.facts.items() if value is not None} for run in runs]
    meta = {**joined_facts(made), "runs": ", ".join(run.name for run in runs)}
    return Page(_title(groups), _lead(groups), sections, meta)


def grouped(runs: Sequence[RunResult]) -> list[Group]:
    """Group the runs that differ only in their seed, in the given order, under unique names."""
    by_settings: dict[str, list[RunResult]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    groups = [sorted(group, key=lambda run: run.settings.get("seed", 0)) for group in by_settings.values()]
    names = [shared_name([run.name for run in group]) for group in groups]
    if "" in names or len(set(names)) < len(names):
        names = [f"{name or 'run'} {number}" for number, name in enumerate(names, 1)]
    return [Group(name, group) for name, group in zip(names, groups, strict=True)]


def shared_name(names: Sequence[str]) -> str:
    """Return a common name for the folders of one group.

    >>> shared_name(["arcface"]), shared_name(["softmax-seed0", "softmax-seed1"]), shared_name(["a", "b"])
    ('arcface', 'softmax', '')
    """
    if len(names) == 1:
        return names[0]
    return common_prefix(names).rstrip("0123456789").rstrip("-_. ").removesuffix("seed").rstrip("-_. ")


def run_table(groups: Sequence[Group]) -> Table:
    """Return the summary: one row per group, mean ± s.d. over its seeds."""
    same_data, same_layers = _same_data(groups), len({_shapes(group.first) for group in groups}) == 1
    keys = [key for key in COLUMNS if any(key in run.numbers for group in groups for run in group.runs)]
    counts = {len(group.runs) for group in groups}
    columns = [Column("run"), *[Column("seeds", None, ".0f")] * (len(counts) > 1)]
    for key in keys:
        comparable = same_data and (same_layers or key != "energy")
        columns.append(COLUMNS[key] if comparable else Column(COLUMNS[key].name, None, COLUMNS[key].format))
    rows: list[list[Cell]] = []
    for group in groups:
        rows.append([group.name, *[len(group.runs)] * (len(counts) > 1)])
        rows[-1] += [measured(run.numbers.get(key) for run in group.runs) for key in keys]
    caption = (
        "Last checkpoint, test data. Fisher score, EER and rank-1 compare test features with each other, EER and "
        f"rank-1 for up to {MOST_COMPARED:,} examples; the smallest angle is that between class vectors."
    )
    if not same_data:
        caption += " The runs were tested on different examples, so no best run is marked."
    elif len(groups) > 1 and min(counts) < 2:
        caption += " A run with one seed has unknown noise, so no best run is marked."
    elif not same_layers:
        caption += " The networks differ, so no best hidden energy is marked."
    return Table("Summary", columns, rows, caption)


def landscape_charts(key: str, grids: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> list[Chart]:
    """Return landscapes of "loss" or "error" by name, on a common colour scale.

    Args:
        key: "loss" or "error".
        grids: grids (P, P) by name; entry [i, j] belongs to the i-th coordinate of the first direction.
        places: coordinates (P,) by name, the same for both directions.
    """
    name, form = {"loss": ("loss", ".3f"), "error": ("test error %", ".1f")}[key]
    finite = torch.cat([grid[grid.isfinite()].double() for grid in grids.values()])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    made = []
    for of, grid in grids.items():
        ends = float(places[of][0]), float(places[of][-1])
        chart = charts.landscape(
            grid.T,  # the first direction is the horizontal axis
            x=ends,
            y=ends,
            value_name=name,
            format=form,
            log=key == "loss" and 0 < 10 * low < high,
            limits=(low, high) if low < high else None,
            marks={"trained": (0.0, 0.0)},
        )
        made.append(Chart(of, chart))
    return made


def learned_chart(key: str, values: Mapping[str, Tensor], starts: set[float | None]) -> Chart:
    """Return a histogram of learned k or factors of ρ by name, with their initial value if all share one."""
    title, name = LEARNED[key]
    start = starts.pop() if len(starts) == 1 else None
    return Chart(title, charts.histogram(values, x_name=name, marks={} if start is None else {"start": start}))


def _settings(run: RunResult) -> dict[str, Any]:
    return {key: value for key, value in run.settings.items() if key != "seed"}


def _name_of(run: RunResult, part: str) -> str:
    setting = run.settings.get(part, "")
    return str(setting.get("name", "") if isinstance(setting, Mapping) else setting)


def _shapes(run: RunResult) -> tuple[tuple[int, int], ...]:
    return tuple((layer.neurons, layer.length) for layer in run.layers.layers) if run.layers else ()


def _same_data(groups: Sequence[Group]) -> bool:
    """Return True if the groups were tested on the same examples."""
    first = groups[0].first
    return all(
        _name_of(group.first, "data") == _name_of(first, "data")
        and tuple(group.first.classes) == tuple(first.classes)
        and torch.equal(group.first.labels, first.labels)
        for group in groups
    )


def _title(groups: Sequence[Group]) -> str:
    data = " and ".join(sorted({_name_of(group.first, "data") for group in groups}))
    if len(groups) == 1:
        return f"{_name_of(groups[0].first, 'head')} on {data}"
    names = [group.name for group in groups]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) <= 4 else f"{len(names)} kinds of runs"
    return f"{listed} on {data}"


def _lead(groups: Sequence[Group]) -> str:
    """Return one sentence per data set."""
    by_data: dict[str, list[Group]] = {}
    for group in groups:
        by_data.setdefault(words_of(group.first.settings.get("data", "")), []).append(group)
    sentences = []
    for name, of in by_data.items():
        runs = [run for group in of for run in group.runs]
        models = " and ".join(sorted({_name_of(run, "model") for run in runs}))
        sizes = span(run.features.shape[1] for run in runs).replace(" to", "- to")
        epochs = span(max(run.over("epoch", "epoch"), default=run.settings.get("epochs") or 0) for run in runs)
        rates = [run.accuracy for run in runs if run.accuracy is not None]
        reached = f"{span(rates, '.1%')} accuracy on" if rates else "validated on"
        sentences.append(
            f"{models} with {sizes}-d features, {epochs} {'epoch' if epochs == '1' else 'epochs'} on "
            f"{runs[0].examples:,} examples of {len(runs[0].classes):,} classes"
            f"{f' of {name}' if len(by_data) > 1 else ''}; {reached} {len(runs[0].labels):,} test examples."
        )
    return " ".join(sentences)


def _differences(groups: Sequence[Group]) -> list[Table]:
    """Return a table of the settings in which the groups differ, if there are several."""
    settings = [_settings(group.first) for group in groups]
    keys = dict.fromkeys(key for one in settings for key in one)
    differ = [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in settings}) > 1]
    rows = [
        [group.name, *(words_of(one.get(key)) for key in differ)] for group, one in zip(groups, settings, strict=True)
    ]
    return [Table("Different settings", [Column("run"), *map(Column, differ)], rows)] if differ else []


# Training ------------------------------------------------------------------------------------------------------------


def _training_tab(groups: Sequence[Group]) -> Stack:
    lines = [line for group in groups for run in group.runs for line in run.metrics if line.get("kind") == "epoch"]
    logged = dict.fromkeys(key for line in lines for key, value in line.items() if isinstance(value, (int, float)))
    validated = [key for key in logged if key not in ("epoch", "step", "loss", "seconds", "rate", "kind")]
    names = {"loss": "training loss", "test_accuracy": "test accuracy", "accuracy": "test accuracy"}
    parts = [_over(groups, "epoch", key, names.get(key, key.replace("_", " "))) for key in ("loss", *validated)]
    parts += [_over(groups, "step", "loss", "batch loss"), _over(groups, "step", "rate", "learning rate")]
    hidden = [_energies(group, alone=len(groups) == 1) for group in groups]
    heads = [_curve(group.name, [_energy_of(run, "head") for run in group.runs]) for group in groups]
    if any(heads):
        chart = charts.lines([one for one in heads if one], y_name="energy", format=".4f")
        hidden.append(Chart("Class vectors", chart))
    sections: list[Section] = []
    if any(parts):
        sections.append(SideBySide("By epoch and by step", [part for part in parts if part]))
    if any(hidden):
        caption = "Mean over pairs of neurons, s = 2; hidden layers in half space. Lower is more evenly spread."
        sections.append(SideBySide("Hyperspherical energy by epoch", [part for part in hidden if part], caption))
    return Stack("Training", sections)


def _over(groups: Sequence[Group], kind: str, key: str, name: str) -> Chart | None:
    """Return a chart with one curve per group over epochs or steps; None if no run logged the metric."""
    series = [_curve(group.name, [run.over(kind, key) for run in group.runs]) for group in groups]
    drawn = [one for one in series if one]
    if not drawn:
        return None
    is_loss, is_rate = "loss" in key, key == "rate"
    share = not (is_loss or is_rate) and all(
        0 <= value <= 1 for one in drawn for value in one.mean if math.isfinite(value)
    )
    better = (
        None if is_rate or kind == "step" or not _same_data(groups) else not (is_loss or "eer" in key or "error" in key)
    )
    form = ".3g" if is_rate else ".1%" if share else ".3f"
    limits = (0.0, 1.0) if share else None
    chart = charts.lines(drawn, x_name=kind, y_name=name, format=form, limits=limits, higher_is_better=better)
    return Chart(name[0].upper() + name[1:], chart)


def _curve(name: str, seeds: Sequence[Mapping[float, Any]]) -> Series | None:
    """Return the values of all seeds at the union of their steps or epochs; None if there are no values."""
    places = sorted({place for seed in seeds for place in seed})
    return Series(name, [[seed.get(place) for place in places] for seed in seeds], x=places) if places else None


def _energy_of(run: RunResult, layer: str) -> dict[float, float | None]:
    energies = run.over("epoch", "energy")
    return {epoch: of[layer] for epoch, of in energies.items() if isinstance(of, Mapping) and layer in of}


def _energies(group: Group, *, alone: bool) -> Chart | None:
    """Return the energies of the hidden layers of one group by epoch, in the order of the network."""
    logged = [of for of in group.first.over("epoch", "energy").values() if isinstance(of, Mapping)]
    names = [name for name in dict.fromkeys(name for of in logged for name in of) if name != "head"]
    curves = [_curve(name, [_energy_of(run, name) for run in group.runs]) for name in names]
    series = [one for one in curves if one]
    if not series:
        return None
    title = "Hidden layers" if alone else f"Hidden layers, {group.name}"
    if len(series) <= MOST_LINES:
        return Chart(title, charts.lines(series, y_name="energy", format=".4f", ordered=True))
    epochs, means = [f"{place:g}" for place in series[0].places], [one.mean for one in series]
    options: dict[str, Any] = {"column_name": "epoch", "value_name": "energy", "format": ".4f"}
    return Chart(title, charts.heat_map(means, names, epochs, **options))


# Features and verification -------------------------------------------------------------------------------------------


def _feature_tab(groups: Sequence[Group]) -> Stack:
    """Return the test features on spheres, 2-d features with their norms, and histograms of norms."""
    by_classes: dict[tuple[str, ...], list[Sphere]] = {}
    flat: list[Section] = []
    for group in groups:
        if group.first.features.shape[1] > 1:
            picture = _sphere(group)
            by_classes.setdefault(tuple(picture.classes), []).append(picture)
        if group.first.features.shape[1] == 2:
            flat.append(_scatter(group))
    caption = "Directions of the test features, one colour per class; the spikes are the class vectors."
    sections: list[Section] = [Spheres("", spheres, caption) for spheres in by_classes.values()]
    if flat:
        caption = "The features themselves, with their norms; lines are the directions of the class vectors."
        sections.append(SideBySide("Features with norms", flat, caption))
    norms = {group.name: sphere.norm(group.first.features.double()).flatten() for group in groups}
    sections.append(Chart("Norms of test features", charts.histogram(norms, x_name="norm")))
    return Stack("Features", sections)


def _sphere(group: Group) -> Sphere:
    run = group.first
    points, labels, vectors, names = _shown(run)
    words, angles = [], None
    if points.shape[1] > 3:
        view, size = project(points, vectors), points.shape[1]
        words.append(
            f"{size}-d, projected to three directions with {view.kept:.0%} of the squared norm; angles are in {size}-d"
        )
        if vectors is not None:
            angles = sphere.angle(sphere.cosine(points.double(), vectors[labels].double())).rad2deg()
        points = torch.from_numpy(view.points)
        vectors = None if view.vectors is None else torch.from_numpy(view.vectors)
    if len(names) < len(run.classes):
        words.append(f"{len(names)} of {len(run.classes):,} classes")
    if run.accuracy is not None:
        words.append(f"accuracy {run.accuracy:.1%}")
    return Sphere(group.name, points, labels, vectors, names, "; ".join(words), angles)


def _scatter(group: Group) -> Chart:
    points, labels, vectors, names = _shown(group.first)
    return Chart(group.name, charts.scatter(points, labels, vectors=vectors, classes=names))


def _shown(run: RunResult) -> tuple[Tensor, Tensor, Tensor | None, list[str]]:
    """Return features, labels, class vectors and names of all classes, or of a few with the most examples."""
    shown = shown_classes(run)
    place = torch.full((len(run.classes),), -1)
    place[shown] = torch.arange(len(shown))
    inside = place[run.labels] >= 0
    vectors = None if run.class_vectors is None else run.class_vectors[shown]
    return run.features[inside], place[run.labels][inside], vectors, [run.classes[index] for index in shown.tolist()]


def shown_classes(run: RunResult) -> Tensor:
    """Return all classes if there are few, else some of those with the most test examples, evenly spaced."""
    counts = run.labels.bincount(minlength=len(run.classes))
    if len(counts) <= MOST_CLASSES:
        return torch.arange(len(counts))
    able = (counts >= counts.sort(descending=True).values[SHOWN_CLASSES - 1]).nonzero().flatten()
    return able[torch.linspace(0, len(able) - 1, SHOWN_CLASSES).long()]


def _verification_tab(groups: Sequence[Group]) -> Stack:
    """Return angles of pairs, ROC and CMC on test examples; the tab is empty for runs without both kinds of pairs."""
    verified = {group.name: [run.verified for run in group.runs if run.verified] for group in groups}
    verified = {name: of for name, of in verified.items() if of}
    if not verified:
        return Stack("Verification", [])
    seen = all(group.first.class_vectors is not None for group in groups)
    compared = span(len(group.first.sample) for group in groups if group.name in verified)
    caption = f"All pairs of {compared} test examples, of the same class (positive) or of two classes (negative)."
    caption += " Training has seen these classes, so this is not an open-set protocol." if seen else ""
    title, alone = "Angles of pairs of test features", len(verified) == 1
    angles = [Chart(title if alone else name, _pair_angles(of[0]), caption * alone) for name, of in verified.items()]
    pairs: Section = angles[0] if alone else SideBySide(title, angles, caption)
    better = True if _same_data(groups) else None
    least = 1 / min(one.roc.negatives for of in verified.values() for one in of)
    rates = torch.logspace(math.log10(least), 0, RATES, dtype=torch.float64)
    depth = min(DEPTH, min(one.identified.entries for of in verified.values() for one in of))
    tars = {
        name: torch.stack([one.roc.tar[torch.searchsorted(one.roc.far, rates, right=True) - 1] for one in of])
        for name, of in verified.items()
    }
    shared: dict[str, Any] = {"format": ".1%", "limits": (0.0, 1.0), "higher_is_better": better}
    roc = charts.lines(
        [Series(name, values, x=rates) for name, values in tars.items()],
        x_name="false accept rate",
        y_name="true accept rate",
        log_x=True,
        **shared,
    )
    ranks = [Series(name, torch.stack([one.identified.cmc(depth) for one in of])) for name, of in verified.items()]
    cmc = charts.lines(ranks, x_name="rank", y_name="identification rate", **shared)
    about = "The gallery is the first test example of each class; all other test examples are probes."
    curves = SideBySide("ROC and CMC", [Chart("ROC", roc), Chart("CMC", cmc, about)])
    return Stack("Verification", [pairs, curves, _rates(verified, better)])


def _pair_angles(verified: Verified) -> Any:
    counts = {kind: getattr(verified.angles, kind).histogram for kind in ("positive", "negative")}
    edges, marks = verified.angles.edges.rad2deg(), {"equal error": verified.threshold}
    return charts.histogram(counts, edges=edges, counts=True, x_name="angle in degrees", format=".1f", marks=marks)


def _rates(verified: Mapping[str, Sequence[Verified]], better: bool | None) -> Table:
    worse = None if better is None else not better
    rates: dict[Column, Callable[[Verified], float | None]] = {
        Column("EER", worse, ".2%"): lambda one: one.roc.eer,
        Column("AUC", better, ".4f"): lambda one: one.roc.auc,
        **{Column(f"TAR at FAR {far:g}", better, ".1%"): partial(_true_accept_rate, far) for far in FARS},
        Column("positive pairs", worse, ".1f", "°"): lambda one: math.degrees(one.angles.positive.mean),
        Column("negative pairs", better, ".1f", "°"): lambda one: math.degrees(one.angles.negative.mean),
        Column("overlap", worse, ".1%"): lambda one: one.angles.overlap,
    }
    rows = [[name, *(measured(map(rate, of)) for rate in rates.values())] for name, of in verified.items()]
    caption = (
        "Rates and mean angles are computed from all pairs; `hypersphere evaluate` draws pairs, so its rates differ."
    )
    return Table("Rates", [Column("run"), *rates], rows, caption)


def _true_accept_rate(far: float, verified: Verified) -> float | None:
    point = verified.roc.at(far)
    return point.true_rate if point.resolved else None


# Class vectors, layers, landscapes -----------------------------------------------------------------------------------


def _class_vector_tab(groups: Sequence[Group]) -> Stack:
    """Return the angles between class vectors, and between the features of each class and all class vectors."""
    able = {g.name: g.first for g in groups if g.first.class_vectors is not None and len(g.first.class_vectors) > 1}
    if not able:
        return Stack("Class vectors", [])
    between = {name: _angles_between(run) for name, run in able.items()}
    maps = {
        "Angles between class vectors": _angle_maps(able, between, "class vector"),
        "Mean angle of test features to class vectors": _angle_maps(
            able, {name: _angles_to_vectors(run) for name, run in able.items()}, "features of"
        ),
    }
    parts: list[Section] = [SideBySide(title, of) for title, of in maps.items()]
    if len(able) == 1:
        parts = [SideBySide("", [Chart(title, of[0].chart, of[0].caption) for title, of in maps.items()])]
    shapes = {tuple(run.class_vectors.shape) for run in able.values()}  # type: ignore[union-attr]
    spread = charts.histogram(
        {name: angles[torch.ones_like(angles).triu(1).bool()] for name, angles in between.items()},
        x_name="angle in degrees",
        edges=range(0, 181, 10) if max(shapes)[0] <= MOST_CLASSES else None,  # wide bins for few pairs
        format=".1f",
        marks=_simplices(shapes),
    )
    about = "" if len(shapes) == 1 else "A regular simplex of C vectors needs C − 1 dimensions."
    return Stack("Class vectors", [*parts, Chart("All angles between class vectors", spread, about)])


def _simplices(shapes: set[tuple[int, ...]]) -> dict[str, float]:
    """Return the angle of a regular simplex for each number C of class vectors (C, d) with C <= d + 1."""
    counts = sorted({count for count, dim in shapes if count <= dim + 1})
    angles = sphere.angle(-1 / (torch.tensor(counts, dtype=torch.float64) - 1)).rad2deg().tolist()
    names = ["regular simplex" if len(shapes) == 1 else f"simplex of {count}" for count in counts]
    return dict(zip(names, angles, strict=True))


def _angles_between(run: RunResult) -> Tensor:
    vectors = run.class_vectors[:MOST_VECTORS].double()  # type: ignore[index]
    return sphere.angle(sphere.cosines(vectors, vectors)).rad2deg().fill_diagonal_(math.nan)


def _angles_to_vectors(run: RunResult) -> Tensor:
    """Return the mean angle between the test features of each class (rows) and each class vector (columns)."""
    inside = run.labels < MOST_VECTORS
    vectors, labels = run.class_vectors[:MOST_VECTORS].double(), run.labels[inside]  # type: ignore[index]
    angles = sphere.angle(sphere.cosines(run.features[inside].double(), vectors)).rad2deg()
    sums = torch.zeros(len(vectors), len(vectors), dtype=torch.float64).index_add_(0, labels, angles)
    return sums / labels.bincount(minlength=len(vectors))[:, None]  # NaN for a class without test examples


def _angle_maps(runs: Mapping[str, RunResult], angles: Mapping[str, Tensor], rows: str) -> list[Chart]:
    """Return one map per group, on a common colour scale."""
    finite = torch.cat([values[values.isfinite()] for values in angles.values()])
    limits = (float(finite.min()), float(finite.max())) if len(finite) and finite.min() < finite.max() else None
    names = {"row_name": rows, "column_name": "class vector", "value_name": "angle in degrees"}
    made = []
    for name, values in angles.items():
        classes = runs[name].classes
        some = f"The first {MOST_VECTORS} of {len(classes):,} classes." if len(values) < len(classes) else ""
        chart = charts.heat_map(values, classes[: len(values)], **names, format=".0f", limits=limits)
        made.append(Chart(name, chart, some))
    return made


def _layer_tab(groups: Sequence[Group]) -> Stack:
    """Return energies relative to random neurons, learned parameters, filters of the first layer, and layer tables."""
    parts: list[Section] = list(_excess(groups))
    for key in LEARNED:
        of = {group.name: group.runs for group in groups if key in group.first.learned}
        values = {name: torch.cat([run.learned[key] for run in runs]) for name, runs in of.items()}
        if values:
            parts.append(learned_chart(key, values, {runs[0].starts.get(key) for runs in of.values()}))
    images = [Images(group.name, group.first.filters) for group in groups if group.first.filters is not None]
    title = "Filters of the first layer"
    if images:
        parts.append(Images(title, images[0].images) if len(images) == 1 else SideBySide(title, images))
    if len(groups) == 1 and groups[0].first.layers is not None:
        parts += layer_tables(groups[0].first.layers)
    return Stack("Layers", parts)


def _excess(groups: Sequence[Group]) -> list[Chart]:
    """Return charts of energy minus that of random neurons; groups with the same layers share a chart."""
    by_names: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        if group.first.layers is not None:
            by_names.setdefault(tuple(layer.name for layer in group.first.layers.layers), []).append(group)
    made = []
    for names, alike in by_names.items():
        shown = names[: MOST_BARS // len(alike)]
        series = [Series(group.name, [_above_random(run)[: len(shown)] for run in group.runs]) for group in alike]
        labels = [name.removeprefix("network.") for name in shown]
        chart = charts.bars(labels, series, value_name="above random neurons", format="+.2%")
        whose = "" if len(by_names) == 1 else f": {', '.join(group.name for group in alike)}"
        caption = (
            "Mean over pairs, s = 2; hidden layers in half space, the head in full space. Below 0 is more evenly "
            "spread than random directions, whose mean is infinite in 3 dimensions or fewer."
        )
        made.append(Chart(f"Energy relative to random neurons{whose}", chart, caption))
    return made


def _above_random(run: RunResult) -> list[float]:
    layers = run.layers.layers if run.layers else ()
    return [layer.energy(half_space=layer.name != "head").excess - 1 for layer in layers]


def _landscape_tab(groups: Sequence[Group]) -> Stack:
    """Return loss and error around the trained weights, if computed."""
    landscapes = {group.name: group.first.landscape for group in groups if group.first.landscape is not None}
    if not landscapes:
        return Stack("Landscape", [])
    places = {name: one.a for name, one in landscapes.items()}
    maps = {
        title: landscape_charts(key, {name: one.values[key] for name, one in landscapes.items()}, places)
        for title, key in (("Loss", "loss"), ("Test error", "error"))
    }
    parts = [SideBySide(title, pictures) for title, pictures in maps.items()]
    if len(landscapes) == 1:
        parts = [SideBySide("", [Chart(title, pictures[0].chart) for title, pictures in maps.items()])]
    return Stack("Landscape", parts, f"{ABOUT_DIRECTIONS} The class vectors are fixed.")
