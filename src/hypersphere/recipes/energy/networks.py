"""Hyperspherical energy in plain CNNs: regularisers, forms of the energy, layers, weights, width and depth."""

from __future__ import annotations

import re
from typing import Any

from hypersphere.recipes.energy import settings
from hypersphere.recipes.energy.settings import (
    BASELINE,
    FIFTH,
    FULL,
    HALF,
    TUNED,
    cifar_scales,
    energy_recipe,
    with_options,
)
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS
from hypersphere.recipes.recipe import Claim, Method, Outcome, Recipe, Row, cells, table_rows
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["CNN", "DEPTH", "FORMS", "LAYERS", "SPHERENET", "WEIGHTS", "WIDTH", "layer_curves"]

_CPU = f"At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels and a quarter of the width. {TUNED}"
_PAPER = (
    "At the scale paper: the schedule, batch, weight decay and weights of appendix D.1 (chapter 6 prints no schedule); "
    "images are shifted by up to four pixels and mirrored. The authors' code has another weight decay (5e-4), label "
    "smoothing and, for CoMHE, a longer schedule, which the text does not mention."
)


def layer_curves(experiment: Experiment, run: Run) -> Outcome:
    """Return the energy of each hidden layer after each validation, named as in figure E.7."""
    lines = [
        line["energy"] for line in run.metrics() if line.get("kind") in ("epoch", "validation") and "energy" in line
    ]
    names = layer_names(lines[-1])
    curves = {f"energy of {title}": [float(line[layer]) for line in lines] for layer, title in names.items()}
    return Outcome({}, curves)


def layer_names(energies: dict[str, Any]) -> dict[str, str]:
    """Return the names of the layers of CNN-9 in the source by their names in the network: Conv1.1 to Conv3.3, fc1.

    >>> layer_names({"stages.0": 1.0, "stages.3": 1.0, "feature": 1.0, "head": 2.0})
    {'stages.0': 'Conv1.1', 'stages.3': 'Conv1.2', 'feature': 'fc1'}
    """
    convolutions = [name for name in energies if re.fullmatch(r"(?:.*\.)?stages\.\d+", name)]
    # Three convolutions per stage.
    named = {name: f"Conv{position // 3 + 1}.{position % 3 + 1}" for position, name in enumerate(convolutions)}
    return named | {name: "fc1" for name in energies if name.rpartition(".")[2] == "feature"}


# --- tables 6.1 and 5.1

_COMPARED: dict[str, Method] = {
    "Baseline": BASELINE,
    "Orthogonal": settings.ORTHOGONAL,
    "Orthonormal": settings.ORTHONORMAL,
    "SRIP": settings.SRIP,
    "MHE": FULL,
    "HS-MHE": HALF,
    "G-CoMHE": settings.GROUP,
    "Adv-CoMHE": settings.ADVERSARIAL,
    "RP-CoMHE": settings.RANDOM,
    "RP-CoMHE (max)": settings.RANDOM_MAX,
    "AP-CoMHE (alter.)": settings.ALTERNATING,
    "AP-CoMHE (unroll)": settings.UNROLLED,
}
# Names of these lines in chapter 6.
_CITED = {"SRIP": "SRIP [29]", "MHE": "MHE [31]", "HS-MHE": "HS-MHE [31]"}

