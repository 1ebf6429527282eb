"""Fine-tuning by rotation compared with full fine-tuning, LoRA and the OFT of PEFT, and the forgetting of each."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import data, rotation
from hypersphere._modes import evaluation_mode
from hypersphere.models import SphereTransformer
from hypersphere.recipes.recipe import Claim, Metric, Outcome, Recipe, Row
from hypersphere.training import minimize

__all__ = ["FINE_TUNING", "fine_tune"]

_HELD_OUT = 0.1  # fraction of the training data of the second task that chooses the learning rate


class _Classifier(nn.Module):
    """An encoder with a linear head; maps images and labels to the cross entropy."""

    def __init__(self, encoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(images)), labels)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the accuracy in per cent, in evaluation mode."""
        with evaluation_mode(self):
            parts = zip(images.split(500), labels.split(500), strict=True)
            correct = sum(int((self.head(self.encoder(x.float() / 255)).argmax(1) == y).sum()) for x, y in parts)
        return 100 * correct / len(labels)


def fine_tune(
    seed: int,
    *,
    method: str,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    network: Mapping[str, Any],
    first_epochs: int,
    epochs: int,
    batch_size: int,
    first_rate: float,
    rates: Sequence[float],
    size: int,
    data_root: Path | None,
) -> Outcome:
    """Train an encoder on one task, adapt it to another one, and measure both tasks.

    Args:
        seed: seed for the initial weights and the order of the images.
        method: "head", "full", "lora", "oft", "rotation" or "butterfly". All methods train a new head.
        first, second: the tasks, as the setting `data` of a config.
        network: options of the encoder, a plain `SphereTransformer`.
        first_epochs, first_rate: of training on the first task.
        epochs, batch_size: of adaptation.
        rates: learning rates of adaptation. Each is one trial, measured on a tenth of the training data.
        size: rank of LoRA, or size of the blocks of the rotations.
        data_root: folder of the data sets.
    """
    start = _trained(seed, json.dumps([first, network, first_epochs, batch_size, first_rate]), data_root)
    train, test = _read(second, data_root)
    held_out = int(_HELD_OUT * len(train[1]))
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(seed))
    images, labels = train[0][order], train[1][order]

    def adapted(rate: float, part: slice) -> tuple[_Classifier, float]:
        torch.manual_seed(seed)
        encoder = copy.deepcopy(start.encoder).requires_grad_(method == "full")
        encoder = _add_adapter(encoder, method, size)
        model = _Classifier(encoder, nn.Linear(start.head.in_features, int(labels.max()) + 1))
        seconds = _train(model, images[part], labels[part], rate, epochs, batch_size, seed)
        return model, seconds

    def trial(rate: float) -> float:
        try:
            return adapted(rate, slice(held_out, None))[0].accuracy(images[:held_out], labels[:held_out])
        except FloatingPointError:  # training diverged
            return 0.0

    best = max(rates, key=trial)
    model, seconds = adapted(best, slice(None))
    _, first_test = _read(first, data_root)
    before = start.accuracy(*first_test)
    after = _Classifier(model.encoder, start.head).accuracy(*first_test)
    parameters = sum(p.numel() for p in model.encoder.parameters() if p.requires_grad)
    return Outcome(
        {
            "accuracy": model.accuracy(*test),
            "first_before": before,
            "first_after": after,
            "forgotten": before - after,
            "parameters": float(parameters),
            "seconds": seconds,
            "rate": best,
        }
    )


@cache
def _trained(seed: int, settings_json: str, data_root: Path | None) -> _Classifier:
    """Return the classifier of the first task, trained once per seed for all rows of this process."""
    first, network, epochs, batch_size, rate = json.loads(settings_json)
    (images, labels), _ = _read(first, data_root)
    torch.manual_seed(seed)
    encoder = SphereTransformer(kind="plain", image_size=images.shape[-1], in_channels=images.shape[1], **network)
    model = _Classifier(encoder, nn.Linear(network["dim"], int(labels.max()) + 1))
    _train(model, images, labels, rate, epochs, batch_size, seed)
    return model


