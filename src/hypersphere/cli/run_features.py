"""Tabs of the page of runs: features on the sphere, verification, angles of class vectors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hypersphere import report, sphere
from hypersphere.cli.evaluate import DRAWN
from hypersphere.cli.options import FARS
from hypersphere.cli.run_groups import Group, better_way
from hypersphere.cli.run_study import Study
from hypersphere.cli.words import span

__all__ = ["class_vector_tab", "feature_tab", "verification_tab"]

MOST_CLASSES, SHOWN_CLASSES = (
    20,
    10,
)  # up to 20 classes have one colour each on the sphere; of more classes, 10 are shown
MOST_VECTORS = 400  # class vectors in a map of angles
RATES = 300  # points of a ROC curve
DEPTH = 20  # ranks of a CMC curve
FEW_DEGREES = 10


def feature_tab(groups: Sequence[Group]) -> report.Stack:
    """Return the test features on spheres; networks with the same classes share one legend."""
    by_classes: dict[tuple[str, ...], list[report.Sphere]] = {}
    for group in groups:
        if group.first.features.shape[1] > 1:
            picture = _sphere(group)
            by_classes.setdefault(tuple(picture.classes), []).append(picture)
    caption = "Directions of the test features, one colour per class; the spikes are the class vectors."
    return report.Stack("Features", [report.Spheres("", spheres, caption) for spheres in by_classes.values()])


def _sphere(group: Group) -> report.Sphere:
    study = group.first
    shown, names = _shown_classes(study), study.task.classes
    place = torch.full((len(names),), -1)
    place[shown] = torch.arange(len(shown))
    is_shown = place[study.labels] >= 0
    points, vectors = study.features[is_shown], study.class_vectors[shown]
    words, labels = [], place[study.labels][is_shown]
    angles = None
    if points.shape[1] > 3:
        view = report.project(points, vectors)
        size = points.shape[1]
        words.append(
            f"{size}-d, projected to three directions with {view.kept:.0%} of the squared norm; angles are in {size}-d"
        )
        angles = sphere.angle(sphere.cosine(points.double(), vectors[labels].double())).rad2deg()
        points, vectors = torch.from_numpy(view.points), torch.from_numpy(view.vectors)
    if len(shown) < len(names):
        words.append(f"{len(shown)} of {len(names):,} classes")
    words.append(f"accuracy {study.accuracy:.1%}")
    chosen = [names[index] for index in shown.tolist()]
    return report.Sphere(group.name, points, labels, vectors, chosen, "; ".join(words), angles)


def _shown_classes(study: Study) -> Tensor:
    """Return all classes if there are few, else some of those with the most test examples, evenly spaced."""
    counts = study.labels.bincount(minlength=len(study.task.classes))
    if len(counts) <= MOST_CLASSES:
        return torch.arange(len(counts))
    able = (counts >= counts.sort(descending=True).values[SHOWN_CLASSES - 1]).nonzero().flatten()
    return able[torch.linspace(0, len(able) - 1, SHOWN_CLASSES).long()]


def verification_tab(groups: Sequence[Group]) -> report.Stack:
    """Return angles of pairs, ROC and CMC on test examples; the tab is empty for runs without both kinds of pairs."""
    able = [group for group in groups if all(study.verified is not None for study in group.studies)]
    if not able:
        return report.Stack("Verification", [])
    compared = span(len(group.first.sample) for group in able)
    caption = (
        f"All pairs of {compared} test examples, of the same class (positive) or of two classes (negative). "
        "Training has seen these classes, so this is not an open-set protocol."
    )
    title, angles = "Angles of pairs of test features", [_angles(group) for group in able]
    pairs: report.Section = report.SideBySide(title, angles, caption)
    if len(angles) == 1:
        pairs = replace(angles[0], title=title, caption=caption)
    curves = report.SideBySide("ROC and CMC", [_roc(able), _cmc(able)])
    return report.Stack("Verification", [pairs, curves, _rates(able)])


def _angles(group: Group) -> report.Histogram:
    verified = group.first.verified
    assert verified is not None
    return report.Histogram(
        group.name,
        [
            report.Distribution("positive", counts=verified.angles.positive.histogram),
            report.Distribution("negative", counts=verified.angles.negative.histogram),
        ],
        x_name="angle in degrees",
        edges=verified.angles.edges.rad2deg(),
        format=".1f",
        marks={"equal error": verified.threshold},
    )


def _roc(groups: Sequence[Group]) -> report.Curves:
    rocs = [[study.verified.roc for study in group.studies if study.verified] for group in groups]
    least = 1 / min(roc.negatives for of_group in rocs for roc in of_group)
    rates = torch.logspace(math.log10(least), 0, RATES, dtype=torch.float64)
    series = [
        report.Series(
            group.name,
            torch.stack([roc.tar[torch.searchsorted(roc.far, rates, right=True) - 1] for roc in of_group]),
            x=rates,
        )
        for group, of_group in zip(groups, rocs, strict=True)
    ]
    return report.Curves(
        "ROC",
        series,
        x_name="false accept rate",
        y_name="true accept rate",
        format=".1%",
        log_x=True,
        limits=(0.0, 1.0),
        higher_is_better=better_way(groups, True),
    )


def _cmc(groups: Sequence[Group]) -> report.Curves:
    searches = [[study.verified.identified for study in group.studies if study.verified] for group in groups]
    depth = min(DEPTH, min(one.entries for of_group in searches for one in of_group))
    series = [
        report.Series(group.name, torch.stack([one.cmc(depth) for one in of_group]))
        for group, of_group in zip(groups, searches, strict=True)
    ]
    return report.Curves(
        "CMC",
        series,
        x_name="rank",
        y_name="identification rate",
        format=".1%",
        limits=(0.0, 1.0),
        higher_is_better=better_way(groups, True),
        caption="The gallery is the first test example of each class; all other test examples are probes.",
    )


def _rates(groups: Sequence[Group]) -> report.Table:
    higher, lower = better_way(groups, True), better_way(groups, False)
    columns = [
        report.Column("run"),
        report.Column("EER", lower, ".2%"),
        report.Column("AUC", higher, ".4f"),
        *(report.Column(f"TAR at FAR {far:g}", higher, ".1%") for far in FARS),
        report.Column("positive pairs", lower, ".1f", "°"),
        report.Column("negative pairs", higher, ".1f", "°"),
        report.Column("overlap", lower, ".1%"),
    ]
    rows = []
    for group in groups:
        verified = group.first.verified
        assert verified is not None
        roc, angles = verified.roc, verified.angles
        tars = [point.true_rate if point.resolved else None for point in map(roc.at, FARS)]
        means = [math.degrees(kind.mean) for kind in (angles.positive, angles.negative)]
        rows.append([group.name, roc.eer, roc.auc, *tars, *means, angles.overlap])
    caption = (
        f"{'First seed only. ' * any(len(group.studies) > 1 for group in groups)}Rates and mean angles are "
        f"computed from all pairs. `hypersphere evaluate` draws up to {DRAWN:,} pairs of a kind, so its rates differ."
    )
    return report.Table("Rates", columns, rows, caption)


def class_vector_tab(groups: Sequence[Group]) -> report.Stack:
    """Return the angles between class vectors, and between the features of each class and all class vectors."""
    able = [group for group in groups if len(group.first.class_vectors) > 1]
    if not able:
        return report.Stack("Class vectors", [])
    between = _maps(able, [_between(group.first) for group in able], "class vector")
    confused = _maps(able, [_confused(group.first) for group in able], "features of")
    titles = ("Angles between class vectors", "Mean angle of test features to class vectors")
    maps = [report.SideBySide(title, of) for title, of in zip(titles, (between, confused), strict=True)]
    if len(able) == 1:
        both = zip(titles, (*between, *confused), strict=True)
        maps = [report.SideBySide("", [replace(one, title=title) for title, one in both])]
    return report.Stack("Class vectors", [*maps, _spread(able)])


def _spread(groups: Sequence[Group]) -> report.Histogram:
    """Return all angles between class vectors, with that of a regular simplex if the dimension is large enough."""
    drawn = []
    for group in groups:
        angles = _between(group.first)
        drawn.append(report.Distribution(group.name, angles[torch.ones_like(angles).triu(1).bool()]))
    shapes = {tuple(group.first.class_vectors.shape) for group in groups}
    return report.Histogram(
        "All angles between class vectors",
        drawn,
        x_name="angle in degrees",
        edges=range(0, 181, FEW_DEGREES) if max(shapes)[0] <= MOST_CLASSES else None,  # wide bins for few pairs
        format=".1f",
        marks=_simplices(shapes),
        caption="" if len(shapes) == 1 else "A regular simplex of C vectors needs C − 1 dimensions.",
    )


def _simplices(shapes: Collection[tuple[int, ...]]) -> dict[str, float]:
    """Return the angle of a regular simplex for each number C of class vectors (C, d) with C <= d + 1."""
    counts = sorted({count for count, dim in shapes if count <= dim + 1})
    angles = sphere.angle(-1 / (torch.tensor(counts, dtype=torch.float64) - 1)).rad2deg().tolist()
    alone = len(shapes) == 1
    return {
        "regular simplex" if alone else f"simplex of {count}": angle
        for count, angle in zip(counts, angles, strict=True)
    }


def _between(study: Study) -> Tensor:
    vectors = study.class_vectors[:MOST_VECTORS].double()
    return sphere.angle(sphere.cosines(vectors, vectors)).rad2deg().fill_diagonal_(math.nan)


def _confused(study: Study) -> Tensor:
    """Return the mean angle between the test features of each class (rows) and each class vector (columns)."""
    included = study.labels < MOST_VECTORS
    vectors, labels = study.class_vectors[:MOST_VECTORS].double(), study.labels[included]
    angles = sphere.angle(sphere.cosines(study.features[included].double(), vectors)).rad2deg()
    sums = torch.zeros(len(vectors), len(vectors), dtype=torch.float64).index_add_(0, labels, angles)
    return sums / labels.bincount(minlength=len(vectors))[:, None]  # NaN for a class without test examples


def _maps(groups: Sequence[Group], angles: Sequence[Tensor], rows: str) -> list[report.HeatMap]:
    """Return one map per group, on a common colour scale."""
    finite = torch.cat([values[values.isfinite()] for values in angles])
    limits = (float(finite.min()), float(finite.max())) if len(finite) and finite.min() < finite.max() else None
    maps = []
    for group, values in zip(groups, angles, strict=True):
        names = group.first.task.classes
        some = f"The first {MOST_VECTORS} of {len(names):,} classes." if len(values) < len(names) else ""
        maps.append(
            report.HeatMap(
                group.name,
                values,
                names[: len(values)],
                row_name=rows,
                column_name="class vector",
                value_name="angle in degrees",
                format=".0f",
                limits=limits,
                caption=some,
            )
        )
    return maps
