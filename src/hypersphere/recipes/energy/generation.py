"""Generative adversarial networks with energy in the discriminator (appendix D.7 of the thesis)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from hypersphere import data, energy, evaluation
from hypersphere.models import Discriminator, Generator
from hypersphere.recipes.protocols import load_data
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row
from hypersphere.training import Config, Trainer, build_experiment, generate, train_gan

__all__ = ["GAN", "train_and_score"]

Classifier = Callable[[Tensor], Tensor]  # images (N, C, H, W) in [0, 1] to probabilities (N, classes)
_NUM_PICTURED = 64


def train_and_score(
    seed: int,
    *,
    images: Mapping[str, Any],
    classifier: Mapping[str, Any] | str,
    latent_dim: int,
    generator_widths: Sequence[int],
    discriminator_widths: Sequence[int],
    steps: int,
    batch_size: int,
    samples: int,
    splits: int,
    spectral: bool,
    regularizer: Mapping[str, Any] | None,
    real: bool,
    data_root: Path | None,
) -> Outcome:
    """Train a GAN and compute the Inception score of its images.

    Args:
        seed: seed of the networks, the batches and the noise.
        images: the real images, as the setting `data` of a config.
        classifier: maps images to probabilities of classes. Either an import path `package.module:function`, for
            example of an Inception network, or the settings of a classifier that is trained on the real images first.
        latent_dim, generator_widths, discriminator_widths: sizes of the networks.
        steps, batch_size: of training.
        samples: number of generated images that are scored.
        splits: number of parts of these images, each of which gets a score.
        spectral: use spectral normalisation in the discriminator.
        regularizer: name and options of a regulariser of the discriminator, or None.
        real: score real test images instead of generated ones; nothing is trained.
        data_root: folder of the data sets.
    """
    split = load_data(images, data_root)
    train, test = split.train, split.validation
    assert isinstance(train, data.TensorSource)
    assert isinstance(test, data.TensorSource)
    classify = _classifier(json.dumps([classifier, images]), data_root)
    if real:
        real_images = test.inputs[:samples].float() / 255
        score = evaluation.inception_score(classify(real_images), splits=splits)
        metrics = {"score": score.mean, "deviation": score.deviation}
        return Outcome(metrics, tensors={"images": real_images[:_NUM_PICTURED]})
    channels, side = train.inputs.shape[1], train.inputs.shape[2]
    first_side = side // 2 ** (len(generator_widths) - 1)
    generator = Generator(latent_dim, tuple(generator_widths), out_channels=channels, side=first_side)
    layers: dict[str, Any] = {"conv": _spectral(nn.Conv2d), "linear": _spectral(nn.Linear)} if spectral else {}
    discriminator = Discriminator(tuple(discriminator_widths), in_channels=channels, image_size=side, **layers)
    terms = []
    if regularizer is not None:
        settings = {key: value for key, value in regularizer.items() if key != "name"}
        # The last layer has a single neuron, which has no energy.
        terms = [energy.REGULARIZERS[regularizer["name"]](discriminator.layers, output_layer=None, **settings)]
    losses = train_gan(
        generator, discriminator, train.inputs, steps=steps, batch_size=batch_size, regularizers=terms, seed=seed
    )
    generated = generate(generator, samples, seed=seed)
    score = evaluation.inception_score(classify(generated), splits=splits)
    hidden_energy = energy.mean_energy(energy.layer_energies(discriminator.layers, torch.eye(2)))
    return Outcome(
        {"score": score.mean, "deviation": score.deviation, "energy": hidden_energy},
        {"discriminator_loss": _thinned(losses.discriminator), "generator_loss": _thinned(losses.generator)},
        {"images": generated[:_NUM_PICTURED]},
    )


def _spectral(layer: type[nn.Module]) -> Callable[..., nn.Module]:
    return lambda *arguments, **options: spectral_norm(layer(*arguments, **options))


def _thinned(values: Sequence[float], count: int = 50) -> list[float]:
    """Return the means of at most `count` consecutive parts."""
    return [float(part.mean()) for part in torch.tensor(values).tensor_split(min(count, len(values)))]


@cache
def _classifier(description: str, data_root: Path | None) -> Classifier:
    """Import a classifier, or train one on real images, once for all rows and seeds of this process.

    The settings are given as JSON, because `cache` needs arguments that can be hashed.
    """
    settings, images = json.loads(description)
    if isinstance(settings, str):
        module, _, name = settings.partition(":")
        return getattr(importlib.import_module(module), name)
    experiment = build_experiment(Config.of({**settings, "data": images, "seed": 0}), data_root=data_root)
    Trainer(experiment).train()
    experiment.objective.eval()
    head: Any = experiment.head

    @torch.no_grad()
    def classify(inputs: Tensor) -> Tensor:
        parts = [head.scores(experiment.objective.features(part)).softmax(1) for part in inputs.split(500)]
        return torch.cat(parts)

    return classify


def _settings(**options: Any) -> dict[str, Any]:
    return {"measure": options}


_HALF = {"name": "mhe", "power": 0, "hidden": 1e-6}
_STRONGER = {"cpu": _settings(regularizer={**_HALF, "hidden": 1.0})}

GAN = Recipe(
    name="energy-gan",
    title="Image generation with energy in the discriminator",
    reference="table D.4 and figure D.3 of the thesis, on CIFAR-10",
    base={
        "measure": {
            "images": {"name": "cifar10"},
            "classifier": {"model": "mhe_cnn9", "epochs": 15, "augment": [{"name": "mirror"}]},
            "latent_dim": 128,
            "generator_widths": [512, 256, 128, 64],
            "discriminator_widths": [64, 128, 256, 512],
            "steps": 200_000,
            "batch_size": 64,
            "samples": 50_000,
            "splits": 10,
            "spectral": False,
            "regularizer": None,
            "real": False,
        }
    },
    scales={
        "paper": {},
        "cpu": {
            "measure": {
                "images": {"name": "cifar10", "pool": 2},
                "classifier": {"model": {"name": "mhe_cnn6", "widths": [16, 32, 64]}, "epochs": 6},
                "latent_dim": 64,
                "generator_widths": [64, 32, 16],
                "discriminator_widths": [16, 32, 64],
                "steps": 4000,
                "samples": 10_000,
            }
        },
        "smoke": {
            "measure": {
                "images": {"name": "generated", "channels": 3, "size": 8},
                "classifier": {"model": {"name": "opt_cnn6", "widths": [4, 4, 4], "feature_dim": 8}, "epochs": 1},
                "latent_dim": 4,
                "generator_widths": [8, 4],
                "discriminator_widths": [4, 8],
                "steps": 2,
                "batch_size": 8,
                "samples": 12,
                "splits": 2,
            }
        },
    },
    rows=(
        Row("Real data", _settings(real=True), {"score": ("T-D.4", "Real data", "mean")}),
        Row("GAN"),
        Row(
            "Orthonormal",
            _settings(regularizer={"name": "orthonormal", "weight": 1e-5}),
            {"score": ("T-D.4", "Orthonormal [117]", "mean")},
        ),
        Row("SN-GAN", _settings(spectral=True), {"score": ("T-D.4", "SN-GANs [118]", "mean")}),
        Row("MHE", _settings(regularizer=_HALF), {"score": ("T-D.4", "MHE (ours)", "mean")}, _STRONGER),
        Row(
            "MHE + SN",
            _settings(spectral=True, regularizer={**_HALF, "hidden": 1e-7}),
            {"score": ("T-D.4", "MHE + SN [118] (ours)", "mean")},
            _STRONGER,
            baseline="SN-GAN",
        ),
    ),
    default_rows={"smoke": ["MHE", "MHE + SN"]},
    seeds=(0, 1, 2),
    metrics=(
        Metric("score", "Inception score", ".2f", True),
        Metric("deviation", "deviation over parts", ".2f", None),
        Metric("energy", "hidden energy", ".4f", False),
    ),
    covers=("T-D.4", "F-D.3"),
    cost={"paper": 5000, "cpu": 1.0, "smoke": 0.002},
    compute=train_and_score,
    baseline="GAN",
    claims=(
        Claim("MHE in the discriminator raises the score.", "MHE"),
        Claim("MHE and spectral normalisation are better than the latter alone.", "MHE + SN"),
    ),
    note="Networks of table D.5; losses of equation D.12. Where the source is silent, the authors' released settings: "
    "Adam at 1e-4 with β = (0.5, 0.999), batches of 64, one step of the discriminator per step of the generator, "
    "200,000 steps, logarithmic half-space energy with weight 1e-6, or 1e-7 with spectral normalisation. The score of "
    "the source uses the Inception network: pass its import path as measure.classifier (images in [0, 1] to "
    "probabilities). By default the classifier is a CNN trained on the real images, so scores can be compared between "
    "rows only. Weight clipping, gradient penalties, WGAN-GP and the normalisations BN, LN and WN are quoted from the "
    "SN-GAN paper in the source and are not run. At the scale cpu: 16×16 pixels, and the weight 1 of the other "
    "experiments, because 1e-6 times a mean over pairs is negligible next to the loss. A run is not resumed if it is "
    "interrupted. The pictures of figure D.3 are the rows GAN and MHE + SN.",
)
