"""Pages of evaluations and inspections, which notebooks display, and the table of `hypersphere evaluate`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hypersphere._validation import require
from hypersphere.energy.inspect import Inspection
from hypersphere.evaluation import Calibration, Identification, OperatingPoint, Roc, RocPoints, Verification, roc
from hypersphere.report import _sections, charts
from hypersphere.report.neurons import inspection_page, layer_tables
from hypersphere.report.page import Chart, Page, Section, SideBySide
from hypersphere.report.runs import MOST_COMPARED
from hypersphere.report.tables import Column, Table
from hypersphere.robustness import RobustAccuracy, Strength

__all__ = ["accuracy_chart", "evaluation_table", "result_page", "strength_chart"]

CALIBRATED_RATES = (0.1, 0.01, 0.001)  # false accept rates for which the page of a calibration shows thresholds
DEPTH = 50  # ranks of a drawn CMC curve
CURVE_POINTS = 101  # of a drawn calibration
SHARE, NUMBER = Column("", format=".2%"), Column("", format=".4f")
Line = tuple[str, str, Sequence[float] | None, str]  # metric, value, interval, what it was computed from


def result_page(result: Any) -> Page:
    """Return the page of a result of `verify`, `verify_blocks`, `roc`, `identify`, `Calibration.fit` or `inspect`.

    Charts need the extra `report`. Without it, the page has tables only.

    Example:
        >>> from hypersphere.evaluation import roc
        >>> result_page(roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0])).title
        'ROC curve'
    """
    kind = next((kind for kind in PAGES if isinstance(result, kind)), None)
    accepted = f"one of {', '.join(known.__name__ for known in PAGES)}"
    require(kind is not None, "result", accepted, type(result).__name__)
    assert kind is not None
    return PAGES[kind](result)


def evaluation_table(results: Mapping[str, Any]) -> Table:
    """Return a table with one row per metric, and a column for confidence intervals if any metric has one.

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


def accuracy_chart(results: Mapping[str, RobustAccuracy]) -> Any:
    """Return an Altair chart of accuracy under attack over ε in units of 1/255, with one curve per model.

    The accuracy without an attack is shown at ε = 0.

    Args:
        results: results of `hypersphere.robustness.accuracy_under` by name of the model.
    """
    require(len(results) > 0, "results", "a mapping with at least one result", results)
    series = []
    for name, result in results.items():
        points = sorted({0.0: result.clean, **dict(zip(result.epsilons, result.accuracies, strict=True))}.items())
        values = [accuracy for _, accuracy in points]
        series.append(charts.Series(name, values, x=[255 * epsilon for epsilon, _ in points]))
    attacks = sorted({result.attack + ", transferred" * result.transferred for result in results.values()})
    chart = charts.lines(series, x_name="ε · 255", y_name="accuracy", format=".1%", limits=(0.0, 1.0))
    return chart.properties(title=f"accuracy under {'; '.join(attacks)}", width=460, height=300)


def strength_chart(results: Mapping[str, Strength], norm: str = "l2") -> Any:
    """Return an Altair chart of the sorted norms of the perturbations that fooled a model (thesis, figure C.1).

    Images that are still classified correctly are left out. Images that were misclassified before the attack are
    included; DeepFool does not change them, so their norm is zero.

    Args:
        results: results of `hypersphere.robustness.fooling_strength` by name of the model.
        norm: "l2" or "linf".
    """
    require(norm in ("l2", "linf"), "norm", "'l2' or 'linf'", norm)
    strengths = {name: result.norms(norm)[result.fooled].sort().values for name, result in results.items()}
    series = [charts.Series(name, values) for name, values in strengths.items() if len(values)]
    require(len(series) > 0, "results", "a mapping with at least one model that was fooled", list(results))
    chart = charts.lines(series, x_name="image, sorted", y_name=f"strength ({norm})")
    return chart.properties(width=460, height=300)


def _can_draw() -> bool:
    """Return True if the packages of the extra `report` are installed."""
    return all(importlib.util.find_spec(package) is not None for package in ("altair", "vl_convert"))


def _metrics(rows: Sequence[tuple[str, str]]) -> Table:
    return Table("", [Column("metric"), Column("value")], rows)


def _point_table(points: Sequence[OperatingPoint], negatives: float) -> Table:
    resolved = [point for point in points if point.resolved]
    rows = [(f"{point.requested_rate:g}", point.true_rate, point.threshold) for point in resolved]
    missing = ", ".join(f"{point.requested_rate:g}" for point in points if not point.resolved)
    caption = f"{negatives:,.0f} different pairs are too few for FAR {missing}." if missing else ""
    columns = [
        Column("false accept rate"),
        Column("true accept rate", format=".2%"),
        Column("threshold", format=".4f"),
    ]
    return Table("Operating points", columns, rows, caption)


