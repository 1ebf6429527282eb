"""The networks of the sources, made of layers that one passes in: plain, sphere, decoupled or rotated.

A network maps inputs to features of `feature_dim` numbers, and a head of `hypersphere.heads` (or an `nn.Linear`)
classifies them; those that take `num_classes` can give logits themselves, for plain training.
"""

from hypersphere.models.autoencoder import Autoencoder
from hypersphere.models.embedding import EmbeddingCNN
from hypersphere.models.gan import Discriminator, Generator, leaky_relu
from hypersphere.models.gcn import GCN, normalized_adjacency
from hypersphere.models.grouping import ball_query, farthest_points
from hypersphere.models.mlp import MLP
from hypersphere.models.plain import PlainCNN
from hypersphere.models.pointnet import PointNet, TransformNet, transform_penalty
from hypersphere.models.pointnet2 import Level, PointNet2
from hypersphere.models.resnet import ResidualUnit, ResNet
from hypersphere.models.sources import MODELS
from hypersphere.models.sphereface import SphereFaceNet, SphereFaceUnit
from hypersphere.models.toy import ToyCNN
from hypersphere.models.units import relu

__all__ = [
    "GCN",
    "MLP",
    "MODELS",
    "Autoencoder",
    "Discriminator",
    "EmbeddingCNN",
    "Generator",
    "Level",
    "PlainCNN",
    "PointNet",
    "PointNet2",
    "ResNet",
    "ResidualUnit",
    "SphereFaceNet",
    "SphereFaceUnit",
    "ToyCNN",
    "TransformNet",
    "ball_query",
    "farthest_points",
    "leaky_relu",
    "normalized_adjacency",
    "relu",
    "transform_penalty",
]
