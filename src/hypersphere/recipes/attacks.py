"""Attacks on decoupled networks, trained naturally and adversarially: tables 4.7 and 4.8 of the thesis, on MNIST."""

from __future__ import annotations

from typing import Any

from hypersphere import data
from hypersphere.recipes.parts import SMOKE, sgd
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row
from hypersphere.robustness import BIM, FGSM, Classifier, accuracy_under
from hypersphere.training import Experiment, Run, Trainer, build_experiment

__all__ = ["RECIPE"]

_STEPS = 20  # of BIM


def measure(experiment: Experiment, run: Run, *, epsilon: float, attacked: int, source_seed: int) -> Outcome:
    """Attack the trained network, white-box and with attacks transferred from a plain network.

    Args:
        experiment, run: the trained network.
        epsilon: size of the attacks.
        attacked: number of test images.
        source_seed: added to the seed for the plain network.
    """
    config = experiment.config
    plain = {"operator": "none", "adversarial": "none", "seed": config.seed + source_seed}
    never = {"validation": {"every": 1_000_000, "energy": False}}
    source = build_experiment(config.patched(plain, never), split=experiment.data, device=experiment.device)
    Trainer(source).train()
    source.objective.eval()
    victim, transferred = (Classifier(one.network, one.head) for one in (experiment, source))
    tested = experiment.data.validation
    assert tested is not None
    part = data.subset(tested, range(min(attacked, len(tested))))
    loader = data.make_loader(part, batch_size=250, sampler=data.SAMPLERS["sequential"](part.labels, 0))
    batches = [((x.float() / 255).to(experiment.device), y.to(experiment.device)) for x, y in loader]
    metrics: dict[str, float] = {}
    for name, attack in (
        ("fgsm", FGSM(epsilon=epsilon)),
        ("bim", BIM(epsilon=epsilon, step=epsilon / 4, steps=_STEPS)),
    ):
        white_box = accuracy_under(victim, batches, attack)
        metrics["clean"] = 100 * white_box.clean
        metrics[name] = 100 * white_box.accuracies[0]
        metrics[f"transferred_{name}"] = 100 * accuracy_under(victim, batches, attack, source=transferred).accuracies[0]
    return Outcome(metrics)


_COLUMNS = ("clean", "fgsm", "bim", "transferred_fgsm", "transferred_bim")
_PRINTED = {  # tables 4.7 and 4.8: natural and adversarial training
    "baseline": ((85.35, 18.82, 8.67, 50.90, 36.22), (83.70, 78.96, 7.96, 77.57, 78.55)),
    "SphereConv": ((88.58, 43.64, 8.89, 56.71, 43.10), (87.41, 85.98, 35.07, 76.29, 77.79)),
    "BallConv": ((91.13, 50.47, 7.74, 49.50, 27.48), (87.47, 82.20, 17.38, 78.67, 80.59)),
    "TanhConv": ((91.45, 52.60, 10.18, 50.61, 29.06), (87.54, 81.46, 19.86, 80.38, 82.47)),
}
_OPERATORS: dict[str, Any] = {
    "baseline": "none",
    "SphereConv": "sphere",
    "BallConv": {"name": "ball", "learn_radius": "layer"},
    "TanhConv": {"name": "tanh", "learn_radius": "layer"},
}


def _row(name: str, adversarial: bool) -> Row:
    printed = dict(zip(_COLUMNS, _PRINTED[name][adversarial], strict=True))
    patch = {"operator": _OPERATORS[name]}
    if not adversarial:
        return Row(name, patch, printed)
    against = {"adversarial": {"name": "fgsm", "epsilon": 0.1}}
    in_source = {"paper": {"adversarial": {"epsilon": 8 / 255}}}
    return Row(f"{name}, adversarially trained", {**patch, **against}, printed, in_source)


RECIPE = Recipe(
    name="attacks",
    title="Accuracy of decoupled networks under attack, on MNIST",
    reference="tables 4.7 and 4.8 of the thesis, on CIFAR-10 with ε = 8/255",
    base={
        "model": {"name": "attack_cnn9", "norm": "batch"},
        "optimizer": sgd(0.05),
        "batch_size": 128,
        "measure": {"epsilon": 0.1, "attacked": 500, "source_seed": 1000},
    },
    scales={
        # The source prints no number of iterations; those of the SphereNets are taken.
        "paper": {
            "data": "cifar10",
            "augment": [{"name": "shift", "pixels": 4}, {"name": "mirror"}],
            "model": {"norm": "none"},
            "init": "he",
            "optimizer": {"name": "adam", "lr": 1e-3},
            "schedule": {"name": "steps", "at": [34_000, 54_000], "unit": "steps"},
            "steps": 64_000,
            "measure": {"epsilon": 8 / 255, "attacked": 10_000},
        },
        "cpu": {
            "data": {"name": "mnist", "limit": 6000},
            "model": {"widths": [8, 16, 32], "feature_dim": 64},
            "epochs": 4,
        },
        "smoke": {**SMOKE, "model": {"widths": [4, 4, 4], "feature_dim": 8}, "measure": {"attacked": 20}},
    },
    rows=tuple(_row(name, adversarial) for adversarial in (False, True) for name in _PRINTED),
    seeds=(0, 1),
    metrics=(
        Metric("clean", "clean %", ".1f", True),
        Metric("fgsm", "FGSM %", ".1f", True),
        Metric("bim", "BIM %", ".1f", True),
        Metric("transferred_fgsm", "FGSM, transferred %", ".1f", True),
        Metric("transferred_bim", "BIM, transferred %", ".1f", True),
    ),
    covers=("T4.7", "T4.8"),
    cost={"paper": 2500, "cpu": 0.7, "smoke": 0.02},
    measure=measure,
    note="CNN-9 with 8, 16 and 32 filters and BatchNorm, 6,000 digits, 4 epochs; attacked with ε = 0.1 (BIM: 20 steps "
    "of 0.025) on 500 test digits. Transferred attacks are computed on a plain, naturally trained network with another "
    "seed. The numbers of the source are for CIFAR-10, so only the order of rows can be compared.",
)
