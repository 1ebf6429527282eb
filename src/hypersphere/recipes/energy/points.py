"""Energy in networks for point clouds (table 6.8 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.protocols import ENERGY, SECONDS
from hypersphere.recipes.recipe import Claim, Method, Metric, Patch, Recipe, Row, Tuning, table_rows

__all__ = ["POINTS"]


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


def _rows(column: str) -> tuple[Row, ...]:
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
    rows=(*_rows("PN"), *_rows("PN (T)"), *_rows("PN++")),
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
