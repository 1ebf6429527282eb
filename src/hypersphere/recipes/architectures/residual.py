"""Residual networks with sphere and decoupled operators (figure 3.3a, tables 3.4, 4.4, 4.5 and C.2, figure 4.4)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.protocols import SECONDS, SMOKE, sgd
from hypersphere.recipes.recipe import Claim, Row, Tuning, table_rows
from hypersphere.training.config import merge

__all__ = ["CONVERGENCE", "DEEP", "OPERATORS", "SPHERE"]

_SMALL: dict[str, Any] = {"name": "resnet20", "depths": [2, 2, 2], "widths": [8, 16, 32], "shortcut": "projection"}
_SIZE = "On a CPU: ResNet-14 on 20,000 images of CIFAR-10 at 16×16 pixels"
_SHORTCUTS = "shortcuts that change the width are ordinary 1×1 convolutions"
_SMOKE: dict[str, Any] = {**SMOKE, "model": {**_SMALL, "depths": [1, 1, 1], "widths": [4, 4, 4]}}


def _scales(paper: Mapping[str, Any], model: str) -> dict[str, Mapping[str, Any]]:
    return {
        "paper": {**paper, "model": {"name": model, "shortcut": "projection"}},
        "cpu": {**cifar.CPU, "model": _SMALL},
        "smoke": _SMOKE,
    }


def _plain_shortcuts(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with ordinary convolutions in the shortcuts, as in the released code."""
    return merge(patch, {"operator": {"layers": "spatial"}}) if "operator" in patch else dict(patch)


# --- convergence (figure 3.3a)

_SIGMOID = cifar.ANGULARS["Sigmoid (0.3)"]
_DATA: dict[str, dict[str, Any]] = {
    "CIFAR10": {"paper": {"augment": cifar.MIRROR}, "cpu": {"augment": cifar.MIRROR}},
    "CIFAR10+": {"paper": {"augment": cifar.SHIFT_AND_MIRROR}},
}
_NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet baseline": {},
    "SphereResNet (Sigmoid 0.3)": {**cifar.sphere(_SIGMOID), **cifar.ORTHONORMAL},
}
CONVERGENCE = cifar.operator_recipe(
    name="spherenet-resnet-convergence",
    title="Convergence of ResNet-32 and SphereResNet-32",
    reference="figure 3.3a of the thesis, curves on CIFAR-10 and CIFAR-10+",
    scales={
        **_scales(cifar.SPHERENET, "spherenet_resnet32"),
        "cpu": {**cifar.CPU, "model": _SMALL, "validation": {"every": 1}},
    },
    rows=tuple(
        Row(
            f"{network} on {data}",
            _plain_shortcuts(patch),
            at=at,
            baseline=f"ResNet baseline on {data}" if patch else None,
        )
        for data, at in _DATA.items()
        for network, patch in _NETWORKS.items()
    ),
    default_rows={"smoke": [f"{network} on CIFAR10+" for network in _NETWORKS]},
    covers=("F3.3a",),
    cost={"paper": 10000, "cpu": 0.6, "smoke": 0.01},
    claims=(Claim("SphereResNet ends better than ResNet on CIFAR-10.", "SphereResNet (Sigmoid 0.3) on CIFAR10"),),
    note=f"All rows are trained with softmax. CIFAR10+ also shifts the images. {cifar.RELEASED}, the orthonormal "
    f"penalty has the weight 1e-4, and {_SHORTCUTS}. {_SIZE}.",
)

# --- CIFAR-10+ and CIFAR-100 (table 3.4)


def _sphere_and_head(angular: Any) -> dict[str, Any]:
    return {**cifar.sphere(angular), **cifar.ORTHONORMAL, "head": {"name": "w_softmax", "angular": angular}}


