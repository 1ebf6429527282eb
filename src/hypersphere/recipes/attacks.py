"""Attacks on decoupled networks, trained naturally and adversarially: tables 4.7 and 4.8 of the thesis, on MNIST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hypersphere import training
from hypersphere._validation import require
from hypersphere.recipes.classification import assemble, classify, settings_of
from hypersphere.recipes.recipe import Metric, Outcome, Recipe, Row, Trial
from hypersphere.robustness import BIM, FGSM, Classifier, accuracy_under, adversarial_loss

__all__ = ["RECIPE"]


class _AdversarialObjective(nn.Module):
    """The loss on images and on the same images after an FGSM attack."""

    def __init__(self, assembly: training.Assembly, epsilon: float) -> None:
        super().__init__()
        self.objective, self.epsilon = assembly.objective, epsilon

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        attack = FGSM(epsilon=self.epsilon)
        return adversarial_loss(self.objective.network, images, labels, attack=attack, loss=self.objective.head)


def run(settings: Mapping[str, Any], trial: Trial) -> Outcome:
    """Train naturally or against FGSM; then attack, white-box and transferred from a plain network."""
    assembly = assemble(settings, trial)
    epsilon = settings["epsilon"]
    is_supported = settings["regularizer"]["name"] == "none" and settings["precision"] == "float32"
    require(
        is_supported,
        "settings",
        "without a regulariser and in float32, because the adversarial loss supports neither",
        settings,
    )
    adversarial_objective = _AdversarialObjective(assembly, epsilon) if settings["adversarial"] else None
    victim = Classifier(assembly.network, assembly.head)

    def more() -> dict[str, float]:
        # Transferred attacks are computed on a second, plain network, which differs also in its seed.
        source_trial = Trial(trial.seed + settings["source_seed"], data_root=trial.data_root)
        source = assemble({**settings, "operator": {"name": "none"}}, source_trial)
        classify(source, source_trial, measure_every=settings["epochs"])
        source_classifier = Classifier(source.network, source.head)
        images, labels = assembly.task.test_inputs[: settings["attacked"]], assembly.task.test_labels
        batches = list(training.Batches(images, labels[: len(images)], 250))
        fgsm, bim = FGSM(epsilon=epsilon), BIM(epsilon=epsilon, step=epsilon / 4, steps=20)
        white_box = accuracy_under(victim, batches, fgsm)
        return {
            "clean": 100 * white_box.clean,
            "fgsm": 100 * white_box.accuracies[0],
            "bim": 100 * accuracy_under(victim, batches, bim).accuracies[0],
            "transferred_fgsm": 100 * accuracy_under(victim, batches, fgsm, source=source_classifier).accuracies[0],
            "transferred_bim": 100 * accuracy_under(victim, batches, bim, source=source_classifier).accuracies[0],
        }

    return classify(assembly, trial, more=more, objective=adversarial_objective)


def _rows(adversarial: bool) -> list[Row]:
    columns = ("clean", "fgsm", "bim", "transferred_fgsm", "transferred_bim")
    printed = {  # tables 4.7 and 4.8
        ("baseline", False): (85.35, 18.82, 8.67, 50.90, 36.22),
        ("SphereConv", False): (88.58, 43.64, 8.89, 56.71, 43.10),
        ("BallConv", False): (91.13, 50.47, 7.74, 49.50, 27.48),
        ("TanhConv", False): (91.45, 52.60, 10.18, 50.61, 29.06),
        ("baseline", True): (83.70, 78.96, 7.96, 77.57, 78.55),
        ("SphereConv", True): (87.41, 85.98, 35.07, 76.29, 77.79),
        ("BallConv", True): (87.47, 82.20, 17.38, 78.67, 80.59),
        ("TanhConv", True): (87.54, 81.46, 19.86, 80.38, 82.47),
    }
    operators: dict[str, dict[str, Any]] = {
        "baseline": {"name": "none"},
        "SphereConv": {"name": "sphere"},
        "BallConv": {"name": "ball", "learn_radius": "layer"},
        "TanhConv": {"name": "tanh", "learn_radius": "layer"},
    }
    suffix = ", adversarially trained" if adversarial else ""
    return [
        Row(
            f"{name}{suffix}",
            {"operator": operator, "adversarial": adversarial},
            dict(zip(columns, printed[name, adversarial], strict=True)),
        )
        for name, operator in operators.items()
    ]


RECIPE = Recipe(
    name="attacks",
    title="Accuracy of decoupled networks under attack, on MNIST",
    reference="tables 4.7 and 4.8 of the thesis, on CIFAR-10 with ε = 8/255",
    settings={
        **settings_of(
            data={"name": "mnist", "limit": 6000},
            model={"name": "attack_cnn9", "widths": [8, 16, 32], "feature_dim": 64, "norm": "batch"},
            optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
            batch_size=128,
            epochs=4,
        ),
        "adversarial": False,
        "epsilon": 0.1,
        "attacked": 500,
        "source_seed": 1000,
    },
    rows=(*_rows(False), *_rows(True)),
    seeds=(0, 1),
    metrics=(
        Metric("clean", "clean %", ".1f", True),
        Metric("fgsm", "FGSM %", ".1f", True),
        Metric("bim", "BIM %", ".1f", True),
        Metric("transferred_fgsm", "FGSM, transferred %", ".1f", True),
        Metric("transferred_bim", "BIM, transferred %", ".1f", True),
    ),
    run=run,
    note="CNN-9 with 8, 16 and 32 filters and BatchNorm, 6,000 digits, 4 epochs; attacked with ε = 0.1 (BIM: 20 "
    "steps of 0.025) on 500 test digits. Transferred attacks are computed on a plain, naturally trained "
    "network with another seed. The numbers of the source are for CIFAR-10, so only the order of rows can be "
    "compared.",
)
