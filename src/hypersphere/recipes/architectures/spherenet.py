"""SphereNets: losses, depth, width, no ReLU, no BatchNorm, learned k, and SphereNorm (chapter 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.layers import DecoupledLayer
from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.protocols import ERROR, SECONDS
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning, table_rows
from hypersphere.training import Experiment, Run
from hypersphere.training.config import merge

__all__ = ["CONVERGENCE", "DEPTH", "LEARNED", "LOSSES", "NO_RELU", "SMALL_BATCHES", "WIDTH", "learned_parameters"]

_NO_BATCH_NORM = {"model": {"norm": "none"}}
_OPERATORS = [name for name in cifar.ANGULARS if name != "Square Cosine"]
# SphereNets have the orthonormal penalty: the text describes it, and the released code has it in every layer.
_SPHERENETS: dict[str, dict[str, Any]] = {
    name: {**cifar.sphere(cifar.ANGULARS[name]), **cifar.ORTHONORMAL} for name in _OPERATORS
}


def _scales(cpu: Mapping[str, Any] | None = None) -> dict[str, Mapping[str, Any]]:
    return {
        "paper": {**cifar.SPHERENET, "model": "spherenet_cnn9"},
        "cpu": merge({**cifar.CPU, "model": cifar.SMALL_CNN}, cpu or {}),
        "smoke": cifar.SMOKE_CNN,
    }


def _as_released(row: Row) -> Row:
    """At the scale of the source, make FC 256 an operator too, followed by BatchNorm, as in the released code."""
    layers = {"operator": {"layers": "all"}} if "operator" in row.patch else {}
    return cifar.with_settings_at(row, paper={"embedding": {"neck": "batch_norm"}, **layers})


# --- losses (table 3.1)

_HEADS: dict[str, dict[str, Any]] = {
    "Original Softmax": {"head": "softmax"},
    **{f"{name} W-Softmax": {"head": {"name": "w_softmax", "angular": cifar.ANGULARS[name]}} for name in _OPERATORS},
    "A-Softmax (m=4)": {"head": {"name": "a_softmax", "m": 4.0, "annealing": {"end": 5.0}}},
    "GA-Softmax (m=4)": {"head": {"name": "ga_softmax", "angular": "linear", "m": 4.0, "annealing": {"end": 5.0}}},
}
_LINES = {**_SPHERENETS, "Original Conv": {}}
_COMPARED_HEADS = ("Original Softmax", "Cosine W-Softmax", "GA-Softmax (m=4)")

LOSSES = cifar.operator_recipe(
    name="spherenet-losses",
    title="SphereConv operators with eight losses",
    reference="table 3.1 of the thesis, CNN-9 on CIFAR-10",
    scales=_scales(),
    rows=tuple(map(_as_released, table_rows("T3.1", _LINES, _HEADS, metric="accuracy", baseline="Original Conv"))),
    default_rows={
        "cpu": [f"{line}, {head}" for line in ("Original Conv", "Sigmoid (0.3)") for head in _COMPARED_HEADS],
        "smoke": ["Original Conv, Original Softmax", "Sigmoid (0.3), GA-Softmax (m=4)"],
    },
    metrics=(cifar.ACCURACY, SECONDS),
    covers=("T3.1",),
    cost={"paper": 9000, "cpu": 0.9, "smoke": 0.01},
    tuning=Tuning({"optimizer.lr": [1e-3, 3e-3]}, metric="accuracy"),
    claims=(
        Claim("With softmax, SphereConv is better than convolution.", "Sigmoid (0.3), Original Softmax"),
        Claim("GA-Softmax improves a SphereNet.", "Sigmoid (0.3), GA-Softmax (m=4)", "Sigmoid (0.3), Original Softmax"),
    ),
    note=f"{cifar.RELEASED}, the orthonormal penalty of SphereNets has the weight 1e-4, and the fully connected layer "
    "is an operator followed by BatchNorm. The source contradicts itself on augmentation; images are mirrored, as "
    f"section 3.4.1 says. Margins are annealed as in SphereFace, which the source does not state. {cifar.SMALL_SIZE}.",
)

# --- depth (table 3.2, figure 3.3d)

_COSINE_HEAD = _HEADS["Cosine W-Softmax"]
_DEPTH_LINES = {**{name: {**patch, **_COSINE_HEAD} for name, patch in _SPHERENETS.items()}, "Original Conv": {}}
_DEPTHS = {f"CNN-{depth}": {"model": f"spherenet_cnn{depth}"} for depth in (3, 9, 18, 45, 60)}
_DEEPEST = {"model": "spherenet_cnn69"}
_RESNET = {"ResNet-32": {"model": {"name": "spherenet_resnet32", "shortcut": "projection"}}}
_NARROW = {"cpu": {"model": {"widths": [8, 12, 16]}}, "smoke": {"model": {"widths": [4, 4, 4]}}}
_NARROW_FEATURE = {"cpu": {"model": {"feature_dim": 32}}, "smoke": {"model": {"feature_dim": 8}}}


def _depth_rows() -> list[Row]:
    table = partial(table_rows, "T3.2", _DEPTH_LINES, metric="accuracy", baseline="Original Conv")
    # Figure 3.3d prints no numbers.
    deepest = [
        Row("Cosine, CNN-69", {**_DEPTH_LINES["Cosine"], **_DEEPEST}, baseline="Original Conv, CNN-69"),
        Row("Original Conv, CNN-69", _DEEPEST),
    ]
    rows = [cifar.with_settings_at(_as_released(row), **_NARROW_FEATURE) for row in (*table(_DEPTHS), *deepest)]
    for row in table(_RESNET):
        # The shortcuts of the released code are ordinary 1×1 convolutions.
        patch = merge(row.patch, {"operator": {"layers": "spatial"}}) if "operator" in row.patch else row.patch
        rows.append(replace(row, patch=patch))
    return [cifar.with_settings_at(row, **_NARROW) for row in rows]


DEPTH = cifar.operator_recipe(
    name="spherenet-depth",
    title="SphereNets of 3 to 69 layers",
    reference="table 3.2 and figure 3.3d of the thesis, on CIFAR-10",
    scales=_scales(cpu={"optimizer": {"lr": 1e-3}}),
    rows=tuple(_depth_rows()),
    default_rows={
        "cpu": [f"{line}, CNN-{depth}" for depth in (3, 9, 18, 69) for line in ("Original Conv", "Cosine")],
        "smoke": ["Cosine, CNN-18", "Original Conv, CNN-3", "Linear, ResNet-32"],
    },
    metrics=(cifar.ACCURACY, SECONDS),
    covers=("T3.2", "F3.3d"),
    cost={"paper": 25000, "cpu": 1.0, "smoke": 0.01},
    claims=(
        Claim("A plain SphereNet of 69 layers is better than a CNN of 69 layers.", "Cosine, CNN-69", source="F3.3d"),
    ),
    tuning=None,
    note=f"{cifar.RELEASED}, the orthonormal penalty of SphereNets has the weight 1e-4, the fully connected layer is "
    "an operator followed by BatchNorm, and shortcuts of the ResNet that change the width are ordinary 1×1 "
    "convolutions. SphereNets are trained with the cosine W-Softmax, CNNs with softmax. On a CPU: networks with 8, 12 "
    "and 16 filters, otherwise as spherenet-losses. The learning rate is that of the source for all rows, 1e-3, and is "
    "not tuned: the question is which networks train at the usual setting.",
)

# --- no ReLU (table 3.3)

NO_RELU = cifar.operator_recipe(
    name="spherenet-no-relu",
    title="SphereNets without ReLU",
    reference="table 3.3 of the thesis, CNN-18 on CIFAR-10",
    scales={
        "paper": {**cifar.SPHERENET, "model": {"name": "spherenet_cnn18", "activation": "none"}},
        "cpu": {
            **cifar.CPU,
            "model": {"name": "spherenet_cnn18", "widths": [8, 12, 16], "feature_dim": 32, "activation": "none"},
        },
        "smoke": merge(cifar.SMOKE_CNN, {"model": {"activation": "none"}}),
    },
    rows=tuple(map(_as_released, table_rows("T3.3", {**_SPHERENETS, "CNN w/o ReLU": {}}, metric="accuracy"))),
    default_rows={
        "cpu": ["Sigmoid (0.1)", "Linear", "Cosine", "CNN w/o ReLU"],
        "smoke": ["Sigmoid (0.1)", "CNN w/o ReLU"],
    },
    metrics=(cifar.ACCURACY, SECONDS),
    covers=("T3.3",),
    cost={"paper": 1500, "cpu": 0.7, "smoke": 0.01},
    baseline="CNN w/o ReLU",
    tuning=Tuning({"optimizer.lr": [1e-3, 3e-3]}, metric="accuracy"),
    claims=(
        Claim("SphereNets need no ReLU.", "Sigmoid (0.1)"),
        Claim("The cosine is non-linear enough without ReLU.", "Cosine"),
    ),
    note=f"{cifar.RELEASED}, and the loss is softmax. Max-pooling is the only other non-linearity. {cifar.SMALL_SIZE}.",
)


# --- convergence, with and without BatchNorm (figure 3.3b)


def _with_early(experiment: Experiment, run: Run, *, early: int) -> Outcome:
    """Add the error after the given number of validations; the first entry of the curve is that before training."""
    errors = outcome_of_lines(run.metrics()).curves["error"]
    return Outcome({"early": errors[min(early, len(errors) - 1)]})


_CURVES: dict[str, dict[str, Any]] = {
    "CNN Baseline": {},
    "SphereNet (cosine) w/o orth.": cifar.sphere(),
    "SphereNet (cosine) w/ orth.": _SPHERENETS["Cosine"],
    "SphereNet (linear) w/ orth.": _SPHERENETS["Linear"],
    "SphereNet (Sigmoid 0.3) w/ orth.": _SPHERENETS["Sigmoid (0.3)"],
}
_NO_BATCH_NORM_CURVES = {"CNN": {}, "SphereNet (cosine)": cifar.sphere(), "SphereNet (linear)": cifar.sphere("linear")}
CONVERGENCE = cifar.operator_recipe(
    name="spherenet-convergence",
    title="Convergence of SphereNets and CNNs, with and without BatchNorm",
    reference="figure 3.3b of the thesis, curves of CNN-9 on CIFAR-10",
    base={"measure": {"early": 1}},
    scales={scale: merge(settings, {"validation": {"every": 2}}) for scale, settings in _scales().items()},
    rows=(
        *(_as_released(Row(name, patch)) for name, patch in _CURVES.items()),
        *(
            Row(
                f"{name} without BatchNorm",
                {**_NO_BATCH_NORM, **patch},
                baseline="CNN without BatchNorm" if patch else None,
            )
            for name, patch in _NO_BATCH_NORM_CURVES.items()
        ),
    ),
    default_rows={
        "cpu": [
            *(name for name in _CURVES if "linear" not in name),
            *("CNN without BatchNorm", "SphereNet (cosine) without BatchNorm"),
        ],
        "smoke": ["CNN Baseline", "SphereNet (linear) w/ orth.", "SphereNet (cosine) without BatchNorm"],
    },
    seeds=(0, 1, 2, 3, 4),
    metrics=(Metric("early", "error % after 2 epochs", ".2f", False), ERROR, SECONDS),
    covers=("F3.3b",),
    cost={"paper": 1500, "cpu": 1.1, "smoke": 0.01},
    measure=_with_early,
    baseline="CNN Baseline",
    claims=(
        Claim("SphereNets converge faster than CNNs.", "SphereNet (cosine) w/ orth."),
        Claim("SphereNets end better than CNNs.", "SphereNet (cosine) w/ orth.", metric="error"),
        Claim("Without BatchNorm, a SphereNet converges faster than a CNN.", "SphereNet (cosine) without BatchNorm"),
        Claim(
            "Without BatchNorm, a SphereNet ends better than a CNN.",
            "SphereNet (cosine) without BatchNorm",
            metric="error",
        ),
    ),
    note=f"The figure has BatchNorm in all curves; the rows without it are added here. {cifar.RELEASED}, the "
    "orthonormal penalty has the weight 1e-4, and the fully connected layer of networks with BatchNorm is an operator "
    f"followed by BatchNorm. {cifar.SMALL_SIZE}; the learning rate of each row is chosen by the final error on "
    "held-out training images.",
)

# --- width (figure 3.3c)

_WIDTHS = {  # filters per stage in the source, and on a CPU
    "16/32/48": ([16, 32, 48], [4, 8, 12]),
    "64/96/128": ([64, 96, 128], [16, 24, 32]),
    "128/192/256": ([128, 192, 256], [32, 48, 64]),
    "256/384/512": ([256, 384, 512], [64, 96, 128]),
}


def _width_rows() -> list[Row]:
    rows = []
    for name, (widths, small) in _WIDTHS.items():
        for network, patch in (("CNN", {}), ("SphereNet", _SPHERENETS["Cosine"])):
            settings = {**patch, "model": {"widths": widths}}
            at = {"cpu": {"model": {"widths": small}}, "smoke": {"model": {"widths": [max(2, small[0] // 4)] * 3}}}
            baseline = f"CNN {name}" if patch else None
            rows.append(_as_released(Row(f"{network} {name}", settings, at=at, baseline=baseline)))
    return rows


WIDTH = cifar.operator_recipe(
    name="spherenet-width",
    title="SphereNets and CNNs of four widths",
    reference="figure 3.3c of the thesis, curves of CNN-9 on CIFAR-10",
    scales=_scales(cpu={"validation": {"every": 2}}),
    rows=tuple(_width_rows()),
    default_rows={
        "cpu": [f"{network} {name}" for network in ("CNN", "SphereNet") for name in list(_WIDTHS)[:3]],
        "smoke": ["CNN 64/96/128", "SphereNet 16/32/48"],
    },
    covers=("F3.3c",),
    cost={"paper": 6000, "cpu": 0.8, "smoke": 0.01},
    claims=(
        Claim("A wide SphereNet is better than a wide CNN.", "SphereNet 128/192/256"),
        Claim("A very narrow CNN is better than a very narrow SphereNet.", "CNN 16/32/48", "SphereNet 16/32/48"),
    ),
    note=f"Operator and loss are not stated for this figure; cosine and softmax are used. {cifar.RELEASED}, and the "
    f"orthonormal penalty of SphereNets has the weight 1e-4. {cifar.SMALL_SIZE}, and a quarter of the widths in the "
    "names.",
)

# --- learned k (figure 3.4)


def _first_of_stages(network: nn.Module) -> dict[str, Tensor]:
    """Return the learned k of the first convolution of each stage, under the names of the figure."""
    layers = [module for module in network.modules() if isinstance(module, DecoupledLayer) and module.weight.ndim == 4]
    learned = [layer.log_k.detach().exp().flatten().cpu() for layer in layers if layer.log_k is not None]
    per_stage = len(learned) // 3
    return {f"k_conv{stage + 1}.1": learned[stage * per_stage] for stage in range(3)} if per_stage else {}


def _learned(experiment: Experiment, run: Run) -> Outcome:
    """Store the learned k and the learned factors of ρ."""
    k, factor = learned_parameters(experiment.network)
    tensors = {name: values for name, values in (("k", k), ("radius_factor", factor)) if len(values)}
    metrics = {
        f"{name}_{statistic}": float(value)
        for name, values in tensors.items()
        for statistic, value in (("mean", values.mean()), ("least", values.min()), ("most", values.max()))
    }
    stages = _first_of_stages(experiment.network)
    metrics |= {f"{name}_mean": float(values.mean()) for name, values in stages.items()}
    return Outcome(metrics, tensors={**tensors, **stages})


def learned_parameters(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Return all learned k and all learned factors of the radius."""
    layers = [module for module in network.modules() if isinstance(module, DecoupledLayer)]
    empty = torch.zeros(0)  # `cat` rejects an empty list
    k = [layer.log_k.detach().exp().flatten().cpu() for layer in layers if layer.log_k is not None]
    factor = [layer.log_radius.detach().exp().flatten().cpu() for layer in layers if layer.log_radius is not None]
    return torch.cat([empty, *k]), torch.cat([empty, *factor])


