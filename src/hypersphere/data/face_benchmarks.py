"""Test sets of face recognition as they are distributed: YouTube Faces and MegaFace with FaceScrub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.data._files import DamagedData, MissingData, data_root, read_content, read_text
from hypersphere.data.images import Size
from hypersphere.data.pairs import Pairs, pairs_from_rows
from hypersphere.data.sources import FileSource, Names, Source, image_files, spaced_positions

__all__ = ["MegaFace", "VideoPairs", "megaface", "youtube_faces"]

FACE_SIZE = (112, 96)
YTF_FIELDS = 5  # split, number of the pair, first video, second video, 1 if both show the same person


@dataclass(frozen=True, eq=False)
class VideoPairs:
    """Pairs of videos.

    Attributes:
        frames: the frames of all videos; their labels are the numbers of the videos.
        pairs: pairs of videos, with folds.
    """

    frames: Source
    pairs: Pairs


@dataclass(frozen=True, eq=False)
class MegaFace:
    """Probes, and distractors that show none of their people.

    Attributes:
        probes: images of FaceScrub; labels are people.
        distractors: images of MegaFace.
    """

    probes: Source
    distractors: Source


def youtube_faces(root: str | Path | None = None, *, size: Size = FACE_SIZE, frames: int = 100) -> VideoPairs:
    """YouTube Faces: 5,000 pairs of 3,424 videos of 1,595 people, in ten folds.

    Reads splits.txt and the folder aligned_images_DB or frame_images_DB (PERSON/VIDEO/FRAME.jpg) in the folder ytf.

    Args:
        root: contains the folder ytf (or YouTubeFaces).
        size: resize every frame to (height, width).
        frames: largest number of frames per video; longer videos are read at evenly spaced frames.
    """
    require(is_integer(frames, 1), "frames", "an integer >= 1", frames)
    folder = _folder(data_root(root), ("ytf", "YTF", "YouTubeFaces"), "splits.txt and the frames")
    images = _folder(folder, ("aligned_images_DB", "frame_images_DB"), "one folder per person and video")
    lists = [folder / name for name in ("splits.txt", "Splits.txt")]
    pair_list = next((path for path in lists if path.is_file()), None)
    if pair_list is None:
        raise MissingData(f"{lists[0]} not found. It lists the pairs of videos.")
    videos: dict[str, int] = {}
    rows = []
    for number, line in enumerate(read_text(pair_list).splitlines(), start=1):
        fields = [field.strip() for field in line.split(",")]
        is_heading = number == 1 and not fields[0].isdecimal()
        if is_heading or not line.strip():
            continue
        if len(fields) != YTF_FIELDS or not fields[0].isdecimal() or fields[4] not in ("0", "1"):
            raise DamagedData(f"{pair_list} line {number} must be `split, number, video, video, 0|1`, not {line!r}")
        first, second = (videos.setdefault(name, len(videos)) for name in fields[2:4])
        rows.append((first, second, fields[4] == "1", int(fields[0]) - 1))
    names: list[str] = []
    labels: list[int] = []
    for video, label in videos.items():
        files = image_files(images / video) if (images / video).is_dir() else []
        if not files:
            raise DamagedData(f"{images / video} must contain the frames of a video that {pair_list} names")
        chosen = [files[position] for position in spaced_positions(len(files), frames)]
        names += [f"{video}/{file}" for file in chosen]
        labels += [label] * len(chosen)
    return VideoPairs(_files(images, names, labels, list(videos), size), pairs_from_rows(rows))


def megaface(root: str | Path | None = None, *, size: Size = FACE_SIZE, distractors: int = 1_000_000) -> MegaFace:
    """MegaFace: probes of FaceScrub, and up to a million distractors.

    Reads facescrub_features_list.json and megaface_features_list.json_N_1 (lists of paths) in the folder templatelists
    of megaface or of megaface/devkit, and the images in the folders facescrub_images and megaface_images. Images in
    facescrub_noises.txt and megaface_noises.txt, which list wrong labels and distractors that show probes, are omitted.

    Args:
        root: contains the folder megaface.
        size: resize every image to (height, width).
        distractors: N, the number of distractors in the list.
    """
    folder = _folder(data_root(root), ("megaface", "MegaFace"), "templatelists, facescrub_images and megaface_images")
    lists = _folder(folder, ("templatelists", "devkit/templatelists"), "the lists of the development kit")
    probes = _folder(folder, ("facescrub_images", "FaceScrub"), "the images of FaceScrub")
    distractor_images = _folder(folder, ("megaface_images", "FlickrFinal2"), "the images of MegaFace")
    names = _read_list(lists / "facescrub_features_list.json", folder / "facescrub_noises.txt")
    people = [name.split("/")[0] for name in names]
    label_of = {person: label for label, person in enumerate(sorted(set(people)))}
    distractor_names = _read_list(
        lists / f"megaface_features_list.json_{distractors}_1", folder / "megaface_noises.txt"
    )
    return MegaFace(
        _files(probes, names, [label_of[person] for person in people], list(label_of), size),
        _files(distractor_images, distractor_names, [0] * len(distractor_names), ["distractor"], size),
    )


def _folder(base: Path, names: Sequence[str], content: str) -> Path:
    """Return the first of the folders that exists."""
    for name in names:
        if (base / name).is_dir():
            return base / name
    raise MissingData(f"{names[0]} not found in {base}. It contains {content}.")


def _read_list(path: Path, noises: Path) -> list[str]:
    """Return the paths of a JSON list, without those that the text file `noises` lists, if it exists."""
    if not path.is_file():
        raise MissingData(f"{path} not found. It is part of the development kit of MegaFace.")
    try:
        content: Any = json.loads(read_content(path))
        if not isinstance(content["path"], list):
            raise TypeError(f"path is {type(content['path']).__name__}")
        names = [str(name) for name in content["path"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedData(f"{path} must be a JSON object with a list of paths: {error!r}") from None
    lines = read_text(noises).splitlines() if noises.is_file() else []
    excluded = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    # A line of `noises` is a file name or a path.
    remaining = [name for name in names if name not in excluded and name.rpartition("/")[2] not in excluded]
    if not remaining:
        raise DamagedData(f"{path} must list at least one image that {noises.name} does not exclude")
    return remaining


def _files(folder: Path, names: list[str], labels: list[int], classes: Sequence[str], size: Size) -> FileSource:
    numbers: Tensor = torch.tensor(labels, dtype=torch.int64)
    return FileSource(folder, Names(names), numbers, classes, size=size, grey=False)
