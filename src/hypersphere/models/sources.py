"""Every network of the sources by name, with the depths and widths of its table.

An entry is its class with the table's arguments set; all others are still to be chosen, and these may be chosen anew.
Names say where a network comes from, not what it is made of: layers are plain unless `conv` says otherwise.

>>> MODELS["opt_cnn6"](num_classes=100).feature_dim
64
>>> MODELS["opt_cnn6"](widths=(8, 8, 8), norm=None).feature_dim
64
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hypersphere.models.autoencoder import Autoencoder
from hypersphere.models.embedding import EmbeddingCNN
from hypersphere.models.gan import Discriminator, Generator
from hypersphere.models.gcn import GCN
from hypersphere.models.mlp import MLP
from hypersphere.models.plain import PlainCNN
from hypersphere.models.pointnet import PointNet
from hypersphere.models.pointnet2 import PointNet2
from hypersphere.models.resnet import ResNet
from hypersphere.models.sphereface import SphereFaceNet
from hypersphere.models.toy import ToyCNN
from hypersphere.models.units import relu

__all__ = ["MODELS"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    # thesis, table B.1
    "spherenet_cnn3": partial(PlainCNN, depth=3, widths=(64, 96, 128), feature_dim=256),
    "spherenet_cnn9": partial(PlainCNN, depth=9, widths=(64, 96, 128), feature_dim=256),
    "spherenet_cnn18": partial(PlainCNN, depth=18, widths=(64, 96, 128), feature_dim=256),
    "spherenet_cnn45": partial(PlainCNN, depth=45, widths=(64, 96, 128), feature_dim=256),
    "spherenet_cnn60": partial(PlainCNN, depth=60, widths=(64, 96, 128), feature_dim=256),
    "spherenet_cnn69": partial(PlainCNN, depth=69, widths=(64, 96, 128), feature_dim=256),
    # thesis, table C.1; without batch normalisation against attacks
    "decoupled_cnn9": partial(PlainCNN, depth=9, widths=(64, 128, 256), feature_dim=512),
    "attack_cnn9": partial(PlainCNN, depth=9, widths=(32, 64, 128), feature_dim=256, norm=None),
    # thesis, tables D.1 and E.1; "wide CNN-9" is of table 17 of the OPT paper
    "mhe_cnn6": partial(PlainCNN, depth=6, widths=(64, 128, 256), feature_dim=256),
    "mhe_cnn9": partial(PlainCNN, depth=9, widths=(64, 128, 256), feature_dim=256),
    "mhe_cnn15": partial(PlainCNN, depth=15, widths=(64, 128, 256), feature_dim=256),
    "wide_cnn9": partial(PlainCNN, depth=9, widths=(64, 128, 256), feature_dim=256),
    # thesis, table E.3
    "small_cnn3": partial(PlainCNN, depth=3, widths=(32, 64, 64), feature_dim=64),
    "small_cnn9": partial(PlainCNN, depth=9, widths=(32, 64, 64), feature_dim=64),
    # thesis, tables F.1 and F.3
    "opt_cnn6": partial(PlainCNN, depth=6, widths=(64, 64, 64), feature_dim=64),
    "opt_cnn9": partial(PlainCNN, depth=9, widths=(64, 64, 64), feature_dim=64),
    "cnn10": partial(PlainCNN, depth=10, widths=(64, 128, 256), feature_dim=256, image_size=224, large_stem=True),
    "few_shot_cnn4": partial(PlainCNN, depth=4, widths=(64, 64, 64, 64), feature_dim=None, image_size=84),
    # thesis, table 2.1: a feature to look at
    "mnist_cnn6": partial(
        PlainCNN,
        depth=6,
        widths=(32, 64, 128),
        feature_dim=2,
        in_channels=1,
        image_size=28,
        kernel_size=5,
        activation=nn.PReLU,
    ),
    "toy_cnn": ToyCNN,
    "embedding_cnn": EmbeddingCNN,
    # thesis, tables B.2, C.1, D.2, F.2
    "resnet20": partial(ResNet, depths=(3, 3, 3), widths=(16, 32, 64)),
    "resnet32": partial(ResNet, depths=(5, 5, 5), widths=(16, 32, 64)),
    "spherenet_resnet32": partial(ResNet, depths=(5, 5, 5), widths=(64, 96, 128)),
    "mhe_resnet32": partial(ResNet, depths=(5, 5, 5), widths=(64, 128, 256)),
    "wide_resnet32": partial(ResNet, depths=(5, 5, 5), widths=(96, 192, 384)),
    "resnet18": partial(
        ResNet, depths=(2, 2, 2, 2), widths=(64, 128, 256, 512), large_stem=True, shortcut="projection"
    ),
    "resnet34": partial(
        ResNet, depths=(3, 4, 6, 3), widths=(64, 128, 256, 512), large_stem=True, shortcut="projection"
    ),
    "wide_resnet18": partial(
        ResNet, depths=(2, 2, 2, 2), widths=(256, 512, 768, 1024), large_stem=True, shortcut="projection"
    ),
    "modified_resnet18": partial(
        SphereFaceNet,
        units=(1, 2, 3, 0),
        widths=(128, 256, 512, 1024),
        feature_dim=None,
        image_size=224,
        large_stem=True,
        bias=False,
        norm=nn.BatchNorm2d,
        activation=relu,
    ),
    # thesis, table 2.7
    "sphereface4": partial(SphereFaceNet, units=(0, 0, 0, 0)),
    "sphereface10": partial(SphereFaceNet, units=(0, 1, 2, 0)),
    "sphereface20": partial(SphereFaceNet, units=(1, 2, 4, 1)),
    "sphereface36": partial(SphereFaceNet, units=(2, 4, 8, 2)),
    "sphereface64": partial(SphereFaceNet, units=(3, 8, 16, 3)),
    # thesis, F.3, 6.6.3 and 7.5; table D.5; figure 1.1
    "mlp": MLP,
    "pointnet": PointNet,
    "pointnet_transforms": partial(PointNet, transforms=True),
    "pointnet2": PointNet2,
    "gcn": GCN,
    "generator": Generator,
    "discriminator": Discriminator,
    "autoencoder": Autoencoder,
}
