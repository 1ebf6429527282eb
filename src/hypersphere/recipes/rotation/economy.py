"""Rotations with fewer parameters: in random subsets of dimensions, and block-diagonal (OPT, tables 10, 11, 19, 20)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypersphere.recipes.architectures.imagenet import PROTOCOL
from hypersphere.recipes.energy.settings import BASELINE, HALF
from hypersphere.recipes.protocols import ENERGY, ERROR, SECONDS, stepwise
from hypersphere.recipes.recipe import Claim, Grid, Method, Patch, Row, cells, table_rows
from hypersphere.recipes.rotation import settings
from hypersphere.recipes.rotation.settings import GRAM_SCHMIDT, ON_CPU, STATED, TINY_CNN, rotation_recipe
from hypersphere.training.config import merge

__all__ = ["BLOCKS", "STOCHASTIC"]

_METRICS = (ERROR, settings.TRAINABLE_PARAMETERS, ENERGY, SECONDS)
_PLAIN_RATES: Grid = {"optimizer.lr": (0.1, 0.03)}
_ROTATION_RATES: Grid = {"optimizer.rotation_lr": (0.3, 1.0)}

# --- S-OPT (tables 10 and 11 of the OPT paper)


def _stochastic(fraction: float | int) -> dict[str, Any]:
    return {"rotation": {"name": "stochastic", "fraction": fraction, "method": "gram_schmidt"}}


_DECAY = {"optimizer": {"rotation_decay": 5e-4}}
_LINES = {
    "Baseline": replace(BASELINE, grid=_PLAIN_RATES),
    "HS-MHE": replace(HALF, grid=_PLAIN_RATES),
    "OPT (GS)": replace(GRAM_SCHMIDT, grid=_ROTATION_RATES),
}
_DRAWN = {"S-OPT (GS)": Method(_stochastic(0.25), _ROTATION_RATES, _DECAY)}
# Neurons are rotated in all dimensions, in a subset that is redrawn during training, or in none.
_SUBSETS = {
    "p = d": _LINES["OPT (GS)"],
    "p = d/8": Method(_stochastic(1 / 8), _ROTATION_RATES, _DECAY),
    "p = d/16": Method(_stochastic(1 / 16), _ROTATION_RATES, _DECAY),
    "p = 16": Method(_stochastic(16), _ROTATION_RATES, _DECAY),
    "p = 3": Method(_stochastic(3), _ROTATION_RATES, _DECAY),
    "p = 0": Method(_stochastic(0), _PLAIN_RATES),
}
_NETWORKS: dict[str, Patch] = {
    "CNN-6": {"model": {"name": "opt_cnn6", "norm": "batch"}},
    "Wide CNN-9": {"model": {"name": "wide_cnn9", "norm": "batch"}},
    "ResNet-18": {"model": {"name": "resnet18"}},
}
_IMAGENET = {
    "data": PROTOCOL["data"],
    "augment": PROTOCOL["augment"],
    "normalize": "auto",
    **stepwise(700_000, [280_000, 467_000, 597_000]),
}
_AT: dict[str, dict[str, Patch]] = {
    "CNN-6": {},
    "Wide CNN-9": {"cpu": {"model": {"widths": [12, 24, 48], "feature_dim": 48}}, "smoke": {"model": TINY_CNN}},
    # This network is for large images; at the cpu scale, only the other columns run by default.
    "ResNet-18": {
        "paper": _IMAGENET,
        "cpu": {"model": {"widths": [8, 16, 16, 32], "large_stem": False}},
        "smoke": {"model": {"widths": [4, 4, 4, 4], "large_stem": False}},
    },
}
# 300 draws with 750 steps each on CIFAR-100, 700 with 1,000 on ImageNet. The rate is divided at the same fractions of
# training as for the other rows.
_LONG = {"paper": stepwise(225_000, [90_000, 150_000, 192_000])}
_EVERY = {"cpu": {"rotation": {"every": 40}}, "smoke": {"rotation": {"every": 1}}}
_DRAWN_AT = {
    "CNN-6": {**_LONG, **_EVERY},
    "Wide CNN-9": merge(_AT["Wide CNN-9"], _LONG, _EVERY),
    "ResNet-18": merge(_AT["ResNet-18"], {"paper": {"rotation": {"every": 1000}}}, _EVERY),
}


def _line_rows(column: str) -> tuple[Row, ...]:
    columns, in_source = {column: _NETWORKS[column]}, {column: f"{column} error"}
    plain = table_rows("O-T10", _LINES, columns, baseline="Baseline", at=_AT, in_source=in_source)
    return (*plain, *table_rows("O-T10", _DRAWN, columns, baseline="Baseline", at=_DRAWN_AT, in_source=in_source))


def _subset_row(name: str, method: Method) -> Row:
    at = merge(_AT["Wide CNN-9"], _LONG) if name == "p = d" else _DRAWN_AT["Wide CNN-9"]
    paper = {"paper": merge(at["paper"], method.paper)}
    patch, printed = merge(_NETWORKS["Wide CNN-9"], method.patch), {"error": ("O-T11", name, "Error (%)")}
    return Row(name, patch, printed, {**at, **paper}, method.grid, "S-OPT (GS), Wide CNN-9")


STOCHASTIC = rotation_recipe(
    name="opt-stochastic",
    title="Rotations of random subsets of the dimensions (S-OPT)",
    reference="tables 10 and 11 of the OPT paper",
    rows=(
        *(row for column in _NETWORKS for row in _line_rows(column)),
        *(_subset_row(name, method) for name, method in _SUBSETS.items()),
    ),
    default_rows={
        "cpu": [
            *cells(["Baseline", "OPT (GS)", "S-OPT (GS)"], ["CNN-6"]),
            *cells(["Baseline", "S-OPT (GS)"], ["Wide CNN-9"]),
            *("p = d/16", "p = 3", "p = 0"),
        ],
        "smoke": ["S-OPT (GS), CNN-6", "p = 0"],
    },
    metrics=_METRICS,
    covers=("O-T10", "O-T11"),
    cost={"paper": 100_000, "cpu": 1.0, "smoke": 0.01},
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
    note=f"{ON_CPU} Each row has two trials on a fifth of the training images: two learning rates of the rotation, or "
    f"of all parameters if there is none. Dimensions are redrawn every 40 steps. {STATED} S-OPT draws a quarter of the "
    "dimensions in every outer iteration, 300 times with 750 steps each (700 times with 1,000 steps on ImageNet), as "
    "in the text and in the released code; algorithm 1 as printed would keep only the last step. The first layer is "
    "rotated as a whole. The learning rate is divided by ten after 40, 67 and 85 % of training (the source: when "
    "saturated). The row p = d/4 of table 11 is S-OPT (GS), Wide CNN-9. OPT ran out of memory in the source for the "
    "two large networks. ImageNet: images resized to 256×256, random windows of 224×224 pixels, top-1 error.",
)

# --- PE-OPT (tables F.4 and F.5 of the thesis)

_FIXED = "Baseline with fixed random neurons"
_BLOCK_METHODS = ("CP", "GS", "HR", "LS", "OGD")
_ONE = "c3/k = 64 (k = 1, original OPT)"
_BLOCK_LINES = {k: f"c3/k = {64 // k} (k = {k})" for k in (2, 4, 8, 16, 32, 64)}


def _block_row(name: str, k: int, shared: bool) -> Row:
    method = settings.METHODS[f"OPT ({name})"]
    title = f"PE-OPT ({name}), k = {k}" if k > 1 else f"OPT ({name})"
    layout = {"blocks": k, "shared": shared, "whole_first": True} if k > 1 else {}
    return Row(
        f"{title}, shared" if shared else title,
        {"rotation": {**method.patch["rotation"], **layout}},
        {"error": ("T-F.4" if shared else "T-F.5", _BLOCK_LINES.get(k, _ONE), f"PE-OPT ({name})")},
        {"paper": method.paper},
        {"optimizer.rotation_lr": (0.03, 0.1)} if name == "OGD" else _ROTATION_RATES,
    )


BLOCKS = rotation_recipe(
    name="opt-blocks",
    title="Block-diagonal rotations, with separate and with shared blocks (PE-OPT)",
    reference="tables F.4 and F.5 of the thesis, tables 19 and 20 of the OPT paper",
    rows=(
        Row("Baseline", printed={"error": ("T-F.5", "Baseline", "PE-OPT (CP)")}, grid=_PLAIN_RATES),
        Row(
            _FIXED,
            {"rotation": {"name": "stochastic", "fraction": 0}},
            {"error": ("T-F.5", _FIXED, "PE-OPT (CP)")},
            grid=_PLAIN_RATES,
        ),
        *(_block_row(name, 1, False) for name in _BLOCK_METHODS),
        *(_block_row(name, k, shared) for shared in (False, True) for k in _BLOCK_LINES for name in _BLOCK_METHODS),
    ),
    default_rows={
        "cpu": ["Baseline", _FIXED, "OPT (GS)"]
        + [f"PE-OPT (GS), {blocks}" for blocks in ("k = 2", "k = 4", "k = 8", "k = 2, shared", "k = 8, shared")],
        "smoke": ["Baseline", "PE-OPT (OGD), k = 4", "PE-OPT (GS), k = 2, shared"],
    },
    metrics=_METRICS,
    covers=("T-F.4", "T-F.5"),
    cost={"paper": 16_000, "cpu": 0.8, "smoke": 0.01},
    baseline="Baseline",
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
        Claim("Eight shared blocks are better than fixed random neurons.", "PE-OPT (GS), k = 8, shared", _FIXED),
    ),
    figures=(),
    note=f"{ON_CPU} Each row has two trials on a fifth of the training images: two learning rates of the rotation, or "
    f"of all parameters if there is none. {STATED} Channels are divided into k blocks; the first layer, with three "
    "channels, is rotated as a whole, and the inputs of the fully connected layer are divided too (neither is stated). "
    "Trainable parameters are those of the whole network, with d(d−1)/2 for a block; the source prints those of one "
    "layer, with d². The rows without blocks, k = 1, and the baselines are the same in both tables.",
)