CNN = energy_recipe(
    name="energy-cnn",
    title="Regularisers of CNN-9: weight decay, orthogonality, energy, compressive energy",
    reference="table 6.1 and figures 6.2, E.6 and E.7 of the thesis, CNN-9 on CIFAR-100",
    rows=table_rows("T6.1", _COMPARED, in_source={**_CITED, "Orthonormal": ""}),
    default_rows={
        "cpu": ["Baseline", "Orthonormal", "MHE", "HS-MHE", "RP-CoMHE", "AP-CoMHE (unroll)"],
        "smoke": ["Baseline", "HS-MHE", "AP-CoMHE (unroll)"],
    },
    seeds=(0, 1, 2, 3, 4),
    covers=("T6.1", "F6.2", "F-E.6", "F-E.7"),
    cost={"paper": 20_000, "cpu": 1.6, "smoke": 0.01},
    measure=layer_curves,
    baseline="Baseline",
    claims=(
        Claim("MHE has a lower error than weight decay alone.", "MHE"),
        Claim("Half-space MHE has a lower error than weight decay alone.", "HS-MHE"),
        Claim("Half-space MHE has a lower error than orthonormality.", "HS-MHE", "Orthonormal"),
        Claim("CoMHE has a lower error than half-space MHE.", "RP-CoMHE", "HS-MHE"),
        Claim("CoMHE has a lower error than weight decay alone.", "RP-CoMHE"),
        Claim("CoMHE ends with a lower energy than half-space MHE.", "RP-CoMHE", "HS-MHE", "energy", "F6.2"),
        Claim("MHE ends with a lower energy than weight decay alone.", "HS-MHE", metric="energy", source="F6.2"),
    ),
    note=f"{_CPU} {_PAPER} The energy is that of the unprojected neurons in half space with s = 2, the mean over pairs "
    "and over hidden layers, before training and after every third epoch; the source sums over layers. The row "
    "Orthonormal is not in table 6.1. The settings of SRIP and of the inner steps of AP-CoMHE and Adv-CoMHE are not "
    "printed: SRIP has the weight 1e-3, and projections have the defaults of this library. The first layer, with "
    "27-dimensional neurons, is not projected, as in the authors' code.",
)

_FORMS: dict[str, Method] = {
    "MHE": FULL,
    "Half-space MHE": HALF,
    "A-MHE": settings.FULL_ANGULAR,
    "Half-space A-MHE": settings.HALF_ANGULAR,
}
# The data of a column at each scale; digits replace both at the scale smoke.
_DATA: dict[str, dict[str, Any]] = {
    "CIFAR-10": {"paper": {"data": "cifar10"}},
    "CIFAR-100": {"paper": {"data": "cifar100"}, "cpu": FIFTH},
}


def _form_rows(source: str, baseline: str) -> list[Row]:
    """Return the rows of a table of all forms of the energy on both data sets, with a row for plain training."""
    rows: list[Row] = []
    for data, at in _DATA.items():
        plain = f"{baseline}, {data}"
        rows.append(Row(plain, BASELINE.patch, {"error": (source, baseline, f"{data} s=2")}, at, BASELINE.grid))
        rows += [
            Row(f"{line}, {column}", powered.patch, {"error": (source, line, column)}, at, method.grid, plain)
            for line, method in _FORMS.items()
            for power in (2, 1, 0)
            for column, powered in [(f"{data} s={power}", with_options(method, power=power))]
        ]
    return rows


FORMS = energy_recipe(
    name="energy-forms",
    title="Forms of the energy: full and half space, distances and angles, powers",
    reference="table 5.1 of the thesis, CNN-9 on CIFAR-10 and CIFAR-100",
    rows=tuple(_form_rows("T5.1", "Baseline")),
    default_rows={
        "cpu": ["Baseline, CIFAR-10", "MHE, CIFAR-10 s=0", *cells(_FORMS, ["CIFAR-10 s=2"])],
        "smoke": ["Baseline, CIFAR-10", "MHE, CIFAR-10 s=0", "A-MHE, CIFAR-10 s=2"],
    },
    seeds=(0, 1, 2, 3, 4),
    covers=("T5.1",),
    cost={"paper": 40_000, "cpu": 1.4, "smoke": 0.01},
    claims=tuple(
        Claim(f"{line} has a lower error than weight decay alone.", f"{line}, CIFAR-10 s=2") for line in _FORMS
    ),
    note=f"{_CPU} {_PAPER} Weights are those printed for the Euclidean distance also where the distance is an angle. "
    "The source prints one number per data set for the baseline.",
)


# --- table 5.4 and figure 5.3

# For each column of the source: 1 if the hidden layers have an energy, and 1 if the output layer has one.
_PLACES = {"O only (H no, O yes)": (0, 1), "H only (H yes, O no)": (1, 0), "H and O": (1, 1)}


