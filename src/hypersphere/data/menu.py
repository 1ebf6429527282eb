"""DATA: training and validation data by name. Each entry is called as `entry(root, **options)`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere._validation import is_integer, is_number, require, require_package
from hypersphere.data._files import MissingData
from hypersphere.data.cifar import cifar10, cifar100, cifar100_fifth
from hypersphere.data.containers import Graph
from hypersphere.data.folder import ARCHIVE_SUFFIXES, image_folder, image_names
from hypersphere.data.generated import generated
from hypersphere.data.hugging_face import HuggingFaceSource
from hypersphere.data.images import Size
from hypersphere.data.layouts import (
    casia_webface,
    imagenet,
    imdb_face,
    mini_imagenet,
    modelnet40,
    ms_celeb,
    with_verification,
)
from hypersphere.data.lfw import find_images, lfw_pairs, lfw_people
from hypersphere.data.lists import ListSource
from hypersphere.data.mnist import digits, fashion_mnist, mnist
from hypersphere.data.modelnet import modelnet10
from hypersphere.data.omniglot import omniglot
from hypersphere.data.pairs import Pairs
from hypersphere.data.planetoid import citeseer, cora, pubmed
from hypersphere.data.recordio import RecordSource
from hypersphere.data.shards import ShardSource
from hypersphere.data.sources import (
    ImageFolderSource,
    Source,
    TensorSource,
    first_sample,
    of_classes,
    spaced_positions,
)
from hypersphere.data.splits import (
    DataSplit,
    frequent_classes,
    join_sources,
    keep_share,
    split_by_sample,
    split_source,
    with_label_noise,
    with_pairs,
)

VALIDATION_FOLDERS = ("val", "validation", "valid", "test")


def _classification(loader: Callable[..., Any]) -> Callable[..., DataSplit]:
    """Return a menu entry for a loader with the splits "train" and "test"."""

    def load(
        root: Path | None,
        *,
        limit: int | None = None,
        pool: int = 1,
        keep: Mapping[str, float] | None = None,
        rising: bool = False,
        held_out: int = 0,
        label_noise: float = 0.0,
        seed: int = 0,
    ) -> DataSplit:
        """Read both splits of a data set.

        `limit` is the number of training examples; `pool` averages images over blocks of this size; `keep` maps
        classes, by name or index, to the fraction that remains; `rising` keeps the fraction (i+1)/n of class i of n;
        `held_out` is the number of training examples that replace the test data, for choices that must not see the
        test data; `label_noise` is the fraction of the training examples that get a wrong label; `seed` selects the
        examples and the wrong labels.
        """
        require(type(rising) is bool, "data.rising", "true or false", rising)
        require(limit is None or is_integer(limit, 1), "data.limit", "None or a number >= 1", limit)
        train, test = (_pooled(TensorSource.of(loader(split, root)), pool) for split in ("train", "test"))
        accepted = f"an integer in [0, {len(train)})"
        require(is_integer(held_out, 0, len(train) - 1), "data.held_out", accepted, held_out)
        if held_out:
            train, test = _hold_out(train, held_out, seed)
        shares = _shares(train.classes, keep, rising)
        if limit is not None or bool((shares != 1).any()):
            train = train.subset(keep_share(train.labels, shares, limit, seed))
        return with_label_noise(DataSplit(train, test), label_noise, seed)

    about = (inspect.getdoc(loader) or loader.__name__).partition("\n")[0]
    load.__doc__ = f"{about}\n\n{inspect.getdoc(load)}"
    return load


def _pooled(source: TensorSource, pool: int) -> TensorSource:
    """Average images over blocks of `pool` × `pool` pixels."""
    is_valid = is_integer(pool, 1) and (pool == 1 or source.inputs.ndim == 4)
    require(is_valid, "data.pool", "an integer >= 1, or 1 if the data are not images", pool)
    if pool == 1:
        return source
    images = F.avg_pool2d(source.inputs.float(), pool).round().to(torch.uint8)
    return TensorSource(images, source.labels, source.classes)


def _hold_out(source: TensorSource, count: int, seed: int) -> tuple[TensorSource, TensorSource]:
    """Return the remaining and the held-out samples."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))
    return source.subset(order[count:].sort().values), source.subset(order[:count].sort().values)


