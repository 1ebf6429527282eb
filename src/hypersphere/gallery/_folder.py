"""The files of a gallery. If a process is killed while it saves, the folder holds the old or the new gallery.

- `rows-ID.safetensors` holds the encoded embeddings, `names-ID.json` the names, one per embedding.
- `index-ID.safetensors` holds the approximate index, if there is one.
- `gallery.json` names these files with their sizes and SHA-256, and holds the settings and a SHA-256 of itself.

Each save writes files with a new ID and replaces `gallery.json` last, in one step. Files of earlier saves are removed
afterwards. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hypersphere._files import MARK, file_summary, locking, make_folder, replacing
from hypersphere._state_files import StoredTensor, write_tensors
from hypersphere._validation import require

__all__ = ["DamagedGallery", "GalleryContent", "read_folder", "write_folder"]

FORMAT = 1
MANIFEST, LOCK = "gallery.json", ".lock"
# Names of files that a save writes, including temporary files of an interrupted save.
OWN_FILES = re.compile(
    r"\.?(rows|names|index)-[0-9a-f]{32}\.(safetensors|json)(\.[0-9a-f]{32}\.tmp)?|\.gallery\.json\..*\.tmp"
)


class DamagedGallery(ValueError):
    """Raised if the files of a gallery are missing or were changed after the save."""


@dataclass(frozen=True)
class GalleryContent:
    """What a folder stores: settings, names, and tensors by file ("rows", "index") and name."""

    settings: dict[str, Any]
    names: list[str]
    tensors: dict[str, dict[str, Tensor]]


def write_folder(folder: Path, content: GalleryContent) -> None:
    """Write a gallery to a folder, and replace the one that is there.

    Raises:
        ValueError: if the path is a file, or the folder holds a `gallery.json` of another program.
    """
    require(folder.is_dir() or not folder.exists(), "folder", "a new or an existing folder", str(folder))
    make_folder(folder)
    with locking(folder / LOCK, wait=True):  # only one process saves at a time
        _refuse_foreign(folder)
        save_id = uuid.uuid4().hex
        files: dict[str, Any] = {}
        for kind, tensors in content.tensors.items():
            with replacing(folder / f"{kind}-{save_id}.safetensors") as draft:
                write_tensors(draft, {name: StoredTensor(tensor) for name, tensor in tensors.items()})
                files[kind] = {"name": f"{kind}-{save_id}.safetensors", **file_summary(draft)}
        with replacing(folder / f"names-{save_id}.json") as draft:
            draft.write_text(json.dumps(content.names), encoding="utf-8")
            files["names"] = {"name": f"names-{save_id}.json", **file_summary(draft)}
        manifest = {"note": MARK, "format": FORMAT, "settings": content.settings, "files": files}
        manifest["sha256"] = _checksum(manifest)
        with replacing(folder / MANIFEST) as draft:  # from here on, the folder holds the new gallery
            draft.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        current = {entry["name"] for entry in files.values()}
        for path in folder.iterdir():
            if path.name not in current and OWN_FILES.fullmatch(path.name):
                with suppress(OSError):  # Windows does not delete files that are open
                    path.unlink()


def read_folder(folder: Path) -> GalleryContent:
    """Read a gallery. Tensors are memory-mapped.

    Raises:
        ValueError: if the folder holds no gallery, or one of another version.
        DamagedGallery: if a file is missing or is not what was written.
    """
    while True:
        manifest = _read_manifest(folder)
        try:
            return _read_files(folder, manifest)
        except FileNotFoundError as error:
            # Another process may have saved since and removed the files of this manifest; then read again.
            if _read_manifest(folder) == manifest:
                raise DamagedGallery(f"{folder} is damaged, a file is missing: {error}") from None


def _read_files(folder: Path, manifest: Mapping[str, Any]) -> GalleryContent:
    """Read the files that a manifest names and verify their checksums."""
    tensors: dict[str, dict[str, Tensor]] = {}
    names: list[str] = []
    for kind, entry in manifest["files"].items():
        path = folder / entry["name"]
        if not OWN_FILES.fullmatch(path.name) or path.parent != folder:
            raise DamagedGallery(f"{folder / MANIFEST} is damaged: {entry['name']!r} is not a gallery file name")
        if file_summary(path) != {"bytes": entry["bytes"], "sha256": entry["sha256"]}:
            raise DamagedGallery(f"{path} is damaged: its content is not what was written")
        try:
            if kind == "names":
                names = json.loads(path.read_text(encoding="utf-8"))
            else:
                tensors[kind] = load_file(path)
        except (SafetensorError, ValueError) as error:
            raise DamagedGallery(f"{path} is damaged: {error}") from None
    return GalleryContent(manifest["settings"], names, tensors)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read gallery.json and verify its mark, checksum and format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} is not a gallery: {MANIFEST}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedGallery(f"{path} is damaged: {error}") from None
    has_mark = isinstance(manifest, dict) and manifest.get("note") == MARK
    if not has_mark or manifest.get("sha256") != _checksum(manifest):
        raise DamagedGallery(f"{path} is damaged: its content is not what was written")
    if manifest["format"] != FORMAT:
        raise ValueError(f"{path} must have format {FORMAT}, not {manifest['format']!r}")
    return manifest


def _refuse_foreign(folder: Path) -> None:
    """Raise a `ValueError` if another program wrote the manifest."""
    path = folder / MANIFEST
    if path.exists() and MARK.encode() not in path.read_bytes():
        raise ValueError(f"{path} was not written by this library and is not replaced; choose another folder")


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