def _layer_rows() -> list[Row]:
    return [
        Row(
            f"{line}, {place.partition(' (')[0]}",
            with_options(
                method, hidden=method.patch["regularizers"][0]["hidden"] if hidden else 0.0, output=float(output)
            ).patch,
            {"error": ("T5.4", line, place)},
        )
        for line, method in _FORMS.items()
        for place, (hidden, output) in _PLACES.items()
        if hidden or not line.startswith("Half-space")  # half space cannot be used on the output layer
    ]


LAYERS = energy_recipe(
    name="energy-layers",
    title="Energy of hidden layers, of the classifier, and of both",
    reference="table 5.4 of the thesis, CNN-9 on CIFAR-100",
    rows=(Row("Baseline", printed={"error": ("T5.4", "Baseline", "H and O")}), *_layer_rows()),
    default_rows={
        "cpu": ["Baseline", "MHE, O only", *cells(["MHE", "Half-space MHE"], ["H only", "H and O"])],
        "smoke": ["Baseline", "MHE, H and O"],
    },
    covers=("T5.4",),
    cost={"paper": 3000, "cpu": 0.5, "smoke": 0.01},
    baseline="Baseline",
    claims=(
        Claim("Energy of all layers is better than energy of the classifier.", "MHE, H and O", "MHE, O only"),
        Claim("Energy of hidden layers is better than energy of the classifier.", "MHE, H only", "MHE, O only"),
    ),
    figures=(),
    tuning=None,
    note=f"At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels, and the weights of the source. {_PAPER} The last "
    "column of the source repeats the numbers of the best power of table 5.1; here s = 2 everywhere. No setting is "
    "tuned.",
)

_WEIGHTED = {"MHE (O)": (FULL, "output"), "MHE (H)": (FULL, "hidden"), "HS-MHE (H)": (HALF, "hidden")}
_NOWHERE = {"hidden": 0.0, "output": 0.0}

WEIGHTS = Recipe(
    name="energy-weights",
    title="The weight of the energy, from 0.01 to 100",
    reference="figure 5.3 of the thesis, CNN-9 on CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=(
        Row("Baseline"),
        *(
            Row(f"{line}, {weight:g}", with_options(method, **{**_NOWHERE, place: weight}).patch)
            for line, (method, place) in _WEIGHTED.items()
            for weight in (0.01, 0.1, 1.0, 10.0, 100.0)
        ),
    ),
    default_rows={
        "cpu": ["Baseline", *cells(_WEIGHTED, ["0.01", "1", "100"])],
        "smoke": ["Baseline", *cells(_WEIGHTED, ["100"])],
    },
    seeds=(0, 1),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("F5.3",),
    cost={"paper": 3500, "cpu": 0.5, "smoke": 0.01},
    baseline="Baseline",
    note="At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels. The weight is what is compared, so nothing is tuned. "
    f"{_PAPER} The source draws curves over weights from 0.01 to 100 without printing the weights or the errors.",
)


# --- width and depth

_SCALABLE = {
    "Baseline": BASELINE,
    "MHE": FULL,
    "HS-MHE": HALF,
    "RP-CoMHE": settings.RANDOM,
    "AP-CoMHE": settings.UNROLLED,
}
_SMALL = ("Baseline", "HS-MHE", "RP-CoMHE")
_WIDTHS = {f"t={t}": t for t in (1, 2, 4, 8, 16, 20)}

