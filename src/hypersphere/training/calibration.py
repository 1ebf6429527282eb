"""The calibration of a run: what a cosine of two of its embeddings means, stored as JSON in the folder of the run.

It is fitted on half of the held-out classes. The other half measures it, now and in later evaluations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from hypersphere._files import MARK, replacing
from hypersphere._validation import require
from hypersphere.data.pairs import sample_pairs
from hypersphere.evaluation import (
    FARS,
    AllPairs,
    Calibration,
    actual_dcf,
    cllr,
    min_cllr,
    min_dcf,
    pair_scores,
    verify_blocks,
)
from hypersphere.training.checkpoint import DamagedCheckpoint

__all__ = ["RunCalibration"]

FILE = "calibration.json"
FORMAT = "hypersphere run calibration 1"
MAX_FITTED_PAIRS = 20_000  # of each kind, same and different; they are also stored
MAX_TESTED_PAIRS = 200_000  # of each kind, for the costs
DCF_PRIOR = 0.01  # prior probability of a same pair in the detection costs


@dataclass(frozen=True, eq=False)
class RunCalibration:
    """A calibration of the cosines between embeddings of a run.

    Attributes:
        calibration: maps cosines to log-likelihood ratios and probabilities.
        thresholds: threshold by false accept rate, from all pairs of the fitted classes.
        classes: names of the classes it was fitted on. Test the calibration on other classes.
        open_set: False if the network was trained on these classes; the calibration is then too optimistic for others.
        step: the checkpoint that computed the embeddings.
        fingerprint: identifies its weights, see `hypersphere.gallery.fingerprint_of`.

    Example:
        >>> x, y = torch.randn(40, 8) + 2 * torch.eye(8).repeat_interleave(5, 0), torch.arange(8).repeat_interleave(5)
        >>> fitted = RunCalibration.fit(x, y, "abcdefgh", far=[0.1], step=3, fingerprint="1f", open_set=True)
        >>> fitted
        RunCalibration(4 classes, 40 same and 150 different pairs, step 3)
        >>> measured = fitted.measure(x, y, "abcdefgh")
        >>> measured["classes"], measured["min_cllr"] <= measured["cllr"]
        (4, True)
    """

    calibration: Calibration
    thresholds: dict[float, float]
    classes: tuple[str, ...]
    open_set: bool
    step: int
    fingerprint: str

    @classmethod
    def fit(
        cls,
        features: Float[Tensor, "samples dim"],
        labels: Int64[Tensor, " samples"],
        classes: Sequence[str],
        *,
        step: int,
        fingerprint: str,
        open_set: bool,
        far: Sequence[float] = FARS,
        prior: float = 0.5,
        method: str = "logistic",
        seed: int = 0,
    ) -> RunCalibration:
        """Fit a calibration to the pairs of a random half of the classes.

        If there are more than 20,000 same or different pairs, a sample is fitted. Thresholds use all pairs.

        Args:
            features: embeddings.
            labels: positions in `classes`.
            classes: names of the classes.
            step, fingerprint, open_set: see the attributes.
            far: false accept rates of the thresholds; those that the pairs cannot resolve are left out.
            prior: the fraction of same pairs that is assumed for probabilities.
            method: "logistic" or "isotonic", see `Calibration.fit`.
            seed: seed for the choice of classes and pairs.

        Raises:
            ValueError: if there are fewer than four classes, or fewer than two with two samples.
        """
        generator = torch.Generator().manual_seed(seed)
        counts = labels.bincount(minlength=len(classes))
        paired, single = ((counts > 1).nonzero().flatten(), (counts == 1).nonzero().flatten())
        if len(paired) < 2 or len(paired) + len(single) < 4:
            accepted = "at least four classes, two of them with two samples"
            classes_given = f"{len(paired) + len(single)} classes, {len(paired)} of them with two samples"
            raise ValueError(f"held-out samples must be of {accepted}, not of {classes_given}")
        # Half of the classes with pairs, rounded up, and half of the others, rounded down. Each half then has at least
        # two classes, at least one of them with pairs.
        paired = paired[torch.randperm(len(paired), generator=generator)]
        single = single[torch.randperm(len(single), generator=generator)]
        chosen = torch.cat([paired[: (len(paired) + 1) // 2], single[: len(single) // 2]]).sort().values
        is_chosen = torch.isin(labels, chosen)
        x, y = features[is_chosen], labels[is_chosen]
        first, second = sample_pairs(y, MAX_FITTED_PAIRS, generator)
        pair_classes = y[first], y[second]
        same = pair_classes[0] == pair_classes[1]
        scores = pair_scores(x, first, second)
        fitted = Calibration.fit(scores, same, method=method, prior=prior, groups=pair_classes)
        points = verify_blocks(AllPairs(x, y), far).points
        thresholds = {
            point.requested_rate: point.threshold
            for point in points
            if point.resolved and math.isfinite(point.threshold)
        }
        names = tuple(classes[index] for index in chosen.tolist())
        return cls(fitted, thresholds, names, open_set, step, fingerprint)

    def is_unfitted(self, labels: Int64[Tensor, " samples"], classes: Sequence[str]) -> Bool[Tensor, " samples"]:
        """Return True for each sample of a class that the calibration was not fitted on."""
        fitted = set(self.classes)
        return torch.tensor([name not in fitted for name in classes])[labels]

    def measure(
        self, features: Float[Tensor, "samples dim"], labels: Int64[Tensor, " samples"], classes: Sequence[str]
    ) -> dict[str, Any]:
        """Measure the calibration on the pairs of all classes that it was not fitted on.

        Costs are in bits (`cllr`) or relative to the better of accepting and rejecting all pairs (DCF, for a prior of
        0.01 and equal costs). They are computed from at most 200,000 pairs of each kind. `far` compares the rate that
        a threshold promises with the rate that it has for all pairs.

        Raises:
            ValueError: if there are no same or no different pairs of other classes.
        """
        is_unfitted = self.is_unfitted(labels, classes)
        x, y = features[is_unfitted], labels[is_unfitted]
        sizes = y.unique(return_counts=True)[1]
        can_measure = len(sizes) > 1 and int(sizes.max()) > 1
        accepted = "of two classes that the calibration was not fitted on, one of them with two samples"
        require(can_measure, "samples", accepted, f"of {len(sizes)}")
        first, second = sample_pairs(y, MAX_TESTED_PAIRS, torch.Generator().manual_seed(0))
        same = y[first] == y[second]
        llrs = self.calibration.llr(pair_scores(x, first, second))
        cost, lowest = cllr(llrs, same), min_cllr(llrs, same)
        rates, (n_same, n_different) = _rates_at(AllPairs(x, y), list(self.thresholds.values()))
        promised = zip(self.thresholds.items(), rates, strict=True)
        return {
            "cllr": cost,
            "min_cllr": lowest,
            "calibration_loss": cost - lowest,
            "min_dcf": min_dcf(llrs, same, DCF_PRIOR),
            "actual_dcf": actual_dcf(llrs, same, DCF_PRIOR),
            "dcf_prior": DCF_PRIOR,
            "far": [
                {"promised": rate, "measured": far, "tar": tar, **self._threshold(threshold)}
                for (rate, threshold), (far, tar) in promised
            ],
            "same": n_same,
            "different": n_different,
            "classes": len(sizes),
        }

    def _threshold(self, threshold: float) -> dict[str, float]:
        """Return a threshold and the probability of a same pair at this cosine."""
        return {"threshold": threshold, "probability": float(self.calibration.probability(threshold))}

    def description(self) -> dict[str, Any]:
        """Return the parameters and thresholds of the calibration, without the pairs, as plain data."""
        stored = self.calibration.to_dict()
        return {
            "method": stored["method"],
            "prior": stored["prior"],
            "map": stored["map"],
            "thresholds": [{"far": far, **self._threshold(threshold)} for far, threshold in self.thresholds.items()],
            "fitted_classes": len(self.classes),
            "open_set": self.open_set,
            "step": self.step,
        }

    def save(self, folder: str | Path) -> Path:
        """Write `calibration.json` into the folder of a run, and return its path."""
        content = {
            "note": MARK,
            "format": FORMAT,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "open_set": self.open_set,
            "classes": self.classes,
            "thresholds": [[far, threshold] for far, threshold in self.thresholds.items()],
            "calibration": self.calibration.to_dict(),
        }
        path = Path(folder) / FILE
        with replacing(path) as draft:
            draft.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> RunCalibration | None:
        """Return the calibration of a run, or None if it has none.

        Raises:
            DamagedCheckpoint: if the file cannot be read.
        """
        path = Path(folder) / FILE
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            require(stored["format"] == FORMAT, "format", FORMAT, stored["format"])
            thresholds = {float(far): float(threshold) for far, threshold in stored["thresholds"]}
            classes = tuple(map(str, stored["classes"]))
            step, fingerprint, open_set = int(stored["step"]), str(stored["fingerprint"]), bool(stored["open_set"])
            return cls(Calibration.from_dict(stored["calibration"]), thresholds, classes, open_set, step, fingerprint)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from None

    def __repr__(self) -> str:
        same, pairs = int(self.calibration.same.sum()), len(self.calibration.same)
        return (
            f"RunCalibration({len(self.classes)} classes, {same} same and {pairs - same} different pairs, "
            f"step {self.step})"
        )


def _rates_at(pairs: AllPairs, thresholds: Sequence[float]) -> tuple[list[tuple[float, float]], tuple[int, int]]:
    """Return the false and the true accept rate at each threshold, and the numbers of same and of different pairs."""
    # Float32 scores are compared in float32, like the scores from which the thresholds were chosen.
    accepted = torch.zeros(len(thresholds), 2, dtype=torch.int64)
    totals = torch.zeros(2, dtype=torch.int64)
    for scores, same in pairs:
        totals += torch.stack([(~same).sum(), same.sum()]).cpu()
        for index, threshold in enumerate(thresholds):
            above = scores >= threshold
            accepted[index] += torch.stack([(above & ~same).sum(), (above & same).sum()]).cpu()
    rates = (accepted / totals).tolist()
    different, same_total = totals.tolist()
    return [(far, tar) for far, tar in rates], (same_total, different)