def _shares(classes: tuple[str, ...], keep: Mapping[str, float] | None, rising: bool) -> Tensor:
    """Return the fraction of each class that remains."""
    count = len(classes)
    shares = (torch.arange(count) + 1) / count if rising else torch.ones(count)
    accepted = "a mapping of classes to fractions, such as --data.keep.3=0.5"
    require(keep is None or isinstance(keep, Mapping), "data.keep", accepted, keep)
    for key, share in (keep or {}).items():
        name = str(key)  # a number in Python or YAML
        is_class = name in classes or (name.isdecimal() and len(name) < 19 and int(name) < count)
        require(is_class, "data.keep", f"some of the {count} classes, by name or index", name)
        require(is_number(share, 0, 1), f"data.keep.{name}", "a fraction in [0, 1]", share)
        shares[classes.index(name) if name in classes else int(name)] = share
    return shares


def _omniglot(
    root: Path | None,
    *,
    split: str = "sample",
    size: int = 28,
    held_out: int = 4,
    characters: int | None = None,
    label_noise: float = 0.0,
    seed: int = 0,
) -> DataSplit:
    """Drawings of 964 characters.

    `split` "sample" uses the last `held_out` drawings of each character for validation; "class" validates on 659
    characters of other alphabets (open set). `size` is the height and width of the images. `characters` is the number
    of characters for training, evenly spaced in the list of all. `label_noise` is the fraction of the training drawings
    that get a wrong label, selected by `seed`.
    """
    require(split in ("sample", "class"), "data.split", "'sample' or 'class'", split)
    drawings: Source = TensorSource.of(omniglot("background", root, size=size))
    if characters is not None:
        count = len(drawings.classes)
        require(is_integer(characters, 1, count), "data.characters", f"None or an integer in 1..{count}", characters)
        drawings = of_classes(drawings, [drawings.classes[label] for label in spaced_positions(count, characters)])
    if split == "sample":
        data = split_by_sample(drawings, held_out)
    else:
        data = DataSplit(drawings, TensorSource.of(omniglot("evaluation", root, size=size)), open_set=True)
    return with_label_noise(data, label_noise, seed)


def _lfw(
    root: Path | None,
    *,
    split: str = "sample",
    at_least: int = 10,
    held_out: int | float = 2,
    fold: int = 0,
    size: Size = None,
    grey: bool | None = None,
    label_noise: float = 0.0,
    seed: int = 0,
) -> DataSplit:
    """Faces of the people with at least `at_least` photographs.

    `split` "sample" uses `held_out` photographs of each person for validation; "class" holds out this number or
    fraction of the people, selected by `seed`; "fold" trains on nine folds of View 2 and validates on the pairs of
    `fold`. `size` resizes the images; `grey` gives one channel. `label_noise` is the fraction of the training images
    that get a wrong label, also selected by `seed`.
    """
    require(split in ("sample", "class", "fold"), "data.split", "'sample', 'class' or 'fold'", split)
    images = find_images(root)
    if split == "fold":
        data = _lfw_fold(root, images, fold, at_least, size, grey)
    else:
        data = split_source(_people(images, at_least, size, grey), split, held_out, seed)
    return with_label_noise(data, label_noise, seed)


def _people(images: Path, at_least: int, size: Size, grey: bool | None) -> Source:
    """Return the images of people who have at least this number of images; no others are decoded."""
    require(is_integer(at_least, 1), "data.at_least", "an integer >= 1", at_least)
    counts = Counter(name.split("/")[0] for name in image_names(images))
    people = [name for name in sorted(counts) if counts[name] >= at_least]
    require(bool(people), "data.at_least", f"at most {max(counts.values())}, the most images of a person", at_least)
    return _folder_source(images, size=size, grey=grey, classes=people)


