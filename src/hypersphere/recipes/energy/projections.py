"""Projections of compressive energy: dimension, number, redrawing, sharing and learning (chapter 6, appendix E.8)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.energy.settings import HALF, LARGE, PAPER, SCALES, cifar_scales, projected
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS
from hypersphere.recipes.recipe import Claim, Place, Recipe, Row

__all__ = ["PROJECTIONS"]

_NEVER = 10**9  # steps after which projections are drawn again: more than any run has
_KINDS: dict[str, dict[str, Any]] = {
    "RP-CoMHE": {"name": "random"},
    "AP-CoMHE (alter.)": {"name": "angle_preserving", "method": "alternating"},
    "AP-CoMHE (unroll.)": {"name": "angle_preserving"},
}


def _row(title: str, place: Place, scales: tuple[str, ...], projection: dict[str, Any], *, shared: bool = True) -> Row:
    (regularizer,) = projected(**projection).patch["regularizers"]
    return Row(title, {"regularizers": [{**regularizer, "shared": shared}]}, {"error": place}, scales=scales)


def _dimension_rows() -> list[Row]:
    """Return the rows of table 6.2: 20 random projections, or one angle-preserving projection."""
    return [
        _row(
            f"{line}, dimension {dim}",
            ("T6.2", line, str(dim)),
            SCALES if (line, dim) == ("RP-CoMHE", 30) else LARGE if line == "RP-CoMHE" and dim in (10, 80) else PAPER,
            {**kind, "dim": dim, "views": 20 if line == "RP-CoMHE" else 1},
        )
        for line, kind in _KINDS.items()
        for dim in (10, 20, 30, 40, 80)
    ]


def _number_rows() -> list[Row]:
    """Return the rows of table 6.3 that table 6.2 does not have: other numbers of projections to 30 dimensions."""
    kinds = {"RP-CoMHE": _KINDS["RP-CoMHE"], "AP-CoMHE": _KINDS["AP-CoMHE (unroll.)"]}
    rows = {"RP-CoMHE": (1, 5, 10, 30, 80), "AP-CoMHE": (5, 10, 20, 30, 80)}
    return [
        _row(
            f"{column}, {views} projection{'s' * (views > 1)}",
            ("T6.3", str(views), column),
            LARGE if column == "RP-CoMHE" and views in (1, 5) else PAPER,
            {**kinds[column], "dim": 30, "views": views},
        )
        for column, numbers in rows.items()
        for views in numbers
    ]


_DEFAULT: dict[str, Any] = {"name": "random", "dim": 30, "views": 20}

PROJECTIONS = Recipe(
    name="energy-projections",
    title="Projections of CoMHE: dimension, number, redrawing, sharing and learning",
    reference="tables 6.2, 6.3 and E.4 and appendix E.8 of the thesis, CNN-9 on CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=(
        Row("HS-MHE", HALF.patch, {"error": ("X-E.8a", "Half-space MHE")}, scales=LARGE),
        *_dimension_rows(),
        *_number_rows(),
        _row("RP-CoMHE, redrawn every 200 steps", ("T-E.4", "RP-CoMHE", "200"), PAPER, {**_DEFAULT, "every": 200}),
        _row("RP-CoMHE, redrawn every 1000 steps", ("T-E.4", "RP-CoMHE", "1000"), PAPER, {**_DEFAULT, "every": 1000}),
        _row("RP-CoMHE, never redrawn", ("T-E.4", "RP-CoMHE", "inf (never)"), LARGE, {**_DEFAULT, "every": _NEVER}),
        _row(
            "projection learned with the network",
            ("X-E.8a", "Naively learned projection"),
            SCALES,
            {**_DEFAULT, "name": "cooperative"},
        ),
        _row(
            "RP-CoMHE, not shared by layers", ("X-E.8b", "Independent projection basis"), LARGE, _DEFAULT, shared=False
        ),
    ),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T6.2", "T6.3", "T-E.4", "X-E.8a", "X-E.8b"),
    cost={"paper": 50_000, "cpu": 1.1, "smoke": 0.01},
    baseline="RP-CoMHE, dimension 30",
    claims=(
        Claim(
            "Projections that are never redrawn are worse.",
            "RP-CoMHE, dimension 30",
            "RP-CoMHE, never redrawn",
            source="T-E.4",
        ),
        Claim(
            "A projection that is learned with the network is worse than a random one.",
            "RP-CoMHE, dimension 30",
            "projection learned with the network",
            source="X-E.8a",
        ),
        Claim(
            "Layers with neurons of equal dimension should share projections.",
            "RP-CoMHE, dimension 30",
            "RP-CoMHE, not shared by layers",
            source="X-E.8b",
        ),
    ),
    note="At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels, 15 epochs, 16, 32 and 64 filters, and nine of the "
    "rows. All rows have the weight 1 of the source. Random projections are redrawn at every step unless said "
    "otherwise, and shared by layers whose neurons have equal dimension. Table 6.2 has 20 random projections per "
    "layer, so its row with dimension 30 is also the row with 20 projections of table 6.3, the row of table E.4 with "
    "redrawing at every step, and the shared projection of appendix E.8, whose text has dimension and number "
    "exchanged. The projection that is learned with the network descends the energy at the rate 0.1, the learning "
    "rate of the network. The inner steps of AP-CoMHE are not printed and have the defaults of this library. No "
    "setting is tuned.",
)
