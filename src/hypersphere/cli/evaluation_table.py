"""Format the results of `hypersphere evaluate` as one table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypersphere import report

__all__ = ["evaluation_table"]

SHARE, NUMBER = report.Column("", format=".2%"), report.Column("", format=".4f")
MOST_COMPARED = 1500  # test samples of which `report` compares all pairs
Line = tuple[str, str, Sequence[float] | None, str]  # metric, value, interval, what it was computed from


def evaluation_table(results: Mapping[str, Any]) -> report.Table:
    """Return one row per metric; there is a column for intervals if any metric has one."""
    lines = [*_classification(results), *_verification(results), *_features(results)]
    columns = [report.Column("metric"), report.Column("value"), report.Column("95 %"), report.Column("from")]
    rows = [[name, value, _interval(value, ends), of] for name, value, ends, of in lines]
    if not any(ends for _, _, ends, _ in lines):
        del columns[2]
        rows = [[name, value, of] for name, value, _, of in rows]
    return report.Table(f"Evaluation of {results['source']}", columns, rows, _caption(results))


def _interval(value: str, ends: Sequence[float] | None) -> str:
    if ends is None:
        return ""
    low, high = ((SHARE if value.endswith("%") else NUMBER).show(end) for end in ends)
    return f"{low.removesuffix('%')} to {high}"


def _classification(results: Mapping[str, Any]) -> Iterator[Line]:
    if part := results.get("classification"):
        yield "classification accuracy", SHARE.show(part["accuracy"]), None, f"{part['samples']:,} samples"


def _verification(results: Mapping[str, Any]) -> Iterator[Line]:
    if part := results.get("verification"):
        ends, of = part.get("intervals", {}), f"{part['same'] + part['different']:,} pairs"
        accuracy = SHARE.show((part["accuracy"], part["standard_error"]))
        yield "verification accuracy", accuracy, ends.get("accuracy"), of
        at = f"cosine ≥ {part['best_threshold']:.3f}"
        yield "accuracy with the best threshold", SHARE.show(part["best_accuracy"]), None, at
        yield "equal error rate", SHARE.show(part["eer"]), ends.get("eer"), of
        yield "area under the ROC curve", NUMBER.show(part["auc"]), ends.get("auc"), of
        for point in part["tar"]:
            origin = f"cosine ≥ {point['threshold']:.3f}" if point["resolved"] else "not resolved"
            yield f"TAR at FAR {point['far']:g}", SHARE.show(point["tar"]), point.get("interval"), origin


def _features(results: Mapping[str, Any]) -> Iterator[Line]:
    if part := results.get("identification"):
        for rank, value in part["rank"].items():
            yield f"identification at rank {rank}", SHARE.show(value), None, f"{part['probes']:,} probes"
    if "angular_fisher_score" in results:
        of = f"{results['samples']:,} samples"
        yield "angular Fisher score", NUMBER.show(results["angular_fisher_score"]), None, of
    if part := results.get("hardness"):
        value = _measured(part["mean"], part["deviation"])
        yield "angular visual hardness", value, None, f"{part['samples']:,} samples"


def _measured(mean: float, deviation: float) -> str:
    """Format mean and deviation with four decimals, or more if the deviation needs them.

    >>> _measured(0.00104, 0.000021), _measured(0.5, 0.1)
    ('0.00104 ± 0.00002', '0.5000 ± 0.1000')
    """
    digits = max(4, -math.floor(math.log10(deviation))) if 0 < deviation < math.inf else 4
    return report.Column("", format=f".{min(digits, 9)}f").show((mean, deviation))


def _caption(results: Mapping[str, Any]) -> str:
    """Return one line of explanation per group of rows."""
    verified, identified, lines = results.get("verification"), results.get("identification"), []
    if part := results.get("classification"):
        lines.append(f"Samples: test data of {part['classes']:,} classes, checkpoint of step {results['step']:,}.")
    if left_out := results.get("left_out"):
        lines.append(f"Omitted: {left_out}.")
    if verified:
        kinds = f"{verified['same']:,} same and {verified['different']:,} different"
        folds = (
            f"in {verified['folds']} folds; a fold uses the threshold of the others, the best threshold uses all pairs"
        )
        lines.append(f"Pairs: {kinds}, {verified['pairs']}, {folds}.")
        if not all(point["resolved"] for point in verified["tar"]):
            lines.append(f"Not resolved: {verified['different']:,} different pairs are too few for this FAR.")
        if "draws" in verified:
            lines.append(f"95 %: percentile bootstrap with {verified['draws']:,} draws of the {verified['drawn']}.")
    if identified:
        lines.append(f"Probes: compared with a gallery of {identified['gallery']:,} samples, the first of each class.")
    if "angular_fisher_score" in results:
        lines.append(f"Fisher score{' and hardness' * ('hardness' in results)}: lower is better.")
    if verified and verified["pairs"] == "drawn" and "classification" in results:
        lines.append(
            f"`report` computes its rates from all pairs of up to {MOST_COMPARED:,} test samples, so they differ."
        )
    return "\n".join(lines)
