"""Hyperspherical energy in plain CNNs: regularisers, forms of the energy, layers, weights, width and depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hypersphere.recipes.energy import settings
from hypersphere.recipes.energy.settings import BASELINE, FIFTH, LARGE, PAPER, TUNED, Method, cifar_scales, method_row
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS
from hypersphere.recipes.recipe import Claim, Outcome, Place, Recipe, Row, Tuning
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["CNN", "DEPTH", "FORMS", "HALF", "LAYERS", "SPHERENET", "WEIGHTS", "WIDTH", "layer_curves"]

HALF = settings.HALF.patch  # half-space MHE with the weights of the source
TUNING = Tuning({}, held_out=0.2)  # every row has a grid
_CPU = (
    "At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels, 15 epochs, 16, 32 and 64 filters (the source: 64, 128 and "
    f"256 on CIFAR-100). {TUNED}"
)
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

_COMPARED: dict[str, tuple[Method, str | None, tuple[str, ...]]] = {
    "Baseline": (BASELINE, "Baseline", settings.SCALES),
    "Orthogonal": (settings.ORTHOGONAL, "Orthogonal", PAPER),
    "Orthonormal": (settings.ORTHONORMAL, None, LARGE),
    "SRIP": (settings.SRIP, "SRIP [29]", PAPER),
    "MHE": (settings.FULL, "MHE [31]", LARGE),
    "HS-MHE": (settings.HALF, "HS-MHE [31]", settings.SCALES),
    "G-CoMHE": (settings.GROUP, "G-CoMHE", PAPER),
    "Adv-CoMHE": (settings.ADVERSARIAL, "Adv-CoMHE", PAPER),
    "RP-CoMHE": (settings.RANDOM, "RP-CoMHE", LARGE),
    "RP-CoMHE (max)": (settings.RANDOM_MAX, "RP-CoMHE (max)", PAPER),
    "AP-CoMHE (alter.)": (settings.ALTERNATING, "AP-CoMHE (alter.)", PAPER),
    "AP-CoMHE (unroll)": (settings.UNROLLED, "AP-CoMHE (unroll)", settings.SCALES),
}

CNN = Recipe(
    name="energy-cnn",
    title="Regularisers of CNN-9: weight decay, orthogonality, energy, compressive energy",
    reference="table 6.1 and figures 6.2, E.6 and E.7 of the thesis, CNN-9 on CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=tuple(
        method_row(name, method, {} if line is None else {"error": ("T6.1", line)}, scales=scales)
        for name, (method, line, scales) in _COMPARED.items()
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T6.1", "F6.2", "F-E.6", "F-E.7"),
    cost={"paper": 20_000, "cpu": 1.6, "smoke": 0.01},
    figures=("error", "energy"),
    measure=layer_curves,
    baseline="Baseline",
    tuning=TUNING,
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
    "27-dimensional neurons, "
    "is not projected, as in the authors' code.",
)

_FORMS: dict[str, Method] = {
    "MHE": settings.FULL,
    "Half-space MHE": settings.HALF,
    "A-MHE": settings.FULL_ANGULAR,
    "Half-space A-MHE": settings.HALF_ANGULAR,
}
# The data of a column at each scale; digits replace both at the scale smoke.
_DATA: dict[str, dict[str, Any]] = {
    "CIFAR-10": {"paper": {"data": "cifar10"}},
    "CIFAR-100": {"paper": {"data": "cifar100"}, "cpu": FIFTH},
}


def _with_power(method: Method, power: int) -> Method:
    (regularizer,) = method.patch["regularizers"]
    return Method({"regularizers": [{**regularizer, "power": power}]}, method.grid)


def _form_rows(source: str, baseline: str, scales: Mapping[tuple[str, int], tuple[str, ...]]) -> list[Row]:
    """Return the rows of a table of all forms of the energy on both data sets, with a row for plain training.

    `scales` are those of rows on CIFAR-10 by line and power; all other rows run at full size only.
    """
    rows: list[Row] = []
    for data, at in _DATA.items():
        is_small = data == "CIFAR-10"
        plain = f"{baseline}, {data}"
        printed: dict[str, Place | float] = {"error": (source, baseline, f"{data} s=2")}
        rows.append(method_row(plain, BASELINE, printed, at=at, scales=settings.SCALES if is_small else PAPER))
        for line, method in _FORMS.items():
            for power in (2, 1, 0):
                column = f"{data} s={power}"
                rows.append(
                    method_row(
                        f"{line}, {column}",
                        _with_power(method, power),
                        {"error": (source, line, column)},
                        at=at,
                        baseline=plain,
                        scales=scales.get((line, power), PAPER) if is_small else PAPER,
                    )
                )
    return rows


FORMS = Recipe(
    name="energy-forms",
    title="Forms of the energy: full and half space, distances and angles, powers",
    reference="table 5.1 of the thesis, CNN-9 on CIFAR-10 and CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=tuple(
        _form_rows(
            "T5.1",
            "Baseline",
            {
                ("MHE", 2): LARGE,
                ("MHE", 0): settings.SCALES,
                ("Half-space MHE", 2): LARGE,
                ("A-MHE", 2): settings.SCALES,
                ("Half-space A-MHE", 2): LARGE,
            },
        )
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T5.1",),
    cost={"paper": 40_000, "cpu": 1.4, "smoke": 0.01},
    figures=("error", "energy"),
    tuning=TUNING,
    claims=tuple(
        Claim(f"{line} has a lower error than weight decay alone.", f"{line}, CIFAR-10 s=2") for line in _FORMS
    ),
    note=f"{_CPU} {_PAPER} Weights are those printed for the Euclidean distance also where the distance is an angle. "
    "At the scale cpu only rows on CIFAR-10 run: all forms with s = 2, and MHE with s = 0; rows on CIFAR-100 "
    "use a fifth of it if they are chosen by name. The source prints one number per data set for the "
    "baseline.",
)


# --- table 5.4 and figure 5.3


def _on(method: Method, *, hidden: bool, output: bool) -> dict[str, Any]:
    """Return the settings of an energy on hidden layers only, on the classifier only, or on both."""
    (regularizer,) = method.patch["regularizers"]
    weights = {"hidden": regularizer["hidden"] if hidden else 0.0, "output": 1.0 if output else 0.0}
    return {"regularizers": [{**regularizer, **weights}]}


_PLACES = {
    "O only (H no, O yes)": {"hidden": False, "output": True},
    "H only (H yes, O no)": {"hidden": True, "output": False},
    "H and O": {"hidden": True, "output": True},
}

LAYERS = Recipe(
    name="energy-layers",
    title="Energy of hidden layers, of the classifier, and of both",
    reference="table 5.4 of the thesis, CNN-9 on CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=(
        Row("Baseline", printed={"error": ("T5.4", "Baseline", "H and O")}),
        *(
            Row(
                f"{line}, {place.partition(' (')[0]}",
                _on(method, **layers),
                {"error": ("T5.4", line, place)},
                scales=settings.SCALES
                if place == "H and O" and line == "MHE"
                else LARGE
                if "A-" not in line
                else PAPER,
            )
            for line, method in _FORMS.items()
            for place, layers in _PLACES.items()
            if layers["hidden"] or not line.startswith("Half-space")  # half space cannot be used on the output layer
        ),
    ),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T5.4",),
    cost={"paper": 3000, "cpu": 0.5, "smoke": 0.01},
    baseline="Baseline",
    claims=(
        Claim("Energy of all layers is better than energy of the classifier.", "MHE, H and O", "MHE, O only"),
        Claim("Energy of hidden layers is better than energy of the classifier.", "MHE, H only", "MHE, O only"),
    ),
    note="At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels, 15 epochs, 16, 32 and 64 filters, and the weights of "
    f"the source in all rows. {_PAPER} The last column of the source repeats the numbers of the best power of table "
    "5.1; here s = 2 everywhere. No setting is tuned.",
)

_POWERS_OF_TEN = (0.01, 0.1, 1.0, 10.0, 100.0)
_WEIGHTED: dict[str, dict[str, Any]] = {
    "MHE (O)": {"half_space": False, "hidden": 0.0, "output": None},
    "MHE (H)": {"half_space": False, "hidden": None, "output": 0.0},
    "HS-MHE (H)": {"hidden": None, "output": 0.0},
}


def _weighted(options: dict[str, Any], weight: float) -> dict[str, Any]:
    """Return the settings of an energy with a weight at the place that is None."""
    filled = {key: weight if value is None else value for key, value in options.items()}
    return {"regularizers": [{"name": "mhe", **filled}]}


WEIGHTS = Recipe(
    name="energy-weights",
    title="The weight of the energy, from 0.01 to 100",
    reference="figure 5.3 of the thesis, CNN-9 on CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=(
        Row("Baseline"),
        *(
            Row(
                f"{line}, {weight:g}",
                _weighted(options, weight),
                scales=settings.SCALES if weight == 100 else LARGE if weight in (0.01, 1.0) else PAPER,
            )
            for line, options in _WEIGHTED.items()
            for weight in _POWERS_OF_TEN
        ),
    ),
    seeds=(0, 1),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("F5.3",),
    cost={"paper": 3500, "cpu": 0.5, "smoke": 0.01},
    baseline="Baseline",
    note="At the scale cpu: a fifth of CIFAR-10 at 16×16 pixels, 15 epochs, 16, 32 and 64 filters. The weight is what "
    f"is compared, so nothing is tuned; three of the five weights run. {_PAPER} The source draws curves over weights "
    "from 0.01 to 100 without printing the weights or the errors.",
)


# --- width and depth

_SCALABLE: dict[str, tuple[Method, str]] = {
    "Baseline": (BASELINE, "Baseline"),
    "MHE": (settings.FULL, "MHE [31]"),
    "HS-MHE": (settings.HALF, "HS-MHE [31]"),
    "RP-CoMHE": (settings.RANDOM, "RP-CoMHE"),
    "AP-CoMHE": (settings.UNROLLED, "AP-CoMHE"),
}


def _width_rows(t: int, scales: tuple[str, ...]) -> list[Row]:
    """Return the rows of CNN-9 with 16t, 32t and 64t filters, and a quarter of them at the scale cpu."""
    at = {
        "paper": {"model": {"widths": [16 * t, 32 * t, 64 * t]}},
        "cpu": {"model": {"widths": [4 * t, 8 * t, 16 * t]}},
        "smoke": {"model": {"widths": [4 * t] * 3}},
    }
    return [
        method_row(
            f"{name}, t={t}",
            method,
            {"error": ("T6.4", line, f"t={t}")},
            at=at,
            baseline=None if name == "Baseline" else f"Baseline, t={t}",
            scales=PAPER if name in ("MHE", "AP-CoMHE") else scales,
        )
        for name, (method, line) in _SCALABLE.items()
    ]


WIDTH = Recipe(
    name="energy-width",
    title="Energy and the width of CNN-9",
    reference="tables 5.2 and 6.4 of the thesis, on CIFAR-100",
    base=CIFAR["base"],
    scales=cifar_scales("mhe_cnn9"),
    rows=(
        *_width_rows(1, settings.SCALES),
        *_width_rows(2, LARGE),
        *_width_rows(4, PAPER),
        *_width_rows(8, PAPER),
        *_width_rows(16, PAPER),
        *_width_rows(20, PAPER),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T6.4", "T5.2"),
    cost={"paper": 100_000, "cpu": 0.8, "smoke": 0.01},
    figures=("error", "energy"),
    tuning=TUNING,
    claims=tuple(
        Claim(f"In a narrow network (t={t}), {name} has a lower error.", f"{name}, t={t}", source=source)
        for t in (1, 2)
        for name, source in (("HS-MHE", "T5.2"), ("RP-CoMHE", "T6.4"))
    ),
    note="16t, 32t and 64t filters. At the scale cpu a quarter of them (4, 8 and 16 filters for t = 1) on a fifth of "
    "CIFAR-10 at 16×16 pixels, 15 epochs; t = 4 is the network of the recipe energy-cnn. "
    f"{TUNED} {_PAPER} Numbers of the source are those of table 6.4; the baseline with t = 16 has another number in "
    "table 5.2.",
)


def _depth_rows(depth: int, per_stage: int, scales: tuple[str, ...]) -> list[Row]:
    network = {"model": {"depth": [per_stage] * 3}}
    return [
        method_row(
            f"{name}, CNN-{depth}",
            method,
            {"error": ("T6.5", line, f"CNN-{depth}")},
            patch=network,
            baseline=None if name == "Baseline" else f"Baseline, CNN-{depth}",
            scales=PAPER if name in ("MHE", "AP-CoMHE") else scales,
        )
        for name, (method, line) in _SCALABLE.items()
    ]


DEPTH = Recipe(
    name="energy-depth",
    title="Energy and the depth of a plain CNN",
    reference="tables 5.3 and 6.5 of the thesis, on CIFAR-100; CNN-15 does not converge without energy there (N/C)",
    base=CIFAR["base"],
    scales=merge(cifar_scales("mhe_cnn9"), {"cpu": {"model": {"widths": [12, 24, 48]}}}),
    rows=(*_depth_rows(6, 2, LARGE), *_depth_rows(9, 3, PAPER), *_depth_rows(15, 5, settings.SCALES)),
    seeds=(0, 1, 2, 3, 4),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T6.5", "T5.3"),
    cost={"paper": 20_000, "cpu": 1.6, "smoke": 0.01},
    figures=("error", "energy"),
    tuning=TUNING,
    claims=tuple(
        Claim(f"With {depth} layers, {name} has a lower error.", f"{name}, CNN-{depth}", source=s)
        for depth in (6, 15)
        for name, s in (("HS-MHE", "T5.3"), ("RP-CoMHE", "T6.5"))
    ),
    note="Two, three or five convolutions per stage. At the scale cpu: 12, 24 and 48 filters, a fifth of CIFAR-10 at "
    "16×16 pixels, 15 epochs. "
    f"{TUNED} {_PAPER} The source does not say when it calls a network not converged; "
    "a run whose loss is not finite is marked as diverged here.",
)

SPHERENET = Recipe(
    name="energy-spherenet",
    title="SphereNet-9 with energy",
    reference="table D.3 of the thesis, CNN-9 of cosine SphereConv on CIFAR-10 and CIFAR-100",
    base=merge(CIFAR["base"], {"operator": {"name": "sphere", "angular": "cosine"}}),
    scales=cifar_scales("mhe_cnn9"),
    rows=(
        *(
            method_row(
                f"SphereNet with Orthonormal Reg., {data}",
                settings.ORTHONORMAL,
                {"error": ("T-D.3", "SphereNet with Orthonormal Reg.", f"{data} s=2")},
                at=at,
                baseline=f"SphereNet Baseline, {data}",
                scales=LARGE if data == "CIFAR-10" else PAPER,
            )
            for data, at in _DATA.items()
        ),
        *_form_rows("T-D.3", "SphereNet Baseline", {("MHE", 2): settings.SCALES, ("Half-space MHE", 2): LARGE}),
    ),
    seeds=(0, 1, 2),
    metrics=(ERROR, ENERGY, SECONDS),
    covers=("T-D.3",),
    cost={"paper": 60_000, "cpu": 1.5, "smoke": 0.01},
    figures=("error", "energy"),
    tuning=TUNING,
    claims=(
        Claim("MHE improves SphereNet.", "MHE, CIFAR-10 s=2"),
        Claim("Half-space MHE improves SphereNet.", "Half-space MHE, CIFAR-10 s=2"),
    ),
    note=f"{_CPU} {_PAPER} SphereConv sees only the directions of filters, so weight decay has no effect on them. At "
    "the scale cpu the rows with s = 2 on CIFAR-10 run, without angular distances.",
)
