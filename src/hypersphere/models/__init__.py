"""Networks of the thesis and its papers, whose layers can be plain, sphere, decoupled or rotated.

A network maps inputs to features with `feature_dim` numbers each, which a head of `hypersphere.heads` (or an
`nn.Linear`) classifies. `MODELS` lists all networks by name, with the published settings.

These arguments mean the same in all networks that take them:

- `in_channels` and `image_size`: channels of the image; its (height, width), or one integer for both.
- `num_classes`: None for features, or an integer for logits from a linear classifier, for plain training. The
  classifier is an `nn.Linear`, whatever the factories.
- `conv` and `linear`: factories of convolutions and fully connected layers, called like `nn.Conv2d` (`nn.Conv1d` in
  PointNet) and `nn.Linear`.
- `norm` and `activation`: factories of the layers that follow a convolution or a fully connected layer, called with the
  number of its channels; None for no such layer.
- `bias`: True for layers with biases.
"""

from hypersphere.models._blocks import relu
from hypersphere.models.activation_checkpointing import checkpoint_activations_
from hypersphere.models.autoencoder import Autoencoder
from hypersphere.models.embedder import Embedder, GeM, layer_depths, load_encoder
from hypersphere.models.embedding import EmbeddingCNN
from hypersphere.models.face import IResNet, MobileFaceNet
from hypersphere.models.gan import Discriminator, Generator, leaky_relu
from hypersphere.models.gcn import GCN, normalized_adjacency
from hypersphere.models.initialization import INITIALIZATIONS
from hypersphere.models.mlp import MLP
from hypersphere.models.network import Network, auto_model
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
from hypersphere.models.sync_batch_norm import sync_batch_norm_
from hypersphere.models.toy import ToyCNN
from hypersphere.models.transformer import SphereTransformer
from hypersphere.models.weights import LoadReport, load_matching_weights_

__all__ = [
    "GCN",
    "INITIALIZATIONS",
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
    "LoadReport",
    "MobileFaceNet",
    "Network",
    "PlainCNN",
    "PointNet",
    "PointNet2",
    "ResNet",
    "ResidualUnit",
    "SphereFaceNet",
    "SphereFaceUnit",
    "SphereTransformer",
    "ToyCNN",
    "TransformNet",
    "auto_model",
    "ball_query",
    "checkpoint_activations_",
    "farthest_points",
    "layer_depths",
    "leaky_relu",
    "load_encoder",
    "load_matching_weights_",
    "normalized_adjacency",
    "relu",
    "sync_batch_norm_",
    "transform_penalty",
]
