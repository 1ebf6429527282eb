"""A perceptron on MNIST trained by rotation, from N(0, 1) and from Xavier initialisation (table 7.3 of the thesis)."""

from __future__ import annotations

from typing import Any

from hypersphere.recipes.protocols import ENERGY, ERROR, SECONDS, SMOKE
from hypersphere.recipes.recipe import Claim, Grid, Recipe, Row, Tuning
from hypersphere.recipes.rotation.settings import (
    HALF,
    LARGE,
    METHODS,
    ORTHOGONAL,
    PAPER,
    TRAINABLE_PARAMETERS,
    count_trainable_parameters,
)
from hypersphere.training.config import merge

__all__ = ["MLP"]

_METHODS: dict[str, dict[str, Any]] = {
    "Baseline": {},
    "Orthogonal": dict(ORTHOGONAL.patch),
    "HS-MHE": dict(HALF.patch),
    **{name: dict(method.patch) for name, method in METHODS.items()},
}
_INITS = {"Normal": "normal", "Xavier": "xavier"}
_PAPER_COLUMNS = {"Normal": "MNIST MLP-N", "Xavier": "MNIST MLP-X"}
# Four learning rates of plain training; of rotations, by method, with one or two rates of all other parameters.
_PLAIN: dict[str, Grid] = {
    "Normal": {"optimizer.lr": (1e-4, 1e-3, 1e-2, 1e-1)},
    "Xavier": {"optimizer.lr": (0.01, 0.03, 0.1, 0.3)},
}
_ROTATION_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "Normal": {"OPT (CP)": (1e-4, 1e-3), "OPT (OGD)": (1e-4, 1e-3), "OPT (OR)": (1e-4, 1e-3)},
    "Xavier": {
        "OPT (CP)": (0.01, 0.03, 0.1, 0.3),
        "OPT (OGD)": (0.01, 0.03, 0.1, 0.3),
        "OPT (OR)": (0.01, 0.03, 0.1, 0.3),
    },
}
_OTHER_ROTATIONS = {"Normal": (1e-3, 1e-2), "Xavier": (0.1, 0.3, 1.0, 3.0)}
_DECAYS: Grid = {"optimizer.weight_decay": (0.0, 1e-4, 5e-4, 1e-3)}


def _grid(name: str, column: str) -> Grid:
    if not name.startswith("OPT"):
        return _PLAIN[column]
    rates = _ROTATION_RATES[column].get(name, _OTHER_ROTATIONS[column])
    others: Grid = {"optimizer.lr": (1e-3, 1e-2)} if column == "Normal" else {"optimizer.lr": (0.1,)}
    return {**others, "optimizer.rotation_lr": rates}


def _at(name: str) -> dict[str, Any]:
    """Return the settings of the source: one learning rate and decay for all parameters, free parameters from N(0, 1).

    OGD starts from the identity, and so does OR, whose squared penalty would diverge from N(0, 1).
    """
    if name in ("OPT (GS)", "OPT (HR)", "OPT (LS)", "OPT (CP)"):
        return {"paper": {"rotation": {"spread": 1.0}, "optimizer": {"rotation_decay": 5e-4}}}
    return {}


def _rows(column: str) -> list[Row]:
    rows = []
    for name, patch in _METHODS.items():
        scales: tuple[str, ...] = LARGE if name in ("Baseline", "OPT (GS)", "OPT (CP)", "OPT (OGD)") else PAPER
        if (name, column) in (("Baseline", "Normal"), ("OPT (CP)", "Normal"), ("OPT (OR)", "Xavier")):
            scales = (*scales, "smoke") if "cpu" in scales else ("paper", "smoke")
        in_thesis = name not in ("Orthogonal", "HS-MHE")
        place = ("T7.3", name, column) if in_thesis else ("O-T6", name, _PAPER_COLUMNS[column])
        rows.append(
            Row(
                f"{name}, {column}",
                merge({"init": _INITS[column]}, patch),
                {"error": place},
                _at(name),
                grid=_grid(name, column),
                baseline=None if name == "Baseline" else f"Baseline, {column}",
                scales=scales,
            )
        )
    return rows


def _stated_rows(column: str) -> list[Row]:
    """Return rows with the learning rate of the source, 0.01 for all parameters, at the scale cpu."""
    return [
        Row(
            f"{name} at 0.01, {column}",
            merge({"init": _INITS[column], "optimizer": {"lr": 0.01}}, _METHODS[name]),
            {"error": ("T7.3", name, column)},
            grid=_DECAYS,
            baseline=None if name == "Baseline" else f"Baseline at 0.01, {column}",
            scales=("cpu",),
        )
        for name in ("Baseline", "OPT (CP)")
    ]


MLP = Recipe(
    name="opt-mlp",
    title="A multilayer perceptron on MNIST, trained by rotation",
    reference="table 7.3 of the thesis, table 6 of the OPT paper",
    base={
        "model": "mlp",
        "init": "xavier",
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
        "batch_size": 100,
    },
    scales={
        "paper": {"data": "mnist", "schedule": "constant", "epochs": 100},
        "cpu": {
            "data": {"name": "mnist", "pool": 2, "limit": 20_000},
            "optimizer": {"weight_decay": 0.0},
            "epochs": 10,
            "validation": {"every": 2},
        },
        "smoke": {**SMOKE, "model": {"widths": [16, 16]}},
    },
    rows=(*_rows("Normal"), *_rows("Xavier"), *_stated_rows("Normal"), *_stated_rows("Xavier")),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, TRAINABLE_PARAMETERS, SECONDS),
    covers=("T7.3",),
    cost={"paper": 250, "cpu": 1.2, "smoke": 0.01},
    measure=count_trainable_parameters,
    figures=("error", "energy"),
    tuning=Tuning({}, held_out=0.2),
    claims=(
        *(
            Claim(f"From {text}, {name} has a lower error than plain training at tuned rates.", f"{name}, {column}")
            for column, text in (("Normal", "N(0, 1)"), ("Xavier", "Xavier initialisation"))
            for name in ("OPT (GS)", "OPT (CP)", "OPT (OGD)")
        ),
        *(
            Claim(
                f"From {text}, OPT (CP) has a lower error than plain training at the rate of the source.",
                f"OPT (CP) at 0.01, {column}",
            )
            for column, text in (("Normal", "N(0, 1)"), ("Xavier", "Xavier initialisation"))
        ),
    ),
    note="At the scale cpu: 196-256-256-10 on 20,000 digits of 14×14 pixels, 10 epochs of SGD with batches of 100 "
    "and one cycle of the learning rate (the source: 28×28 pixels, 60,000 digits, 100 epochs at 0.01). Each row has "
    "four trials on a fifth of the training digits: plain training four learning rates; rotations four learning "
    "rates of R (from N(0, 1): two, with two of all other parameters). The rows at 0.01 have the learning rate of "
    "the source for all parameters and choose one of four weight decays. At the scale paper: 0.01 for all "
    "parameters, a constant rate (no schedule is stated) and weight decay 5e-4, the general remark of the source, on "
    "all weights and on R (not on R of OGD and OR). Normal is N(0, 1) and Xavier is uniform, as in the repository "
    "that the source follows; there is no BatchNorm. GS, HR, LS and CP start from free parameters from N(0, 1). "
    "Trainable parameters: d(d−1)/2 for a rotation.",
)
