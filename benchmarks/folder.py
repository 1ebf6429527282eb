"""Train from a folder of JPEG files: memory, throughput, and the overhead of the loop.

- Memory: the peak of the training process and its workers, above the model, for two numbers of images.
- Throughput: images per second with workers that decode, relative to the same images in memory.
- Overhead: the time of the `Trainer` relative to a plain PyTorch loop that uses the same loader, model and optimiser.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, compare, environment
from hypersphere.data import DataSplit, TensorSource
from hypersphere.training import Config, Trainer
from hypersphere.training.build import Experiment, build

SIDE, CLASSES, BATCH = 64, 100, 64  # the same head and the same validation data for all numbers of images


def write_images(folder: Path, count: int) -> None:
    """Write small JPEG files, one folder per class; hard links repeat 400 different files."""
    from PIL import Image

    originals = folder.parent / "originals"
    if not originals.exists():
        originals.mkdir(parents=True)
        generator = torch.Generator().manual_seed(0)
        for number in range(400):
            coarse = torch.rand(1, 3, 8, 8, generator=generator)
            pixels = torch.nn.functional.interpolate(coarse, SIDE, mode="bilinear")[0]
            image = Image.fromarray((255 * pixels).to(torch.uint8).permute(1, 2, 0).numpy())
            image.save(originals / f"{number}.jpg", quality=90)
    for number in range(count):
        place = folder / f"class-{number % CLASSES:03d}"
        place.mkdir(parents=True, exist_ok=True)
        os.link(originals / f"{number % 400}.jpg", place / f"{number // CLASSES}.jpg")


def config_of(folder: Path, *, workers: int, steps: int, widths: tuple[int, ...] = (32, 64, 64, 64)) -> Config:
    """Return the settings of the benchmark."""
    return Config.of(
        {
            "data": {"name": "image_folder", "path": str(folder), "size": SIDE, "held_out": 1},
            "model": {"name": "embedding_cnn", "widths": list(widths), "feature_dim": 64},
            "normalize": {"name": "centered"},
            "head": "arcface",
            "batch_size": BATCH,
            "workers": workers,
            "steps": steps,
            "log_every": 50,
            "validation": {"every": 1000, "energy": False},
        }
    )


def tree_memory() -> int:
    """Return the proportional memory of this process and its children, in bytes."""
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    total = 0
    for process in processes:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += 1024 * int(text.partition("Pss:")[2].split()[0])
    return total


def peak_of_training(folder: str, workers: int, steps: int, results: Any) -> None:
    """Train for some steps and report the peak memory above what a built network needs.

    The network is narrow, because the peak of large activations varies by more than what is measured here.
    """
    torch.set_num_threads(1)
    config = config_of(Path(folder), workers=workers, steps=steps, widths=(4, 8, 8, 8))
    blank = build(config)
    del blank
    before, peak, running = tree_memory(), 0, True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, tree_memory())
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    Trainer(build(config)).train()
    running = False
    watcher.join()
    results.put(peak - before)


def in_memory(experiment: Experiment) -> DataSplit:
    """Return the data of an experiment as tensors."""
    source = experiment.data.train
    images = torch.stack([source[index] for index in range(len(source))])
    train = TensorSource(images, source.labels, source.classes)
    return DataSplit(train, experiment.data.validation, experiment.data.open_set)


def plain_loop(experiment: Experiment, steps: int) -> None:
    """Train with the loader, network, head and optimiser of an experiment in a plain loop."""
    network, head, optimizer = experiment.network, experiment.head, experiment.optimizer
    network.train()
    done = 0
    while done < steps:
        for inputs, labels in experiment.loader:
            loss = head(network(inputs.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break


def main(arguments: list[str]) -> None:
    """Measure, print and, with --record, write the table."""
    parser = argparse.ArgumentParser(prog="./run bench folder", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, nargs=2, default=(2_000, 40_000))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = ["# Training from a folder of JPEG files", "", ", ".join(f"{k} {v}" for k, v in environment().items()), ""]
    record: dict[str, Any] = {"environment": environment()}
    with tempfile.TemporaryDirectory() as temporary:
        peaks = []
        for count in options.images:
            folder = Path(temporary) / str(count)
            write_images(folder, count)
            results = multiprocessing.get_context("spawn").Queue()
            worker = multiprocessing.get_context("spawn").Process(
                target=peak_of_training, args=(str(folder), 2, 30, results)
            )
            worker.start()
            peaks.append(results.get())
            worker.join()
        record["peak_megabytes"] = [peak / 1e6 for peak in peaks]
        difference = (peaks[1] - peaks[0]) / 1e6
        lines.append(
            f"Peak memory above the model, with 2 workers: {peaks[0] / 1e6:.0f} MB for {options.images[0]:,} images, "
            f"{peaks[1] / 1e6:.0f} MB for {options.images[1]:,}; difference {difference:.0f} MB (target < 50 MB)."
        )
        folder, steps = Path(temporary) / str(options.images[0]), 60
        from_files = build(config_of(folder, workers=2, steps=steps))
        by_hand = build(config_of(folder, workers=2, steps=steps))
        from_memory = build(config_of(folder, workers=0, steps=steps), split=in_memory(from_files))

        def train(experiment: Experiment) -> None:
            Trainer(experiment).train()

        table = compare(
            {
                "plain loop": lambda: plain_loop(by_hand, steps),
                "Trainer": lambda: train(from_files),
                "Trainer, images in memory": lambda: train(from_memory),
            },
            baseline="plain loop",
            rounds=options.rounds,
            warmup=1,
        )
    overhead = table["Trainer"].ratio
    throughput = table["Trainer, images in memory"].ratio / table["Trainer"].ratio
    record |= {"overhead": overhead, "throughput": throughput, "table": {k: vars(v) for k, v in table.items()}}
    lines += [
        "",
        f"Time of the Trainer relative to a plain loop with the same loader: {overhead:.3f} (target ≤ 1.03).",
        "",
        f"Images per second with 2 workers relative to the same images in memory: {throughput:.2f} (target ≥ 0.9).",
        "",
    ]
    print("\n".join(lines))
    if options.record:
        (RESULTS / "folder.md").write_text("\n".join(lines), encoding="utf-8")
        (RESULTS / "folder.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
