"""Plain and residual CNNs trained by rotation: every way to learn it, with and without BatchNorm, and freer variants.

Tables 7.1, 7.4, 7.5, 7.7 and 7.8 and figures 7.3 and F.2 of the thesis, table 6 of the OPT paper.
"""

from __future__ import annotations

from hypersphere.recipes.energy.networks import layer_curves
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE
from hypersphere.recipes.recipe import Claim, Outcome, Recipe, Row
from hypersphere.recipes.rotation.settings import (
    BASELINE,
    CNN_BASE,
    HALF,
    LARGE,
    METHODS,
    ON_CPU,
    PAPER,
    REGULARIZERS,
    SCALES,
    SMALL,
    SMALL_CNN,
    STATED,
    TINY_CNN,
    TRAINABLE_PARAMETERS,
    TUNED,
    TUNING,
    Method,
    cnn_scales,
    count_trainable_parameters,
    method_row,
    rotated,
    with_decay,
)
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["BARE", "CNN", "RESNET", "UNIT_NEURONS", "measure_layers"]

_METRICS = (ERROR, ENERGY, TRAINABLE_PARAMETERS, SECONDS)


def measure_layers(experiment: Experiment, run: Run) -> Outcome:
    """Count the trainable parameters, and return the energy of each layer after each validation."""
    return Outcome(count_trainable_parameters(experiment, run).metrics, layer_curves(experiment, run).curves)


# --- CNN-6 and CNN-9 (tables 7.1 and 7.4, figures 7.3 and F.2)

_COLUMNS = {"CNN-6": "opt_cnn6", "CNN-9": "opt_cnn9"}
_COMPARED: dict[str, Method] = {"Baseline": BASELINE, **REGULARIZERS, **METHODS}
_UNCONSTRAINED = with_decay(rotated("free", (0.01, 0.1)))
_UNCONSTRAINED_TRAINED = with_decay(rotated("free", (0.01, 0.1), learn_neurons=True))
_TRAINED_NEURONS = rotated("gram_schmidt", learn_neurons=True)
_FREER: dict[str, tuple[Method, str]] = {
    "UPT, trained neurons": (_UNCONSTRAINED_TRAINED, "UPT | FN N | LR U"),
    "UPT": (_UNCONSTRAINED, "UPT | FN Y | LR U"),
    "OPT (GS), trained neurons": (_TRAINED_NEURONS, "OPT | FN N | LR GS"),
}
_SMALL_ROWS = ("Baseline", "HS-MHE", "OPT (GS)", "OPT (CP)", "OPT (OGD)", "OPT (OR)")


def _scales(column: str, name: str) -> tuple[str, ...]:
    if column != "CNN-6":
        return PAPER
    if name in ("Baseline", "OPT (GS)", "UPT"):
        return SCALES
    return LARGE if name in _SMALL_ROWS or name in _FREER else PAPER


def _rows() -> list[Row]:
    rows = []
    for column, model in _COLUMNS.items():
        network = {"model": {"name": model, "norm": "batch"}}
        for name, method in _COMPARED.items():
            # The thesis has fewer rows than the paper.
            place = ("O-T6", name, f"CIFAR-100 {column}") if name in ("Orthogonal", "SRIP") else ("T7.4", name, column)
            rows.append((f"{name}, {column}", method, place, network, _scales(column, name)))
        for name, (method, line) in _FREER.items():
            rows.append((f"{name}, {column}", method, ("T7.1", line, column), network, _scales(column, name)))
    return [
        method_row(
            name,
            method,
            {"error": place},
            patch=network,
            at={"cpu": {"model": SMALL_CNN}, "smoke": {"model": TINY_CNN}},
            baseline=None if name.startswith("Baseline") else f"Baseline, {name[-5:]}",
            scales=scales,
        )
        for name, method, place, network, scales in rows
    ]


def _better(text: str, better: str, than: str, metric: str = "error", source: str = "T7.4") -> Claim:
    return Claim(text, f"{better}, CNN-6", f"{than}, CNN-6", metric, source)


