"""Why angles: reconstructions from angles or norms, and angular visual hardness (figures 1.1 and 1.2 of the thesis)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import data, evaluation, models, sphere, training
from hypersphere.data.lists import read_rows
from hypersphere.recipes.protocols import ERROR, SMOKE, load_data, sgd
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row
from hypersphere.training import Experiment, Run

__all__ = ["HARDNESS", "RECONSTRUCTION"]

# --- angles or norms (figure 1.1)

PICTURED_IMAGES = 16


class _SquaredError(nn.Module):
    """The mean squared error of reconstructions."""

    def forward(self, reconstructions: Tensor, images: Tensor) -> Tensor:
        return (reconstructions - images).square().mean()


class _ReconstructionBatches:
    """Batches in which the images are both inputs and targets."""

    def __init__(self, batches: data.Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for images, _ in self.batches:
            yield images, images


def reconstruct(
    seed: int,
    *,
    source: dict[str, Any],
    widths: list[int],
    epochs: int,
    batch_size: int,
    lr: float,
    keep: str,
    data_root: Path | None = None,
) -> Outcome:
    """Train an autoencoder, then decode test images from inner products, angles or norms.

    Args:
        seed: seed of weights and batches.
        source: the data, name and options.
        widths: channels of the encoder; the last one is that of the code.
        epochs, batch_size, lr: of training with Adam.
        keep: output of the last layer of the encoder, "product", "angle" or "norm".
        data_root: folder of the data sets.
    """
    split = load_data(source, data_root)
    train, test = (_images(part) for part in (split.train, split.validation))
    model = models.Autoencoder(train.shape[1], tuple(widths))
    batches = data.Batches(train, torch.zeros(len(train)), batch_size, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    total = epochs * len(batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=total)
    history = training.fit(
        model, _SquaredError(), _ReconstructionBatches(batches), epochs=epochs, optimizer=optimizer, scheduler=scheduler
    )
    model.eval()
    with torch.no_grad():
        images = test.float() / 255
        # Codes of cosines are far smaller than those that the decoder was trained on, so rescale them.
        decoded = torch.cat([model.decode(model.encode(part, keep=keep, rescale=True)) for part in images.split(500)])
    metrics = {
        "error": 1000 * float((decoded - images).square().mean()),
        "correlation": float(_correlations(decoded, images).mean()),
    }
    tensors = {} if seed else {"images": test[:PICTURED_IMAGES], "reconstructions": decoded[:PICTURED_IMAGES]}
    return Outcome(metrics, {"loss": [epoch.loss for epoch in history]}, tensors)


def _images(source: data.Source | None) -> Tensor:
    assert source is not None
    return torch.stack([source[index] for index in range(len(source))])


def _correlations(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation of the pixels of corresponding images, which brightness and contrast do not change."""
    x, y = (images.double().flatten(1) for images in (first, second))
    return sphere.cosine(x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True))


RECONSTRUCTION = Recipe(
    name="angles-or-norms",
    title="Images decoded from angles or from norms",
    reference="figure 1.1 of the thesis",
    base={"measure": {"source": {"name": "cifar10"}, "batch_size": 128, "lr": 2e-3, "keep": "product"}},
    scales={
        "paper": {"measure": {"widths": [32, 64, 128], "epochs": 100}},
        "cpu": {"measure": {"source": {"limit": 10_000}, "widths": [16, 32, 64], "epochs": 10}},
        "smoke": {
            "measure": {"source": {"name": "digits", "limit": 60}, "widths": [4, 8], "epochs": 1, "batch_size": 30}
        },
    },
    rows=(
        Row("inner products"),
        Row("angles", {"measure": {"keep": "angle"}}),
        Row("norms", {"measure": {"keep": "norm"}}),
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        Metric("error", "squared error × 1000", ".2f", False),
        Metric("correlation", "correlation with the image", ".3f", True),
    ),
    covers=("F1.1",),
    cost={"paper": 5, "cpu": 0.2, "smoke": 0.001},
    compute=reconstruct,
    baseline="inner products",
    claims=(
        Claim(
            "Images decoded from angles resemble the input more than those from norms.",
            "angles",
            "norms",
            "correlation",
        ),
    ),
    note="The thesis states neither data nor network: CIFAR-10 and three 4×4 convolutions of stride 2, mirrored by the "
    "decoder, trained with Adam on the squared error. After training, the inner product ⟨w, x⟩ of the last layer of "
    "the encoder is replaced by cos θ or by ‖w‖‖x‖, scaled to the root mean square of the inner products; the thesis "
    "mentions no scale. All three rows train the same network with the same seed. The correlation is that of pixels, "
    "averaged over test images. Nothing is tuned, because the rows differ after training only.",
)

# --- angular visual hardness (figure 1.2)

NEIGHBOURS = 20
PICTURED = 2000


