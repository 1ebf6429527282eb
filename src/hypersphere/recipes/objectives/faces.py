"""Faces: losses, margins, depth and ablations, tested on LFW, YTF and MegaFace (section 2.3, A.5, A.6, table 2.5).

The thesis trains on CASIA-WebFace. At the cpu scale, networks are trained on LFW itself: on the people of nine folds,
and tested on the pairs of the tenth.
"""

from __future__ import annotations

from typing import Any

from hypersphere.recipes import face_protocol as protocol
from hypersphere.recipes.recipe import Claim, Row, Tuning, cells

__all__ = ["ABLATION", "DEPTH", "LFW", "LOSSES", "L_SOFTMAX"]

NOTE = (
    "At the cpu scale, 96×112 faces of LFW are reduced to 48×56 grey pixels. The people of nine folds of View 2 with "
    "at least 4 photographs (about 540 people, 5,900 faces) are the training data, the 600 pairs of the remaining "
    "fold the test data; seed k tests fold k, so that rows are compared fold by fold. Fold 0 was used to choose the "
    "length of training and the annealing, so it is not tested. The threshold is the best one for 1,000 pairs of each "
    "kind of people in the other folds who have two or three photographs and are not trained on. Images of the test "
    "fold are ranked among the photographs of about 3,600 people who have only one, instead of a million distractors, "
    "and TAR is that at a false accept rate of 0.1 % instead of 1e-6. Trials hold out a tenth of the training people "
    "of fold 0; as in View 1 of LFW, these people also occur in the folds that are tested. The thesis trains on 0.49 "
    "million faces, so only the order of rows can be compared. At the paper scale the thesis does not state momentum, "
    "weight decay, activation, the size of the faces and the schedule of λ; those of the released code are used (0.9, "
    "5e-4, PReLU, 112×96, λ = 1000/(1 + 0.12t) down to 5). The cpu scale has the same λ, which falls to 5.5 in its "
    "1,520 steps, or to 15 in rows whose trials prefer that. The folds share most of their training people, so the "
    "intervals are somewhat too narrow. Videos of YTF are compared by the mean features of up to 100 frames, which "
    "the thesis does not state."
)
RATES: dict[str, list[Any]] = {"optimizer.lr": [0.05, 0.1, 0.2, 0.4]}
# Half as many rates, and two ends of the annealing: the same number of trials.
RATES_AND_ENDS: dict[str, list[Any]] = {"optimizer.lr": [0.1, 0.2], "head.annealing.end": [5, 15]}
# Trials use the training people of fold 0.
TUNING = Tuning(RATES, metric="accuracy", seeds=(0,))


def _scales(paper: dict[str, Any] | str, units: list[int]) -> dict[str, dict[str, Any]]:
    return {
        "paper": {**protocol.FACES["paper"], "model": paper},
        "cpu": {**protocol.FACES["cpu"], "model": protocol.cpu_network(units)},
        "smoke": {**protocol.FACES["smoke"], "model": protocol.smoke_network(units)},
    }


def _margin_row(m: int) -> Row:
    printed = {"accuracy": ("T2.8", "LFW", f"m={m}"), "ytf": ("T2.8", "YTF", f"m={m}")}
    return Row(f"m={m}", {"head": protocol.a_softmax(m)}, printed, grid=RATES_AND_ENDS if m > 1 else None)


LFW = protocol.face_recipe(
    name="lfw",
    title="Verification of faces with growing margins",
    reference="table 2.8 of the thesis",
    scales=_scales("sphereface64", [0, 0, 0, 0]),
    rows=(
        Row(
            "Original softmax",
            {"head": "softmax"},
            {"accuracy": ("T2.8", "LFW", "Original softmax"), "ytf": ("T2.8", "YTF", "Original softmax")},
        ),
        *map(_margin_row, (1, 2, 3, 4)),
    ),
    seeds=tuple(range(1, 7)),
    metrics=(
        protocol.ACCURACY,
        protocol.YTF,
        protocol.EER,
        protocol.RANK1,
        protocol.TAR,
        protocol.FISHER,
        protocol.SEPARATION,
    ),
    covers=("T2.8",),
    cost={"paper": 20000, "cpu": 0.7, "smoke": 0.01},
    baseline="Original softmax",
    tuning=TUNING,
    claims=(
        Claim("A margin of m = 4 verifies faces better than softmax.", "m=4"),
        Claim("A margin of m = 4 verifies faces better than m = 1.", "m=4", "m=1"),
        Claim("A margin of m = 4 gives a lower Fisher score than m = 1.", "m=4", "m=1", "fisher", "T-A.1"),
    ),
    note=f"{NOTE} The network is SphereFace-4 with batch normalisation at the cpu scale.",
)