_MARGIN = {"name": "ga_softmax", "angular": "linear", "m": 4.0, "annealing": {"end": 5.0}}
_VERSIONS: dict[str, dict[str, Any]] = {
    "Baseline ResNet-32 (softmax)": {},
    "SphereResNet-32 (S-SW)": _sphere_and_head(_SIGMOID),
    "SphereResNet-32 (L-LW)": _sphere_and_head("linear"),
    "SphereResNet-32 (C-CW)": _sphere_and_head("cosine"),
    "SphereResNet-32 (S-G)": {**cifar.sphere(_SIGMOID), **cifar.ORTHONORMAL, "head": _MARGIN},
}
_PLUS_AND_HUNDRED = {"CIFAR-10+": {"paper": {"data": "cifar10"}}, "CIFAR-100": {"paper": {"data": "cifar100"}}}
SPHERE = cifar.operator_recipe(
    name="spherenet-resnet",
    title="SphereResNet-32 with four losses",
    reference="table 3.4 of the thesis, on CIFAR-10+ and CIFAR-100",
    scales=_scales({**cifar.SPHERENET, "augment": cifar.SHIFT_AND_MIRROR}, "wide_resnet32"),
    rows=table_rows(
        "T3.4",
        {name: _plain_shortcuts(patch) for name, patch in _VERSIONS.items()},
        {column: {} for column in _PLUS_AND_HUNDRED},
        metric="accuracy",
        baseline="Baseline ResNet-32 (softmax)",
        at=_PLUS_AND_HUNDRED,
    ),
    default_rows={
        "cpu": [f"{name}, CIFAR-10+" for name in _VERSIONS if "C-CW" not in name],
        "smoke": ["Baseline ResNet-32 (softmax), CIFAR-10+", "SphereResNet-32 (S-G), CIFAR-10+"],
    },
    metrics=(cifar.ACCURACY, SECONDS),
    covers=("T3.4",),
    cost={"paper": 30000, "cpu": 0.7, "smoke": 0.01},
    tuning=Tuning({"optimizer.lr": [1e-3, 3e-3]}, metric="accuracy"),
    claims=(
        Claim("SphereResNet is better than ResNet.", "SphereResNet-32 (S-SW), CIFAR-10+"),
        Claim(
            "The margin loss is the best version of SphereResNet.",
            "SphereResNet-32 (S-G), CIFAR-10+",
            "SphereResNet-32 (S-SW), CIFAR-10+",
        ),
    ),
    note="The table also cites ELU, FitResNet (LSUV) and ResNet-1001 from other papers. The text mentions vertical "
    "mirroring, which the works it follows do not use; images are shifted by up to 4 pixels and mirrored horizontally. "
    f"{cifar.RELEASED}, the orthonormal penalty has the weight 1e-4, and {_SHORTCUTS}. The margin is annealed as in "
    f"SphereFace. {_SIZE}.",
)

# --- decoupled operators, with Adam and SGD (tables 4.4 and C.2, figure 4.4)

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "SGD": {
        "paper": {"optimizer": sgd(0.1)},
        "cpu": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    },
}


def _operator_rows(source: str, optimizer: str) -> list[Row]:
    at, baseline = _OPTIMIZERS[optimizer], f"ResNet Baseline, {optimizer}"
    grid = {"optimizer.lr": [0.05, 0.2]} if optimizer == "SGD" else None
    rows = [Row(baseline, {}, {"error": (source, "ResNet Baseline", "Cosine")}, at, grid)]
    for name, column in product(cifar.MAGNITUDES, ("Linear", "Cosine", "Square Cosine")):
        patch = _plain_shortcuts(cifar.decoupled(name, cifar.ANGULARS[column]))
        title = f"{name}, {column}, {optimizer}"
        rows.append(Row(title, patch, {"error": (source, name, column)}, at, grid, baseline))
    return rows


