import pytest
import torch
from torch import nn

from hypersphere.models import MLP


def test_mlp_has_the_layers_of_the_thesis():
    shapes = [tuple(m.weight.shape) for m in MLP(num_classes=10).modules() if isinstance(m, nn.Linear)]
    assert shapes == [(256, 784), (256, 256), (10, 256)]


def test_mlp_classifier_is_linear_in_the_features():
    model = MLP(6, (5, 4), num_classes=3, norm=nn.BatchNorm1d).eval()
    x = torch.rand(2, 2, 3)
    torch.testing.assert_close(model(x), model.classifier(model.features(x)))
    assert model.features(x).shape == (2, 4)


@pytest.mark.parametrize("widths", [(), (0,), 64, "64"])
def test_mlp_rejects_invalid_widths(widths):
    with pytest.raises(ValueError, match=r"widths must be a sequence of 1 or more integers >= 1, not"):
        MLP(widths=widths)
