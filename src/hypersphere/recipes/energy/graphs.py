"""Energy in networks of graphs and of point clouds (tables E.6 and 6.8 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.protocols import ENERGY, GRAPH_BASE, GRAPH_METRICS, GRAPH_SCALES, SECONDS
from hypersphere.recipes.recipe import Claim, Method, Metric, Patch, Recipe, Row, Tuning, table_rows

__all__ = ["ENERGIES", "POINTS"]

# --- citation graphs (table E.6)

_DECAYS = {"optimizer.weight_decay": (5e-4, 1e-3)}
_WEIGHTS = {**_DECAYS, "regularizers.0.hidden": (1.0, 10.0)}
_COMHE = {"name": "comhe", "hidden": 1.0, "output": 0.0}
_METHODS = {
    "GCN": Method(grid={**_DECAYS, "optimizer.lr": (0.01, 0.02)}),
    "HS-MHE": Method({"regularizers": [{**_COMHE, "name": "mhe"}]}, _WEIGHTS),
    "RP-CoMHE": Method({"regularizers": [_COMHE]}, _WEIGHTS),
    "AP-CoMHE": Method({"regularizers": [{**_COMHE, "projection": {"name": "angle_preserving"}}]}, _WEIGHTS),
}
_GRAPHS = ("Citeseer", "Cora", "Pubmed")
_SMOKE = {"smoke": {"data": {"name": "generated", "kind": "graph", "size": 40}}}

ENERGIES = Recipe(
    name="energy-gcn",
    title="Graph convolutional networks with energy",
    reference="table E.6 of the thesis",
    base=GRAPH_BASE,
    scales=GRAPH_SCALES,
    rows=table_rows(
        "T-E.6",
        _METHODS,
        {graph: {"data": graph.lower()} for graph in _GRAPHS},
        metric="accuracy",
        baseline="GCN",
        at=dict.fromkeys(_GRAPHS, _SMOKE),
        in_source={"GCN": "GCN Baseline", "HS-MHE": "HS-MHE [31]"},
    ),
    seeds=tuple(range(20)),
    metrics=GRAPH_METRICS,
    covers=("T-E.6",),
    cost={"paper": 0.7, "cpu": 1.1, "smoke": 0.002},
    tuning=Tuning({}, metric="accuracy", seeds=(100, 101, 102)),
    claims=tuple(
        Claim(f"{name} improves a graph network on {graph}.", f"{name}, {graph}")
        for graph in _GRAPHS
        for name in ("HS-MHE", "RP-CoMHE", "AP-CoMHE")
    ),
    note="The public split; two layers, 16 hidden units, dropout 0.5; Adam at 0.01 for 200 epochs without early "
    "stopping. The weight decay is 5e-4 on all weights (in the official code on those of the first layer only, with "
    "early stopping after ten epochs). The energy is that of the hidden neurons. Its weight is not printed and is 1 at "
    "the scale paper. At the scale cpu each row tries two weight decays, with two weights of the energy or, without "
    "energy, with two learning rates, and uses the best of these four on the validation nodes, averaged over three "
    "seeds.",
)

# --- point clouds (table 6.8)


def _decays(batch_size: int, epochs: int) -> dict[str, Any]:
    """Return training for a number of epochs of 9,843 clouds, with a rate times 0.7 after each 200,000 clouds."""
    every, total = 200_000 // batch_size, epochs * -(-9_843 // batch_size)
    schedule = {"name": "steps", "at": list(range(every, total, every)), "factor": 0.7, "unit": "steps"}
    return {"epochs": epochs, "batch_size": batch_size, "schedule": schedule}


_SMALL: Patch = {"per_point": [16, 16, 16, 32, 128], "hidden": [64, 32]}
_TINY: Patch = {"per_point": [4, 4, 4, 8, 8], "hidden": [8, 8]}
# By column: the network with the schedule of the source, a small network, and a tiny one.
_NETWORKS: dict[str, dict[str, Patch]] = {
    **{
        column: {
            "paper": {"model": name, **_decays(32, 250)},
            "cpu": {"model": {"name": name, **_SMALL}},
            "smoke": {"model": {"name": name, **_TINY}},
        }
        for column, name in (("PN", "pointnet"), ("PN (T)", "pointnet_transforms"))
    },
    "PN++": {
        "paper": {"model": "pointnet2", **_decays(16, 251)},
        "cpu": {"model": "pointnet2"},
        "smoke": {"model": "pointnet2", "data": {"name": "generated", "kind": "points", "size": 512}},
    },
}
_ENERGIES: dict[str, dict[str, Any]] = {
    "MHE": {"name": "mhe", "half_space": False},
    "HS-MHE": {"name": "mhe"},
    "RP-CoMHE": {"name": "comhe"},
    "AP-CoMHE": {"name": "comhe", "projection": {"name": "angle_preserving"}},
}


def _cloud_rows(column: str) -> tuple[Row, ...]:
    # T-Nets have a penalty of their matrices in every row.
    terms: list[dict[str, Any]] = [{"name": "t_net"}] if column == "PN (T)" else []
    lines = {"Original": Method({"regularizers": terms}, {"optimizer.weight_decay": (0.0, 1e-4)})}
    for name, energy in _ENERGIES.items():
        weights = {f"regularizers.{len(terms)}.hidden": (1.0, 10.0)}
        lines[name] = Method({"regularizers": [*terms, {**energy, "power": 1, "hidden": 1.0}]}, weights)
    cited = {"MHE": "MHE [31]", "HS-MHE": "HS-MHE [31]"}
    return table_rows(
        "T6.8", lines, {column: {}}, metric="accuracy", baseline="Original", at=_NETWORKS, in_source=cited
    )


POINTS = Recipe(
    name="energy-pointnet",
    title="PointNet with and without T-Nets and PointNet++ with energy",
    reference="table 6.8 of the thesis, on ModelNet40",
    base={
        "optimizer": {"name": "adam", "lr": 0.001, "weight_decay": 0.0},
        "augment": [{"name": "turn_points"}, {"name": "jitter_points"}],
    },
    scales={
        "paper": {"data": "modelnet40", "validation": {"every": 10}},
        "cpu": {
            "data": "modelnet10",
            "augment": [{"name": "turn_points", "axis": 2}, {"name": "jitter_points"}],  # shapes stand on the z plane
            "batch_size": 32,
            "epochs": 12,
            "validation": {"every": 4},
        },
        "smoke": {"data": {"name": "generated", "kind": "points", "size": 16}, "batch_size": 24, "epochs": 1},
    },
    rows=(*_cloud_rows("PN"), *_cloud_rows("PN (T)"), *_cloud_rows("PN++")),
    default_rows={"cpu": ["Original, PN", "HS-MHE, PN", "RP-CoMHE, PN"], "smoke": ["Original, PN", "RP-CoMHE, PN"]},
    seeds=(0, 1, 2, 3, 4),
    metrics=(Metric("accuracy", "test accuracy %", ".2f", True), ENERGY, SECONDS),
    covers=("T6.8",),
    cost={"paper": 5000, "cpu": 0.9, "smoke": 0.01},
    tuning=Tuning({}, metric="accuracy", held_out=0.1),
    claims=(
        Claim("Half-space MHE improves PointNet.", "HS-MHE, PN"),
        Claim("CoMHE improves PointNet.", "RP-CoMHE, PN"),
    ),
    note="1,024 points per cloud; Adam at 0.001, times 0.7 after each 200,000 clouds (the text says iterations, the "
    "released code counts clouds); clouds are turned about the vertical axis and jittered, as in the released code. "
    "The energy has s = 1 on all layers; its weight is not printed for point clouds and is 1 at the scale paper. "
    "Layers with fewer than 30 inputs are not projected. PointNet++ has single-scale grouping. At the scale cpu: "
    "ModelNet10; the weight of the energy, and the weight decay of the row without it, is the better of two on a tenth "
    "of the training clouds.",
)
