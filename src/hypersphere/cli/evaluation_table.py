"""What `hypersphere evaluate` found, as one table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypersphere import report
from hypersphere.cli.run_study import MOST_COMPARED

__all__ = ["evaluation_table"]

SHARE, NUMBER = report.Column("", format=".2%"), report.Column("", format=".4f")
Line = tuple[str, str, Sequence[float] | None, str]  # the measure, its value, its interval, and what it is of


def evaluation_table(found: Mapping[str, Any]) -> report.Table:
    """Return one line a measure, with its interval where any has one."""
    lines = [*_classification(found), *_verification(found), *_features(found)]
    columns = [report.Column("measure"), report.Column("value"), report.Column("95 %"), report.Column("of")]
    rows = [[name, value, _interval(value, ends), of] for name, value, ends, of in lines]
    if not any(ends for _, _, ends, _ in lines):
        del columns[2]
        rows = [[name, value, of] for name, value, _, of in rows]
    return report.Table(f"Evaluation of {found['source']}", columns, rows, _caption(found))


def _interval(value: str, ends: Sequence[float] | None) -> str:
    if ends is None:
        return ""
    low, high = ((SHARE if value.endswith("%") else NUMBER).show(end) for end in ends)
    return f"{low.removesuffix('%')} to {high}"


def _classification(found: Mapping[str, Any]) -> Iterator[Line]:
    if part := found.get("classification"):
        yield "classification accuracy", SHARE.show(part["accuracy"]), None, f"{part['samples']:,} samples"


def _verification(found: Mapping[str, Any]) -> Iterator[Line]:
    if part := found.get("verification"):
        ends, of = part.get("intervals", {}), f"{part['same'] + part['different']:,} pairs"
        accuracy = SHARE.show((part["accuracy"], part["standard_error"]))
        yield "verification accuracy", accuracy, ends.get("accuracy"), of
        yield "accuracy with the best threshold", SHARE.show(part["best_accuracy"]), None, of
        yield "equal error rate", SHARE.show(part["eer"]), ends.get("eer"), of
        yield "area under the ROC curve", NUMBER.show(part["auc"]), ends.get("auc"), of
        for point in part["tar"]:
            told = of if point["resolved"] else "not resolved"
            yield f"true accepts at {point['far']:g} false", SHARE.show(point["tar"]), point.get("interval"), told


def _features(found: Mapping[str, Any]) -> Iterator[Line]:
    if part := found.get("identification"):
        for rank, value in part["rank"].items():
            yield f"identification at rank {rank}", SHARE.show(value), None, f"{part['probes']:,} probes"
    if "angular_fisher_score" in found:
        of = f"{found['samples']:,} samples"
        yield "angular Fisher score", NUMBER.show(found["angular_fisher_score"]), None, of
    if part := found.get("hardness"):
        value = _measured(part["mean"], part["deviation"])
        yield "angular visual hardness", value, None, f"{part['samples']:,} samples"


def _measured(mean: float, deviation: float) -> str:
    """Both with four decimals, or as many as the deviation needs to be seen.

    >>> _measured(0.00104, 0.000021), _measured(0.5, 0.1)
    ('0.00104 ± 0.00002', '0.5000 ± 0.1000')
    """
    digits = max(4, -math.floor(math.log10(deviation))) if 0 < deviation < math.inf else 4
    return report.Column("", format=f".{min(digits, 9)}f").show((mean, deviation))


def _caption(found: Mapping[str, Any]) -> str:
    """What the lines are of, a line each."""
    verified, identified, words = found.get("verification"), found.get("identification"), []
    if part := found.get("classification"):
        words.append(f"Samples: test data of {part['classes']:,} classes, after step {found['step']:,}.")
    if left_out := found.get("left_out"):
        words.append(f"Left out: {left_out}.")
    if verified:
        kinds = f"{verified['same']:,} same and {verified['different']:,} different"
        folds = f"in {verified['folds']} folds; the threshold of a fold is that of the others, the best one that of all"
        words.append(f"Pairs: {kinds}, {verified['pairs']}, {folds}.")
        if not all(point["resolved"] for point in verified["tar"]):
            words.append(f"Not resolved: by {verified['different']:,} different pairs.")
        if "draws" in verified:
            words.append(f"95 %: percentiles over {verified['draws']:,} draws of the {verified['drawn']}.")
    if identified:
        words.append(f"Probes: searched among {identified['gallery']:,} samples, the first of each class.")
    if "angular_fisher_score" in found:
        words.append(f"Fisher score{' and hardness' * ('hardness' in found)}: lower is better.")
    if verified and verified["pairs"] == "drawn" and "classification" in found:
        words.append(
            f"The page of `report` has rates of all pairs of up to {MOST_COMPARED:,} test samples, so they differ."
        )
    return "\n".join(words)