OPERATORS = cifar.operator_recipe(
    name="decoupled-resnet",
    title="Decoupled ResNet-32, trained with Adam and with SGD",
    reference="tables 4.4 and C.2 and figure 4.4 of the thesis, on CIFAR-100",
    scales=_scales(cifar.DECOUPLED, "wide_resnet32"),
    rows=(*_operator_rows("T4.4", "Adam"), *_operator_rows("T-C.2", "SGD")),
    default_rows={
        "cpu": [
            f"{name}, {optimizer}"
            for optimizer in ("Adam", "SGD")
            for name in ("ResNet Baseline", "TanhConv, Cosine", "SegConv, Cosine")
        ],
        "smoke": ["ResNet Baseline, SGD", "LinearConv, Square Cosine, Adam"],
    },
    covers=("T4.4", "F4.4", "T-C.2"),
    cost={"paper": 120000, "cpu": 0.9, "smoke": 0.01},
    claims=(
        Claim("With Adam, SegConv is better than convolution.", "SegConv, Cosine, Adam"),
        Claim("With SGD, SegConv is better than convolution.", "SegConv, Cosine, SGD", source="T-C.2"),
        Claim(
            "The ordinary network is better with SGD than with Adam.",
            "ResNet Baseline, SGD",
            "ResNet Baseline, Adam",
            source="T-C.2",
        ),
    ),
    note=f"Whether there is a ReLU is not stated; there is one. {cifar.RELEASED}, the orthogonal penalty has the "
    f"weight 5e-6, filters are rescaled to norm 1 every 100 steps, and {_SHORTCUTS}. The learning rate of SGD is not "
    f"stated; 0.1 with momentum 0.9 is used. {_SIZE}.",
)

# --- against very deep networks (table 4.5)

_W_SOFTMAX = {"head": {"name": "w_softmax", "angular": "cosine"}}
_DEEP_LINES: dict[str, dict[str, Any]] = {
    "DCNet-32 (TanhConv + Cosine)": {**cifar.decoupled("TanhConv"), **_W_SOFTMAX},
    "DCNet-32 (LinearConv + Square Cos.)": {**cifar.decoupled("LinearConv", "square_cosine"), **_W_SOFTMAX},
}


_TEN_AND_HUNDRED = {"CIFAR-10": {"paper": {"data": "cifar10"}}, "CIFAR-100": {"paper": {"data": "cifar100"}}}
DEEP = cifar.operator_recipe(
    name="decoupled-deep",
    title="DCNet-32 with the weight-normalised softmax",
    reference="table 4.5 of the thesis, on CIFAR-10 and CIFAR-100",
    scales=_scales(cifar.DECOUPLED, "wide_resnet32"),
    rows=table_rows(
        "T4.5",
        {"ResNet-32 (softmax)": {}, **{name: _plain_shortcuts(patch) for name, patch in _DEEP_LINES.items()}},
        {column: {} for column in _TEN_AND_HUNDRED},
        baseline="ResNet-32 (softmax)",
        at=_TEN_AND_HUNDRED,
        in_source={"ResNet-32 (softmax)": ""},
    ),
    default_rows={
        "cpu": ["ResNet-32 (softmax), CIFAR-10", *(f"{name}, CIFAR-10" for name in _DEEP_LINES)],
        "smoke": ["DCNet-32 (LinearConv + Square Cos.), CIFAR-10"],
    },
    covers=("T4.5",),
    cost={"paper": 15000, "cpu": 0.5, "smoke": 0.01},
    claims=(Claim("DCNet-32 is better than ResNet-32.", "DCNet-32 (TanhConv + Cosine), CIFAR-10"),),
    note="The table cites ResNet-110 and ResNet-1001 from other papers; the ResNet-32 with softmax is added here. "
    "Whether the rows were trained with Adam or with SGD is not clear from the text; Adam is used, as in table 4.4. "
    f"{cifar.RELEASED}, the orthogonal penalty has the weight 5e-6, filters are rescaled to norm 1 every 100 steps, "
    f"and {_SHORTCUTS}. {_SIZE}.",
)
