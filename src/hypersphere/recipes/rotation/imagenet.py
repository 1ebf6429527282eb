"""A plain network of ten layers on ImageNet, trained by rotation (table 7 of the OPT paper)."""

from __future__ import annotations

from dataclasses import replace

from hypersphere.recipes.architectures.imagenet import PROTOCOL, measure_top5
from hypersphere.recipes.energy.settings import BASELINE, HALF, ORTHOGONAL, SMALL, TUNING
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Recipe, table_rows
from hypersphere.recipes.rotation.settings import CAYLEY, DESCENT, TUNED

__all__ = ["IMAGENET"]

_METHODS = {"Baseline": BASELINE, "Orthogonal": ORTHOGONAL, "HS-MHE": HALF, "OPT (OGD)": DESCENT, "OPT (CP)": CAYLEY}

IMAGENET = Recipe(
    name="opt-imagenet",
    title="CNN-10 on ImageNet, trained by rotation",
    reference="table 7 of the OPT paper (table 7.9 of the thesis)",
    base={**CIFAR["base"], "model": {"name": "cnn10"}},
    scales={
        "paper": {
            **{key: PROTOCOL[key] for key in ("data", "augment")},
            "model": {"image_size": 224},  # of the windows; images have 256
            "init": "he",
            "optimizer": {"weight_decay": 5e-4, "decay_everything": True},
            **stepwise(700_000, [280_000, 467_000, 597_000]),
        },
        "cpu": {
            **SMALL,
            "data": {"name": "cifar10", "limit": 10_000},
            "model": {"widths": [16, 24, 32], "feature_dim": 64},
        },
        "smoke": {**SMOKE, "model": {"name": "opt_cnn6", "widths": [4, 4, 4], "feature_dim": 8}},
    },
    rows=tuple(
        replace(row, printed={"error": ("O-T7", row.name, "Top-1"), "top5_error": ("O-T7", row.name, "Top-5")})
        for row in table_rows("O-T7", _METHODS)
    ),
    default_rows={"cpu": ["Baseline", "HS-MHE", "OPT (OGD)", "OPT (CP)"], "smoke": ["Baseline", "OPT (CP)"]},
    seeds=(0, 1, 2),
    metrics=(ERROR, Metric("top5_error", "top-5 error %", ".2f", False), ENERGY, SECONDS),
    covers=("O-T7",),
    cost={"paper": 60_000, "cpu": 0.5, "smoke": 0.01},
    measure=measure_top5,
    figures=("error", "top5_error"),
    baseline="Baseline",
    tuning=TUNING,
    claims=tuple(Claim(f"{name} improves CNN-10.", name) for name in ("OPT (CP)", "OPT (OGD)")),
    note="At the scale paper: 700,000 steps of 128 images at the rate 0.1, divided by ten after 40, 67 and 85 % of "
    "them (the source: when saturated), weight decay 5e-4 on everything; images resized to 256×256, random windows of "
    "224×224 pixels, mirrored, and the central window for validation (appendix B.2 of the thesis, which the paper "
    "refers to); free parameters from N(0, 1), OGD from the identity at the rate 0.02. The weights of the regularisers "
    "are not printed; those of chapters 5 and 6 are used. At the scale cpu, as a weak stand-in: the same architecture, "
    f"with its 7×7 stem, on 10,000 images of CIFAR-10 at 32×32 pixels. {TUNED}",
)
