"""Plain and residual CNNs trained by rotation: all parametrisations, with and without BatchNorm, and freer variants.

Tables 7.1, 7.4, 7.5, 7.7 and 7.8 and figures 7.3 and F.2 of the thesis, tables 6 and 7 of the OPT paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypersphere.recipes.architectures.imagenet import PROTOCOL, measure_top5
from hypersphere.recipes.energy.networks import layer_curves
from hypersphere.recipes.energy.settings import BASELINE, HALF, ORTHOGONAL, SMALL, TUNING
from hypersphere.recipes.protocols import CIFAR, ENERGY, ERROR, SECONDS, SMOKE, stepwise
from hypersphere.recipes.recipe import Claim, Method, Metric, Outcome, Patch, Recipe, Row, cells, table_rows
from hypersphere.recipes.rotation import settings
from hypersphere.recipes.rotation.settings import CAYLEY, DESCENT
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["BARE", "CNN", "IMAGENET", "RESNET", "UNIT_NEURONS", "measure_layers"]


def measure_layers(experiment: Experiment, run: Run) -> Outcome:
    """Count the trainable parameters, and return the energy of each layer after each validation."""
    return Outcome(settings.count_trainable_parameters(experiment, run).metrics, layer_curves(experiment, run).curves)


# --- CNN-6 and CNN-9 (tables 7.1 and 7.4, figures 7.3 and F.2)

_COLUMNS = {"CNN-6": "opt_cnn6", "CNN-9": "opt_cnn9"}
_COMPARED: dict[str, Method] = {**settings.PLAIN, **settings.METHODS}
_FREER = {
    "UPT, trained neurons": settings.with_decay(settings.rotated("free", (0.01, 0.1), learn_neurons=True)),
    "UPT": settings.with_decay(settings.rotated("free", (0.01, 0.1))),
    "OPT (GS), trained neurons": settings.rotated("gram_schmidt", learn_neurons=True),
}
_FREER_LINES = ("UPT | FN N | LR U", "UPT | FN Y | LR U", "OPT | FN N | LR GS")
_ON_CPU = ("Baseline", "HS-MHE", "OPT (GS)", "OPT (CP)", "OPT (OGD)", "OPT (OR)")


def _compared_rows(
    source: str, names: Sequence[str], columns: Mapping[str, Patch], at: Mapping[str, Patch]
) -> list[Row]:
    """Return the rows of `_COMPARED`: those in `names` with the numbers of `source`, the others with those of OPT."""
    rows: list[Row] = []
    for column, network in columns.items():
        for line, method in _COMPARED.items():
            table = source if line in names else "O-T6"
            rows += table_rows(
                table,
                {line: method},
                {column: network},
                baseline="Baseline",
                at={column: at},
                in_source={} if line in names else {column: f"CIFAR-100 {column}"},
            )
    return rows


def _cnn_rows() -> list[Row]:
    at = {"cpu": {"model": settings.SMALL_CNN}, "smoke": {"model": settings.TINY_CNN}}
    rows: list[Row] = []
    for column, model in _COLUMNS.items():
        network = {column: {"model": {"name": model, "norm": "batch"}}}
        # The thesis has fewer rows than the paper.
        rows += _compared_rows("T7.4", ["Baseline", "HS-MHE", *settings.METHODS], network, at)
        freer = dict(zip(_FREER, _FREER_LINES, strict=True))
        rows += table_rows("T7.1", _FREER, network, baseline="Baseline", at={column: at}, in_source=freer)
    return rows


CNN = settings.rotation_recipe(
    name="opt-cnn",
    title="CNN-6 and CNN-9 trained by rotation",
    reference="tables 7.1 and 7.4 and figures 7.3 and F.2 of the thesis, table 6 of the OPT paper",
    scales=merge(settings.cnn_scales(), {"cpu": {"validation": {"every": 1}}}),  # the curves are figures of the source
    rows=tuple(_cnn_rows()),
    default_rows={
        "cpu": cells([*_ON_CPU, *_FREER], ["CNN-6"]),
        "smoke": cells(["Baseline", "OPT (GS)", "UPT"], ["CNN-6"]),
    },
    covers=("T7.1", "T7.4", "O-T6", "F7.3", "F-F.2"),
    cost={"paper": 8000, "cpu": 1.5, "smoke": 0.01},
    measure=measure_layers,
    claims=(
        *(
            Claim(f"{name} has a lower error than plain training.", f"{name}, CNN-6", source="T7.4")
            for name in ("OPT (GS)", "OPT (CP)", "OPT (OGD)", "OPT (OR)")
        ),
        Claim("OPT (GS) has a lower error than half-space MHE.", "OPT (GS), CNN-6", "HS-MHE, CNN-6", source="T7.4"),
        Claim("Plain training has a lower error than an unconstrained matrix.", "Baseline, CNN-6", "UPT, CNN-6"),
        Claim("An orthogonal matrix is better than an unconstrained one.", "OPT (GS), CNN-6", "UPT, CNN-6"),
        Claim("Fixed neurons are better than trained ones.", "OPT (GS), CNN-6", "OPT (GS), trained neurons, CNN-6"),
        Claim("Fixed neurons are better also without orthogonality.", "UPT, CNN-6", "UPT, trained neurons, CNN-6"),
        Claim("Rotation ends with a lower energy.", "OPT (GS), CNN-6", metric="energy", source="F7.3"),
        Claim("Half-space MHE ends with a lower energy.", "HS-MHE, CNN-6", metric="energy", source="F7.3"),
    ),
    note=f"{settings.ON_CPU} {settings.TUNED} UPT has an unconstrained R with weight decay: two rates and two decays "
    f"are tried. {settings.STATED} Rotations act on all layers except the classifier. Table 6 of the paper also has a "
    "perceptron (recipe opt-mlp) and residual networks (opt-resnet). The weights of the regularisers are not printed; "
    "those of chapters 5 and 6 are used. The curves show the half-space energy with s = 2, averaged over pairs and "
    "layers, and of each layer; the source sums it over layers. OGD on CNN-6 is 33.33 in table 7.4 and 33.37 in table "
    "7.7.",
)

# --- without BatchNorm (table 7.5)

_RATES = {
    **dict.fromkeys(("OPT (GS)", "OPT (HR)", "OPT (LS)", "OPT (CP)"), (0.3, 1.0)),
    **dict.fromkeys(("OPT (OGD)", "OPT (OR)"), (0.03, 0.1)),
}
_NO_BATCH_NORM = {
    name: replace(method, grid={"optimizer.lr": (0.1, 0.03), "optimizer.rotation_lr": _RATES[name]})
    for name, method in settings.METHODS.items()
}

BARE = settings.rotation_recipe(
    name="opt-cnn-bare",
    title="CNN-6 without BatchNorm trained by rotation",
    reference="table 7.5 of the thesis, table 5 of the OPT paper",
    base=merge(settings.CNN_BASE, {"model": {"norm": "none"}}),
    rows=table_rows("T7.5", {"Baseline": BASELINE, "HS-MHE": HALF, **_NO_BATCH_NORM}),
    default_rows={"cpu": _ON_CPU, "smoke": ["Baseline", "OPT (CP)"]},
    covers=("T7.5",),
    cost={"paper": 2000, "cpu": 0.8, "smoke": 0.01},
    baseline="Baseline",
    claims=tuple(
        Claim(f"Without BatchNorm, {name} has a lower error than {than}.", name, row)
        for name in ("OPT (GS)", "OPT (CP)", "OPT (OGD)")
        for than, row in (("plain training", "Baseline"), ("half-space MHE", "HS-MHE"))
    ),
    note=f"{settings.ON_CPU} Each row has four trials on a fifth of the training images: rotations two learning rates "
    "of R and two of all other parameters, plain training two learning rates and two weight decays, half-space MHE two "
    f"weights and two weight decays. {settings.STATED} Whether the source changes the learning rate without BatchNorm "
    "is not stated. OPT (OR) did not converge in the source.",
)

# --- unit neurons (table 7.7)

_NORMS = {"w/o Norm": False, "w/ Norm": True}


def _norm_row(name: str, column: str) -> Row:
    method = _COMPARED[name]
    rotation = method.patch.get("rotation", {"name": "none"})
    patch = merge(method.patch, {"rotation": {**rotation, "normalize": _NORMS[column]}})
    (row,) = table_rows("T7.7", {name: replace(method, patch=patch)}, {column: {}})
    return replace(row, baseline=f"{name}, w/o Norm") if _NORMS[column] else row


UNIT_NEURONS = settings.rotation_recipe(
    name="opt-unit-neurons",
    title="Random neurons scaled to norm 1 before training",
    reference="table 7.7 of the thesis, table 3 of the OPT paper",
    rows=tuple(_norm_row(name, column) for name in ("Baseline", *settings.METHODS) for column in _NORMS),
    default_rows={"cpu": cells(["Baseline", "OPT (LS)", "OPT (CP)"], _NORMS), "smoke": cells(["OPT (CP)"], _NORMS)},
    seeds=(0, 1, 2),
    covers=("T7.7",),
    cost={"paper": 4000, "cpu": 0.6, "smoke": 0.01},
    claims=tuple(
        Claim(f"Unit neurons improve {text}.", f"{name}, w/ Norm")
        for name, text in (("Baseline", "plain training"), ("OPT (LS)", "OPT (LS)"), ("OPT (CP)", "OPT (CP)"))
    ),
    note=f"{settings.ON_CPU} {settings.TUNED} {settings.STATED} Neurons are scaled once, before training; a rotation "
    "keeps their norms, plain training does not (the source does not say how its baseline is normalised). The network "
    "has BatchNorm, so norms change the size of steps rather than the functions that can be learned.",
)

# --- residual networks (table 7.8)

_THESIS = ("Baseline", "OPT (GS)", "OPT (CP)")  # the other lines are only in the paper

RESNET = settings.rotation_recipe(
    name="opt-resnet",
    title="Residual networks trained by rotation",
    reference="table 7.8 of the thesis, table 6 of the OPT paper",
    base=CIFAR["base"],
    scales={"paper": settings.cnn_scales()["paper"], "cpu": SMALL, "smoke": SMOKE},
    rows=tuple(
        _compared_rows(
            "T7.8",
            _THESIS,
            {f"ResNet-{depth}": {"model": {"name": f"resnet{depth}"}} for depth in (20, 32)},
            {
                "cpu": {"model": {"depths": [1, 1, 1], "widths": [8, 16, 32]}},
                "smoke": {"model": {"depths": [1, 1], "widths": [4, 4]}},
            },
        )
    ),
    default_rows={"cpu": cells(_THESIS, ["ResNet-20"]), "smoke": cells(["Baseline", "OPT (CP)"], ["ResNet-20"])},
    covers=("T7.8",),
    cost={"paper": 6000, "cpu": 0.5, "smoke": 0.01},
    claims=tuple(
        Claim(f"{name} improves a residual network.", f"{name}, ResNet-20") for name in ("OPT (GS)", "OPT (CP)")
    ),
    note="At the scale cpu: ResNet-8 on 10,000 images of CIFAR-10 at 16×16 pixels; rotations start at the identity. "
    f"{settings.TUNED} {settings.STATED} Shortcuts have no weights. The thesis prints for OPT (GS) the numbers that "
    "the paper prints for OPT (HR), which are therefore the same in both rows; the paper has 30.49 and 29.34 for OPT "
    "(GS).",
)

# --- ImageNet (table 7 of the OPT paper)

_IMAGENET_METHODS = {
    "Baseline": BASELINE,
    "Orthogonal": ORTHOGONAL,
    "HS-MHE": HALF,
    "OPT (OGD)": DESCENT,
    "OPT (CP)": CAYLEY,
}

IMAGENET = Recipe(
    name="opt-imagenet",
    title="CNN-10 on ImageNet, trained by rotation",
    reference="table 7 of the OPT paper (table 7.9 of the thesis)",
    base={**CIFAR["base"], "model": {"name": "cnn10"}},
    scales={
        "paper": {
            **{key: PROTOCOL[key] for key in ("data", "augment")},
            "model": {"image_size": 224},  # size of the windows; images have 256×256 pixels
            "init": "he",
            "optimizer": {"weight_decay": 5e-4, "decay_everything": True},
            **stepwise(700_000, [280_000, 467_000, 597_000]),
        },
        "cpu": {
            **SMALL,
            "data": {"name": "cifar10", "limit": 10_000},
            "model": {"widths": [16, 24, 32], "feature_dim": 64},
        },
        "smoke": {**SMOKE, "model": {"name": "opt_cnn6", "widths": [4, 4, 4], "feature_dim": 8}},
    },
    rows=tuple(
        replace(row, printed={"error": ("O-T7", row.name, "Top-1"), "top5_error": ("O-T7", row.name, "Top-5")})
        for row in table_rows("O-T7", _IMAGENET_METHODS)
    ),
    default_rows={"cpu": ["Baseline", "HS-MHE", "OPT (OGD)", "OPT (CP)"], "smoke": ["Baseline", "OPT (CP)"]},
    seeds=(0, 1, 2),
    metrics=(ERROR, Metric("top5_error", "top-5 error %", ".2f", False), ENERGY, SECONDS),
    covers=("O-T7",),
    cost={"paper": 60_000, "cpu": 0.5, "smoke": 0.01},
    measure=measure_top5,
    figures=("error", "top5_error"),
    baseline="Baseline",
    tuning=TUNING,
    claims=tuple(Claim(f"{name} improves CNN-10.", name) for name in ("OPT (CP)", "OPT (OGD)")),
    note="At the scale paper: 700,000 steps of 128 images at the rate 0.1, divided by ten after 40, 67 and 85 % of "
    "them (the source: when saturated), weight decay 5e-4 on everything; images resized to 256×256, random windows of "
    "224×224 pixels, mirrored, and the central window for validation (appendix B.2 of the thesis, which the paper "
    "refers to); free parameters from N(0, 1), OGD from the identity at the rate 0.02. The weights of the regularisers "
    "are not printed; those of chapters 5 and 6 are used. At the scale cpu, as a weak stand-in: the same architecture, "
    f"with its 7×7 stem, on 10,000 images of CIFAR-10 at 32×32 pixels. {settings.TUNED}",
)