def _read(task: Mapping[str, Any], data_root: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and labels for training and for testing."""
    options = {key: value for key, value in task.items() if key != "name"}
    split = data.DATA[task["name"]](data_root, **options)
    assert isinstance(split.train, data.TensorSource)
    assert isinstance(split.validation, data.TensorSource)
    return (split.train.inputs, split.train.labels), (split.validation.inputs, split.validation.labels)


def _add_adapter(encoder: nn.Module, method: str, size: int) -> nn.Module:
    """Add the trainable parameters of a method to all linear layers of the blocks; return the encoder."""
    layers = [name for name, layer in encoder.named_modules() if "blocks" in name and isinstance(layer, nn.Linear)]
    if method in ("lora", "oft"):
        import peft

        config: Any = (
            peft.LoraConfig(r=size, lora_alpha=2 * size, target_modules=layers)
            if method == "lora"
            else peft.OFTConfig(r=0, oft_block_size=size, target_modules=layers, use_cayley_neumann=False)
        )
        return peft.get_peft_model(encoder, config)
    if method in ("rotation", "butterfly"):
        factors = 2 if method == "butterfly" else 1
        rotation.rotate_(
            encoder, block_size=size, factors=factors, where=lambda name, _: name in layers, output_layer=None
        )
        for parameter in rotation.rotation_parameters(encoder):
            parameter.requires_grad_()
    return encoder


def _train(
    model: _Classifier, images: Tensor, labels: Tensor, rate: float, epochs: int, batch_size: int, seed: int
) -> float:
    """Train with AdamW and a cosine schedule; return the processor time in seconds."""
    batches = data.Batches(images, labels, batch_size, torch.Generator().manual_seed(seed))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    start = time.process_time()
    minimize(model, batches, optimizer=optimizer, scheduler=schedule, epochs=epochs, clip=1.0)
    return time.process_time() - start


_ROWS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "rates": [3e-4, 1e-3, 3e-3, 1e-2], "size": 0},
    "new head only": {"method": "head", "rates": [3e-3, 1e-2, 3e-2, 1e-1], "size": 0},
    "LoRA (PEFT)": {"method": "lora", "rates": [3e-3, 1e-2, 3e-2, 1e-1], "size": 4},
    "OFT (PEFT)": {"method": "oft", "rates": [3e-3, 1e-2, 3e-2, 1e-1], "size": 16},
    "rotation": {"method": "rotation", "rates": [3e-3, 1e-2, 3e-2, 1e-1], "size": 16},
    "butterfly rotation": {"method": "butterfly", "rates": [3e-3, 1e-2, 3e-2, 1e-1], "size": 8},
}

FINE_TUNING = Recipe(
    name="fine-tuning",
    title="Fine-tuning by rotation, and what it forgets",
    reference="beyond the sources: OFT and BOFT compared with LoRA and full fine-tuning",
    base={"measure": {"method": "full", "rates": [1e-3], "size": 0, "first_rate": 2e-3}},
    scales={
        "paper": {
            "measure": {
                "first": {"name": "mnist"},
                "second": {"name": "fashion_mnist"},
                "network": {"dim": 192, "depth": 6, "heads": 6, "patch_size": 4},
                "first_epochs": 20,
                "epochs": 20,
                "batch_size": 128,
            }
        },
        "cpu": {
            "measure": {
                "first": {"name": "mnist", "limit": 20000},
                "second": {"name": "fashion_mnist", "limit": 10000},
                "network": {"dim": 64, "depth": 3, "heads": 4, "patch_size": 7},
                "first_epochs": 5,
                "epochs": 4,
                "batch_size": 128,
            }
        },
        "smoke": {
            "measure": {
                "first": {"name": "digits"},
                "second": {"name": "generated", "classes": 4, "per_class": 16, "size": 8},
                "network": {"dim": 16, "depth": 1, "heads": 2, "patch_size": 4},
                "first_epochs": 1,
                "epochs": 1,
                "batch_size": 64,
            }
        },
    },
    rows=tuple(Row(name, {"measure": options}) for name, options in _ROWS.items()),
    seeds=(0, 1, 2),
    metrics=(
        Metric("accuracy", "accuracy of the second task %", ".2f", True),
        Metric("forgotten", "accuracy lost on the first task", ".2f", False),
        Metric("parameters", "trainable parameters of the encoder", ",.0f"),
        Metric("seconds", "processor time, s", ".0f"),
        Metric("rate", "chosen rate", ".4f"),
    ),
    cost={"paper": 60.0, "cpu": 1.4, "smoke": 0.01},
    compute=fine_tune,
    baseline="full",
    claims=(
        Claim("Rotations forget less than full fine-tuning.", "rotation", "full", "forgotten", "OFT paper"),
        Claim("Rotations forget less than LoRA.", "rotation", "LoRA (PEFT)", "forgotten", "OFT paper"),
        Claim("Rotations are more accurate than LoRA.", "rotation", "LoRA (PEFT)", "accuracy", "OFT paper"),
    ),
    note="A small vision transformer is trained on MNIST and adapted to 10,000 images of Fashion-MNIST, with a new "
    "head. All adapters are on the linear layers of the blocks. Every row gets four trials that choose the learning "
    "rate on a tenth of the training images of the second task. In a first run with three trials, all adapters chose "
    "the largest rate of their grid. So the grids were moved to larger rates and all rows run again, which measured "
    "the test images a second time. The accuracy lost on MNIST is measured with the old "
    "head on the adapted encoder. LoRA and OFT are those of PEFT; `rotation` has the parameters of OFT and is computed "
    "by this library. Processor time is that of adaptation on one thread, next to other processes: it is no benchmark.",
)
