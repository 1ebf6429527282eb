"""Decoupled networks, trained naturally and adversarially: attacks and features (tables 4.7 and 4.8, appendix C.3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hypersphere import data, evaluation
from hypersphere.recipes.architectures import cifar
from hypersphere.recipes.protocols import SECONDS, SMOKE, picture, stepwise
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row, Tuning
from hypersphere.robustness import BIM, FGSM, Classifier, DeepFool, accuracy_under, fooling_strength
from hypersphere.training import Experiment, Run, Trainer, build_experiment

__all__ = ["ATTACKS", "FEATURES", "measure"]


def measure(
    experiment: Experiment,
    run: Run,
    *,
    epsilon: float,
    step: float,
    steps: int,
    attacked: int,
    fooled: int,
    source_seed: int,
    source_lr: float | None,
) -> Outcome:
    """Attack the trained network: white-box, with attacks transferred from a plain network, and with DeepFool.

    Trials, which only choose settings, are not attacked.

    Args:
        experiment, run: the trained network.
        epsilon: size of FGSM and BIM.
        step, steps: size and number of the steps of BIM.
        attacked: number of test images for FGSM and BIM.
        fooled: number of test images for DeepFool.
        source_seed: added to the seed for the plain network.
        source_lr: learning rate of the plain network, the same for all rows; None for that of the row.
    """
    if experiment.config.selection:
        return Outcome()
    victim = Classifier(experiment.network, experiment.head)
    source = _plain_network(experiment, source_seed, source_lr)
    batches = _batches(experiment, attacked)
    metrics: dict[str, float] = {}
    for name, attack in (("fgsm", FGSM(epsilon=epsilon)), ("bim", BIM(epsilon=epsilon, step=step, steps=steps))):
        metrics[name] = 100 * accuracy_under(victim, batches, attack).accuracies[0]
        metrics[f"transferred_{name}"] = 100 * accuracy_under(victim, batches, attack, source=source).accuracies[0]
    tensors: dict[str, Tensor] = {}
    for norm in ("l2", "linf"):
        strength = fooling_strength(victim, _batches(experiment, fooled), DeepFool(norm))
        metrics[f"deepfool_{norm}"] = strength.median(norm)
        tensors[f"deepfool_{norm}"] = strength.norms(norm).cpu()
    return Outcome(metrics, tensors=tensors)


def _plain_network(experiment: Experiment, source_seed: int, source_lr: float | None) -> Classifier:
    """Train a plain network on the same data with another seed, without attacks."""
    config = experiment.config
    plain = {"operator": "none", "regularizers": [], "adversarial": "none", "seed": config.seed + source_seed}
    if source_lr is not None:
        plain["optimizer"] = {"lr": source_lr}
    no_validation = {"validation": {"every": 1_000_000, "energy": False}}
    source = build_experiment(config.patched(plain, no_validation), split=experiment.data, device=experiment.device)
    Trainer(source).train()
    source.objective.eval()
    return Classifier(source.network, source.head)


def _batches(experiment: Experiment, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first test images in [0, 1] and their labels."""
    validation = experiment.data.validation
    assert validation is not None
    images = data.subset(validation, range(min(count, len(validation))))
    loader = data.Loader(images, batch_size=250, sampler=data.SAMPLERS["sequential"](images.labels, 0))
    return [((x.float() / 255).to(experiment.device), y.to(experiment.device)) for x, y in loader]


_OPERATORS: dict[str, dict[str, Any]] = {
    "Baseline": {},
    **{name: cifar.decoupled(name, project=False) for name in ("SphereConv", "BallConv", "TanhConv")},
}
_TRAINED = {"": "natural training", ", adversarially trained": "FGSM adversarial training"}


def _row(name: str, trained: str) -> Row:
    line = _TRAINED[trained]
    printed = {
        "accuracy": ("T4.7", f"{line} / None", name),
        "fgsm": ("T4.7", f"{line} / FGSM", name),
        "bim": ("T4.7", f"{line} / BIM", name),
        "transferred_fgsm": ("T4.8", f"{line} / FGSM", name),
        "transferred_bim": ("T4.8", f"{line} / BIM", name),
    }
    attack = {"adversarial": {"name": "fgsm", "epsilon": 8 / 255}} if trained else {}
    return Row(
        f"{name}{trained}",
        {**_OPERATORS[name], **attack},
        printed,
        baseline=None if name == "Baseline" else f"Baseline{trained}",
    )


