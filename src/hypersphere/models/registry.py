"""All networks by name, with the depths and widths of the table that defines them.

An entry is a class with some arguments set; the caller can pass the others and replace these. Layers are plain unless
`conv` or `linear` is passed.

>>> MODELS["opt_cnn6"](num_classes=100).feature_dim
64
>>> MODELS["opt_cnn6"](widths=(8, 8, 8), norm=None).feature_dim
64
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hypersphere.models._blocks import relu
from hypersphere.models.autoencoder import Autoencoder
from hypersphere.models.embedding import EmbeddingCNN
from hypersphere.models.face import IResNet, MobileFaceNet
from hypersphere.models.gan import Discriminator, Generator
from hypersphere.models.gcn import GCN
from hypersphere.models.mlp import MLP
from hypersphere.models.plain import PlainCNN
from hypersphere.models.pointnet import PointNet, PointNet2
from hypersphere.models.resnet import ResNet
from hypersphere.models.sphereface import SphereFaceNet
from hypersphere.models.toy import ToyCNN
from hypersphere.models.transformer import SphereTransformer

__all__ = ["MODELS"]

# Families of networks that differ in depth.
SPHERENET_CNN = partial(PlainCNN, widths=(64, 96, 128), feature_dim=256)
WIDE_CNN = partial(PlainCNN, widths=(64, 128, 256), feature_dim=256)
NARROW_CNN = partial(PlainCNN, widths=(64, 64, 64), feature_dim=64)
LSOFTMAX_CNN = partial(PlainCNN, feature_dim=256, activation=nn.PReLU)
LARGE_RESNET = partial(ResNet, widths=(64, 128, 256, 512), large_stem=True, shortcut="projection")

MODELS: dict[str, Callable[..., nn.Module]] = {
    # Thesis, table B.1: 32×32 images; no parameter counts are printed.
    "spherenet_cnn3": partial(SPHERENET_CNN, depth=3),
    "spherenet_cnn9": partial(SPHERENET_CNN, depth=9),
    "spherenet_cnn18": partial(SPHERENET_CNN, depth=18),
    "spherenet_cnn45": partial(SPHERENET_CNN, depth=45),
    "spherenet_cnn60": partial(SPHERENET_CNN, depth=60),
    "spherenet_cnn69": partial(SPHERENET_CNN, depth=69),
    # Thesis, table C.1. The networks of the attack experiments have no batch normalisation.
    "decoupled_cnn9": partial(WIDE_CNN, depth=9, feature_dim=512),
    "attack_cnn9": partial(PlainCNN, depth=9, widths=(32, 64, 128), feature_dim=256, norm=None),
    # Thesis, tables D.1 and E.1. The OPT paper calls CNN-9 "wide CNN-9" (table 17; 2.99M weights in table 10).
    "mhe_cnn6": partial(WIDE_CNN, depth=6),
    "mhe_cnn9": partial(WIDE_CNN, depth=9),
    "mhe_cnn15": partial(WIDE_CNN, depth=15),
    "wide_cnn9": partial(WIDE_CNN, depth=9),
    # Thesis, table E.3.
    "small_cnn3": partial(PlainCNN, depth=3, widths=(32, 64, 64), feature_dim=64),
    "small_cnn9": partial(PlainCNN, depth=9, widths=(32, 64, 64), feature_dim=64),
    # Thesis, tables F.1 and F.3. CNN-6 has 258K weights (OPT paper, table 10).
    "opt_cnn6": partial(NARROW_CNN, depth=6),
    "opt_cnn9": partial(NARROW_CNN, depth=9),
    "cnn10": partial(WIDE_CNN, depth=10, image_size=224, large_stem=True),
    "few_shot_cnn4": partial(PlainCNN, depth=4, widths=(64, 64, 64, 64), feature_dim=None, image_size=84),
    # Thesis, table 2.1, first column: 28×28 digits and a 2-d feature that can be drawn.
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
    # Thesis, table 2.1, other columns: MNIST, CIFAR-10, CIFAR-100 and faces. The first convolution (Conv0.x) has the
    # width of the first stage.
    "lsoftmax_cnn10": partial(LSOFTMAX_CNN, depth=(4, 3, 3), widths=(64, 64, 64), in_channels=1, image_size=28),
    "lsoftmax_cnn13": partial(LSOFTMAX_CNN, depth=(5, 4, 4), widths=(64, 96, 128)),
    "lsoftmax_cnn13_wide": partial(LSOFTMAX_CNN, depth=(5, 4, 4), widths=(96, 192, 384), feature_dim=512),
    "lsoftmax_cnn17": partial(
        LSOFTMAX_CNN,
        depth=(5, 4, 4, 4),
        widths=(64, 256, 256, 256),
        feature_dim=512,
        image_size=(112, 96),
        first_stride=2,
        last_pool=False,
    ),
    # Not in the thesis: small networks for quick experiments.
    "toy_cnn": ToyCNN,
    "embedding_cnn": EmbeddingCNN,
    # Thesis, tables B.2, C.1, D.2, F.2. ResNet-20 to 34 have 0.27M, 0.46M, 11.7M and 21.8M parameters.
    "resnet20": partial(ResNet, depths=(3, 3, 3), widths=(16, 32, 64)),
    "resnet32": partial(ResNet, depths=(5, 5, 5), widths=(16, 32, 64)),
    "spherenet_resnet32": partial(ResNet, depths=(5, 5, 5), widths=(64, 96, 128)),
    "mhe_resnet32": partial(ResNet, depths=(5, 5, 5), widths=(64, 128, 256)),
    "wide_resnet32": partial(ResNet, depths=(5, 5, 5), widths=(96, 192, 384)),
    "resnet18": partial(LARGE_RESNET, depths=(2, 2, 2, 2)),
    "resnet34": partial(LARGE_RESNET, depths=(3, 4, 6, 3)),
    "resnet50": partial(LARGE_RESNET, depths=(3, 4, 6, 3), bottleneck=True),  # 25.6M; He et al. 2016, table 1
    "wide_resnet18": partial(LARGE_RESNET, depths=(2, 2, 2, 2), widths=(256, 512, 768, 1024)),
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
    # Thesis, table 2.7: 112×96 faces.
    "sphereface4": partial(SphereFaceNet, units=(0, 0, 0, 0)),
    "sphereface10": partial(SphereFaceNet, units=(0, 1, 2, 0)),
    "sphereface20": partial(SphereFaceNet, units=(1, 2, 4, 1)),
    "sphereface36": partial(SphereFaceNet, units=(2, 4, 8, 2)),
    "sphereface64": partial(SphereFaceNet, units=(3, 8, 16, 3)),
    # Not in the thesis: the networks of insightface, for 112×112 faces.
    "iresnet18": partial(IResNet, depths=(2, 2, 2, 2)),
    "iresnet34": partial(IResNet, depths=(3, 4, 6, 3)),
    "iresnet50": partial(IResNet, depths=(3, 4, 14, 3)),
    "iresnet100": partial(IResNet, depths=(3, 13, 30, 3)),
    "mobilefacenet": MobileFaceNet,
    "mobilefacenet_large": partial(MobileFaceNet, depths=(2, 8, 12, 4), scale=4),
    # Not in the thesis: transformers on patches of images, plain and normalised (nGPT).
    "vit": partial(SphereTransformer, image_size=32, kind="plain"),
    "normalized_vit": partial(SphereTransformer, image_size=32, kind="normalized"),
    # Thesis, F.3 (MLP), 6.6.3 and 7.5 (point clouds, graphs), table D.5 (GAN), figure 1.1 (autoencoder).
    "mlp": MLP,
    "pointnet": PointNet,
    "pointnet_transforms": partial(PointNet, transforms=True),
    "pointnet2": PointNet2,
    "gcn": GCN,
    "generator": Generator,
    "discriminator": Discriminator,
    "autoencoder": Autoencoder,
}
