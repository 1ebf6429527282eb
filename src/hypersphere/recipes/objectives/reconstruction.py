"""Reconstructions from angles or from norms alone (figure 1.1 of the thesis)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import data, models, sphere, training
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row

__all__ = ["RECONSTRUCTION"]

PICTURED = 16


class _SquaredError(nn.Module):
    """The mean squared error of reconstructions."""

    def forward(self, reconstructions: Tensor, images: Tensor) -> Tensor:
        return (reconstructions - images).square().mean()


class _ImagesToThemselves:
    """Batches of images as inputs and as targets."""

    def __init__(self, batches: data.Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for images, _ in self.batches:
            yield images, images


def compute(
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
        keep: what the last layer of the encoder passes on, "product", "angle" or "norm".
        data_root: folder of the data sets.
    """
    options = {key: value for key, value in source.items() if key != "name"}
    split = data.DATA[source["name"]](data_root, **options)
    train, test = (_images(part) for part in (split.train, split.validation))
    model = models.Autoencoder(train.shape[1], tuple(widths))
    batches = data.Batches(train, torch.zeros(len(train)), batch_size, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    total = epochs * len(batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=total)
    history = training.fit(
        model, _SquaredError(), _ImagesToThemselves(batches), epochs=epochs, optimizer=optimizer, scheduler=scheduler
    )
    model.eval()
    with torch.no_grad():
        images = test.float() / 255
        # Codes of cosines are far smaller than those the decoder was trained on, so they are rescaled.
        decoded = torch.cat([model.decode(model.encode(part, keep=keep, rescale=True)) for part in images.split(500)])
    metrics = {
        "error": 1000 * float((decoded - images).square().mean()),
        "correlation": float(_correlations(decoded, images).mean()),
    }
    tensors = {} if seed else {"images": test[:PICTURED], "reconstructions": decoded[:PICTURED]}
    return Outcome(metrics, {"loss": [epoch.loss for epoch in history]}, tensors)


def _images(source: data.Source | None) -> Tensor:
    assert source is not None
    return torch.stack([source[at] for at in range(len(source))])


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
    compute=compute,
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