_TRIPLET = {
    "name": "metric_learning",
    # Unit features, squared distances, a margin of 0.2 and semi-hard triplets, as in FaceNet.
    "loss": {"name": "TripletMarginLoss", "margin": 0.2, "distance": {"name": "LpDistance", "power": 2}},
    "miner": {"name": "TripletMarginMiner", "margin": 0.2, "type_of_triplets": "semihard"},
    "softmax_weight": 0.0,
}
_CONTRASTIVE = {"name": "metric_learning", "loss": "ContrastiveLoss", "loss_weight": 0.1}
_FOUR_PER_PERSON = {"sampler": {"name": "m_per_class", "m": 4}}
# Names of the same row in tables 2.9, 2.10 and 5.10, with its settings.
_LOSSES: dict[str, tuple[str | None, str, dict[str, Any]]] = {
    "Softmax Loss": ("Softmax Loss", "Softmax Loss", {"head": "softmax"}),
    "Softmax+Contrastive [36]": (
        "Softmax+Contrastive Loss [36]",
        "Softmax+Contrastive [36]",
        {"head": _CONTRASTIVE, **_FOUR_PER_PERSON},
    ),
    "Triplet Loss [34]": ("Triplet Loss [34]", "Triplet Loss [34]", {"head": _TRIPLET, **_FOUR_PER_PERSON}),
    "L-Softmax Loss [9]": (
        "L-Softmax Loss [9]",
        "L-Softmax Loss [9]",
        {"head": {"name": "l_softmax", "m": 4, "annealing": protocol.SOURCE_ANNEALING}},
    ),
    "Softmax+Center Loss [63]": ("Softmax+Center Loss [63]", "Softmax+Center Loss [63]", {"head": "center"}),
    "SphereFace": ("SphereFace (single model)", "SphereFace", {"head": protocol.a_softmax(4)}),
    "CosineFace": (None, "CosineFace [13, 14]", {"head": {"name": "am_softmax", "s": 30.0, "m": 0.35}}),
    "SphereFace+": (None, "SphereFace+ (ours)", {"head": protocol.a_softmax(4, energy_weight=1.0)}),
}
_LOSS_GRIDS: dict[str, dict[str, list[Any]]] = {
    "Softmax+Contrastive [36]": {"optimizer.lr": [0.1, 0.2], "head.loss_weight": [0.1, 1.0]},
    "L-Softmax Loss [9]": RATES_AND_ENDS,
    "Softmax+Center Loss [63]": {"optimizer.lr": [0.1, 0.2], "head.center_weight": [0.003, 0.03]},
    "SphereFace": RATES_AND_ENDS,
    "CosineFace": {"optimizer.lr": [0.1, 0.2], "head.m": [0.35, 0.2]},
    "SphereFace+": {"optimizer.lr": [0.1, 0.2], "head.energy_weight": [1.0, 0.1]},
}


def _loss_row(name: str) -> Row:
    """Return the row of a loss, with the numbers of tables 2.9 and 2.10, or of table 5.10 if it is only there."""
    in_megaface, in_energy, patch = _LOSSES[name]
    printed: dict[str, Any] = {"accuracy": ("T5.10", in_energy, "LFW"), "rank1": ("T5.10", in_energy, "MegaFace")}
    if in_megaface is not None:
        printed = {
            "accuracy": ("T2.9", name, "LFW"),
            "ytf": ("T2.9", name, "YTF"),
            "rank1": ("T2.10", in_megaface, "Rank1 Acc."),
            "tar": ("T2.10", in_megaface, "Ver."),
        }
    return Row(name, patch, printed, grid=_LOSS_GRIDS.get(name))


LOSSES = protocol.face_recipe(
    name="face-losses",
    title="Losses for faces: verification, and identification among a million distractors",
    reference="tables 2.9, 2.10 and 5.10 and figure 2.12 of the thesis",
    scales=_scales("sphereface64", [0, 0, 0, 0]),
    rows=tuple(map(_loss_row, _LOSSES)),
    metrics=(protocol.ACCURACY, protocol.YTF, protocol.RANK1, protocol.TAR, protocol.EER, protocol.FISHER),
    covers=("T2.9", "T2.10", "F2.12", "T5.10"),
    cost={"paper": 32000, "cpu": 1.5, "smoke": 0.01},
    figures=("cmc", "roc"),
    baseline="Softmax Loss",
    tuning=TUNING,
    claims=(
        Claim("SphereFace verifies faces better than softmax.", "SphereFace"),
        Claim("SphereFace identifies faces better than softmax.", "SphereFace", metric="rank1", source="T2.10"),
        Claim("SphereFace verifies better than triplets.", "SphereFace", "Triplet Loss [34]"),
        Claim("SphereFace+ verifies better than SphereFace.", "SphereFace+", "SphereFace", source="T5.10"),
    ),
    note=f"{NOTE} Contrastive and triplet loss are those of pytorch-metric-learning, with four photographs per person "
    "in a batch; triplets follow FaceNet (margin 0.2, semi-hard), because the thesis states no settings. The weights "
    "of contrastive and centre loss were cross-validated in the thesis but are not printed: 0.1 and 0.003 at the paper "
    "scale, tuned at the cpu scale. CosineFace is cited there, from the paper that introduced it. SphereFace+ is "
    "trained from scratch here; recipe sphereface-plus has the two stages of the source. Rows of tables 2.9 and 2.10 "
    "that cite other systems are not run, nor is the three-patch ensemble, whose patches are not printed "
    "(evaluation.patch_features computes its features). Numbers of table 5.10 that repeat tables 2.9 and 2.10 are "
    "shown as printed there.",
)