CNN = Recipe(
    name="opt-cnn",
    title="CNN-6 and CNN-9 trained by rotation",
    reference="tables 7.1 and 7.4 and figures 7.3 and F.2 of the thesis, table 6 of the OPT paper",
    base=CNN_BASE,
    scales=merge(cnn_scales(), {"cpu": {"validation": {"every": 1}}}),  # the curves are figures of the source
    rows=tuple(_rows()),
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    covers=("T7.1", "T7.4", "O-T6", "F7.3", "F-F.2"),
    cost={"paper": 8000, "cpu": 1.5, "smoke": 0.01},
    measure=measure_layers,
    figures=("error", "energy"),
    tuning=TUNING,
    claims=(
        *(
            _better(f"{name} has a lower error than plain training.", name, "Baseline")
            for name in ("OPT (GS)", "OPT (CP)", "OPT (OGD)", "OPT (OR)")
        ),
        _better("OPT (GS) has a lower error than half-space MHE.", "OPT (GS)", "HS-MHE"),
        _better("Plain training has a lower error than an unconstrained matrix.", "Baseline", "UPT", source="T7.1"),
        _better("An orthogonal matrix is better than an unconstrained one.", "OPT (GS)", "UPT", source="T7.1"),
        _better("Fixed neurons are better than trained ones.", "OPT (GS)", "OPT (GS), trained neurons", source="T7.1"),
        _better("Fixed neurons are better also without orthogonality.", "UPT", "UPT, trained neurons", source="T7.1"),
        _better("Rotation ends with a lower energy.", "OPT (GS)", "Baseline", "energy", "F7.3"),
        _better("Half-space MHE ends with a lower energy.", "HS-MHE", "Baseline", "energy", "F7.3"),
    ),
    note=f"{ON_CPU} {TUNED} UPT has an unconstrained R with weight decay: two rates and two decays are tried. {STATED} "
    "Rotations act on all layers except the classifier. Table 6 of the paper also has a perceptron (recipe opt-mlp) "
    "and residual networks (opt-resnet). The weights of the regularisers are not printed; those of chapters 5 and 6 "
    "are used. The curves show the half-space energy with s = 2, averaged over pairs and layers, and of each layer; "
    "the source sums it over layers. OGD on CNN-6 is 33.33 in table 7.4 and 33.37 in table 7.7.",
)

# --- without BatchNorm (table 7.5)

_BARE_RATES = {"optimizer.lr": (0.1, 0.03), "optimizer.rotation_lr": (0.3, 1.0)}
_BARE_GRIDS = {
    **dict.fromkeys(("OPT (GS)", "OPT (HR)", "OPT (LS)", "OPT (CP)"), _BARE_RATES),
    "OPT (OGD)": {"optimizer.lr": (0.1, 0.03), "optimizer.rotation_lr": (0.03, 0.1)},
    "OPT (OR)": {"optimizer.lr": (0.1, 0.03), "optimizer.rotation_lr": (0.03, 0.1)},
}
_BARE_METHODS = {"Baseline": BASELINE, "HS-MHE": HALF, **METHODS}
_BARE_SCALES = {"OPT (HR)": PAPER, "OPT (LS)": PAPER, "Baseline": SCALES, "OPT (CP)": SCALES}

