"""The calibration of a run in `hypersphere evaluate`: fitted on request, and measured on other classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hypersphere._validation import require
from hypersphere.cli.opening import Opened
from hypersphere.training import RunCalibration

__all__ = ["CalibrationFit", "measure_calibration"]


@dataclass(frozen=True)
class CalibrationFit:
    """How to fit a calibration, see `RunCalibration.fit`."""

    far: Sequence[float]
    prior: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < self.prior < 1, "--prior", "a probability in (0, 1)", self.prior)


def measure_calibration(
    opened: Opened, features: Tensor, labels: Tensor, *, fit: CalibrationFit | None, plain: bool
) -> dict[str, Any]:
    """Fit and store a calibration, or read the stored one, and measure it on the other classes.

    Args:
        opened: the run.
        features, labels: embeddings of the held-out data.
        fit: how to fit it; None to read the stored one.
        plain: False if embeddings are compared in another way than the calibration assumes.

    Returns:
        The key "calibration" with its measurements, or nothing if the run has no calibration.
    """
    classes = opened.held_out.classes
    if fit is None:
        fitted = opened.run.calibration()
        if fitted is None:
            return {}
        left_out = opened.refusal(fitted) or ("" if plain else "it is one of plain cosines")
        if left_out:
            return {"calibration": {"left_out": left_out}}
        return {"calibration": {**fitted.measure(features, labels, classes), "fitted": fitted.description()}}
    fitted = RunCalibration.fit(
        features,
        labels,
        classes,
        step=opened.step,
        fingerprint=opened.fingerprint,
        open_set=opened.experiment.data.open_set,
        far=fit.far,
        prior=fit.prior,
        seed=fit.seed,
    )
    measured = {**fitted.measure(features, labels, classes), "fitted": fitted.description()}
    return {"calibration": {**measured, "file": str(fitted.save(opened.run.folder))}}
