"""Datasets and pair protocols: read from your own files, checked, never fetched.

Every loader takes the folder that holds all datasets as `root`; without it the environment variable HYPERSPHERE_DATA
names that folder. To add a dataset, write a loader and list it in DATASETS.
"""

from collections.abc import Callable
from typing import Any

from hypersphere.data.cifar import cifar10, cifar100, cifar100_fifth
from hypersphere.data.digits import digits
from hypersphere.data.errors import DamagedData, ForbiddenGlobal, MissingData
from hypersphere.data.folder import image_folder, image_names
from hypersphere.data.graph import Graph
from hypersphere.data.idx import fashion_mnist, mnist
from hypersphere.data.labelled import LabelledImages, PointClouds
from hypersphere.data.lfw import lfw, lfw_pairs, lfw_people
from hypersphere.data.modelnet import modelnet10
from hypersphere.data.omniglot import omniglot
from hypersphere.data.pairs import Pairs, draw_pairs, read_pairs
from hypersphere.data.planetoid import citeseer, cora, planetoid, pubmed
from hypersphere.data.root import data_root

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
    "DATASETS",
    "DamagedData",
    "ForbiddenGlobal",
    "Graph",
    "LabelledImages",
    "MissingData",
    "Pairs",
    "PointClouds",
    "cifar10",
    "cifar100",
    "cifar100_fifth",
    "citeseer",
    "cora",
    "data_root",
    "digits",
    "draw_pairs",
    "fashion_mnist",
    "image_folder",
    "image_names",
    "lfw",
    "lfw_pairs",
    "lfw_people",
    "mnist",
    "modelnet10",
    "omniglot",
    "planetoid",
    "pubmed",
    "read_pairs",
]