WIDTH = energy_recipe(
    name="energy-width",
    title="Energy and the width of CNN-9",
    reference="tables 5.2 and 6.4 of the thesis, on CIFAR-100",
    rows=table_rows(
        "T6.4",
        _SCALABLE,
        {column: {} for column in _WIDTHS},
        baseline="Baseline",
        at={
            column: {
                "paper": {"model": {"widths": [16 * t, 32 * t, 64 * t]}},
                "cpu": {"model": {"widths": [4 * t, 8 * t, 16 * t]}},
                "smoke": {"model": {"widths": [4 * t] * 3}},
            }
            for column, t in _WIDTHS.items()
        },
        in_source=_CITED,
    ),
    default_rows={"cpu": cells(_SMALL, ["t=1", "t=2"]), "smoke": cells(_SMALL, ["t=1"])},
    seeds=(0, 1, 2, 3, 4),
    covers=("T6.4", "T5.2"),
    cost={"paper": 100_000, "cpu": 0.8, "smoke": 0.01},
    claims=tuple(
        Claim(f"In a narrow network (t={t}), {name} has a lower error.", f"{name}, t={t}", source=source)
        for t in (1, 2)
        for name, source in (("HS-MHE", "T5.2"), ("RP-CoMHE", "T6.4"))
    ),
    note="16t, 32t and 64t filters. At the scale cpu a quarter of them on a fifth of CIFAR-10 at 16×16 pixels; t = 4 "
    f"is the network of the recipe energy-cnn. {TUNED} {_PAPER} Numbers of the source are those of table 6.4; the "
    "baseline with t = 16 has another number in table 5.2.",
)


DEPTH = energy_recipe(
    name="energy-depth",
    title="Energy and the depth of a plain CNN",
    reference="tables 5.3 and 6.5 of the thesis, on CIFAR-100; CNN-15 does not converge without energy there (N/C)",
    scales=merge(cifar_scales("mhe_cnn9"), {"cpu": {"model": {"widths": [12, 24, 48]}}}),
    rows=table_rows(
        "T6.5",
        _SCALABLE,
        {f"CNN-{depth}": {"model": {"depth": [depth // 3] * 3}} for depth in (6, 9, 15)},
        baseline="Baseline",
        in_source=_CITED,
    ),
    default_rows={"cpu": cells(_SMALL, ["CNN-6", "CNN-15"]), "smoke": cells(_SMALL, ["CNN-15"])},
    seeds=(0, 1, 2, 3, 4),
    covers=("T6.5", "T5.3"),
    cost={"paper": 20_000, "cpu": 1.6, "smoke": 0.01},
    claims=tuple(
        Claim(f"With {depth} layers, {name} has a lower error.", f"{name}, CNN-{depth}", source=s)
        for depth in (6, 15)
        for name, s in (("HS-MHE", "T5.3"), ("RP-CoMHE", "T6.5"))
    ),
    note=f"Two, three or five convolutions per stage. At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels. {TUNED} "
    f"{_PAPER} The source does not say when it calls a network not converged; a run whose loss is not finite is marked "
    "as diverged here.",
)

SPHERENET = energy_recipe(
    name="energy-spherenet",
    title="SphereNet-9 with energy",
    reference="table D.3 of the thesis, CNN-9 of cosine SphereConv on CIFAR-10 and CIFAR-100",
    base=merge(CIFAR["base"], {"operator": {"name": "sphere", "angular": "cosine"}}),
    rows=(
        *(
            Row(
                f"SphereNet with Orthonormal Reg., {data}",
                settings.ORTHONORMAL.patch,
                {"error": ("T-D.3", "SphereNet with Orthonormal Reg.", f"{data} s=2")},
                at,
                settings.ORTHONORMAL.grid,
                f"SphereNet Baseline, {data}",
            )
            for data, at in _DATA.items()
        ),
        *_form_rows("T-D.3", "SphereNet Baseline"),
    ),
    default_rows={
        "cpu": [
            *cells(["SphereNet with Orthonormal Reg.", "SphereNet Baseline"], ["CIFAR-10"]),
            *cells(["MHE", "Half-space MHE"], ["CIFAR-10 s=2"]),
        ],
        "smoke": ["SphereNet Baseline, CIFAR-10", "MHE, CIFAR-10 s=2"],
    },
    covers=("T-D.3",),
    cost={"paper": 60_000, "cpu": 1.5, "smoke": 0.01},
    claims=(
        Claim("MHE improves SphereNet.", "MHE, CIFAR-10 s=2"),
        Claim("Half-space MHE improves SphereNet.", "Half-space MHE, CIFAR-10 s=2"),
    ),
    note=f"{_CPU} {_PAPER} SphereConv sees only the directions of filters, so weight decay has no effect on them.",
)
