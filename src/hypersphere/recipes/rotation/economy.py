"""Rotations with fewer parameters: of random subsets of dimensions, and block-diagonal (OPT, tables 10, 11, 19, 20)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.architectures.imagenet import PROTOCOL
from hypersphere.recipes.protocols import ENERGY, ERROR, SECONDS, stepwise
from hypersphere.recipes.recipe import Claim, Grid, Place, Recipe, Row, Tuning
from hypersphere.recipes.rotation.settings import (
    BASELINE,
    CAYLEY,
    CNN_BASE,
    DESCENT,
    GRAM_SCHMIDT,
    HALF,
    HOUSEHOLDER,
    LARGE,
    LOWDIN,
    ON_CPU,
    PAPER,
    SCALES,
    STATED,
    TINY_CNN,
    TRAINABLE_PARAMETERS,
    Method,
    cnn_scales,
    count_trainable_parameters,
    method_row,
)
from hypersphere.training.config import merge

__all__ = ["BLOCKS", "STOCHASTIC"]

_METRICS = (ERROR, TRAINABLE_PARAMETERS, ENERGY, SECONDS)
_PLAIN_RATES: Grid = {"optimizer.lr": (0.1, 0.03)}
_ROTATION_RATES: Grid = {"optimizer.rotation_lr": (0.3, 1.0)}

# --- S-OPT (tables 10 and 11 of the OPT paper)


def _stochastic(fraction: float | int) -> dict[str, Any]:
    return {"rotation": {"name": "stochastic", "fraction": fraction, "method": "gram_schmidt"}}


# 300 draws with 750 steps each on CIFAR-100, 700 with 1,000 on ImageNet. The rate is divided at the same fractions of
# training as for the other rows.
_LONG = stepwise(225_000, [90_000, 150_000, 192_000])
_DRAWN = {"cpu": {"rotation": {"every": 40}}, "smoke": {"rotation": {"every": 1}}}
_IMAGENET = {
    "data": PROTOCOL["data"],
    "augment": PROTOCOL["augment"],
    "normalize": "auto",
    **stepwise(700_000, [280_000, 467_000, 597_000]),
}
_NETWORKS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "CNN-6": ({"model": {"name": "opt_cnn6", "norm": "batch"}}, {}),
    "Wide CNN-9": (
        {"model": {"name": "wide_cnn9", "norm": "batch"}},
        {"cpu": {"model": {"widths": [12, 24, 48], "feature_dim": 48}}, "smoke": {"model": TINY_CNN}},
    ),
    "ResNet-18": ({"model": {"name": "resnet18"}}, {"paper": _IMAGENET}),
}
_LINES: dict[str, Method] = {
    "Baseline": BASELINE,
    "HS-MHE": HALF,
    "OPT (GS)": GRAM_SCHMIDT,
    "S-OPT (GS)": Method(_stochastic(0.25), paper={"optimizer": {"rotation_decay": 5e-4}}),
}


def _line_rows() -> list[Row]:
    rows = []
    for column, (network, at) in _NETWORKS.items():
        for name, method in _LINES.items():
            by_scale = at
            if name == "S-OPT (GS)":
                inner = {"rotation": {"every": 1000}} if column == "ResNet-18" else _LONG
                by_scale = merge(at, {"paper": inner}, _DRAWN)
            scales: tuple[str, ...] = PAPER
            if column == "CNN-6" and name != "HS-MHE":
                scales = SCALES if name == "S-OPT (GS)" else LARGE
            if (column, name) in (("Wide CNN-9", "Baseline"), ("Wide CNN-9", "S-OPT (GS)")):
                scales = LARGE
            if column == "ResNet-18":
                # The network is for large images; the other columns stand for it on a CPU.
                by_scale = merge(by_scale, {"cpu": {"model": {"widths": [8, 16, 16, 32], "large_stem": False}}})
                by_scale = merge(by_scale, {"smoke": {"model": {"widths": [4, 4, 4, 4], "large_stem": False}}})
            rows.append(
                method_row(
                    f"{name}, {column}",
                    method,
                    {"error": ("O-T10", name, f"{column} error")},
                    patch=network,
                    at=by_scale,
                    baseline=None if name == "Baseline" else f"Baseline, {column}",
                    grid=_ROTATION_RATES if "OPT" in name else _PLAIN_RATES,
                    scales=scales,
                )
            )
    return rows


_SUBSETS: dict[str, dict[str, Any]] = {
    "p = d": dict(GRAM_SCHMIDT.patch),
    "p = d/8": _stochastic(1 / 8),
    "p = d/16": _stochastic(1 / 16),
    "p = 16": _stochastic(16),
    "p = 3": _stochastic(3),
    "p = 0": _stochastic(0),
}


def _subset_rows() -> list[Row]:
    network, at = _NETWORKS["Wide CNN-9"]
    rows = []
    for name, patch in _SUBSETS.items():
        by_scale = merge(at, {"paper": _LONG}) if name == "p = d" else merge(at, {"paper": _LONG}, _DRAWN)
        decay = {} if name == "p = 0" else {"optimizer": {"rotation_decay": 5e-4}}
        method = GRAM_SCHMIDT if name == "p = d" else Method(patch, paper=decay)
        rows.append(
            method_row(
                name,
                method,
                {"error": ("O-T11", name, "Error (%)")},
                patch=network,
                at=by_scale,
                baseline="S-OPT (GS), Wide CNN-9",
                grid=_PLAIN_RATES if name == "p = 0" else _ROTATION_RATES,
                scales=SCALES if name == "p = 0" else LARGE if name in ("p = d/16", "p = 3") else PAPER,
            )
        )
    return rows


STOCHASTIC = Recipe(
    name="opt-stochastic",
    title="Rotations of random subsets of the dimensions (S-OPT)",
    reference="tables 10 and 11 of the OPT paper",
    base=CNN_BASE,
    scales=cnn_scales(),
    rows=(*_line_rows(), *_subset_rows()),
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    covers=("O-T10", "O-T11"),
    cost={"paper": 100_000, "cpu": 1.0, "smoke": 0.01},
    measure=count_trainable_parameters,
    figures=("error", "energy"),
    tuning=Tuning({}, held_out=0.2),
    claims=(
        Claim("S-OPT has a lower error than plain training.", "S-OPT (GS), CNN-6"),
        Claim("OPT has a lower error than S-OPT.", "OPT (GS), CNN-6", "S-OPT (GS), CNN-6"),
        Claim("In a wide network, S-OPT has a lower error than plain training.", "S-OPT (GS), Wide CNN-9"),
        Claim(
            "A quarter of the dimensions is better than a sixteenth.",
            "S-OPT (GS), Wide CNN-9",
            "p = d/16",
            source="O-T11",
        ),
        Claim("A sixteenth of the dimensions is better than three.", "p = d/16", "p = 3", source="O-T11"),
        Claim("Three dimensions are better than fixed random neurons.", "p = 3", "p = 0", source="O-T11"),
    ),
    note=f"{ON_CPU} The wide CNN-9 has 12, 24 and 48 filters there. Each row has two trials on a fifth of the training "
    "images: two learning rates of the rotation, or of all parameters if there is none. Dimensions are redrawn every "
    f"40 steps. {STATED} S-OPT draws a quarter of the dimensions in every outer iteration, 300 times with 750 steps "
    "each (700 times with 1,000 steps on ImageNet), as in the text and in the released code; algorithm 1 as printed "
    "would keep only the last step. The first layer is rotated as a whole. The learning rate is divided by ten after "
    "40, 67 and 85 % of training (the source: when saturated). The row p = d/4 of table 11 is "
    "S-OPT (GS), Wide CNN-9. OPT ran out of memory in the source for the two large networks. ImageNet: images resized "
    "to 256×256, random windows of 224×224 pixels, top-1 error.",
)

# --- PE-OPT (tables F.4 and F.5 of the thesis)

_BLOCK_METHODS: dict[str, Method] = {"CP": CAYLEY, "GS": GRAM_SCHMIDT, "HR": HOUSEHOLDER, "LS": LOWDIN, "OGD": DESCENT}
_ONE = "c3/k = 64 (k = 1, original OPT)"
_BLOCK_LINES = {k: f"c3/k = {64 // k} (k = {k})" for k in (2, 4, 8, 16, 32, 64)}
_ON_CPU = {("GS", 1, False), ("GS", 2, False), ("GS", 4, False), ("GS", 8, False), ("GS", 2, True), ("GS", 8, True)}
_ON_DIGITS = {("GS", 2, True), ("OGD", 4, False)}


def _block_row(method_name: str, k: int, shared: bool) -> Row:
    method = _BLOCK_METHODS[method_name]
    table = "T-F.4" if shared else "T-F.5"
    title = f"PE-OPT ({method_name}), k = {k}" if k > 1 else f"OPT ({method_name})"
    layout = {"blocks": k, "shared": shared, "whole_first": True} if k > 1 else {}
    place: Place = (table, _BLOCK_LINES.get(k, _ONE), f"PE-OPT ({method_name})")
    scales = ["paper"]
    scales += ["cpu"] * ((method_name, k, shared) in _ON_CPU) + ["smoke"] * ((method_name, k, shared) in _ON_DIGITS)
    return method_row(
        f"{title}, shared" if shared else title,
        method,
        {"error": place},
        patch={"rotation": {**method.patch["rotation"], **layout}},
        grid={"optimizer.rotation_lr": (0.03, 0.1)} if method_name == "OGD" else _ROTATION_RATES,
        scales=tuple(scales),
    )


BLOCKS = Recipe(
    name="opt-blocks",
    title="Block-diagonal rotations, with separate and with shared blocks (PE-OPT)",
    reference="tables F.4 and F.5 of the thesis, tables 19 and 20 of the OPT paper",
    base=CNN_BASE,
    scales=cnn_scales(),
    rows=(
        method_row("Baseline", BASELINE, {"error": ("T-F.5", "Baseline", "PE-OPT (CP)")}, grid=_PLAIN_RATES),
        Row(
            "Baseline with fixed random neurons",
            {"rotation": {"name": "stochastic", "fraction": 0}},
            {"error": ("T-F.5", "Baseline with fixed random neurons", "PE-OPT (CP)")},
            grid=_PLAIN_RATES,
            scales=LARGE,
        ),
        *(_block_row(name, 1, False) for name in _BLOCK_METHODS),
        *(_block_row(name, k, shared) for shared in (False, True) for k in _BLOCK_LINES for name in _BLOCK_METHODS),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    covers=("T-F.4", "T-F.5"),
    cost={"paper": 16_000, "cpu": 0.8, "smoke": 0.01},
    measure=count_trainable_parameters,
    baseline="Baseline",
    tuning=Tuning({}, held_out=0.2),
    claims=(
        *(
            Claim(
                f"With {k} separate blocks, rotation is better than plain training.",
                f"PE-OPT (GS), k = {k}",
                source="T-F.5",
            )
            for k in (2, 4)
        ),
        Claim("Two separate blocks are better than eight.", "PE-OPT (GS), k = 2", "PE-OPT (GS), k = 8", source="T-F.5"),
        Claim(
            "Eight separate blocks are better than eight shared ones.",
            "PE-OPT (GS), k = 8",
            "PE-OPT (GS), k = 8, shared",
        ),
        Claim("Plain training is better than eight shared blocks.", "Baseline", "PE-OPT (GS), k = 8, shared"),
        Claim(
            "Eight shared blocks are better than fixed random neurons.",
            "PE-OPT (GS), k = 8, shared",
            "Baseline with fixed random neurons",
        ),
    ),
    note=f"{ON_CPU} Each row has two trials on a fifth of the training images: two learning rates of the rotation, or "
    f"of all parameters if there is none. {STATED} Channels are divided into k blocks; the first layer, with three "
    "channels, is rotated as a whole, and the inputs of the fully connected layer are divided too (neither is "
    "stated). Trainable parameters are those of the whole network, with d(d−1)/2 for a block; the source prints "
    "those of one layer, with d². The rows without blocks, k = 1, and the baselines are the same in both tables.",
)