BARE = Recipe(
    name="opt-cnn-bare",
    title="CNN-6 without BatchNorm trained by rotation",
    reference="table 7.5 of the thesis, table 5 of the OPT paper",
    base=merge(CNN_BASE, {"model": {"norm": "none"}}),
    scales=cnn_scales(),
    rows=tuple(
        method_row(
            name, method, {"error": ("T7.5", name)}, grid=_BARE_GRIDS.get(name), scales=_BARE_SCALES.get(name, LARGE)
        )
        for name, method in _BARE_METHODS.items()
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    covers=("T7.5",),
    cost={"paper": 2000, "cpu": 0.8, "smoke": 0.01},
    measure=count_trainable_parameters,
    figures=("error", "energy"),
    baseline="Baseline",
    tuning=TUNING,
    claims=tuple(
        Claim(f"Without BatchNorm, {name} has a lower error than {than}.", name, row)
        for name in ("OPT (GS)", "OPT (CP)", "OPT (OGD)")
        for than, row in (("plain training", "Baseline"), ("half-space MHE", "HS-MHE"))
    ),
    note=f"{ON_CPU} Each row has four trials on a fifth of the training images: rotations two learning rates of R and "
    "two of all other parameters, plain training two learning rates and two weight decays, half-space MHE two weights "
    f"and two weight decays. {STATED} Whether the source changes the learning rate without BatchNorm is not stated. "
    "OPT (OR) did not converge in the source.",
)

# --- unit neurons (table 7.7)

_NORMS = {"w/o Norm": False, "w/ Norm": True}


def _with_norm(method: Method, normalize: bool) -> Method:
    chosen = method.patch.get("rotation", {"name": "none"})
    return Method(merge(method.patch, {"rotation": {**chosen, "normalize": normalize}}), method.grid, method.paper)


def _norm_rows() -> list[Row]:
    rows = []
    for name, method in {"Baseline": BASELINE, **METHODS}.items():
        for column, normalize in _NORMS.items():
            scales = SCALES if name == "OPT (CP)" else LARGE if name in ("Baseline", "OPT (LS)") else PAPER
            rows.append(
                method_row(
                    f"{name}, {column}",
                    _with_norm(method, normalize),
                    {"error": ("T7.7", name, column)},
                    baseline=f"{name}, w/o Norm" if normalize else None,
                    scales=scales,
                )
            )
    return rows


UNIT_NEURONS = Recipe(
    name="opt-unit-neurons",
    title="Random neurons scaled to norm 1 before training",
    reference="table 7.7 of the thesis, table 3 of the OPT paper",
    base=CNN_BASE,
    scales=cnn_scales(),
    rows=tuple(_norm_rows()),
    seeds=(0, 1, 2),
    metrics=_METRICS,
    covers=("T7.7",),
    cost={"paper": 4000, "cpu": 0.6, "smoke": 0.01},
    measure=count_trainable_parameters,
    figures=("error", "energy"),
    tuning=TUNING,
    claims=tuple(
        Claim(f"Unit neurons improve {text}.", f"{name}, w/ Norm")
        for name, text in (("Baseline", "plain training"), ("OPT (LS)", "OPT (LS)"), ("OPT (CP)", "OPT (CP)"))
    ),
    note=f"{ON_CPU} {TUNED} {STATED} Neurons are scaled once, before training; a rotation keeps their norms, plain "
    "training does not (the source does not say how its baseline is normalised). The network has BatchNorm, so norms "
    "change the size of steps rather than the functions that can be learned.",
)

# --- residual networks (table 7.8)

_RESNETS = {"ResNet-20": "resnet20", "ResNet-32": "resnet32"}
_THESIS = ("Baseline", "OPT (GS)", "OPT (CP)")  # the other lines are only in the paper


def _residual_rows() -> list[Row]:
    return [
        method_row(
            f"{name}, {column}",
            method,
            {"error": ("T7.8", name, column) if name in _THESIS else ("O-T6", name, f"CIFAR-100 {column}")},
            patch={"model": {"name": model}},
            at={
                "cpu": {"model": {"depths": [1, 1, 1], "widths": [8, 16, 32]}},
                "smoke": {"model": {"depths": [1, 1], "widths": [4, 4]}},
            },
            baseline=None if name == "Baseline" else f"Baseline, {column}",
            scales=(SCALES if name != "OPT (GS)" else LARGE) if name in _THESIS and column == "ResNet-20" else PAPER,
        )
        for column, model in _RESNETS.items()
        for name, method in _COMPARED.items()
    ]


RESNET = Recipe(
    name="opt-resnet",
    title="Residual networks trained by rotation",
    reference="table 7.8 of the thesis, table 6 of the OPT paper",
    base=CIFAR["base"],
    scales={"paper": cnn_scales()["paper"], "cpu": SMALL, "smoke": SMOKE},
    rows=tuple(_residual_rows()),
    seeds=(0, 1, 2, 3, 4),
    metrics=_METRICS,
    covers=("T7.8",),
    cost={"paper": 6000, "cpu": 0.5, "smoke": 0.01},
    measure=count_trainable_parameters,
    figures=("error", "energy"),
    tuning=TUNING,
    claims=tuple(
        Claim(f"{name} improves a residual network.", f"{name}, ResNet-20") for name in ("OPT (GS)", "OPT (CP)")
    ),
    note="At the scale cpu: ResNet-8, one block per stage of 8, 16 and 32 filters, 10,000 images of CIFAR-10 at 16×16 "
    f"pixels, 15 epochs; rotations start at the identity. {TUNED} {STATED} Shortcuts have no weights. The thesis "
    "prints for OPT (GS) the numbers that the paper prints for OPT (HR), which are therefore the same in both rows; "
    "the paper has 30.49 and 29.34 for OPT (GS).",
)
