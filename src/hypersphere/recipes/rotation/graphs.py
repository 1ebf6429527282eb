"""Networks of graphs and point clouds trained by rotation (table 9 of the OPT paper; 7.11 and 7.12 of the thesis)."""

from __future__ import annotations

from hypersphere.recipes.energy.graphs import POINTS
from hypersphere.recipes.protocols import ENERGY, GRAPH_BASE, SECONDS
from hypersphere.recipes.recipe import Claim, Method, Metric, Patch, Recipe, Row, Tuning, cells, table_rows
from hypersphere.recipes.rotation.settings import TRAINABLE_PARAMETERS, count_trainable_parameters

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
_CITED = {"Cora": "Cora (GCN)", "Pubmed": "Pubmed (GCN)", "ModelNet": "ModelNet-40 (PointNet)"}
_METHODS = {"OPT (GS)": "gram_schmidt", "OPT (CP)": "cayley", "OPT (OGD)": "descent"}
# Two learning rates: of all parameters for the baseline, of the rotation for GS, CP and OGD.
_RATES = {
    "Cora": ((0.01, 0.02), (1e-3, 1e-2), (1e-4, 1e-3), (0.03, 0.1)),
    "Pubmed": ((0.01, 0.02), (1e-3, 1e-2), (1e-3, 1e-2), (0.03, 0.1)),
    "ModelNet": ((1e-3, 3e-3), (3e-3, 1e-2), (3e-3, 1e-2), (0.01, 0.1)),
}


def _rows(column: str) -> tuple[Row, ...]:
    is_graph = column != "ModelNet"
    network: Patch = {"data": column.lower(), **GRAPH_BASE} if is_graph else _CLOUDS
    plain, *rotated = _RATES[column]
    lines = {"Baseline": Method(grid={"optimizer.lr": plain})}
    for (name, method), rates in zip(_METHODS.items(), rotated, strict=True):
        # Neurons of graphs are drawn from N(0, 1), because a rotation cannot make them longer; see the note.
        patch = {"rotation": method, **({"init": "normal"} if is_graph else {})}
        paper = {} if is_graph or method == "descent" else {"rotation": {"spread": 1.0}}
        lines[name] = Method(patch, {"optimizer.rotation_lr": rates}, paper)
    at = {column: _GRAPH_AT if is_graph else _CLOUDS_AT}
    return table_rows("O-T9", lines, {column: network}, metric="accuracy", baseline="Baseline", at=at, in_source=_CITED)


GRAPHS_AND_POINTS = Recipe(
    name="opt-graphs-and-points",
    title="Networks of graphs and point clouds trained by rotation",
    reference="table 9 of the OPT paper (tables 7.11 and 7.12 of the thesis)",
    base={"model": "gcn"},
    scales={"paper": {}, "cpu": {}, "smoke": {}},
    rows=(*_rows("Cora"), *_rows("Pubmed"), *_rows("ModelNet")),
    default_rows={
        "cpu": ["OPT (OGD), Pubmed", *cells(["Baseline", "OPT (CP)"], _RATES)],
        "smoke": ["OPT (OGD), Pubmed", "OPT (CP), ModelNet"],
    },
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
    "text says iterations, the code of PointNet counts clouds), 250 epochs of batches of 32; free parameters from N(0, "
    "1); clouds turned about the vertical axis and jittered. At the scale cpu the graphs have the same protocol, and "
    "PointNet is narrower and trained on ModelNet10; each row uses the better of two learning rates, of the rotation "
    "if there is one: on validation nodes, or on a fifth of the training clouds. The thesis prints 87.86 for OPT (CP) "
    "on ModelNet40, the number of OGD in the paper.",
)
