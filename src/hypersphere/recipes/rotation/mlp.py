"""A perceptron on MNIST trained by rotation, from N(0, 1) and from Xavier initialisation (table 7.3 of the thesis)."""

from __future__ import annotations

from hypersphere.recipes.energy.settings import TUNING
from hypersphere.recipes.protocols import ENERGY, ERROR, SECONDS, SMOKE
from hypersphere.recipes.recipe import Claim, Grid, Method, Recipe, Row, cells, table_rows
from hypersphere.recipes.rotation import settings

__all__ = ["MLP"]

_LINES = ("Baseline", "Orthogonal", "HS-MHE", *settings.METHODS)
_PATCHES = {name: {**settings.PLAIN, **settings.METHODS}[name].patch for name in _LINES}
_INITS = {"Normal": {"init": "normal"}, "Xavier": {"init": "xavier"}}
# Four learning rates of plain training; of rotations, by method, with one or two rates of all other parameters.
_PLAIN: dict[str, Grid] = {
    "Normal": {"optimizer.lr": (1e-4, 1e-3, 1e-2, 1e-1)},
    "Xavier": {"optimizer.lr": (0.01, 0.03, 0.1, 0.3)},
}
_SLOWER = ("OPT (CP)", "OPT (OGD)", "OPT (OR)")
_SLOWER_RATES = {"Normal": (1e-4, 1e-3), "Xavier": (0.01, 0.03, 0.1, 0.3)}
_RATES = {"Normal": (1e-3, 1e-2), "Xavier": (0.1, 0.3, 1.0, 3.0)}
_OTHER_RATES = {"Normal": (1e-3, 1e-2), "Xavier": (0.1,)}
_DECAYS: Grid = {"optimizer.weight_decay": (0.0, 1e-4, 5e-4, 1e-3)}
# The source has one learning rate and decay for all parameters, and free parameters from N(0, 1). OGD starts from the
# identity, and so does OR, whose squared penalty would diverge from N(0, 1).
_PAPER = {"rotation": {"spread": 1.0}, "optimizer": {"rotation_decay": 5e-4}}


def _method(name: str, column: str) -> Method:
    if not name.startswith("OPT"):
        return Method(_PATCHES[name], _PLAIN[column])
    rates = (_SLOWER_RATES if name in _SLOWER else _RATES)[column]
    grid = {"optimizer.lr": _OTHER_RATES[column], "optimizer.rotation_lr": rates}
    return Method(_PATCHES[name], grid, {} if name in ("OPT (OGD)", "OPT (OR)") else _PAPER)


def _rows(column: str) -> list[Row]:
    rows: list[Row] = []
    for name in _LINES:
        # The thesis has no regularisers.
        source = "O-T6" if name in ("Orthogonal", "HS-MHE") else "T7.3"
        lines, columns = {name: _method(name, column)}, {column: _INITS[column]}
        in_source = {column: f"MNIST MLP-{column[0]}"} if source == "O-T6" else {}
        rows += table_rows(source, lines, columns, baseline="Baseline", in_source=in_source)
    return rows


def _stated_rows(column: str) -> tuple[Row, ...]:
    """Return rows with the learning rate of the source, 0.01 for all parameters, at the scale cpu."""
    names = {f"{name} at 0.01": name for name in ("Baseline", "OPT (CP)")}
    lines = {title: Method(_PATCHES[name], _DECAYS) for title, name in names.items()}
    columns = {column: {**_INITS[column], "optimizer": {"lr": 0.01}}}
    return table_rows("T7.3", lines, columns, baseline="Baseline at 0.01", in_source=names)


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
    default_rows={
        "paper": cells(_LINES, _INITS),
        "cpu": cells(["Baseline", "OPT (GS)", "OPT (CP)", "OPT (OGD)", "Baseline at 0.01", "OPT (CP) at 0.01"], _INITS),
        "smoke": ["Baseline, Normal", "OPT (CP), Normal", "OPT (OR), Xavier"],
    },
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, settings.TRAINABLE_PARAMETERS, SECONDS),
    covers=("T7.3",),
    cost={"paper": 250, "cpu": 1.2, "smoke": 0.01},
    measure=settings.count_trainable_parameters,
    figures=("error", "energy"),
    tuning=TUNING,
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
    note="At the scale cpu: 20,000 digits of 14×14 pixels, 10 epochs and one cycle of the learning rate (the source: "
    "60,000 digits of 28×28 pixels, 100 epochs at 0.01). Each row has four trials on a fifth of the training digits: "
    "plain training four learning rates; rotations four learning rates of R (from N(0, 1): two, with two of all other "
    "parameters). The rows at 0.01 have the learning rate of the source for all parameters and choose one of four "
    "weight decays. At the scale paper: 0.01 for all parameters, a constant rate (no schedule is stated) and weight "
    "decay 5e-4, the general remark of the source, on all weights and on R (not on R of OGD and OR). Normal is N(0, 1) "
    "and Xavier is uniform, as in the repository that the source follows; there is no BatchNorm. GS, HR, LS and CP "
    "start from free parameters from N(0, 1). Trainable parameters: d(d−1)/2 for a rotation.",
)
