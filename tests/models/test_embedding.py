import pytest
import torch
from torch import nn

from hypersphere.models import EmbeddingCNN


@pytest.mark.parametrize("first_stride", [1, 2, 3])
@pytest.mark.parametrize("image_size", [(28, 28), (37, 24), (25, 50), 29])
def test_embedding_cnn_accepts_any_image_size(image_size, first_stride):
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    model = EmbeddingCNN(2, image_size, 5, (4, 3, 6), first_stride=first_stride)
    assert model(torch.rand(2, 2, *size)).shape == (2, 5)


def test_embedding_cnn_works_without_norm_and_activation():
    model = EmbeddingCNN(1, 8, 5, (4, 6), norm=None, activation=None)
    assert [type(layer) for layer in model.stages] == [nn.Conv2d, nn.MaxPool2d] * 2
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 5)


def test_embedding_cnn_rejects_images_that_pooling_reduces_to_nothing():
    with pytest.raises(ValueError, match="image_size must be at least 8 in height and width, not 7"):
        EmbeddingCNN(1, 7)
