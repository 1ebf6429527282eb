"""The target function of L-Softmax (figure 2.3 of the thesis)."""

from __future__ import annotations

import math

import torch

from hypersphere.functions.margin import Multiplicative
from hypersphere.recipes.recipe import Axis, Metric, Outcome, Recipe, Row

__all__ = ["TARGET"]


def compute(seed: int, *, m: int, points: int) -> Outcome:
    """Return ψ(θ) on [0, π], its value at π, and its largest excess over the cosine."""
    angles = torch.linspace(0, math.pi, points, dtype=torch.float64)
    cosines = angles.cos()
    psi = cosines if m == 1 else Multiplicative(m)(cosines)
    return Outcome({"at_pi": float(psi[-1]), "excess": float((psi - cosines).max())}, {"psi": psi.tolist()})


TARGET = Recipe(
    name="lsoftmax-function",
    title="The target function of L-Softmax",
    reference="figure 2.3 of the thesis",
    base={"measure": {"m": 1, "points": 181}},
    scales={"paper": {}, "cpu": {}, "smoke": {"measure": {"points": 13}}},
    rows=(Row("Softmax"), *(Row(f"L-Softmax (m={m})", {"measure": {"m": m}}) for m in (2, 3, 4))),
    metrics=(Metric("at_pi", "ψ(π)", ".2f", None), Metric("excess", "largest excess over cos θ", ".4f", None)),
    covers=("F2.3",),
    cost={"paper": 0.001, "cpu": 0.001, "smoke": 0.001},
    figures=("psi",),
    compute=compute,
    axes={"psi": Axis("angle to the class vector", 0, math.pi)},
    note="ψ(θ) = (−1)^k cos(mθ) − 2k on [kπ/m, (k+1)π/m]. It falls from 1 to 1 − 2m and is never above the cosine. The "
    "thesis prints D(π/m) = cos(π/m) as the condition of continuity, which should be cos(π).",
)