ATTACKS = Recipe(
    name="attacks",
    title="Accuracy of decoupled networks under attack",
    reference="tables 4.7 and 4.8 and figure C.1 of the thesis, CNN-9 without BatchNorm on CIFAR-10",
    base={
        "model": {"name": "attack_cnn9", "norm": "none"},
        "measure": {
            "epsilon": 8 / 255,
            "step": 2 / 255,
            "steps": 20,
            "attacked": 10_000,
            "fooled": 10_000,
            "source_seed": 1000,
            "source_lr": None,
        },
    },
    scales={
        "paper": {**cifar.SPHERENET, "augment": cifar.SHIFT_AND_MIRROR},
        "cpu": {
            **cifar.CPU,
            "model": {"widths": [8, 16, 32], "feature_dim": 64},
            "measure": {"attacked": 1000, "fooled": 200, "source_lr": 3e-3},
        },
        "smoke": {
            **SMOKE,
            "model": {"widths": [4, 4, 4], "feature_dim": 8},
            "measure": {"attacked": 20, "fooled": 5, "steps": 3},
        },
    },
    rows=tuple(_row(name, trained) for trained in _TRAINED for name in _OPERATORS),
    default_rows={
        # BallConv is omitted on a CPU: it differs from TanhConv only by the smoothness of one corner.
        "cpu": [f"{name}{trained}" for name in ("Baseline", "SphereConv", "TanhConv") for trained in _TRAINED],
        "smoke": ["Baseline", "SphereConv, adversarially trained"],
    },
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        Metric("accuracy", "clean %", ".1f", True),
        Metric("fgsm", "FGSM %", ".1f", True),
        Metric("bim", "BIM %", ".1f", True),
        Metric("transferred_fgsm", "FGSM, transferred %", ".1f", True),
        Metric("transferred_bim", "BIM, transferred %", ".1f", True),
        Metric("deepfool_l2", "DeepFool, median ℓ₂", ".3f", True),
        Metric("deepfool_linf", "DeepFool, median ℓ∞", ".4f", True),
    ),
    covers=("T4.7", "T4.8", "F-C.1"),
    cost={"paper": 5000, "cpu": 1.8, "smoke": 0.01},
    measure=measure,
    tuning=Tuning({"optimizer.lr": [1e-3, 3e-3]}, metric="accuracy"),
    claims=(
        *(
            Claim(f"{name} resists FGSM better than convolution.", name, metric="fgsm")
            for name in ("SphereConv", "TanhConv")
        ),
        *(
            Claim(
                f"Trained adversarially, {name} resists BIM better than convolution.",
                f"{name}, adversarially trained",
                metric="bim",
            )
            for name in ("SphereConv", "TanhConv")
        ),
        Claim(
            "SphereConv resists transferred attacks better than convolution.",
            "SphereConv",
            metric="transferred_bim",
            source="T4.8",
        ),
        Claim("Larger perturbations are needed to fool TanhConv.", "TanhConv", metric="deepfool_l2", source="F-C.1"),
    ),
    note="Networks with natural and with FGSM training are attacked directly, and by attacks on a plain, naturally "
    "trained network with another seed and one learning rate for all rows. Half of the loss of adversarial training is "
    "that of the attacked images; the source does not state the fraction. Its number of steps is not stated; those of "
    "the SphereNets are taken. There are plain gradients and no weight projection, as stated. The source contradicts "
    "itself on the network (CNN-9 or ResNet); CNN-9 is used. DeepFool is run for ℓ₂ and for ℓ∞; medians are over "
    "images that were classified correctly. On a CPU, images have 16×16 pixels, and learning rates are chosen by the "
    "accuracy without attack.",
)

# --- two-dimensional features (figures C.2 and C.3)


def measure_features(experiment: Experiment, run: Run) -> Outcome:
    """Store the features of the test images, and measure how well their directions separate the classes."""
    features, labels = experiment.embed()
    fisher = evaluation.angular_fisher_score(features, labels)
    return Outcome({"fisher": fisher}, tensors=picture(experiment, features, labels))


_ATTACK = {"adversarial": {"name": "fgsm", "epsilon": 0.1}}


_FEATURE_TRAINING: dict[str, dict[str, Any]] = {"": {}, ", adversarially trained": _ATTACK}
_FEATURE_OPERATORS = {"CNN" if name == "Baseline" else name: patch for name, patch in _OPERATORS.items()}

FEATURES = Recipe(
    name="decoupled-features",
    title="Two-dimensional features of decoupled networks",
    reference="figures C.2 and C.3 of the thesis, on MNIST",
    base={
        "model": {
            "name": "mnist_cnn6",
            "kernel_size": 3,
            "feature_dim": 256,
            "activation": "relu",
            "feature_activation": "relu",
        },
        "embedding": {"dim": 2, "neck": "linear"},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "batch_size": 128,
    },
    scales={
        "paper": {"data": "mnist", **stepwise(20_000, [10_000, 15_000])},
        "cpu": {
            "data": {"name": "mnist", "pool": 2, "limit": 12_000},
            "model": {"widths": [8, 16, 32], "feature_dim": 64},
            "epochs": 15,
            "validation": {"every": 5, "energy": False, "batch_size": 500},
        },
        "smoke": {**SMOKE, "model": {"widths": [4, 4, 4], "feature_dim": 8}},
    },
    rows=tuple(
        Row(f"{name}{trained}", {**operator, **patch}, baseline=None if name == "CNN" else f"CNN{trained}")
        for trained, patch in _FEATURE_TRAINING.items()
        for name, operator in _FEATURE_OPERATORS.items()
    ),
    default_rows={
        # BallConv is omitted, as above.
        "cpu": [f"{name}{trained}" for name in ("CNN", "SphereConv", "TanhConv") for trained in _FEATURE_TRAINING],
        "smoke": ["CNN", "TanhConv, adversarially trained"],
    },
    seeds=(0, 1, 2),
    metrics=(Metric("accuracy", "accuracy %", ".2f", True), Metric("fisher", "Fisher score", ".4f", False), SECONDS),
    covers=("F-C.2", "F-C.3"),
    cost={"paper": 60, "cpu": 0.5, "smoke": 0.01},
    measure=measure_features,
    tuning=Tuning({"optimizer.lr": [1e-3, 3e-3]}, metric="accuracy"),
    claims=(
        *(
            Claim(f"Features of {name} are more compact than those of a CNN.", name, metric="fisher")
            for name in ("SphereConv", "TanhConv")
        ),
        Claim(
            "Trained adversarially, features of TanhConv are more compact than those of a CNN.",
            "TanhConv, adversarially trained",
            metric="fisher",
            source="F-C.3",
        ),
    ),
    note="The source shows pictures; the angular Fisher score of the test features is added here, lower is more "
    "compact. Six convolutions, FC 256, FC 2 and the classifier; max-pooling after every second convolution, ReLU, "
    "BatchNorm, the number of steps and ε = 0.1 of the attack are not stated in the source. Convolutions are "
    "decoupled, fully connected layers are ordinary.",
)
