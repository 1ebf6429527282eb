import pytest
import torch
from torch import nn

from hypersphere.models import SphereFaceNet, SphereFaceUnit, relu


def test_sphereface_residual_units_start_with_standard_deviation_001():
    torch.manual_seed(0)
    model = SphereFaceNet((1, 2), (16, 32), 8, image_size=(12, 10))
    convs = [m for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and "residual" in name]
    assert len(convs) == 6
    assert all(0.009 < float(conv.weight.detach().std()) < 0.011 for conv in convs)


def test_sphereface_features_have_no_activation():
    torch.manual_seed(0)
    model = SphereFaceNet((1, 2), (16, 32), 8, image_size=(12, 10))
    assert model(torch.randn(20, 3, 12, 10)).min() < 0


def test_sphereface_unit_is_the_identity_if_a_convolution_is_zero():
    unit = SphereFaceUnit(3, bias=False, activation=None)
    nn.init.zeros_(unit.residual[1].weight)
    x = torch.randn(1, 3, 4, 4)
    assert torch.equal(unit(x), x)


def test_sphereface_rejects_units_that_do_not_match_the_widths():
    with pytest.raises(ValueError, match="units must be 4 integers >= 0, one per entry of widths"):
        SphereFaceNet((1,))


def test_sphereface_feature_activation_confines_features_to_one_orthant():
    torch.manual_seed(0)
    options = {"units": (0, 0), "widths": (4, 4), "feature_dim": 6, "image_size": 8}
    images = torch.rand(5, 3, 8, 8)
    assert bool((SphereFaceNet(**options)(images) < 0).any())
    assert bool((SphereFaceNet(**options, feature_activation=relu)(images) >= 0).all())
