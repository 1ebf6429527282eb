"""`hypersphere embed`: images to embeddings, by the network of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hypersphere.cli.embeddings import SUFFIXES, Embeddings, write_embeddings
from hypersphere.cli.target import check_target
from hypersphere.data import LabelledImages, MissingData, image_folder
from hypersphere.data.folder import is_image
from hypersphere.evaluation import mirrored_features
from hypersphere.functions.menu import require
from hypersphere.training import Batches
from hypersphere.training.job import Assembly
from hypersphere.training.run import Run

__all__ = ["embed", "features_of", "read_images", "require_images"]


def embed(
    folder: Path, images: Path | None, *, out: Path | None, mirror: bool, batch: int, data_root: Path | None
) -> None:
    """Write the embeddings of a folder of images, or of the run's own test data; name the files at the end."""
    if images is not None and out is None:
        raise ValueError("--out must be given with a folder of images: a .npy or .safetensors file")
    target = out or folder / "embeddings.safetensors"
    check_target("--out", target, SUFFIXES)
    assembly = Run.open(folder).assembly(data_root)
    task = assembly.task
    if images is None:
        features = features_of(assembly, task.test_inputs, mirror=mirror, batch=batch)
        found = Embeddings(features, task.test_labels, None, task.classes)
    else:
        require_images(assembly, "a folder of images")
        channels, height, width = task.inputs.shape[1:]
        read, flat = read_images(images, (height, width), grey=channels == 1)
        features = features_of(assembly, read.images, mirror=mirror, batch=batch)
        found = Embeddings(features, None if flat else read.labels, read.names, None if flat else read.classes)
    beside = write_embeddings(target, found)
    count, size = features.shape
    print(f"{count} embeddings of {size} numbers: {target}, with their names and labels in {beside.name}")


@torch.no_grad()
def features_of(assembly: Assembly, inputs: Tensor, *, mirror: bool = False, batch: int = 500) -> Tensor:
    """Return the features (N, d) of inputs as the task has them, or (N, 2d) with those of the mirror images."""
    if mirror:
        require_images(assembly, "--mirror")
        return mirrored_features(assembly.objective.features, inputs, batch=batch)
    size = len(inputs) if assembly.task.graph is not None else batch
    batches = Batches(inputs, torch.zeros(len(inputs)), size)
    return torch.cat([assembly.objective.features(x) for x, _ in batches])


def require_images(assembly: Assembly, what: str) -> None:
    """Refuse `what` for a run that was trained on points or on nodes of a graph."""
    if assembly.task.inputs.ndim != 4:
        raise ValueError(f"{what} needs a run on images, not on {assembly.job.data['name']}")


def read_images(folder: Path, size: tuple[int, int], *, grey: bool) -> tuple[LabelledImages, bool]:
    """Read images of a folder, or of a folder of folders or an archive, one a class; say whether it was the first."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    if not any(is_image(path) and path.is_file() for path in inside):
        return image_folder(folder, size=size, grey=grey), False
    mixed = next((path.name for path in inside if path.is_dir() and any(map(is_image, path.iterdir()))), None)
    require(mixed is None, str(folder), "images, or folders of images, not both", mixed)
    place = folder.resolve()
    if place.name.startswith("."):
        raise MissingData(f"{folder} is a hidden folder, which is not read")
    found = image_folder(place.parent, size=size, grey=grey, classes=[place.name])
    names = tuple(name.split("/", 1)[1] for name in found.names)
    return LabelledImages(found.images, found.labels, found.classes, names), True