def _sigmoid(k: float) -> dict[str, Any]:
    return {**cifar.sphere({"name": "sigmoid", "k": k}), **cifar.ORTHONORMAL, **_COSINE_HEAD}


_LEARNED_K = merge(_sigmoid(0.5), {"operator": {"learn_k": "filter"}})
_TEXT = "best fixed sigmoid SphereConv (cosine W-Softmax), as quoted in the text"
_LEARNED_PRINTED = {
    "accuracy": ("F3.4", "learnable SphereConv (cosine W-Softmax)"),
    "k_conv3.1_mean": ("F3.4", "centre of k in conv3.1"),
}
LEARNED = Recipe(
    name="learned-parameters",
    title="Learned k of the sigmoid SphereConv and learned radii of the TanhConv",
    reference="figure 3.4 and section C.2 of the thesis",
    base={},
    scales=_scales(),
    rows=(
        *(
            _as_released(Row(f"k = {k}", _sigmoid(k), {"accuracy": ("F3.4", _TEXT)} if k == 0.3 else {}))
            for k in (0.1, 0.3, 0.5, 0.7)
        ),
        _as_released(Row("a learned k per filter", _LEARNED_K, _LEARNED_PRINTED)),
        Row("TanhConv, ρ = 1", {"operator": {"name": "tanh"}}),
        Row(
            "TanhConv, a learned ρ per filter",
            {"operator": {"name": "tanh", "learn_radius": "filter"}},
            baseline="TanhConv, ρ = 1",
        ),
    ),
    default_rows={"smoke": ["a learned k per filter", "TanhConv, a learned ρ per filter"]},
    seeds=(0, 1, 2),
    metrics=(
        cifar.ACCURACY,
        Metric("k_mean", "mean k", ".3f", None),
        Metric("k_least", "least k", ".3f", None),
        Metric("k_most", "largest k", ".3f", None),
        Metric("k_conv1.1_mean", "mean k, conv1.1", ".3f", None),
        Metric("k_conv2.1_mean", "mean k, conv2.1", ".3f", None),
        Metric("k_conv3.1_mean", "mean k, conv3.1", ".3f", None),
        Metric("radius_factor_mean", "mean factor of ρ", ".3f", None),
        Metric("radius_factor_least", "least factor of ρ", ".3f", None),
        Metric("radius_factor_most", "largest factor of ρ", ".3f", None),
    ),
    covers=("F3.4",),
    cost={"paper": 2000, "cpu": 0.7, "smoke": 0.01},
    measure=_learned,
    baseline="k = 0.3",
    claims=(Claim("A learned k is better than the best fixed one.", "a learned k per filter"),),
    note=f"The text quotes 91.22 for the best fixed k, whereas table 3.1 prints 91.28 for k = 0.3. {cifar.RELEASED}, "
    "and the orthonormal penalty has the weight 1e-4. k starts at 0.5, as the text says; the released code starts it "
    f"at 0.7. ρ is a learned factor, which starts at 1, times the running mean of the patch norm. {cifar.SMALL_SIZE}, "
    "with one learning rate for all rows, because all of them are SphereNets or all are TanhConv networks that differ "
    "in one number.",
)