def _score_chart(scores: torch.Tensor, same: torch.Tensor) -> Chart:
    samples = {"same": scores[same].cpu(), "different": scores[~same].cpu()}
    return Chart("Scores of pairs", charts.histogram(samples, x_name="score"))


def _roc_page(curve: Roc) -> Page:
    rows = [("equal error rate", f"{curve.eer:.2%}"), ("area under the curve", f"{curve.auc:.4f}")]
    sections: list[Section] = [_metrics(rows), *([_sections.roc_chart({"TAR": [curve]})] if _can_draw() else [])]
    return Page("ROC curve", f"{curve.positives:,.0f} same and {curve.negatives:,.0f} different pairs.", sections)


def _points_page(verified: RocPoints) -> Page:
    sections = [
        _metrics([("equal error rate", f"{verified.eer:.2%}")]),
        _point_table(verified.points, verified.different),
    ]
    return Page("Verification", f"{verified.same:,} same and {verified.different:,} different pairs.", sections)


def _verification_page(verified: Verification) -> Page:
    rows = [
        ("accuracy", f"{verified.accuracy:.2%} ± {verified.standard_error:.2%}"),
        ("best accuracy, chosen on the test pairs", f"{verified.best_accuracy:.2%}"),
        ("equal error rate", f"{verified.eer:.2%}"),
        ("area under the ROC curve", f"{verified.auc:.4f}"),
    ]
    sections: list[Section] = [_metrics(rows), _point_table(verified.points, verified.roc.negatives)]
    if _can_draw():
        scores = _score_chart(verified.scores, verified.same)
        sections.append(SideBySide("", [scores, _sections.roc_chart({"TAR": [verified.roc]})]))
    same = int(verified.same.sum())
    lead = f"{same:,} same and {len(verified.same) - same:,} different pairs in {len(verified.accuracies)} folds."
    return Page("Verification", lead, sections)


def _identification_page(result: Identification) -> Page:
    ranks = [(str(rank), accuracy) for rank, accuracy in result.accuracy.items()]
    sections: list[Section] = [Table("", [Column("rank"), Column("identified", format=".2%")], ranks)]
    if _can_draw():
        sections.append(_sections.cmc_chart({"identified": [result]}, DEPTH))
    strangers = len(result.mated) - int(result.mated.sum())
    lead = f"{len(result.ranks):,} probes among {result.entries:,} entries."
    return Page("Identification", lead + f" {strangers:,} probes have no mate." * bool(strangers), sections)


def _calibration_page(calibration: Calibration) -> Page:
    same = calibration.same
    counts = f"{int(same.sum()):,} same and {int((~same).sum()):,} different pairs"
    has_quality = calibration.quality is not None
    rows = [("method", calibration.method), ("prior of probabilities", f"{calibration.prior:.4g}")]
    sections: list[Section] = [_metrics(rows)]
    if not has_quality:
        curve = roc(calibration.scores, calibration.same)
        sections.append(_point_table([curve.at(rate) for rate in CALIBRATED_RATES], curve.negatives))
    if _can_draw():
        drawn = [_score_chart(calibration.scores, same)]
        if not has_quality:
            ends = float(calibration.scores.min()), float(calibration.scores.max())
            places = torch.linspace(*ends, CURVE_POINTS, dtype=torch.float64)
            series = [charts.Series("probability", calibration.probability(places), x=places)]
            chart = charts.lines(series, x_name="score", y_name="probability of same", limits=(0.0, 1.0))
            drawn.append(Chart("Probability", chart))
        sections.append(SideBySide("", drawn))
    return Page("Calibration", f"Fitted to {counts}.", sections)


def _inspection_page(inspection: Inspection) -> Page:
    if _can_draw():
        return inspection_page(inspection, "the model")
    return Page("Neurons of the model", f"{len(inspection.layers)} layers.", layer_tables(inspection))


PAGES: dict[type, Callable[[Any], Page]] = {
    Verification: _verification_page,
    RocPoints: _points_page,
    Roc: _roc_page,
    Identification: _identification_page,
    Calibration: _calibration_page,
    Inspection: _inspection_page,
}