def measure_hardness(experiment: Experiment, run: Run, *, frequency: str, data_root: Path | None = None) -> Outcome:
    """Correlate hardness, confidence and feature norm of test images with their selection frequency.

    It is the fraction of people who name the class of the image, or of the nearest training images that have it.

    Args:
        experiment: the trained experiment.
        run: its run.
        frequency: a CSV file in the folder of the data sets with the columns image (the name of a test image) and
            frequency; or "neighbours" for the fraction of the nearest training images that are of the class.
        data_root: folder of the data sets.
    """
    features, labels = experiment.embed()
    head: Any = experiment.head
    with torch.no_grad():
        scores = head.scores(features.to(experiment.device)).cpu().double()
    chosen, frequencies = _frequencies(experiment, frequency, data_root)
    features, labels, scores = features[chosen], labels[chosen], scores[chosen]
    values = {
        "hardness": evaluation.angular_visual_hardness(features, labels, head.weight.detach().cpu()).double(),
        "confidence": scores.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1),
        "norm": sphere.norm(features).double(),
    }
    metrics = {f"{key}_correlation": evaluation.rank_correlation(value, frequencies) for key, value in values.items()}
    # The text says that confidence is high for nearly all images.
    metrics["confident"] = 100 * float((values["confidence"] > 0.9).double().mean())
    if experiment.config.seed:
        return Outcome(metrics)
    tensors = {key: value[:PICTURED].float() for key, value in {**values, "frequency": frequencies}.items()}
    return Outcome(metrics, tensors=tensors)


def _frequencies(experiment: Experiment, frequency: str, data_root: Path | None) -> tuple[Tensor, Tensor]:
    """Return the indices of the test images that have a frequency, and their frequencies."""
    split = experiment.data
    assert split.validation is not None
    if frequency == "neighbours":
        return torch.arange(len(split.validation)), _neighbour_frequency(split.train, split.validation)
    listed = {
        image: float(value)
        for _, (image, value) in read_rows(data.data_root(data_root) / frequency, ["image", "frequency"])
    }
    # Names may be paths with the folder of the class, or names of files.
    names = [split.validation.name(index) for index in range(len(split.validation))]
    values = [listed.get(name, listed.get(name.rpartition("/")[2])) for name in names]
    pairs = [(index, value) for index, value in enumerate(values) if value is not None]
    if not pairs:
        raise data.DamagedData(f"{frequency} must name images of the test data, such as {names[0]!r}")
    return torch.tensor([index for index, _ in pairs]), torch.tensor([value for _, value in pairs], dtype=torch.float64)


def _neighbour_frequency(train: data.Source, test: data.Source) -> Tensor:
    """Return, for each test image, the fraction of the nearest training images (by pixels) with its label."""
    train_pixels, pixels = (_images(source).flatten(1) for source in (train, test))
    references = train_pixels.float() / 255
    shares = []
    for rows, labels in zip((pixels.float() / 255).split(500), test.labels.split(500), strict=True):
        nearest = torch.cdist(rows, references).topk(min(NEIGHBOURS, len(references)), largest=False).indices
        shares.append((train.labels[nearest] == labels.unsqueeze(1)).double().mean(1))
    return torch.cat(shares)


HARDNESS = Recipe(
    name="visual-hardness",
    title="Angular visual hardness, confidence and feature norm against selection frequency",
    reference="figure 1.2 of the thesis",
    base={"head": "softmax", "optimizer": sgd(0.1), "measure": {"frequency": "neighbours"}},
    scales={
        "paper": {
            "data": {"name": "imagenet", "size": 224},
            "model": "resnet50",
            "augment": [{"name": "crop", "scale": [0.08, 1.0]}, {"name": "mirror"}],
            "optimizer": {"weight_decay": 1e-4},
            "batch_size": 256,
            "epochs": 90,
            "schedule": {"name": "steps", "at": [30, 60], "unit": "epochs"},
            "measure": {"frequency": "human-frequency.csv"},
        },
        "cpu": {
            "data": {"name": "fashion_mnist", "limit": 20_000, "pool": 2},
            "model": {"name": "lsoftmax_cnn10", "depth": [2, 1, 1], "widths": [16, 16, 16], "feature_dim": 32},
            "batch_size": 128,
            "epochs": 10,
            "validation": {"every": 5},
        },
        "smoke": {
            **SMOKE,
            "model": {"name": "lsoftmax_cnn10", "depth": [1, 1, 1], "widths": [4, 4, 4], "feature_dim": 8},
        },
    },
    rows=(Row("softmax"),),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        ERROR,
        Metric("hardness_correlation", "rank correlation with hardness", ".3f", None),
        Metric("confidence_correlation", "rank correlation with confidence", ".3f", None),
        Metric("norm_correlation", "rank correlation with the norm", ".3f", None),
        Metric("confident", "images with confidence above 0.9 %", ".1f", None),
    ),
    covers=("F1.2",),
    cost={"paper": 3000, "cpu": 0.07, "smoke": 0.005},
    measure=measure_hardness,
    note="AVH is θ(w_y, x)/Σ θ(w_j, x); smaller is easier, so its correlation with the frequency should be negative. "
    "At the paper scale a ResNet-50 is trained on ImageNet by the usual schedule, because the thesis analyses a "
    "trained one, and human-frequency.csv in the folder of the data sets lists image and frequency, the fraction of "
    "people who named the class of a validation image. No such data are here: at the cpu scale, on Fashion-MNIST in "
    "14×14 pixels, the frequency is the fraction of the 20 nearest training images (by pixels) that have the class of "
    "the test image. It does not depend on the network, but it is not a human judgement. Nothing is tuned: there is "
    "one method.",
)
