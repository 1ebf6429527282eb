"""Published data sets as they are distributed: ImageNet, mini-ImageNet, ModelNet40 and training sets of faces."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere._validation import is_integer, require
from hypersphere.data._files import DamagedData, MissingData, data_root, read_content, read_text
from hypersphere.data.images import BrokenSample, Size, height_and_width
from hypersphere.data.lfw import find_images, lfw_pairs
from hypersphere.data.lists import LabelCodes, ListSource, read_rows
from hypersphere.data.recordio import BinSource, RecordSource
from hypersphere.data.sources import (
    CenterCropped,
    FileSource,
    ImageFolderSource,
    Names,
    Source,
    class_folders,
    common_fingerprint,
    file_fingerprint,
    of_classes,
)
from hypersphere.data.splits import DataSplit, join_sources, split_by_class


def imagenet(root: Path | None, *, size: Size = 224, fit: str = "crop", margin: int = 0) -> DataSplit:
    """ImageNet (ILSVRC 2012): 1.28 million photographs of 1,000 classes, and 50,000 for validation.

    Reads imagenet/train and imagenet/val with one folder per class, or the archive of Kaggle in ILSVRC/Data/CLS-LOC,
    whose validation images are in one folder and whose labels are in LOC_val_solution.csv. Images are resized to
    `size`; `fit` "crop" keeps the aspect ratio. `margin` cuts this number of pixels from the height and width of
    validation images, which keeps their centre; the augmentation `window` does it at random for training images.
    """
    sides = height_and_width(size)
    largest = math.inf if sides is None else min(sides) - 1
    fits = is_integer(margin, 0) and margin <= largest
    require(fits, "data.margin", f"an integer >= 0 below the size {size}", margin)
    base = data_root(root)
    candidates = [base / name for name in ("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")]
    folder = _first_folder(candidates, "train", "Put the folders train and val in the folder imagenet.")
    options: dict[str, Any] = {"size": size, "grey": False, "fit": fit}
    train = ImageFolderSource(folder / "train", **options)
    if class_folders(folder / "val", None):
        joined = join_sources(train, ImageFolderSource(folder / "val", **options))
        return _crop_validation(joined, margin)
    solutions = [base / "LOC_val_solution.csv", folder / "LOC_val_solution.csv", folder.parent / "LOC_val_solution.csv"]
    solution = next((path for path in solutions if path.is_file()), None)
    if solution is None:
        raise MissingData(f"{folder / 'val'} must have one folder per class, or LOC_val_solution.csv in {base}")
    codes = LabelCodes()

    def scan() -> Iterator[str]:
        for _, (image, prediction) in read_rows(solution, ["ImageId", "PredictionString"]):
            codes.append(prediction.split(" ")[0])  # the class, followed by boxes
            yield f"{image}.JPEG"

    names = Names(scan())
    labels, classes = codes.labels(train.classes)
    return _crop_validation(DataSplit(train, FileSource(folder / "val", names, labels, classes, **options)), margin)


def _crop_validation(split: DataSplit, margin: int) -> DataSplit:
    """Crop the validation images at their centre, to `margin` pixels less in height and width."""
    assert split.validation is not None
    return replace(split, validation=CenterCropped(split.validation, margin)) if margin else split


def mini_imagenet(root: Path | None, *, size: Size = 84, fit: str = "crop", validation: str = "val") -> DataSplit:
    """mini-ImageNet: 64 training classes, and 16 (val) or 20 (test) other classes of 600 images each.

    Reads mini-imagenet/{train,val,test}.csv with the columns filename and label and the folder images, or one folder
    per class in mini-imagenet/{train,val,test}. `validation` is "val" or "test". Images are resized to `size`; `fit`
    "crop" keeps the aspect ratio.
    """
    require(validation in ("val", "test"), "data.validation", "'val' or 'test'", validation)
    base = data_root(root)
    candidates = [base / name for name in ("mini-imagenet", "mini_imagenet", "miniImageNet")]
    folder = next((path for path in candidates if path.is_dir()), None)
    if folder is None:
        raise MissingData(f"mini-imagenet not found in {base}. Put train, val and test there, as lists or as folders.")
    options: dict[str, Any] = {"size": size, "grey": False, "fit": fit}

    def read(part: str) -> Source:
        if not (folder / f"{part}.csv").is_file():
            return ImageFolderSource(folder / part, **options)
        return ListSource(folder / f"{part}.csv", images=folder / "images", path_column="filename", **options)

    return join_sources(read("train"), read(validation))


def _faces(names: Sequence[str], about: str) -> Callable[..., DataSplit]:
    """Return the loader of a training set of faces, in the first of the folders that exists."""

    def load(
        root: Path | None,
        *,
        size: Size = (112, 96),
        fit: str = "stretch",
        validation: str = "class",
        held_out: int | float = 0.05,
        exclude: str | None = None,
        seed: int = 0,
    ) -> DataSplit:
        """Read the data set.

        One folder per person, or train.rec and train.idx. `validation` is "class", which holds out the number or
        fraction `held_out` of the people, selected by `seed`; "lfw", which reads LFW and its pairs; or the name of a
        .bin verification set in the folder. `exclude` is a text file in the folder with the people that are left out,
        such as those of the test data, one per line. Images are resized to `size`; `fit` "crop" keeps the aspect ratio.
        """
        base = data_root(root)
        folder = next((base / name for name in names if (base / name).is_dir()), None)
        if folder is None:
            raise MissingData(f"{names[0]} not found in {base}. Put one folder of images per person in it.")
        options: dict[str, Any] = {"size": size, "grey": False, "fit": fit}
        is_record = (folder / "train.rec").is_file()
        source: Source = RecordSource(folder, **options) if is_record else ImageFolderSource(folder, **options)
        if exclude is not None:
            excluded = {line.strip() for line in read_text(folder / exclude).splitlines()}
            source = of_classes(source, [name for name in source.classes if name not in excluded])
        if validation == "class":
            return split_by_class(source, held_out, seed)
        return with_verification(source, folder, validation, root, options)

    load.__doc__ = f"{about}\n\n{inspect.getdoc(load)}"
    return load


casia_webface = _faces(
    ("casia-webface", "CASIA-WebFace", "faces_webface_112x112"),
    "CASIA-WebFace: 494,414 photographs of 10,575 people.",
)
ms_celeb = _faces(
    ("ms-celeb", "MS-Celeb-1M", "faces_emore", "faces_ms1m_112x112"),
    "MS-Celeb-1M, cleaned: 8.6 million photographs of 96,000 people in the thesis, fewer in faces_emore.",
)
imdb_face = _faces(("imdb-face", "IMDb-Face"), "IMDb-Face: 1.7 million photographs of 56,000 people.")


def with_verification(
    source: Source, folder: Path, validation: str, root: Path | None, options: dict[str, Any]
) -> DataSplit:
    """Return training data with the pairs of LFW ("lfw") or of a .bin file in the folder as validation data."""
    if validation == "lfw":
        images = find_images(root)
        require(images.is_dir(), "data.validation", "a .bin file if LFW is an archive; unpack it to use lfw", "lfw")
        faces = ImageFolderSource(images, **options)
        pairs = lfw_pairs(root, names=faces.names)
        return DataSplit(source, faces, open_set=True, pairs=pairs)
    require(validation.endswith(".bin"), "data.validation", "'class', 'lfw' or the name of a .bin file", validation)
    verification = BinSource(folder / validation, **options)
    return DataSplit(source, verification, open_set=True, pairs=verification.pairs)


def modelnet40(root: Path | None, *, points: int = 1024) -> DataSplit:
    """ModelNet40: 12,311 shapes of 40 classes as point clouds in the unit ball, 9,843 for training.

    Reads modelnet40_normal_resampled (text files of points with the lists modelnet40_train.txt and
    modelnet40_test.txt), or ModelNet40 (meshes CLASS/train/*.off and CLASS/test/*.off, from whose surface points are
    drawn). `points` is the number of points per cloud.
    """
    require(is_integer(points, 1, 10_000), "data.points", "an integer in 1..10000", points)
    base = data_root(root)
    resampled, meshes = base / "modelnet40_normal_resampled", base / "ModelNet40"
    if resampled.is_dir():
        classes = read_text(resampled / "modelnet40_shape_names.txt").split()
        train, test = (_resampled(resampled, part, classes, points) for part in ("train", "test"))
    elif meshes.is_dir():
        classes = [folder.name for folder in class_folders(meshes, None)]
        train, test = (_meshes(meshes, part, classes, points) for part in ("train", "test"))
    else:
        raise MissingData(f"modelnet40_normal_resampled or ModelNet40 not found in {base}")
    return DataSplit(train, test)


class PointFileSource:
    """Point clouds (P, 3) in separate files, read when they are needed: text of `x,y,z,…` lines, or .off meshes.

    Each cloud is centred and scaled to the unit ball.
    """

    def __init__(self, folder: Path, names: Names, labels: Tensor, classes: Sequence[str], points: int) -> None:
        self.folder, self.names, self.labels, self.classes = folder, names, labels, tuple(classes)
        self.points = points

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        name = self.names[index]
        try:
            content = read_content(self.folder / name).decode("ascii")
            if name.endswith(".off"):
                cloud = _surface_points(*_parse_off(content), self.points, zlib.crc32(name.encode()))
            else:
                cloud = _parse_points(content, self.points)
        except (ValueError, IndexError, OverflowError, OSError) as error:
            raise BrokenSample(name, str(error), "point cloud") from error
        cloud = cloud - cloud.mean(0)
        radius = float(np.sqrt((cloud**2).sum(1).max()))
        return torch.from_numpy((cloud / (radius if radius > 0 else 1)).astype(np.float32))

    def name(self, index: int) -> str:
        """Return the path of a file in the folder."""
        return self.names[index]

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of classes and names, the sizes of up to 10,000 files and the first bytes of up to 200."""
        return common_fingerprint(self.classes, self.labels) | file_fingerprint(self.names, self.folder)


def _resampled(folder: Path, part: str, classes: Sequence[str], points: int) -> PointFileSource:
    """Return the clouds of a list of text files."""
    list_path = folder / f"modelnet40_{part}.txt"
    shapes = read_text(list_path).split()
    label_of = {name: label for label, name in enumerate(classes)}
    labels = []
    for shape in shapes:
        # Such as airplane_0001 and night_stand_0001.
        class_name = shape.rpartition("_")[0]
        if class_name not in label_of:
            raise DamagedData(f"{list_path} must list shapes of the {len(classes)} classes, not {shape!r}")
        labels.append(label_of[class_name])
    names = Names(f"{shape.rpartition('_')[0]}/{shape}.txt" for shape in shapes)
    return PointFileSource(folder, names, torch.tensor(labels, dtype=torch.int64), classes, points)


def _meshes(folder: Path, part: str, classes: Sequence[str], points: int) -> PointFileSource:
    """Return the clouds of the meshes CLASS/PART/*.off."""
    class_files = [sorted((folder / name / part).glob("*.off")) for name in classes]
    names = Names(f"{file.parent.parent.name}/{part}/{file.name}" for files in class_files for file in files)
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(files) for files in class_files]))
    return PointFileSource(folder, names, labels, classes, points)


def _parse_points(content: str, count: int) -> NDArray[np.float64]:
    """Return the first `count` points of a text with one point per line."""
    rows = [line.split(",")[:3] for line in content.splitlines()[:count]]
    cloud = np.array(rows, dtype=np.float64)
    if cloud.shape != (count, 3) or not np.isfinite(cloud).all():
        raise ValueError(
            f"it must begin with {count} lines of at least three finite numbers, but has {len(rows)} lines"
        )
    return cloud


def _parse_off(content: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return vertices (V, 3) and triangles (F, 3) of a mesh. Faces with more corners become fans of triangles."""
    # Skip three characters rather than a line, because some files of ModelNet lack the line break after OFF.
    if not content.startswith("OFF"):
        raise ValueError(f"it must begin with OFF, not {content[:10]!r}")
    fields = content[3:].split()
    vertex_count, face_count = int(fields[0]), int(fields[1])
    if not 0 < vertex_count <= len(fields) or not 0 < face_count <= len(fields):
        raise ValueError(f"it must have vertices and faces, not {vertex_count} and {face_count}")
    end = 3 + 3 * vertex_count
    vertices = np.array(fields[3:end], dtype=np.float64).reshape(vertex_count, 3)
    triangles = []
    for _ in range(face_count):
        corners = [int(field) for field in fields[end + 1 : end + 1 + int(fields[end])]]
        end += 1 + len(corners)
        triangles += [(corners[0], corners[i], corners[i + 1]) for i in range(1, len(corners) - 1)]
    faces = np.array(triangles, dtype=np.int64).reshape(-1, 3)
    if not len(faces) or faces.min() < 0 or faces.max() >= vertex_count or not np.isfinite(vertices).all():
        raise ValueError("its vertices must be finite, and its faces must refer to them")
    return vertices, faces


def _surface_points(
    vertices: NDArray[np.float64], faces: NDArray[np.int64], count: int, seed: int
) -> NDArray[np.float64]:
    """Return random points, uniformly distributed on the surface of a mesh."""
    corner, first, second = (vertices[faces[:, i]] for i in range(3))
    areas = np.linalg.norm(np.cross(first - corner, second - corner), axis=1) / 2
    if not areas.sum() > 0:
        raise ValueError("its surface must have a positive area")
    generator = np.random.default_rng(seed)
    chosen = generator.choice(len(faces), size=count, p=areas / areas.sum())
    # (1 − √u), √u(1 − v), √u·v are barycentric coordinates of a uniform point of a triangle.
    root_u, v = np.sqrt(generator.random((count, 1))), generator.random((count, 1))
    return (1 - root_u) * corner[chosen] + root_u * (1 - v) * first[chosen] + root_u * v * second[chosen]


def _first_folder(candidates: Sequence[Path], part: str, advice: str) -> Path:
    """Return the first folder that has the subfolder `part`."""
    for folder in candidates:
        if (folder / part).is_dir():
            return folder
    raise MissingData(f"none of {', '.join(map(str, candidates))} contains {part}. {advice}")
