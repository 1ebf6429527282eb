"""The results of `hypersphere evaluate` as one table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypersphere.report.runs import MOST_COMPARED
from hypersphere.report.tables import Column, Table

__all__ = ["evaluation_table"]

SHARE, NUMBER = Column("", format=".2%"), Column("", format=".4f")
Line = tuple[str, str, Sequence[float] | None, str]  # metric, value, interval, what it was computed from


def evaluation_table(results: Mapping[str, Any]) -> Table:
    """Return one row per metric; there is a column for intervals if any metric has one.

    Args:
        results: the content of the file that `hypersphere evaluate --json` writes.
    """
    lines = list(_lines(results))
    headings = ["metric", "value", "95 %", "from"]
    rows = [[metric, value, _interval(value, ends), origin] for metric, value, ends, origin in lines]
    if not any(ends for _, _, ends, _ in lines):
        headings.remove("95 %")
        rows = [[metric, value, origin] for metric, value, _, origin in rows]
    columns = [Column(heading) for heading in headings]
    return Table(f"Evaluation of {results['source']}", columns, rows, "\n".join(_captions(results)))


def _lines(results: Mapping[str, Any]) -> Iterator[Line]:
    if part := results.get("classification"):
        yield "classification accuracy", SHARE.show(part["accuracy"]), None, f"{part['samples']:,} samples"
    if part := results.get("verification"):
        ends, count = part.get("intervals", {}), f"{part['same'] + part['different']:,} pairs"
        accuracy = SHARE.show((part["accuracy"], part["standard_error"]))
        yield "verification accuracy", accuracy, ends.get("accuracy"), count
        best = f"cosine ≥ {part['best_threshold']:.3f}"
        yield "best accuracy", SHARE.show(part["best_accuracy"]), None, best
        yield "area under the ROC curve", NUMBER.show(part["auc"]), ends.get("auc"), count
        # Without "rates", all numbers are of the same pairs.
        rates = part.get("rates", part)
        same, different = f"{rates['same']:,} same pairs", f"{rates['different']:,} different pairs"
        count = f"{rates['same'] + rates['different']:,} pairs"
        yield "equal error rate", SHARE.show(part["eer"]), ends.get("eer"), count
        for point in part["tar"]:
            resolved, name = point["resolved"], f"at FAR {point['far']:g}"
            yield f"TAR {name}", SHARE.show(point["tar"]), point.get("interval"), same if resolved else "not resolved"
            if resolved:
                yield f"threshold {name}", NUMBER.show(point["threshold"]), point.get("threshold_interval"), different
    if (part := results.get("calibration")) and "left_out" not in part:
        yield from _calibration_lines(part)
    if part := results.get("identification"):
        for rank, value in part["rank"].items():
            yield f"identification at rank {rank}", SHARE.show(value), None, f"{part['probes']:,} probes"
    if "angular_fisher_score" in results:
        score, count = results["angular_fisher_score"], f"{results['samples']:,} samples"
        yield "angular Fisher score", NUMBER.show(score), None, count
    if part := results.get("hardness"):
        value = _with_deviation(part["mean"], part["deviation"])
        yield "angular visual hardness", value, None, f"{part['samples']:,} samples"


def _calibration_lines(part: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the rows of a calibration."""
    origin = f"{part['classes']:,} other classes"
    yield "Cllr, in bits", NUMBER.show(part["cllr"]), None, origin
    yield "lowest possible Cllr", NUMBER.show(part["min_cllr"]), None, origin
    yield f"minDCF at prior {part['dcf_prior']:g}", NUMBER.show(part["min_dcf"]), None, origin
    yield "DCF of the calibration", NUMBER.show(part["actual_dcf"]), None, origin
    for point in part["far"]:
        origin = f"cosine ≥ {point['threshold']:.3f}, probability {point['probability']:.2f}"
        yield f"FAR, promised {point['promised']:g}", SHARE.show(point["measured"]), None, origin


def _interval(value: str, ends: Sequence[float] | None) -> str:
    if ends is None:
        return ""
    low, high = ((SHARE if value.endswith("%") else NUMBER).show(end) for end in ends)
    return f"{low.removesuffix('%')} to {high}"


def _with_deviation(mean: float, deviation: float) -> str:
    """Format mean and deviation with four decimals, or more if the deviation needs them.

    >>> _with_deviation(0.00104, 0.000021), _with_deviation(0.5, 0.1)
    ('0.00104 ± 0.00002', '0.5000 ± 0.1000')
    """
    digits = max(4, -math.floor(math.log10(deviation))) if 0 < deviation < math.inf else 4
    return Column("", format=f".{min(digits, 9)}f").show((mean, deviation))


def _captions(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line of explanation per group of rows."""
    if "data" in results:  # a run, not files of embeddings
        yield f"Samples: {results['data']} of {results['classes']:,} classes, checkpoint of step {results['step']:,}."
    if left_out := results.get("left_out"):
        yield f"Omitted: {left_out}."
    if part := results.get("verification"):
        kinds = f"{part['same']:,} same and {part['different']:,} different, {part['pairs']}"
        rule = "a fold uses the threshold of the others; the best accuracy uses the test pairs themselves"
        yield f"Pairs: {kinds}, in {part['folds']} folds; {rule}."
        rates = part.get("rates", part)
        if rates is not part:
            yield "Rates and thresholds: of all pairs of the samples."
        if not all(point["resolved"] for point in part["tar"]):
            yield f"Not resolved: {rates['different']:,} different pairs are too few for this FAR."
        draws = sorted({one["draws"] for one in (part, rates) if "draws" in one}, reverse=True)
        if draws:
            numbers, drawn = " or ".join(f"{number:,}" for number in draws), part.get("drawn") or rates["drawn"]
            yield f"95 %: percentile bootstrap with {numbers} draws of the {drawn}."
        is_same = rates is not part and results.get("samples", 0) <= MOST_COMPARED
        if part["pairs"] == "drawn" and "classification" in results and not is_same:
            yield f"`report` computes its rates from all pairs of up to {MOST_COMPARED:,} samples, so they differ."
    if part := results.get("calibration"):
        yield from _calibration_captions(part)
    if part := results.get("identification"):
        yield f"Probes: compared with a gallery of {part['gallery']:,} samples, the first of each class."
    if "angular_fisher_score" in results:
        yield f"Fisher score{' and hardness' * ('hardness' in results)}: lower is better."


def _calibration_captions(part: Mapping[str, Any]) -> Iterator[str]:
    if "left_out" in part:
        yield f"Calibration not applied: {part['left_out']}."
        return
    fitted = part["fitted"]
    yield (
        f"Calibration: fitted on {fitted['fitted_classes']:,} classes, measured on {part['classes']:,} others; "
        f"probabilities assume that {fitted['prior']:.0%} of the pairs are same."
    )
    if not fitted["open_set"]:
        yield "Training has seen these classes, so the calibration is too optimistic for new ones."
    if "file" in part:
        yield f"Stored in {part['file']}."