def _lfw_fold(root: Path | None, images: Path, fold: int, at_least: int, size: Size, grey: bool | None) -> DataSplit:
    """Train on the people of all folds but one; validate on the pairs of this fold."""
    folds = lfw_people(root)
    require(is_integer(fold, 0, len(folds) - 1), "data.fold", f"in 0..{len(folds) - 1}", fold)
    names = image_names(images)
    counts = Counter(name.split("/")[0] for name in names)
    validation_people = sorted(set(folds[fold]) & set(counts))
    train_people = [name for name in sorted(set(counts) - set(validation_people)) if counts[name] >= at_least]
    require(bool(train_people), "data.at_least", "small enough that people remain for training", at_least)
    train = _folder_source(images, size=size, grey=grey, classes=train_people)
    is_grey = first_sample(train).shape[0] == 1  # both parts have the same number of channels
    validation = _folder_source(images, size=size, grey=is_grey, classes=validation_people)
    pairs = lfw_pairs(root, names=names).split(fold)[1]
    # Pairs refer to all images, but validation has only those of the fold.
    position = {validation.name(index): index for index in range(len(validation))}
    first, second = (
        torch.tensor([position[names[index]] for index in side.tolist()]) for side in (pairs.first, pairs.second)
    )
    return DataSplit(train, validation, open_set=True, pairs=Pairs(first, second, pairs.same, 0 * pairs.fold))


def _image_folder(
    root: Path | None,
    *,
    path: str,
    size: Size = None,
    grey: bool | None = None,
    fit: str = "stretch",
    split: str = "sample",
    held_out: int | float | None = None,
    at_least: int = 1,
    pairs: str | None = None,
    seed: int = 0,
) -> DataSplit:
    """Images in `path`, one folder per class, decoded when they are needed.

    `split` "sample" uses the last `held_out` images of each class for validation, by default one; "class" holds out
    this number or fraction of the classes, by default a fifth, selected by `seed`; "folders" reads `path`/train and
    `path`/val (or validation, valid, test), whose classes may differ. `size` resizes the images to a square or to
    (height, width); `fit` "stretch" changes the aspect ratio, "crop" cuts off the borders. `grey` gives one channel.
    `at_least` drops training classes with fewer images. `pairs` is a file of verification pairs of validation images.
    Relative paths are resolved against `root`, if given. A compressed archive is decoded into memory.
    """
    folder = _resolve_path(root, path)
    require(split in ("sample", "class", "folders"), "data.split", "'sample', 'class' or 'folders'", split)
    require(split != "folders" or held_out is None, "data.held_out", "unset with split=folders", held_out)
    read = partial(_folder_source, size=size, fit=fit)
    train = read(folder / "train" if split == "folders" else folder, grey=grey)
    read_validation = None
    if split == "folders":
        present = [name for name in VALIDATION_FOLDERS if (folder / name).is_dir()]
        if not present:
            raise MissingData(f"{folder} must contain one of the folders {', '.join(VALIDATION_FOLDERS)} next to train")
        read_validation = partial(read, folder / present[0])
    return _with_validation(train, at_least, read_validation, split, held_out, seed, _resolve_optional(root, pairs))


def _image_list(
    root: Path | None,
    *,
    path: str,
    validation: str | None = None,
    images: str | None = None,
    path_column: str = "path",
    label_column: str = "label",
    split_column: str | None = None,
    size: Size = None,
    grey: bool | None = None,
    fit: str = "stretch",
    split: str = "sample",
    held_out: int | float | None = None,
    at_least: int = 1,
    pairs: str | None = None,
    seed: int = 0,
) -> DataSplit:
    """Images whose paths and labels are listed in a CSV, TSV, JSONL or Parquet file at `path`.

    Validation data are listed in a second file `validation`, or are the rows whose `split_column` is val, validation,
    valid or test, or are split off by `split`, `held_out` (by default one image per class, or a fifth of the classes)
    and `seed` as for image_folder. `images` is the folder to which listed paths refer, by default that of the list;
    `path_column` and `label_column` name the columns. `size`, `fit`, `grey`, `at_least` and `pairs` are as for
    image_folder.
    """
    options: dict[str, Any] = {"size": size, "fit": fit, "path_column": path_column, "label_column": label_column}
    options["images"] = _resolve_optional(root, images)
    list_file = _resolve_path(root, path)
    require(validation is None or split_column is None, "data.validation", "unset with split_column", validation)
    _check_split(split, held_out, validation=validation, split_column=split_column)
    in_train, read_validation = None, None
    if split_column is not None:
        in_train = (split_column, ("train", "training"))
        read_validation = partial(ListSource, list_file, where=(split_column, VALIDATION_FOLDERS), **options)
    elif validation is not None:
        read_validation = partial(ListSource, _resolve_path(root, validation), **options)
    train = ListSource(list_file, where=in_train, grey=grey, **options)
    return _with_validation(train, at_least, read_validation, split, held_out, seed, _resolve_optional(root, pairs))


