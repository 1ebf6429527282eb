"""`hypersphere enroll`: embed a folder of images with a run, and add them to a gallery."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypersphere._files import locking, make_folder
from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import print_line

if TYPE_CHECKING:
    from hypersphere.gallery import Gallery

__all__ = ["enroll"]

MANIFEST = "gallery.json"
LOCK = ".enroll.lock"  # held from reading a gallery to saving it, so that no names of another command are lost


def enroll(
    folder: options.RunFolder,
    images: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder with one folder of images per name, or with one image per name."),
    ],
    gallery: Annotated[Path, typer.Option(help="Folder of the gallery; it is created if it does not exist.")],
    dtype: Annotated[
        str | None, typer.Option(help="Storage of a new gallery: float32 (default), float16, int8 or binary.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="Index of a new gallery: exact (default), or hnsw or ivf of faiss.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="First remove all images that these names have in the gallery.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 500,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Add images to a gallery. The name of an image is that of its folder, or of its file if there are no folders."""
    from hypersphere.cli.opening import open_run
    from hypersphere.gallery import Gallery

    require(images.is_dir(), "FOLDER", "an existing folder of images", str(images))
    require(not gallery.is_file(), "--gallery", "a folder", f"the file {gallery}")
    manifest = _manifest(gallery)
    enrolled = _load_existing(gallery, dtype, index)
    opened = open_run(folder, step=step, device=device, with_data=False, trust_code=trust_code)
    source, has_folders = opened.images([images], "enroll")
    features, labels = opened.embed(source, batch=batch)
    if has_folders:
        names = [source.classes[label] for label in labels.tolist()]
    else:
        names = [Path(source.name(position)).stem for position in range(len(source))]
    # Created first, so that invalid options leave no folder behind.
    new = Gallery(features.shape[1], dtype or "float32", index or "exact", opened.fingerprint)
    make_folder(gallery)
    with locking(gallery / LOCK, wait=True):
        if _manifest(gallery) != manifest:  # another command has saved in the meantime
            enrolled = _load_existing(gallery, dtype, index)
        enrolled = new if enrolled is None else enrolled
        existing_names = sorted(set(names).intersection(enrolled.names))
        if replace and existing_names:
            enrolled.remove(existing_names)
        enrolled.enroll(names, features, fingerprint=opened.fingerprint)
        enrolled.save(gallery)
    print_line(f"{len(names)} images of {len(set(names))} names enrolled in {gallery}, which now has {len(enrolled)}")
    if existing_names:
        change = (
            "were replaced" if replace else "were there before and now have more images; --replace removes old ones"
        )
        print_line(f"{len(existing_names)} of these names {change}")
    step_option = "" if step is None else f" --step {step}"
    print_line(f"Next: hypersphere search {gallery} IMAGE --run {folder}{step_option}")


def _manifest(folder: Path) -> bytes | None:
    """Return the content of the manifest of a gallery, which differs after every save, or None if there is none."""
    path = folder / MANIFEST
    return path.read_bytes() if path.is_file() else None


def _load_existing(folder: Path, dtype: str | None, index: str | None) -> Gallery | None:
    """Return the gallery of a folder, or None if there is none yet; refuse options that differ from it."""
    from hypersphere.gallery import Gallery

    if not (folder / MANIFEST).exists():
        return None
    gallery = Gallery.load(folder)
    for option, value, current in (("--dtype", dtype, gallery.dtype), ("--index", index, gallery.index)):
        require(value in (None, current), option, f"{current}, as in {folder}", value)
    return gallery
