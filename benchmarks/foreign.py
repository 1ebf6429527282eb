"""Train a small Hugging Face ViT from one YAML file on 100 people of LFW, and verify 100 people it has never seen.

The table compares the trained encoder with the same encoder before training, on the same pairs, with bootstrap
intervals over people.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.timing import RESULTS, environment
from hypersphere import data
from hypersphere.data import draw_pairs
from hypersphere.evaluation import verify
from hypersphere.training import Config, Trainer
from hypersphere.training.build import Experiment, build

PEOPLE, MOST = 100, 20

CONFIG = """
data: {name: image_folder, split: class, held_out: 100, size: 64}
model: {name: "hf:vit", hidden_size: 96, num_hidden_layers: 4, num_attention_heads: 4, intermediate_size: 192,
        patch_size: 8}
embedding: {dim: 64, pool: mean, neck: linear_batch_norm}
augment: [{name: crop, scale: [0.8, 1.0]}, flip, {name: colour, brightness: 0.2}]
head: {name: am_softmax, s: 16, m: 0.2}
optimizer: {name: adamw, lr: 0.001, weight_decay: 0.05}
precision: bfloat16
accumulate: 4
batch_size: 16
workers: 2
epochs: 40
validation: {protocols: [verification], best: verification.accuracy, every: 10, energy: false}
"""


def write_people(folder: Path, root: Path | None) -> None:
    """Write up to 20 photographs of each of the 200 people of LFW with the most, as JPEG files."""
    from PIL import Image

    faces = data.lfw(root)
    counts = torch.bincount(faces.labels, minlength=len(faces.classes))
    for label in counts.argsort(descending=True, stable=True)[: 2 * PEOPLE].tolist():
        place = folder / faces.classes[label]
        place.mkdir(parents=True)
        for number, image in enumerate(faces.images[faces.labels == label][:MOST]):
            pixels = image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(pixels).save(place / f"{number}.jpg", quality=95)


def verification(experiment: Experiment) -> tuple[float, float, float]:
    """Return the accuracy on drawn pairs of unseen people and its 95 % interval, from resampled people."""
    features, labels = experiment.embed()
    pairs = draw_pairs(labels, folds=10, per_fold=300, seed=0)
    result = verify(features[pairs.first], features[pairs.second], pairs.same, folds=pairs.fold)
    people = labels[pairs.first], labels[pairs.second]
    interval = result.interval("accuracy", identities=people, generator=torch.Generator().manual_seed(0))
    return result.accuracy, interval.low, interval.high


def main(arguments: list[str]) -> None:
    """Train, print the table and, with --record, write it."""
    parser = argparse.ArgumentParser(prog="./run bench foreign", description=__doc__)
    parser.add_argument("--data-root", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings: dict[str, Any] = yaml.safe_load(CONFIG)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "people"
        write_people(folder, options.data_root)
        settings["data"]["path"] = str(folder)
        if options.epochs is not None:
            settings["epochs"] = options.epochs
        experiment = build(Config.of(settings))
        before = verification(experiment)
        Trainer(experiment).train()
        after = verification(experiment)
    lines = [
        "# A Hugging Face ViT trained on 100 people of LFW, verified on 100 others",
        "",
        ", ".join(f"{key} {value}" for key, value in environment().items()),
        "",
        "| encoder | verification accuracy | 95 % interval (people resampled) |",
        "|---|---|---|",
        *(
            f"| {name} | {100 * value:.2f} % | {100 * low:.2f} to {100 * high:.2f} % |"
            for name, (value, low, high) in (("untrained", before), ("trained", after))
        ),
        "",
        f"{len(experiment.data.train)} photographs of {PEOPLE} people, {experiment.steps} steps of 4 × 16 images.",
        "",
    ]
    print("\n".join(lines))
    if options.record:
        (RESULTS / "foreign.md").write_text("\n".join(lines), encoding="utf-8")
        record = {"environment": environment(), "settings": settings, "before": before, "after": after}
        (RESULTS / "foreign.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