def _shards(
    root: Path | None,
    *,
    path: str,
    validation: str | None = None,
    size: Size = None,
    grey: bool | None = None,
    fit: str = "stretch",
    split: str = "sample",
    held_out: int | float | None = None,
    at_least: int = 1,
    pairs: str | None = None,
    seed: int = 0,
) -> DataSplit:
    """Images in tar shards in the layout of WebDataset: a folder, a file or a pattern at `path`.

    Validation data are the shards at `validation`, or are split off by `split`, `held_out` (by default one image per
    class, or a fifth of the classes) and `seed` as for image_folder; `size`, `fit`, `grey`, `at_least` and `pairs` are
    also as there. `hypersphere pack` writes shards.
    """
    _check_split(split, held_out, validation=validation)
    train = ShardSource(_resolve_path(root, path), size=size, grey=grey, fit=fit)
    shards = _resolve_optional(root, validation)
    read_validation = None if shards is None else partial(ShardSource, shards, size=size, fit=fit)
    return _with_validation(train, at_least, read_validation, split, held_out, seed, _resolve_optional(root, pairs))


def _recordio(
    root: Path | None,
    *,
    path: str,
    validation: str | None = None,
    size: Size = None,
    grey: bool | None = None,
    fit: str = "stretch",
    split: str = "class",
    held_out: int | float | None = None,
    at_least: int = 1,
    seed: int = 0,
) -> DataSplit:
    """Images in an MXNet RecordIO file, or in train.rec of a folder, at `path`, as distributed by insightface.

    `validation` is a .bin verification set in the same folder, or "lfw" for the pairs of LFW; without it, validation
    data are split off by `split`, `held_out` (by default a fifth of the classes, or one image per class) and `seed`
    as for image_folder. `size`, `fit`, `grey` and `at_least` are also as there.
    """
    record = _resolve_path(root, path)
    options: dict[str, Any] = {"size": size, "grey": grey, "fit": fit}
    _check_split(split, held_out, validation=validation)
    train = frequent_classes(RecordSource(record, **options), at_least)
    if validation is None:
        return split_source(train, split, held_out, seed)
    return with_verification(train, record if record.is_dir() else record.parent, validation, root, options)


def _hf_dataset(
    root: Path | None,
    *,
    path: str,
    name: str | None = None,
    train: str = "train",
    validation: str | None = None,
    image: str = "image",
    label: str = "label",
    size: Size = None,
    grey: bool | None = None,
    fit: str = "stretch",
    split: str = "sample",
    held_out: int | float | None = None,
    at_least: int = 1,
    seed: int = 0,
) -> DataSplit:
    """Images of a Hugging Face data set: a folder written by `save_to_disk`, or a name for `load_dataset`.

    `path` is the folder or the name, and `name` the configuration; `train` and `validation` are the names of its
    splits. Without `validation`, data are split off by `split`, `held_out` (by default one image per class, or a
    fifth of the classes) and `seed` as for image_folder. `image` and `label` name the columns; `size`, `fit`, `grey`
    and `at_least` are as for image_folder.
    """
    datasets = require_package("datasets", "datasets", "data")
    _check_split(split, held_out, validation=validation)
    folder = _resolve_path(root, path)
    loaded = datasets.load_from_disk(str(folder)) if folder.is_dir() else datasets.load_dataset(path, name)
    has_splits = isinstance(loaded, Mapping)
    require(has_splits, "data.path", "a data set with splits (DatasetDict)", type(loaded).__name__)

    def read(setting: str, part: str, grey: bool | None) -> Source:
        require(part in loaded, setting, f"one of the splits {', '.join(loaded)}", part)
        return HuggingFaceSource(loaded[part], image=image, label=label, size=size, grey=grey, fit=fit)

    read_validation = None if validation is None else partial(read, "data.validation", validation)
    return _with_validation(read("data.train", train, grey), at_least, read_validation, split, held_out, seed)


