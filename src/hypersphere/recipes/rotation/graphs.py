"""Networks of graphs and point clouds trained by rotation (table 9 of the OPT paper; 7.11 and 7.12 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.energy.points import POINTS
from hypersphere.recipes.protocols import ENERGY, GRAPH_BASE, SECONDS
from hypersphere.recipes.recipe import Claim, Grid, Metric, Patch, Recipe, Row, Tuning
from hypersphere.recipes.rotation.settings import LARGE, PAPER, SCALES, TRAINABLE_PARAMETERS, count_trainable_parameters
from hypersphere.training.config import merge

__all__ = ["GRAPHS_AND_POINTS"]

_GRAPH_AT: dict[str, Patch] = {
    "paper": {"epochs": 200},
    "cpu": {"epochs": 200},
    "smoke": {"data": {"name": "generated", "kind": "graph", "size": 30}, "epochs": 3},
}
_CLOUDS: Patch = {"optimizer": POINTS.base["optimizer"], "augment": POINTS.base["augment"]}
_CLOUDS_AT: dict[str, Patch] = {
    "paper": {
        **POINTS.scales["paper"],
        "model": "pointnet",
        "epochs": 250,
        "batch_size": 32,
        # Multiplied by 0.7 after each 200,000 clouds.
        "schedule": {"name": "steps", "at": [6250 * k for k in range(1, 13)], "factor": 0.7, "unit": "steps"},
    },
    "cpu": {
        **POINTS.scales["cpu"],
        "model": {"name": "pointnet", "per_point": [16, 16, 16, 32, 64], "hidden": [64, 32]},
        "epochs": 10,
    },
    "smoke": {**POINTS.scales["smoke"], "model": {"name": "pointnet", "per_point": [4, 4, 8], "hidden": [8]}},
}
_COLUMNS: dict[str, tuple[str, Patch, dict[str, Patch]]] = {
    "Cora": ("Cora (GCN)", {"data": "cora", **GRAPH_BASE}, _GRAPH_AT),
    "Pubmed": ("Pubmed (GCN)", {"data": "pubmed", **GRAPH_BASE}, _GRAPH_AT),
    "ModelNet": ("ModelNet-40 (PointNet)", _CLOUDS, _CLOUDS_AT),
}
_METHODS = {"Baseline": None, "OPT (GS)": "gram_schmidt", "OPT (CP)": "cayley", "OPT (OGD)": "descent"}
# Two learning rates: of all parameters, or of the rotation.
_PLAIN: dict[str, Grid] = {
    "Cora": {"optimizer.lr": (0.01, 0.02)},
    "Pubmed": {"optimizer.lr": (0.01, 0.02)},
    "ModelNet": {"optimizer.lr": (1e-3, 3e-3)},
}
_ROTATION_RATES: dict[str, dict[str, tuple[float, float]]] = {
    "Cora": {"OPT (GS)": (1e-3, 1e-2), "OPT (CP)": (1e-4, 1e-3), "OPT (OGD)": (0.03, 0.1)},
    "Pubmed": {"OPT (GS)": (1e-3, 1e-2), "OPT (CP)": (1e-3, 1e-2), "OPT (OGD)": (0.03, 0.1)},
    "ModelNet": {"OPT (GS)": (3e-3, 1e-2), "OPT (CP)": (3e-3, 1e-2), "OPT (OGD)": (0.01, 0.1)},
}
_SMALL = {
    "Cora": ("Baseline", "OPT (CP)"),
    "Pubmed": ("Baseline", "OPT (CP)", "OPT (OGD)"),
    "ModelNet": ("Baseline", "OPT (CP)"),
}
_ON_GENERATED = (("Pubmed", "OPT (OGD)"), ("ModelNet", "OPT (CP)"))


def _rows(graph: str) -> list[Row]:
    column, network, at = _COLUMNS[graph]
    rows = []
    for name, method in _METHODS.items():
        patch: dict[str, Any] = {}
        grid = _PLAIN[graph]
        if method is not None:
            # Neurons from N(0, 1), because a rotation cannot make them longer; see the note.
            patch = {"rotation": method, **({} if graph == "ModelNet" else {"init": "normal"})}
            grid = {"optimizer.rotation_lr": _ROTATION_RATES[graph][name]}
        spread: dict[str, Any] = {"rotation": {"spread": 1.0}} if method in ("gram_schmidt", "cayley") else {}
        scales: tuple[str, ...] = LARGE if name in _SMALL[graph] else PAPER
        rows.append(
            Row(
                f"{name}, {graph}",
                merge(network, patch),
                {"accuracy": ("O-T9", name, column)},
                {**at, "paper": merge(at["paper"], spread if graph == "ModelNet" else {})},
                grid=grid,
                baseline=None if name == "Baseline" else f"Baseline, {graph}",
                scales=SCALES if (graph, name) in _ON_GENERATED else scales,
            )
        )
    return rows


GRAPHS_AND_POINTS = Recipe(
    name="opt-graphs-and-points",
    title="Networks of graphs and point clouds trained by rotation",
    reference="table 9 of the OPT paper (tables 7.11 and 7.12 of the thesis)",
    base={"model": "gcn"},
    scales={"paper": {}, "cpu": {}, "smoke": {}},
    rows=(*_rows("Cora"), *_rows("Pubmed"), *_rows("ModelNet")),
    seeds=(0, 1, 2, 3, 4),
    metrics=(Metric("accuracy", "test accuracy %", ".2f", True), ENERGY, TRAINABLE_PARAMETERS, SECONDS),
    covers=("O-T9",),
    cost={"paper": 2000, "cpu": 1.4, "smoke": 0.01},
    measure=count_trainable_parameters,
    tuning=Tuning({}, metric="accuracy", held_out=0.2),
    claims=tuple(
        Claim(f"{name} improves {text}.", f"{name}, {graph}")
        for graph, name, text in (
            ("Cora", "OPT (CP)", "a graph network on Cora"),
            ("Pubmed", "OPT (CP)", "a graph network on Pubmed"),
            ("Pubmed", "OPT (OGD)", "a graph network on Pubmed"),
            ("ModelNet", "OPT (CP)", "PointNet"),
        )
    ),
    note="Graphs: the public split; 16 hidden neurons, dropout 0.5, Adam at 0.01 for 200 epochs with weight decay "
    "5e-4, as in the official code, without early stopping; only the hidden layer is rotated, in all 1,433 (Cora) or "
    "500 (Pubmed) dimensions. Its fixed neurons are drawn from N(0, 1): rows of the input sum to one, and plain "
    "training makes its neurons six times as long, which a rotation cannot. Rotations start at the identity there, "
    "because free parameters from N(0, 1) are not stated for graphs. Point clouds: PointNet without T-Nets on "
    "ModelNet40, all layers except the classifier rotated; Adam at 0.001, times 0.7 after each 200,000 clouds (the "
    "text says iterations, the code of PointNet counts clouds), 250 epochs of batches of 32; free parameters from "
    "N(0, 1); clouds turned about the vertical axis and jittered. At the scale cpu the graphs have the same protocol, "
    "and PointNet has 16, 16, 16, 32 and 64 channels per point on ModelNet10, 10 epochs; each row uses the better of "
    "two learning rates, of the rotation if there is one: on validation nodes, or on a fifth of the training clouds. "
    "The thesis prints 87.86 for OPT (CP) on ModelNet40, the number of OGD in the paper.",
)
