"""Results of evaluations and inspections as pages, which notebooks display."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hypersphere._validation import require
from hypersphere.energy.inspect import Inspection
from hypersphere.evaluation import Calibration, Identification, OperatingPoint, Roc, RocPoints, Verification, roc
from hypersphere.report import _blocks, charts
from hypersphere.report.neurons import inspection_page, layer_tables
from hypersphere.report.page import Chart, Page, Section, SideBySide
from hypersphere.report.tables import Column, Table

__all__ = ["result_page"]

CALIBRATED_RATES = (0.1, 0.01, 0.001)  # false accept rates for which the page of a calibration shows thresholds
DEPTH = 50  # ranks of a drawn CMC curve
CURVE = 101  # points of a drawn calibration


def result_page(result: Any) -> Page:
    """Return the page of a result: of `verify`, `verify_blocks`, `roc`, `identify`, `Calibration.fit` or `inspect`.

    Charts need the extra `report`. Without it, the page has tables only.

    Example:
        >>> from hypersphere.evaluation import roc
        >>> result_page(roc([0.9, 0.8, 0.7, 0.3], [1, 0, 1, 0])).title
        'ROC curve'
    """
    kind = next((kind for kind in PAGES if isinstance(result, kind)), None)
    accepted = f"one of {', '.join(one.__name__ for one in PAGES)}"
    require(kind is not None, "result", accepted, type(result).__name__)
    assert kind is not None
    return PAGES[kind](result)


def _can_draw() -> bool:
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
    sections: list[Section] = [_metrics(rows), *([_blocks.roc_chart({"TAR": [curve]})] if _can_draw() else [])]
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
        sections.append(SideBySide("", [scores, _blocks.roc_chart({"TAR": [verified.roc]})]))
    same = int(verified.same.sum())
    lead = f"{same:,} same and {len(verified.same) - same:,} different pairs in {len(verified.accuracies)} folds."
    return Page("Verification", lead, sections)


def _identification_page(result: Identification) -> Page:
    ranks = [(str(rank), accuracy) for rank, accuracy in result.accuracy.items()]
    sections: list[Section] = [Table("", [Column("rank"), Column("identified", format=".2%")], ranks)]
    if _can_draw():
        sections.append(_blocks.cmc_chart({"identified": [result]}, DEPTH))
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
            places = torch.linspace(*ends, CURVE, dtype=torch.float64)
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
