import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hypersphere.models import ResidualUnit, ResNet


def test_pad_shortcut_takes_every_second_pixel_and_appends_zeros():
    unit = ResidualUnit(2, 5, stride=2, shortcut="pad", norm=None)
    for parameter in unit.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(2, 2, 5, 5)
    expected = torch.cat([x[:, :, [0, 2, 4]][..., [0, 2, 4]].clamp(min=0), torch.zeros(2, 3, 3, 3)], 1)
    assert torch.equal(unit(x), expected)


def test_residual_unit_without_activation_maps_zero_to_zero():
    unit = ResidualUnit(2, 2, norm=None, activation=None)
    assert torch.equal(unit(torch.zeros(1, 2, 3, 3)), torch.zeros(1, 2, 3, 3))


def test_projection_shortcut_can_reduce_channels():
    assert ResidualUnit(6, 4, shortcut="projection")(torch.rand(2, 6, 5, 5)).shape == (2, 4, 5, 5)


def test_bottleneck_unit_is_the_sum_of_three_convolutions_and_the_projection():
    unit = ResidualUnit(3, 8, stride=2, bottleneck=2, norm=None, activation=None)
    reduce, middle, expand = (layer.weight for layer in unit.residual)
    x = torch.randn(2, 3, 5, 5)
    expected = F.conv2d(F.conv2d(F.conv2d(x, reduce, stride=2), middle, padding=1), expand)
    torch.testing.assert_close(unit(x), expected + F.conv2d(x, unit.projection[0].weight, stride=2))


def test_resnet_classifier_is_linear_in_the_features():
    model = ResNet((1, 1), (4, 6), num_classes=3).eval()
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(model(x), model.classifier(model.features(x)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet((1,), (4, 8)), "depths must be 2 integers >= 1, one per entry of widths"),
        (lambda: ResNet((1, 1), (8, 4)), "shortcut must be 'projection' if widths decrease, not 'pad'"),
        (lambda: ResNet(shortcut="conv"), "shortcut must be 'pad' or 'projection', not 'conv'"),
        (lambda: ResNet(num_classes=0), "num_classes must be None or an integer >= 2, not 0"),
    ],
)
def test_resnet_rejects_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
