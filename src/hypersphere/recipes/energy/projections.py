"""Projections of compressive energy: dimension, number, redrawing, sharing and learning (chapter 6, appendix E.8)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.energy.settings import HALF, energy_recipe, projected, with_options
from hypersphere.recipes.recipe import Claim, Place, Row, cells

__all__ = ["PROJECTIONS"]

_LEARNED = "projection learned with the network"
_NEVER = 10**9  # steps between two draws of the projections, more than any run has
_KINDS: dict[str, dict[str, Any]] = {
    "RP-CoMHE": {"name": "random"},
    "AP-CoMHE (alter.)": {"name": "angle_preserving", "method": "alternating"},
    "AP-CoMHE (unroll.)": {"name": "angle_preserving"},
}


def _row(title: str, place: Place, projection: dict[str, Any], *, shared: bool = True) -> Row:
    return Row(title, with_options(projected(**projection), shared=shared).patch, {"error": place})


def _number_row(line: str, kind: str, views: int) -> Row:
    """Return a row of table 6.3: several projections to 30 dimensions."""
    title = f"{line}, {views} projection{'s' * (views > 1)}"
    return _row(title, ("T6.3", str(views), line), {**_KINDS[kind], "dim": 30, "views": views})


_DEFAULT: dict[str, Any] = {"name": "random", "dim": 30, "views": 20}

PROJECTIONS = energy_recipe(
    name="energy-projections",
    title="Projections of CoMHE: dimension, number, redrawing, sharing and learning",
    reference="tables 6.2, 6.3 and E.4 and appendix E.8 of the thesis, CNN-9 on CIFAR-100",
    rows=(
        Row("HS-MHE", HALF.patch, {"error": ("X-E.8a", "Half-space MHE")}),
        # Table 6.2: 20 random projections, or one angle-preserving projection.
        *(
            _row(
                f"{line}, dimension {dim}",
                ("T6.2", line, str(dim)),
                {**kind, "dim": dim, "views": 20 if line == "RP-CoMHE" else 1},
            )
            for line, kind in _KINDS.items()
            for dim in (10, 20, 30, 40, 80)
        ),
        # The rows of table 6.3 that are not in table 6.2.
        *(_number_row("RP-CoMHE", "RP-CoMHE", views) for views in (1, 5, 10, 30, 80)),
        *(_number_row("AP-CoMHE", "AP-CoMHE (unroll.)", views) for views in (5, 10, 20, 30, 80)),
        _row("RP-CoMHE, redrawn every 200 steps", ("T-E.4", "RP-CoMHE", "200"), {**_DEFAULT, "every": 200}),
        _row("RP-CoMHE, redrawn every 1000 steps", ("T-E.4", "RP-CoMHE", "1000"), {**_DEFAULT, "every": 1000}),
        _row("RP-CoMHE, never redrawn", ("T-E.4", "RP-CoMHE", "inf (never)"), {**_DEFAULT, "every": _NEVER}),
        _row(_LEARNED, ("X-E.8a", "Naively learned projection"), {**_DEFAULT, "name": "cooperative"}),
        _row("RP-CoMHE, not shared by layers", ("X-E.8b", "Independent projection basis"), _DEFAULT, shared=False),
    ),
    default_rows={
        "cpu": [
            "HS-MHE",
            *(f"RP-CoMHE, dimension {dim}" for dim in (10, 30, 80)),
            *cells(["RP-CoMHE"], ["1 projection", "5 projections", "never redrawn", "not shared by layers"]),
            _LEARNED,
        ],
        "smoke": ["RP-CoMHE, dimension 30", _LEARNED],
    },
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
            _LEARNED,
            source="X-E.8a",
        ),
        Claim(
            "Layers with neurons of equal dimension should share projections.",
            "RP-CoMHE, dimension 30",
            "RP-CoMHE, not shared by layers",
            source="X-E.8b",
        ),
    ),
    figures=(),
    tuning=None,
    note="At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels. All rows have the weight 1 of the source. Random "
    "projections are redrawn at every step unless said otherwise, and shared by layers whose neurons have equal "
    "dimension. Table 6.2 has 20 random projections per layer, so its row with dimension 30 is also the row with 20 "
    "projections of table 6.3, the row of table E.4 with redrawing at every step, and the shared projection of "
    "appendix E.8, whose text has dimension and number exchanged. The projection that is learned with the network "
    "descends the energy at the rate 0.1, the learning rate of the network. The inner steps of AP-CoMHE are not "
    "printed and have the defaults of this library. No setting is tuned.",
)
