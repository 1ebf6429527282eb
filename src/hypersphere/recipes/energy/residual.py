"""Energy in residual networks on CIFAR and ImageNet (tables 5.5, 5.6, 6.6 and 6.7, figure 6.3 of the thesis)."""

from __future__ import annotations

from torch import Tensor, nn

from hypersphere.recipes.architectures.imagenet import PROTOCOL
from hypersphere.recipes.energy import settings
from hypersphere.recipes.energy.settings import BASELINE, FIFTH, SMALL, TUNED, energy_recipe
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Claim, Method, Metric, Outcome, Recipe, cells, table_rows
from hypersphere.training import Experiment, Run

__all__ = ["IMAGENET", "RESNET", "colour_share", "first_filters"]

_METHODS: dict[str, Method] = {
    "Baseline": BASELINE,
    "Orthogonal": settings.ORTHOGONAL,
    "SRIP": settings.SRIP,
    "MHE": settings.FULL,
    "HS-MHE": settings.HALF,
    "RP-CoMHE": settings.RANDOM,
    "AP-CoMHE": settings.UNROLLED,
}
_CITED = {"Orthogonal": "Orthogonal [27]", "SRIP": "SRIP [29]", "MHE": "MHE [31]", "HS-MHE": "HS-MHE [31]"}

RESNET = energy_recipe(
    name="energy-resnet",
    title="ResNet-32 with energy",
    reference="tables 5.5 and 6.6 of the thesis, on CIFAR-10 and CIFAR-100",
    scales={
        "paper": {**CIFAR["paper"], "model": "mhe_resnet32"},
        "cpu": {**SMALL, "model": {"name": "mhe_resnet32", "depths": [2, 2, 2], "widths": [12, 24, 48]}},
        "smoke": {**SMOKE, "model": {"name": "mhe_resnet32", "depths": [1, 1, 1], "widths": [4, 4, 4]}},
    },
    rows=table_rows(
        "T6.6",
        _METHODS,
        {"CIFAR-10": {}, "CIFAR-100": {}},
        baseline="Baseline",
        at={"CIFAR-10": {"paper": {"data": "cifar10"}}, "CIFAR-100": {"paper": {"data": "cifar100"}, "cpu": FIFTH}},
        in_source=_CITED,
    ),
    default_rows={
        "cpu": cells(["Baseline", "HS-MHE", "RP-CoMHE"], ["CIFAR-10"]),
        "smoke": cells(["Baseline", "RP-CoMHE"], ["CIFAR-10"]),
    },
    covers=("T6.6", "T5.5"),
    cost={"paper": 60_000, "cpu": 0.8, "smoke": 0.01},
    claims=(
        Claim("Half-space MHE improves a residual network.", "HS-MHE, CIFAR-10", source="T5.5"),
        Claim("CoMHE improves a residual network.", "RP-CoMHE, CIFAR-10"),
    ),
    note="At the scale paper: ResNet-32 with 64, 128 and 256 filters (table D.2; four times the usual width), the "
    "schedule of appendix D.1, shortcuts that pad with zeros (not stated). At the scale cpu: a residual network of 14 "
    f"layers on a fifth of CIFAR-10 at 16×16 pixels. {TUNED} The rows ResNet-110 and ResNet-1001 are quoted from other "
    "papers in the source and do not run.",
)


# --- ImageNet


def colour_share(filters: Tensor) -> float:
    """Return the share of the squared norm of filters (N, C, H, W) that differs between channels; 0 for grey filters.

    >>> import torch
    >>> colour_share(torch.ones(2, 3, 4, 4))
    0.0
    """
    grey = filters.mean(1, keepdim=True)
    return float((filters - grey).square().sum() / filters.square().sum())


def first_filters(experiment: Experiment, run: Run) -> Outcome:
    """Store the filters of the first convolution, and measure how coloured they are."""
    layer = next(module for module in experiment.network.modules() if isinstance(module, nn.Conv2d))
    filters = layer.weight.detach().cpu()
    return Outcome({"colour": 100 * colour_share(filters)}, tensors={"filters": filters})


# The rows of the figure, which are the only ones at the smaller scales.
_PICTURED = cells(["Baseline", "RP-CoMHE"], ["Res-18"])

IMAGENET = Recipe(
    name="energy-imagenet",
    title="ResNet-18, 34 and 50 with energy on ImageNet, and the filters of the first layer",
    reference="tables 5.6 and 6.7 and figure 6.3 of the thesis",
    base=CIFAR["base"],
    scales={
        "paper": {
            "data": PROTOCOL["data"],
            "augment": PROTOCOL["augment"],
            "optimizer": {"weight_decay": 1e-4},
            "batch_size": 64,
            "validation": {"every": 5},
            **stepwise(500_000, [150_000, 300_000, 400_000]),
        },
        "cpu": {
            **SMALL,
            "channels_last": False,
            "validation": {"every": 1},
            "data": {"name": "cifar10", "limit": 10_000},
            "model": {"name": "resnet18", "depths": [1, 1, 1, 1], "widths": [16, 16, 32, 32]},
        },
        "smoke": {**SMOKE, "model": {"name": "resnet18", "depths": [1, 1], "widths": [4, 4], "large_stem": False}},
    },
    rows=table_rows(
        "T6.7",
        {
            line: _METHODS.get(line, settings.ORTHONORMAL).patch
            for line in ("Baseline", "Orthogonal", "Orthonormal", "SRIP", "MHE", "HS-MHE", "RP-CoMHE", "AP-CoMHE")
        },
        {f"Res-{depth}": {} for depth in (18, 34, 50)},
        baseline="Baseline",
        at={f"Res-{depth}": {"paper": {"model": f"resnet{depth}"}} for depth in (18, 34, 50)},
        in_source={**_CITED, "Baseline": "baseline", "Orthonormal": "Orthnormal [12]"},
    ),
    default_rows={"cpu": _PICTURED, "smoke": _PICTURED},
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, Metric("colour", "colour of filters %", ".1f", False), SECONDS),
    covers=("T6.7", "T5.6", "F6.3"),
    cost={"paper": 2_000_000, "cpu": 0.1, "smoke": 0.01},
    measure=first_filters,
    claims=(
        Claim("CoMHE improves a residual network.", "RP-CoMHE, Res-18"),
        Claim("Filters are less coloured with CoMHE.", "RP-CoMHE, Res-18", metric="colour", source="F6.3"),
    ),
    note="At the scale paper: images resized to 256×256 pixels, random windows of 224×224 pixels and mirroring, the "
    "central window for validation, top-1 error (appendix B.2, which the source refers to); the schedule of table 5.6. "
    "Table 6.7 contains table 5.6. At the scale cpu, as a stand-in for the picture of the filters: a residual network "
    "of ten layers with the 7×7 stem on a fifth of CIFAR-10 at 32×32 pixels. Colour is the share of the energy of the "
    "filters of the first layer that differs between channels. The source does not say which network and which CoMHE "
    "its figure shows. No setting is tuned.",
)