# --- SphereNorm at small batches (figure 3.5)

_SPHERE_NORM = {"operator": {"name": "sphere_norm", "rescale": None}}
_NORMS: dict[str, dict[str, Any]] = {
    "BatchNorm": {},
    "SphereNorm": {**_NO_BATCH_NORM, **_SPHERE_NORM},
    "Rescaled SphereNorm": {**_NO_BATCH_NORM, "operator": {"name": "sphere_norm", "rescale": "learned"}},
    "SphereNorm w/ Orth.": {**_NO_BATCH_NORM, **_SPHERE_NORM, **cifar.ORTHONORMAL},
    "SphereNorm+BatchNorm": _SPHERE_NORM,
}


SMALL_BATCHES = cifar.operator_recipe(
    name="spherenorm",
    title="SphereNorm and BatchNorm with small batches",
    reference="figure 3.5 of the thesis, curves of CNN-9 on CIFAR-10",
    scales=_scales(
        cpu={"epochs": None, "steps": 10_000, "validation": {"every": 2000, "every_unit": "steps"}},
    ),
    rows=tuple(
        # All sizes have the same number of steps, so larger batches see more images.
        Row(
            f"{name}, batch {size}",
            {**patch, "batch_size": size},
            baseline=None if name == "BatchNorm" else f"BatchNorm, batch {size}",
        )
        for size in (4, 8, 16, 32)
        for name, patch in _NORMS.items()
    ),
    default_rows={
        "cpu": [f"{name}, batch 4" for name in _NORMS if name != "Rescaled SphereNorm"],
        "smoke": ["Rescaled SphereNorm, batch 8", "SphereNorm+BatchNorm, batch 8"],
    },
    seeds=(0, 1, 2, 3, 4),
    covers=("F3.5",),
    cost={"paper": 8000, "cpu": 1.3, "smoke": 0.01},
    claims=(
        Claim("At batch 4, SphereNorm is at least as good as BatchNorm.", "SphereNorm, batch 4"),
        Claim("At batch 4, both normalisations together are better than BatchNorm.", "SphereNorm+BatchNorm, batch 4"),
        Claim(
            "At batch 4, both normalisations together are better than SphereNorm.",
            "SphereNorm+BatchNorm, batch 4",
            "SphereNorm, batch 4",
        ),
    ),
    note="Only the batch size of the first panel, 4, can be read in the source; 8, 16 and 32 are chosen here. "
    f"SphereNorm replaces convolutions; the fully connected layer is ordinary. {cifar.RELEASED}, and the orthonormal "
    f"penalty has the weight 1e-4. {cifar.SMALL_SIZE}.",
)
