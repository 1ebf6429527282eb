"""`hypersphere embed`: compute the embeddings of images with the network of a run."""

from __future__ import annotations

from pathlib import Path

from hypersphere._validation import require
from hypersphere.cli.embeddings import SUFFIXES, Embeddings, write_embeddings
from hypersphere.cli.opening import device_of, open_run
from hypersphere.cli.target import check_target
from hypersphere.data import LabelledImages, MissingData, image_folder
from hypersphere.data.folder import is_image

__all__ = ["embed", "read_images"]


def embed(
    folder: Path,
    images: Path | None,
    *,
    out: Path | None,
    mirror: bool,
    batch: int,
    step: int | None,
    device: str | None,
    data_root: Path | None,
) -> None:
    """Write the embeddings of a folder of images, or of the test data of the run, and print the names of the files."""
    if images is not None and out is None:
        raise ValueError("a folder of images needs --out, a .npy or .safetensors file to write")
    target = out or folder / "embeddings.safetensors"
    check_target("--out", target, SUFFIXES)
    opened = open_run(folder, data_root, step=step, device=device_of(device), data=images is None)
    task = opened.assembly.task
    if images is None:
        features = opened.features(task.test_inputs, mirror=mirror, batch=batch)
        embeddings = Embeddings(features, task.test_labels, task.test_names, task.classes)
    else:
        opened.require_images("a folder of images")
        channels, height, width = task.inputs.shape[1:]
        read, flat = read_images(images, (height, width), grey=channels == 1)
        features = opened.features(read.images, mirror=mirror, batch=batch)
        embeddings = Embeddings(features, None if flat else read.labels, read.names, None if flat else read.classes)
    description = write_embeddings(target, embeddings)
    count, size = features.shape
    print(f"{count} embeddings with {size} dimensions: {target}; names and labels: {description.name}")


def read_images(folder: Path, size: tuple[int, int], *, grey: bool) -> tuple[LabelledImages, bool]:
    """Read a folder of images, or a folder or archive with one folder per class; return True for a flat folder."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    if not any(is_image(path) and path.is_file() for path in inside):
        return image_folder(folder, size=size, grey=grey), False
    mixed = next((path.name for path in inside if path.is_dir() and any(map(is_image, path.iterdir()))), None)
    require(mixed is None, str(folder), "either images or folders of images", mixed)
    place = folder.resolve()
    if place.name.startswith("."):
        raise MissingData(f"{folder} is a hidden folder; hidden folders are not read")
    pictures = image_folder(place.parent, size=size, grey=grey, classes=[place.name])
    names = tuple(name.split("/", 1)[1] for name in pictures.names)
    return LabelledImages(pictures.images, pictures.labels, pictures.classes, names), True