_UNITS = {4: [0, 0, 0, 0], 10: [0, 1, 2, 0], 20: [1, 2, 4, 1], 36: [2, 4, 8, 2], 64: [3, 8, 16, 3]}


def _depth_rows(depth: int) -> list[Row]:
    """Return the rows of softmax and A-Softmax for a depth, with the numbers that figure 2.11 and table A.2 print."""
    networks: dict[str, dict[str, Any]] = {
        "paper": {"model": f"sphereface{depth}"},
        "cpu": {"model": {"units": _UNITS[depth]}},
        "smoke": {"model": {"units": _UNITS[min(depth, 10)]}},
    }
    printed: dict[str, dict[str, Any]] = {"Softmax": {}, "A-Softmax (m=4)": {}}
    for loss, numbers in printed.items():
        column = {4: "4 layers", 64: "64 layers (deepest)"}.get(depth)
        if column:
            numbers |= {"accuracy": ("F2.11", loss, f"LFW {column}"), "ytf": ("F2.11", loss, f"YTF {column}")}
    rows = {"A-Softmax (m=4)": f"SphereFace ({depth} conv layers)", "Softmax": f"Softmax Loss ({depth} conv layers)"}
    for loss, row in rows.items():
        if loss == "A-Softmax (m=4)" or depth == 64:
            rank, tar = "Rank-1 Id. Acc. with 1M distractors", "Ver. TAR for 1e-6 FAR"
            printed[loss] |= {"rank1": ("T-A.2", row, rank), "tar": ("T-A.2", row, tar)}
    softmax = Row(f"Softmax, {depth} layers", {"head": "softmax"}, printed["Softmax"], networks)
    name, head = f"A-Softmax (m=4), {depth} layers", protocol.a_softmax(4)
    margin = Row(name, {"head": head}, printed["A-Softmax (m=4)"], networks, baseline=softmax.name)
    return [softmax, margin]


_SHALLOW = cells(["Softmax", "A-Softmax (m=4)"], ["4 layers", "10 layers", "20 layers"])
DEPTH = protocol.face_recipe(
    name="face-depth",
    title="Margins in networks of 4 to 64 layers",
    reference="figure 2.11 and table A.2 of the thesis",
    scales=_scales("sphereface64", [0, 0, 0, 0]),
    rows=tuple(row for depth in _UNITS for row in _depth_rows(depth)),
    default_rows={"cpu": _SHALLOW, "smoke": _SHALLOW},
    seeds=(1, 2, 3),
    metrics=(protocol.ACCURACY, protocol.YTF, protocol.RANK1, protocol.TAR, protocol.FISHER),
    covers=("F2.11", "T-A.2"),
    cost={"paper": 30000, "cpu": 1.5, "smoke": 0.01},
    tuning=Tuning({"optimizer.lr": [0.1, 0.2]}, metric="accuracy", seeds=(0,)),
    claims=tuple(
        Claim(
            f"With {depth} layers, A-Softmax (m = 4) verifies better than softmax.", f"A-Softmax (m=4), {depth} layers"
        )
        for depth in (4, 10, 20)
    ),
    note=f"{NOTE} Only the ends of the curves of figure 2.11 are printed. It states 97.75 for softmax with 64 layers, "
    "table 2.8 states 97.88.",
)

