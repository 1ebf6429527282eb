"""Data sets and pair protocols, read from your files and verified. Nothing is downloaded.

A loader is called as `loader(split, root)`, or as `loader(root)` if the data set has no splits. `root` is the folder
that contains all data sets; without it, the environment variable HYPERSPHERE_DATA names that folder. DATASETS lists
these loaders. `hypersphere train` chooses from DATA, whose entries return a `DataSplit` (`data/menu.py`).
"""

from collections.abc import Callable
from typing import Any

from hypersphere.data._files import DamagedData, ForbiddenGlobal, MissingData, data_root
from hypersphere.data.augment import AUGMENTATIONS
from hypersphere.data.cifar import cifar10, cifar100, cifar100_fifth
from hypersphere.data.containers import Graph, LabelledImages, PointClouds
from hypersphere.data.face_benchmarks import MegaFace, VideoPairs, megaface, youtube_faces
from hypersphere.data.folder import image_folder, image_names, open_images
from hypersphere.data.generated import published_outline
from hypersphere.data.hugging_face import HuggingFaceSource
from hypersphere.data.images import BrokenSample
from hypersphere.data.lfw import lfw, lfw_pairs, lfw_people
from hypersphere.data.lists import ListSource
from hypersphere.data.loading import Batches, Loader
from hypersphere.data.menu import DATA
from hypersphere.data.mnist import digits, fashion_mnist, mnist
from hypersphere.data.modelnet import modelnet10
from hypersphere.data.normalize import NORMALIZATIONS
from hypersphere.data.omniglot import omniglot
from hypersphere.data.pairs import NoPairsError, Pairs, draw_all_class_pairs, draw_pairs, read_pairs
from hypersphere.data.planetoid import citeseer, cora, planetoid, pubmed
from hypersphere.data.recordio import BinSource, RecordSource
from hypersphere.data.samplers import SAMPLERS, Sampler
from hypersphere.data.shards import ShardSource, pack
from hypersphere.data.sources import (
    ImageFolderSource,
    Mirrored,
    Source,
    TensorSource,
    of_classes,
    subset,
)
from hypersphere.data.splits import DataSplit, fingerprint_difference, selection_split
from hypersphere.data.trials import (
    IJB,
    TemplateSet,
    Trials,
    ijb,
    read_template_list,
    read_template_pairs,
    read_template_set,
    read_trials,
)

DATASETS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar100_fifth": cifar100_fifth,
    "omniglot": omniglot,
    "lfw": lfw,
    "modelnet10": modelnet10,
    "cora": cora,
    "citeseer": citeseer,
    "pubmed": pubmed,
    "image_folder": image_folder,
}

__all__ = [
    "AUGMENTATIONS",
    "DATA",
    "DATASETS",
    "IJB",
    "NORMALIZATIONS",
    "SAMPLERS",
    "Batches",
    "BinSource",
    "BrokenSample",
    "DamagedData",
    "DataSplit",
    "ForbiddenGlobal",
    "Graph",
    "HuggingFaceSource",
    "ImageFolderSource",
    "LabelledImages",
    "ListSource",
    "Loader",
    "MegaFace",
    "Mirrored",
    "MissingData",
    "NoPairsError",
    "Pairs",
    "PointClouds",
    "RecordSource",
    "Sampler",
    "ShardSource",
    "Source",
    "TemplateSet",
    "TensorSource",
    "Trials",
    "VideoPairs",
    "cifar10",
    "cifar100",
    "cifar100_fifth",
    "citeseer",
    "cora",
    "data_root",
    "digits",
    "draw_all_class_pairs",
    "draw_pairs",
    "fashion_mnist",
    "fingerprint_difference",
    "ijb",
    "image_folder",
    "image_names",
    "lfw",
    "lfw_pairs",
    "lfw_people",
    "megaface",
    "mnist",
    "modelnet10",
    "of_classes",
    "omniglot",
    "open_images",
    "pack",
    "planetoid",
    "published_outline",
    "pubmed",
    "read_pairs",
    "read_template_list",
    "read_template_pairs",
    "read_template_set",
    "read_trials",
    "selection_split",
    "subset",
    "youtube_faces",
]
