"""Training by rotation and plain training: perceptrons, CNNs and PointNet (tables of chapter 7 of the thesis)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypersphere import rotation
from hypersphere.recipes.energy_networks import HALF
from hypersphere.recipes.parts import CIFAR, ENERGY, ERROR, SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["CNN", "CNN6_BASE", "CNN6_SCALES", "MLP", "POINTNET", "rotated"]

_TRAINED_NUMBERS = Metric("parameters", "trained numbers", ".0f", None)
_METHODS: dict[str, dict[str, Any]] = {
    "OPT (GS)": {"name": "gram_schmidt"},
    "OPT (HR)": {"name": "householder"},
    "OPT (LS)": {"name": "lowdin"},
    "OPT (CP)": {"name": "cayley"},
    "OPT (exponential)": {"name": "exponential"},
    "OPT (OGD)": {"name": "descent"},
    "OPT (OR)": {"name": "penalized"},
}


def _degrees_of_freedom(experiment: Experiment, run: Run) -> Outcome:
    """Count the trained numbers: d(d−1)/2 for a rotation."""
    count = rotation.degrees_of_freedom(experiment.objective, on_group=experiment.rotation.on_group)
    return Outcome({"parameters": float(count)})


def rotated(method: Mapping[str, Any], rate: float, **optimizer: Any) -> dict[str, Any]:
    """Return the patches of a row with a rotation and its learning rate, which in the source is that of SGD."""
    return {
        "patch": {"rotation": dict(method), "optimizer": {"rotation_lr": rate, **optimizer}},
        "at": {"paper": {"optimizer": {"rotation_lr": None}}},
    }


# By initialisation and method: the learning rate of rotations, chosen on held-out digits, and the error of table 7.3.
_DIGITS: dict[str, dict[str, tuple[float, float | None]]] = {
    "normal": {
        "OPT (GS)": (1e-3, 5.11),
        "OPT (HR)": (1e-3, 5.31),
        "OPT (LS)": (1e-3, 5.32),
        "OPT (CP)": (1e-4, 5.14),
        "OPT (OGD)": (1e-4, 5.38),
        "OPT (OR)": (1e-4, 5.41),
        "S-OPT (CP)": (1e-4, None),
    },
    "xavier": {
        "OPT (GS)": (0.3, 1.45),
        "OPT (HR)": (0.3, 1.60),
        "OPT (LS)": (0.3, 1.54),
        "OPT (CP)": (0.03, 1.49),
        "OPT (exponential)": (0.1, None),
        "OPT (OGD)": (0.1, 1.56),
        "OPT (OR)": (0.1, 1.78),
        "S-OPT (CP)": (0.1, None),
    },
}
_DIGIT_RATES = {"normal": 1e-3, "xavier": 0.1}
_DIGIT_METHODS = {**_METHODS, "S-OPT (CP)": {"name": "stochastic", "every": 100}}
_SOURCE_RATE = {"paper": {"optimizer": {"lr": 0.01, "rotation_lr": None}}}  # one rate for all parameters


def _digit_rows(init: str, plain: float) -> list[Row]:
    rate = _DIGIT_RATES[init]
    rows = [Row(f"{init}, baseline", {"init": init, "optimizer": {"lr": rate}}, {"error": plain}, _SOURCE_RATE)]
    for name, (rotation_rate, error) in _DIGITS[init].items():
        optimizer = {"lr": rate, "rotation_lr": rotation_rate}
        patch = {"init": init, "optimizer": optimizer, "rotation": _DIGIT_METHODS[name]}
        rows.append(Row(f"{init}, {name}", patch, {} if error is None else {"error": error}, _SOURCE_RATE))
    return rows


# Neurons from N(0, 1), scaled to norm 1.
_UNIT = {
    "init": "normal",
    "optimizer": {"lr": 0.1, "rotation_lr": 0.01},
    "rotation": {"name": "cayley", "normalize": True},
}
MLP = Recipe(
    name="opt-mlp",
    title="A multilayer perceptron on MNIST, trained by rotation",
    reference="table 7.3 of the thesis, table 6 of the OPT paper",
    base={
        "model": "mlp",
        "init": "xavier",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "batch_size": 100,
    },
    scales={
        "paper": {"data": "mnist", "schedule": "constant", "epochs": 100},
        "cpu": {"data": {"name": "mnist", "pool": 2}, "epochs": 4},
        "smoke": {**SMOKE, "model": {"widths": [16, 16]}},
    },
    rows=(
        *_digit_rows("normal", 6.05),
        Row("normal, OPT (CP), unit neurons", _UNIT, at=_SOURCE_RATE),
        *_digit_rows("xavier", 2.14),
        # The learning rate of the source for all parameters, instead of rates chosen on held-out digits.
        Row("xavier, baseline at 0.01", {"optimizer": {"lr": 0.01}}, {"error": 2.14}),
        Row(
            "xavier, OPT (CP) at 0.01",
            {"optimizer": {"lr": 0.01, "rotation_lr": 0.01}, "rotation": _METHODS["OPT (CP)"]},
            {"error": 1.49},
        ),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, _TRAINED_NUMBERS, SECONDS),
    covers=("T7.3",),
    cost={"paper": 150, "cpu": 0.9, "smoke": 0.02},
    measure=_degrees_of_freedom,
    figures=("error", "energy"),
    note="196-256-256-10 on all 60,000 digits at 14×14 pixels, 4 epochs of SGD with batches of 100 and a one-cycle "
    "learning rate (the source: 28×28 pixels, 100 epochs). Learning rates were chosen on 10,000 digits held out from "
    "training, after 3 epochs on 20,000 others, with one seed: from four values for plain training and for the "
    "rotations of CP, from two or three for the other rotations; all other parameters have the rate of plain training. "
    "With unit neurons the other parameters have 0.1, and the rate of the rotation was chosen from three. HR has the "
    "rate of GS, to which it is equal except for rounding and signs. S-OPT rotates a quarter of the dimensions, which "
    "are redrawn every 100 steps. The last two rows have the learning rate of the source, 0.01, for all parameters. "
    "Trained numbers: d(d−1)/2 for a rotation.",
)

CNN6_BASE: dict[str, Any] = {**CIFAR["base"], "model": {"name": "opt_cnn6", "norm": "batch"}}
CNN6_SCALES: dict[str, dict[str, Any]] = {
    "paper": {
        **CIFAR["paper"],
        "init": "he",
        "optimizer": {"weight_decay": 5e-4},
        **stepwise(75_000, [30_000, 50_000, 64_000]),
    },
    "cpu": {**CIFAR["cpu"], "model": {"widths": [32, 32, 32], "feature_dim": 64}},
    "smoke": {**SMOKE, "model": {"widths": [4, 4, 4], "feature_dim": 8}},
}
_BARE = {"model": {"norm": "none"}}


def _row(name: str, error: float, method: Mapping[str, Any], rate: float) -> Row:
    return Row(name, printed={"error": error}, **rotated(method, rate))


def _bare_row(name: str, error: float, rate: float) -> Row:
    # Without BatchNorm, rates were chosen again: 0.03 for all other parameters.
    patches = rotated(_METHODS[name], rate, lr=0.03)
    in_source = {"paper": {"optimizer": {"lr": 0.1, "rotation_lr": None}}}
    return Row(f"no BatchNorm, {name}", {**patches["patch"], **_BARE}, {"error": error}, in_source)


CNN = Recipe(
    name="opt-cnn",
    title="CNN-6 on a fifth of CIFAR-100, trained by rotation",
    reference="tables 7.1, 7.4 and 7.5 of the thesis; tables 10 and 20 of the OPT paper",
    base=CNN6_BASE,
    scales=CNN6_SCALES,
    rows=(
        Row("baseline", printed={"error": 37.59}),
        Row("HS-MHE", HALF, {"error": 34.97}),
        _row("OPT (GS)", 33.02, _METHODS["OPT (GS)"], 0.3),
        _row("OPT (CP)", 33.53, _METHODS["OPT (CP)"], 0.3),
        _row("OPT (OGD)", 33.33, _METHODS["OPT (OGD)"], 0.1),
        _row("OPT (OR)", 34.70, _METHODS["OPT (OR)"], 0.1),
        _row("UPT", 42.61, {"name": "free"}, 0.03),
        _row("S-OPT (GS), p = d/4", 33.70, {"name": "stochastic", "method": "gram_schmidt", "every": 40}, 0.3),
        _row("PE-OPT (CP), k = 2", 33.54, {"name": "cayley", "blocks": 2, "whole_first": True}, 0.3),
        _row("PE-OPT (CP), k = 4", 34.77, {"name": "cayley", "blocks": 4, "whole_first": True}, 0.3),
        Row("no BatchNorm, baseline", _BARE, {"error": 38.95}),
        Row("no BatchNorm, HS-MHE", {**_BARE, **HALF}, {"error": 36.90}),
        _bare_row("OPT (GS)", 35.61, 1.0),
        _bare_row("OPT (CP)", 34.88, 0.3),
        _bare_row("OPT (OGD)", 35.38, 0.1),
    ),
    seeds=(0, 1),
    metrics=(ERROR, ENERGY, _TRAINED_NUMBERS, SECONDS),
    covers=("T7.1", "T7.4", "T7.5", "O-T6", "O-T10", "T-F.5", "F7.3"),
    cost={"paper": 1500, "cpu": 0.5, "smoke": 0.02},
    measure=_degrees_of_freedom,
    figures=("error", "energy"),
    note="CNN-6 with 32 filters per layer (the source: 64) on 10,000 images of 16×16 pixels, 6 epochs. Errors are far "
    "above those of the source, so only differences between rows can be compared. Learning rates were chosen on 2,000 "
    "images held out from training, after 4 epochs, with one seed: from three values for plain training and for the "
    "rotations of CP, from two for those of GS, OR, UPT and S-OPT, from four for OGD; all other parameters have the "
    "rate of plain training, and PE-OPT has the rate of CP. Without BatchNorm: from two for plain training (0.1), and "
    "from two or three for the rotations of CP, GS and OGD, with 0.03 for all other parameters. Weight decay applies "
    "to everything except rotations. S-OPT rotates a quarter of the dimensions, which are redrawn every 40 steps; "
    "PE-OPT rotates the first layer with a single block. Trained numbers: d(d−1)/2 for a rotation.",
)

POINTNET = Recipe(
    name="opt-pointnet",
    title="PointNet on ModelNet10, trained by rotation",
    reference="table 7.12 of the thesis and table 9 of the OPT paper, on ModelNet40",
    base={"model": "pointnet", "optimizer": {"name": "adam", "lr": 3e-3}, "batch_size": 32},
    scales={
        "paper": {
            "data": "modelnet40",
            "optimizer": {"lr": 1e-3},
            # The source multiplies by 0.7 every 200,000 examples.
            "schedule": {"name": "steps", "at": [6250 * k for k in range(1, 13)], "factor": 0.7, "unit": "steps"},
            "epochs": 250,
        },
        "cpu": {"data": "modelnet10", "model": {"per_point": [32, 32, 64, 128], "hidden": [64, 64]}, "epochs": 6},
        "smoke": {
            "data": {"name": "generated", "kind": "points", "size": 20},
            "model": {"per_point": [4, 4, 8], "hidden": [8]},
            "epochs": 1,
        },
    },
    rows=(
        Row("baseline", printed={"accuracy": 87.1}),
        Row("OPT (GS)", printed={"accuracy": 87.23}, **rotated(_METHODS["OPT (GS)"], 0.01)),
        Row("OPT (CP)", printed={"accuracy": 87.81}, **rotated(_METHODS["OPT (CP)"], 0.01)),
    ),
    seeds=(0, 1),
    metrics=(Metric("accuracy", "test accuracy %", ".2f", True), ENERGY, _TRAINED_NUMBERS, SECONDS),
    covers=("O-T9",),
    cost={"paper": 2000, "cpu": 0.5, "smoke": 0.005},
    measure=_degrees_of_freedom,
    note="PointNet without transforms and with narrow layers on the 10 classes of ModelNet10; 6 epochs of Adam with "
    "batches of 32. Learning rates were chosen on 800 shapes held out from training, after 2 epochs on 1,500 others, "
    "with one seed: from three values for plain training (0.003), from four for the rotations of CP and from three for "
    "GS (0.01), with 0.003 for all other parameters. The source uses 0.001 for all parameters. Its numbers are for "
    "ModelNet40; the thesis prints 87.86 for CP, which the paper prints for OGD.",
)