_WITH_RELU = {"model": {"feature_activation": "relu"}}
_STEPS: dict[str, dict[str, Any]] = {
    "A": {**_WITH_RELU, "head": {"name": "softmax", "bias": True}},
    "B": {"head": {"name": "softmax", "bias": True}},
    "C": {"head": "softmax"},
    "D": {"head": "modified_softmax"},
    "E": {"head": protocol.a_softmax(2)},
    "F": {"head": protocol.a_softmax(3)},
    "G": {"head": protocol.a_softmax(4)},
}
ABLATION = protocol.face_recipe(
    name="face-ablation",
    title="From softmax to A-Softmax in six steps",
    reference="table A.1 of the thesis",
    scales=_scales("sphereface4", [0, 0, 0, 0]),
    rows=tuple(
        Row(
            name,
            patch,
            {"accuracy": ("T-A.1", name, "accuracy"), "fisher": ("T-A.1", name, "AFS")},
            grid={"optimizer.lr": [0.1], "head.annealing.end": [5, 15]} if name in "EFG" else None,
        )
        for name, patch in _STEPS.items()
    ),
    metrics=(protocol.ACCURACY, protocol.FISHER, protocol.EER, protocol.RANK1, protocol.SEPARATION),
    covers=("T-A.1",),
    cost={"paper": 3000, "cpu": 1.0, "smoke": 0.01},
    baseline="A",
    tuning=Tuning({"optimizer.lr": [0.1, 0.2]}, metric="accuracy", seeds=(0,)),
    claims=(
        Claim("Removing the last ReLU improves verification.", "B"),
        Claim("Removing the biases does not matter much, and improves verification.", "C", "B"),
        Claim("Unit class vectors improve verification.", "D", "C"),
        Claim("A margin of m = 4 improves verification.", "G", "D"),
        Claim("A margin of m = 4 lowers the Fisher score.", "G", "D", "fisher"),
        Claim("A margin of m = 4 lowers the Fisher score compared with m = 2.", "G", "E", "fisher"),
    ),
    note=f"{NOTE} A: softmax with biases and a ReLU after the features; B: without the ReLU; C: without biases; D: "
    "unit class vectors; E, F, G: margins m = 2, 3, 4. The network has 4 convolutions. The Fisher score is that of the "
    "images in the test pairs; the thesis does not state its data.",
)

L_SOFTMAX = protocol.face_recipe(
    name="face-lsoftmax",
    title="L-Softmax for faces",
    reference="table 2.5 of the thesis",
    base={**protocol.FACES["base"], "measure": {**protocol.FACES["base"]["measure"], "pca": 0.95}},
    scales={
        "paper": {
            **protocol.FACES["paper"],
            "model": "lsoftmax_cnn17",
            "normalize": "mean_image",
            "augment": [],
            "batch_size": 256,
            "steps": None,
            "epochs": 30,
            "schedule": {"name": "plateau", "metric": "loss", "factor": 0.1, "patience": 1, "least": 0.01},
            "validation": {"every": 1, "every_unit": "epochs", "energy": False},
            "measure": {"distractors": "lfw", "far": 1e-3},
        },
        "cpu": {
            **protocol.FACES["cpu"],
            "model": {"name": "lsoftmax_cnn17", "depth": [2, 1, 1, 1], "widths": [16, 32, 32, 32], "feature_dim": 64},
        },
        "smoke": {
            **protocol.FACES["smoke"],
            "model": {"name": "lsoftmax_cnn17", "depth": [1, 1, 1, 1], "widths": [4, 4, 4, 4], "feature_dim": 8},
        },
    },
    rows=(
        Row("Softmax", {"head": "softmax"}, {"accuracy": ("T2.5", "Softmax", "accuracy")}),
        Row(
            "Softmax + Contrastive",
            {"head": _CONTRASTIVE, **_FOUR_PER_PERSON},
            {"accuracy": ("T2.5", "Softmax + Contrastive", "accuracy")},
            grid=_LOSS_GRIDS["Softmax+Contrastive [36]"],
        ),
        *(
            Row(
                f"L-Softmax (m={m})",
                {"head": {"name": "l_softmax", "m": m, "annealing": protocol.SOURCE_ANNEALING}},
                {"accuracy": ("T2.5", f"L-Softmax (m={m})", "accuracy")},
                grid=RATES_AND_ENDS,
            )
            for m in (2, 3, 4)
        ),
    ),
    metrics=(protocol.ACCURACY, protocol.EER, protocol.RANK1, protocol.FISHER),
    covers=("T2.5",),
    cost={"paper": 5000, "cpu": 1.0, "smoke": 0.01},
    baseline="Softmax",
    tuning=TUNING,
    claims=(
        Claim("L-Softmax (m = 4) verifies better than softmax.", "L-Softmax (m=4)"),
        Claim(
            "L-Softmax (m = 4) verifies better than softmax with contrastive loss.",
            "L-Softmax (m=4)",
            "Softmax + Contrastive",
        ),
    ),
    note=f"{NOTE} The network is the last column of table 2.1, at the cpu scale with 5 convolutions. Features are "
    "projected to the principal directions that have 95 % of the variance of training features; the thesis does not "
    "state their number. The learning rate falls by ten when the training loss stops falling, twice. λ and the weight "
    "of the contrastive loss are not printed.",
)