def _with_validation(
    train: Source,
    at_least: int,
    read_validation: Callable[..., Source] | None,
    split: str,
    held_out: int | float | None,
    seed: int,
    pairs: Path | None = None,
) -> DataSplit:
    """Return training data, and validation data from `read_validation(grey=…)` or split off from the training data."""
    train = frequent_classes(train, at_least)
    if read_validation is None:
        data = split_source(train, split, held_out, seed)
    else:
        # Validation images get the number of channels of the training images.
        data = join_sources(train, read_validation(grey=first_sample(train).shape[0] == 1))
    return with_pairs(data, pairs)


def _check_split(split: str, held_out: int | float | None, **given: str | None) -> None:
    """Check the kind of split, and that `held_out` is unset if another setting gives the validation data."""
    require(split in ("sample", "class"), "data.split", "'sample' or 'class'", split)
    names = [name for name, value in given.items() if value is not None]
    require(not names or held_out is None, "data.held_out", f"unset with {', '.join(names)}", held_out)


def _folder_source(
    path: Path,
    *,
    size: Size = None,
    grey: bool | None = None,
    fit: str = "stretch",
    classes: Sequence[str] | None = None,
) -> Source:
    """Return a lazy source of a folder, or the images of an archive in memory."""
    if not path.is_dir() and path.name.lower().endswith(ARCHIVE_SUFFIXES):
        require(fit == "stretch", "data.fit", "stretch for an archive", fit)
        return TensorSource.of(image_folder(path, size=size, grey=grey, classes=classes))
    return ImageFolderSource(path, size=size, grey=grey, fit=fit, classes=classes)


def _resolve_path(root: Path | None, path: str | Path) -> Path:
    """Return a path, resolved against `root` if it is relative and `root` is given."""
    location = Path(path).expanduser()
    return location if root is None else Path(root).expanduser() / location


def _resolve_optional(root: Path | None, path: str | None) -> Path | None:
    return None if path is None else _resolve_path(root, path)


def _graph(loader: Callable[..., Graph]) -> Callable[..., DataSplit]:
    """Return a menu entry for the loader of a graph. The samples are the training and test nodes."""

    def load(root: Path | None) -> DataSplit:
        graph = loader(root)
        parts = (mask.nonzero().flatten() for mask in (graph.train, graph.test))
        train, test = (TensorSource(nodes, graph.labels[nodes], graph.classes) for nodes in parts)
        return DataSplit(train, test, graph=graph)

    load.__doc__ = loader.__doc__
    return load


DATA: dict[str, Callable[..., DataSplit]] = {
    "digits": _classification(digits),
    "mnist": _classification(mnist),
    "fashion_mnist": _classification(fashion_mnist),
    "cifar10": _classification(cifar10),
    "cifar100": _classification(cifar100),
    "cifar100_fifth": _classification(cifar100_fifth),
    "modelnet10": _classification(modelnet10),
    "omniglot": _omniglot,
    "lfw": _lfw,
    "image_folder": _image_folder,
    "image_list": _image_list,
    "shards": _shards,
    "recordio": _recordio,
    "hf_dataset": _hf_dataset,
    "imagenet": imagenet,
    "mini_imagenet": mini_imagenet,
    "casia_webface": casia_webface,
    "ms_celeb": ms_celeb,
    "imdb_face": imdb_face,
    "modelnet40": modelnet40,
    "cora": _graph(cora),
    "citeseer": _graph(citeseer),
    "pubmed": _graph(pubmed),
    "generated": generated,
}
