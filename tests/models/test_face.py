"""IResNet and MobileFaceNet against a functional evaluation that uses insightface's parameter names."""

import pytest
import torch
import torch.nn.functional as F

from hypersphere.models import MODELS, IResNet, MobileFaceNet


def batch_norm(state, name, x):
    keys = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(x, *(state[f"{name}.{key}"] for key in keys))


def iresnet_reference(state, depths, images):
    """Evaluate insightface's IResNet from its state dict, in evaluation mode."""
    x = F.prelu(batch_norm(state, "bn1", F.conv2d(images, state["conv1.weight"], padding=1)), state["prelu.weight"])
    for stage, depth in enumerate(depths, 1):
        for unit in range(depth):
            at, stride = f"layer{stage}.{unit}", 2 if unit == 0 else 1
            y = F.conv2d(batch_norm(state, f"{at}.bn1", x), state[f"{at}.conv1.weight"], padding=1)
            y = F.prelu(batch_norm(state, f"{at}.bn2", y), state[f"{at}.prelu.weight"])
            y = batch_norm(state, f"{at}.bn3", F.conv2d(y, state[f"{at}.conv2.weight"], stride=stride, padding=1))
            if unit == 0:
                x = F.conv2d(x, state[f"{at}.downsample.0.weight"], stride=2)
                x = batch_norm(state, f"{at}.downsample.1", x)
            x = x + y
    x = batch_norm(state, "bn2", x).flatten(1)
    return batch_norm(state, "features", F.linear(x, state["fc.weight"], state["fc.bias"]))


def mobilefacenet_reference(state, depths, images):
    """Evaluate insightface's MobileFaceNet from its state dict, in evaluation mode."""

    def unit(at, x, stride=1, groups=1, activate=True, padding=None):
        weight = state[f"{at}.layers.0.weight"]
        padding = weight.shape[-1] // 2 if padding is None else padding
        x = batch_norm(state, f"{at}.layers.1", F.conv2d(x, weight, stride=stride, padding=padding, groups=groups))
        return F.prelu(x, state[f"{at}.layers.2.weight"]) if activate else x

    def bottleneck(at, x, stride):
        y = unit(f"{at}.layers.0", x)
        y = unit(f"{at}.layers.1", y, stride, groups=y.shape[1])
        return unit(f"{at}.layers.2", y, activate=False)

    def stage(at, x, depth):
        for number in range(depth):
            x = x + bottleneck(f"{at}.layers.{number}", x, 1)
        return x

    x = unit("layers.0", images, 2)
    x = unit("layers.1", x, groups=64) if depths[0] == 1 else stage("layers.1", x, depths[0])
    for number, depth in enumerate(depths[1:]):
        x = stage(f"layers.{3 + 2 * number}", bottleneck(f"layers.{2 + 2 * number}", x, 2), depth)
    x = unit("conv_sep", x)
    x = unit("features.layers.0", x, groups=512, activate=False, padding=0).flatten(1)
    return batch_norm(state, "features.layers.3", F.linear(x, state["features.layers.2.weight"]))


def trained(network):
    """Return a network with statistics and biases that differ from their initial values."""
    generator = torch.Generator().manual_seed(0)
    for name, value in network.state_dict().items():
        if "running_var" in name or (value.ndim == 1 and "weight" in name):
            value.copy_(0.5 + torch.rand(value.shape, generator=generator))
        elif value.ndim == 1:
            value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return network.double().eval()


@pytest.mark.parametrize("size", [(32, 32), (40, 33)])
def test_iresnet_agrees_with_functional_evaluation(size):
    depths = (2, 1, 3, 1)
    network = trained(IResNet(depths, (4, 6, 8, 8), image_size=size, feature_dim=5))
    images = torch.rand(3, 3, *size, dtype=torch.float64)
    expected = iresnet_reference(network.state_dict(), depths, images)
    torch.testing.assert_close(network(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("depths", "size"), [((1, 2, 1, 1), (32, 32)), ((2, 1, 1, 2), (40, 33))])
def test_mobilefacenet_agrees_with_functional_evaluation(depths, size):
    network = trained(MobileFaceNet(depths, 1, image_size=size, feature_dim=5))
    images = torch.rand(3, 3, *size, dtype=torch.float64)
    expected = mobilefacenet_reference(network.state_dict(), depths, images)
    torch.testing.assert_close(network(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("iresnet18", 24.03), ("iresnet34", 34.14), ("iresnet50", 43.59), ("iresnet100", 65.15), ("mobilefacenet", 2.06)],
)
def test_face_networks_have_the_published_number_of_parameters(name, millions):
    with torch.device("meta"):
        network = MODELS[name]()
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.02)


def test_iresnet_last_norm_has_a_fixed_weight():
    network = IResNet((1, 1, 1, 1), (4, 4, 4, 4), image_size=16, feature_dim=3)
    assert not network.features.weight.requires_grad
    assert network.features.bias.requires_grad


@pytest.mark.parametrize("network", [IResNet, MobileFaceNet])
def test_face_networks_refuse_small_images(network):
    with pytest.raises(ValueError, match="image_size must be at least 16"):
        network((1, 1, 1, 1), image_size=15)


@pytest.mark.parametrize("network", [IResNet, MobileFaceNet])
def test_face_networks_refuse_other_numbers_of_stages(network):
    with pytest.raises(ValueError, match=r"depths (and widths )?must be four integers >= 1"):
        network((1, 1, 1))
