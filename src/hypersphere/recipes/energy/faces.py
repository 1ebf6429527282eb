"""AM-Softmax with energy of the class vectors (appendix D.6 of the thesis)."""

from __future__ import annotations

from hypersphere.recipes.protocols import sgd, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Recipe, Row

__all__ = ["AM_SOFTMAX"]

_ENERGY = {"regularizers": [{"name": "mhe", "hidden": 0.0, "half_space": False, "output": 1.0}]}

AM_SOFTMAX = Recipe(
    name="energy-am-softmax",
    title="Face verification by AM-Softmax, with and without energy of the class vectors",
    reference="appendix D.6 of the thesis (in the text), SphereFace-20 trained on CASIA-WebFace",
    base={"head": {"name": "am_softmax", "s": 30.0, "m": 0.35}, "optimizer": sgd(0.1), "batch_size": 128},
    scales={
        "paper": {
            "data": {"name": "casia_webface", "validation": "lfw"},
            "model": "sphereface20",
            "normalize": "centered",
            "augment": [{"name": "mirror"}],
            "validation": {"every": 5},
            **stepwise(28_000, [16_000, 24_000]),
        },
        "cpu": {
            "data": {"name": "lfw", "split": "fold", "fold": 0, "at_least": 3, "size": [56, 48]},
            "model": {"name": "embedding_cnn", "widths": [32, 64, 128], "first_stride": 2, "feature_dim": 128},
            "normalize": "none",
            "augment": [{"name": "roll", "pixels": 2}],
            "validation": {"every": 10},
            "epochs": 10,
        },
        "smoke": {
            "data": {"name": "generated", "classes": 40, "per_class": 8, "open_set": True},
            "model": {"name": "embedding_cnn", "widths": [4, 4], "feature_dim": 8},
            "epochs": 1,
        },
    },
    rows=(
        Row("AM-Softmax", printed={"verification.accuracy": ("X-D.6", "AM-Softmax")}),
        Row("AM-Softmax + MHE", _ENERGY, {"verification.accuracy": ("X-D.6", "AM-Softmax + MHE")}),
    ),
    seeds=tuple(range(10)),
    metrics=(
        Metric("verification.accuracy", "verification %", ".2f", True),
        Metric("verification.eer", "EER %", ".2f", False),
    ),
    covers=("X-D.6",),
    cost={"paper": 1500, "cpu": 0.5, "smoke": 0.005},
    seeded=("seed", "data.fold"),
    baseline="AM-Softmax",
    claims=(Claim("Energy of the class vectors raises the accuracy of AM-Softmax.", "AM-Softmax + MHE"),),
    note="s = 30 and m = 0.35, the settings of the paper of AM-Softmax; they and the weight of the energy, 1 here, are "
    "not printed in the thesis, and the same settings are used for both rows. At the scale cpu: View 2 of LFW, trained "
    "on the people of nine folds and tested on the 600 pairs of the remaining fold; seed k leaves out fold k. The "
    "accuracy is that of ten-fold cross-validation within these pairs.",
)
