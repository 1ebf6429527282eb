"""The networks of the sources. Layer factories are passed in, so each can be plain, sphere, decoupled or rotated.

A network maps inputs to features with `feature_dim` numbers each, which a head of `hypersphere.heads` (or an
`nn.Linear`) classifies. Networks that take `num_classes` can return logits themselves, for plain training.
`MODELS` lists all networks by name, with the settings of their tables.
"""

from hypersphere.models._blocks import relu
from hypersphere.models.autoencoder import Autoencoder
from hypersphere.models.embedder import Embedder, GeM, layer_depths, load_encoder
from hypersphere.models.embedding import EmbeddingCNN
from hypersphere.models.face import IResNet, MobileFaceNet
from hypersphere.models.gan import Discriminator, Generator, leaky_relu
from hypersphere.models.gcn import GCN, normalized_adjacency
from hypersphere.models.mlp import MLP
from hypersphere.models.plain import PlainCNN
from hypersphere.models.pointnet import (
    Level,
    PointNet,
    PointNet2,
    TransformNet,
    ball_query,
    farthest_points,
    transform_penalty,
)
from hypersphere.models.registry import MODELS
from hypersphere.models.resnet import ResidualUnit, ResNet
from hypersphere.models.sphereface import SphereFaceNet, SphereFaceUnit
from hypersphere.models.toy import ToyCNN

__all__ = [
    "GCN",
    "MLP",
    "MODELS",
    "Autoencoder",
    "Discriminator",
    "Embedder",
    "EmbeddingCNN",
    "GeM",
    "Generator",
    "IResNet",
    "Level",
    "MobileFaceNet",
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
    "layer_depths",
    "leaky_relu",
    "load_encoder",
    "normalized_adjacency",
    "relu",
    "transform_penalty",
]