def _lines(results: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the rows of an evaluation, in groups that share a caption."""
    if part := results.get("classification"):
        yield "classification accuracy", SHARE.show(part["accuracy"]), None, f"{part['samples']:,} samples"
    if part := results.get("verification"):
        ends, count = part.get("intervals", {}), f"{part['same'] + part['different']:,} pairs"
        accuracy = SHARE.show((part["accuracy"], part["standard_error"]))
        yield "verification accuracy", accuracy, ends.get("accuracy"), count
        best = f"cosine ≥ {part['best_threshold']:.3f}"
        yield "best accuracy", SHARE.show(part["best_accuracy"]), None, best
        yield "area under the ROC curve", NUMBER.show(part["auc"]), ends.get("auc"), count
        # "rates" holds the numbers of pairs if the error rates come from other pairs than the accuracy.
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
        for rank, value in _informative_ranks(part).items():
            yield f"identification at rank {rank}", SHARE.show(value), None, f"{part['probes']:,} probes"
    if "angular_fisher_score" in results:
        score, count = results["angular_fisher_score"], f"{results['samples']:,} samples"
        yield "angular Fisher score", NUMBER.show(score), None, count
    if part := results.get("hardness"):
        value = _with_deviation(part["mean"], part["deviation"])
        yield "angular visual hardness", value, None, f"{part['samples']:,} samples"


def _informative_ranks(part: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the accuracies at ranks below the size of the gallery; at higher ranks the accuracy is always 1.

    >>> _informative_ranks({"rank": {"1": 0.9, "10": 1.0}, "gallery": 6})
    {'1': 0.9}
    """
    return {rank: value for rank, value in part["rank"].items() if int(rank) < part["gallery"]}


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
    if "data" in results:  # absent if files of embeddings were evaluated
        yield f"Samples: {results['data']} of {results['classes']:,} classes, checkpoint of step {results['step']:,}."
    if left_out := results.get("left_out"):
        yield f"Omitted: {left_out}."
    if part := results.get("verification"):
        kinds = f"{part['same']:,} same and {part['different']:,} different, {part['pairs']}"
        rule = "a fold uses the threshold of the others; the best accuracy uses the test pairs themselves"
        yield f"Pairs: {kinds}, in {part['folds']} folds; {rule}."
        yield "Verification accuracy: mean over the folds ± its standard error."
        rates = part.get("rates", part)
        if rates is not part:
            yield "Rates and thresholds: of all pairs of the samples."
        if not all(point["resolved"] for point in part["tar"]):
            yield f"Not resolved: {rates['different']:,} different pairs are too few for this FAR."
        draws = sorted({source["draws"] for source in (part, rates) if "draws" in source}, reverse=True)
        if draws:
            numbers, drawn = " or ".join(f"{number:,}" for number in draws), part.get("drawn") or rates["drawn"]
            yield f"95 %: percentile bootstrap with {numbers} draws of the {drawn}."
        uses_all_pairs = rates is not part and results.get("samples", 0) <= MOST_COMPARED
        if part["pairs"] == "drawn" and "classification" in results and not uses_all_pairs:
            yield f"`report` computes its rates from all pairs of up to {MOST_COMPARED:,} samples, so they differ."
    if part := results.get("calibration"):
        yield from _calibration_captions(part)
    if part := results.get("identification"):
        size, is_complete = part["gallery"], len(_informative_ranks(part)) == len(part["rank"])
        left_out = "" if is_complete else f"; ranks from {size:,} on are always 100 % and omitted"
        yield f"Probes: compared with a gallery of {size:,} samples, the first of each class{left_out}."
    if "angular_fisher_score" in results:
        has_hardness = "hardness" in results
        deviation = " Hardness: mean ± standard deviation over the samples." * has_hardness
        yield f"Fisher score{' and hardness' * has_hardness}: lower is better.{deviation}"


def _calibration_captions(part: Mapping[str, Any]) -> Iterator[str]:
    if "left_out" in part:
        yield f"Calibration not applied: {part['left_out']}."
        return
    fitted = part["fitted"]
    yield (
        f"Calibration: fitted on {fitted['fitted_classes']:,} classes, measured on {part['classes']:,} others; "
        f"probabilities assume that {fitted['prior']:.0%} of the pairs are same."
    )
    if unresolved := part.get("unresolved"):
        rates = ", ".join(f"{rate:g}" for rate in unresolved)
        yield f"FAR {rates} is not promised, because the different pairs of the fitted classes cannot resolve it."
    if not fitted["open_set"]:
        yield "Training has seen these classes, so the calibration is too optimistic for new ones."
    if "file" in part:
        yield f"Stored in {part['file']}."
