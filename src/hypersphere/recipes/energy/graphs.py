"""Energy in graph convolutional networks on citation graphs (table E.6 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.protocols import GRAPH_BASE, GRAPH_METRICS, GRAPH_SCALES
from hypersphere.recipes.recipe import Claim, Recipe, Row, Tuning

__all__ = ["ENERGIES"]

_DECAYS = {"optimizer.weight_decay": (5e-4, 1e-3)}
_WEIGHTS = {**_DECAYS, "regularizers.0.hidden": (1.0, 10.0)}
_METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "GCN": ({}, {**_DECAYS, "optimizer.lr": (0.01, 0.02)}, "GCN Baseline"),
    "HS-MHE": ({"regularizers": [{"name": "mhe", "hidden": 1.0, "output": 0.0}]}, _WEIGHTS, "HS-MHE [31]"),
    "RP-CoMHE": ({"regularizers": [{"name": "comhe", "hidden": 1.0, "output": 0.0}]}, _WEIGHTS, "RP-CoMHE"),
    "AP-CoMHE": (
        {"regularizers": [{"name": "comhe", "projection": {"name": "angle_preserving"}, "hidden": 1.0, "output": 0.0}]},
        _WEIGHTS,
        "AP-CoMHE",
    ),
}
_SMOKE = {"smoke": {"data": {"name": "generated", "kind": "graph", "size": 40}}}


def _rows(graph: str) -> list[Row]:
    return [
        Row(
            f"{name}, {graph}",
            {"data": graph.lower(), **patch},
            {"accuracy": ("T-E.6", line, graph)},
            _SMOKE,
            grid=grid,
            baseline=None if name == "GCN" else f"GCN, {graph}",
        )
        for name, (patch, grid, line) in _METHODS.items()
    ]


ENERGIES = Recipe(
    name="energy-gcn",
    title="Graph convolutional networks with energy",
    reference="table E.6 of the thesis",
    base=GRAPH_BASE,
    scales=GRAPH_SCALES,
    rows=(*_rows("Citeseer"), *_rows("Cora"), *_rows("Pubmed")),
    seeds=tuple(range(20)),
    metrics=GRAPH_METRICS,
    covers=("T-E.6",),
    cost={"paper": 0.7, "cpu": 1.1, "smoke": 0.002},
    tuning=Tuning({}, metric="accuracy", seeds=(100, 101, 102)),
    claims=tuple(
        Claim(f"{name} improves a graph network on {graph}.", f"{name}, {graph}")
        for graph in ("Citeseer", "Cora", "Pubmed")
        for name in ("HS-MHE", "RP-CoMHE", "AP-CoMHE")
    ),
    note="The public split; two layers, 16 hidden units, dropout 0.5; Adam at 0.01 for 200 epochs without early "
    "stopping. The weight decay is 5e-4 on all weights (in the official code on those of the first layer only, with "
    "early stopping after ten epochs). The energy is that of the hidden neurons. Its weight is not printed and is 1 "
    "at the scale paper. At the scale cpu each row tries two weight decays, with two weights of the energy or, without "
    "energy, with two learning rates, and uses the best of these four on the validation nodes, averaged over three "
    "seeds.",
)
