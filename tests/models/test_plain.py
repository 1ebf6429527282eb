import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.layers import DecoupledConv2d, DecoupledLinear, sphere_conv2d
from hypersphere.models import MODELS, PlainCNN, relu


def test_plain_cnn_with_sphere_layers_ignores_the_scale_of_the_input():
    model = PlainCNN(6, (4, 6, 8), 5, image_size=8, norm=None, conv=sphere_conv2d, linear=DecoupledLinear)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(model(x), model(7 * x))


def test_plain_cnn_can_be_rotated_and_folded():
    torch.manual_seed(0)
    model = PlainCNN(3, (4, 4, 4), 6, image_size=8, num_classes=3).eval()
    x = torch.rand(2, 3, 8, 8)
    hs.rotation.rotate_(model, "cayley")
    rotated = model(x)
    assert type(model.classifier) is nn.Linear  # the output layer is not rotated
    torch.testing.assert_close(hs.rotation.fold_(model)(x), rotated)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, None])
def test_plain_cnn_with_69_sphere_layers_trains_without_shortcuts(norm):
    torch.manual_seed(0)
    model = MODELS["spherenet_cnn69"](
        widths=(8, 8, 8), feature_dim=16, image_size=8, num_classes=2, norm=norm, conv=sphere_conv2d
    )
    assert sum(isinstance(m, DecoupledConv2d) for m in model.modules()) == 69
    x, y = torch.rand(16, 3, 8, 8), torch.arange(16) % 2
    x[y == 1, :, :4] *= 0.2
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.003), []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(bool(torch.isfinite(g).all()) for g in gradients)
        assert float(gradients[0].abs().max()) > 0  # the gradient reaches the first layer
        optimizer.step()
        losses.append(float(loss.detach()))
    if norm is not None:  # without normalisation, a network this deep and narrow maps all images to the same feature
        assert sum(losses[-3:]) / 3 < 0.8 * losses[0]


def test_plain_cnn_classifier_is_linear_in_the_features():
    """There is no activation between the features and the classifier, as there is none before a head."""
    torch.manual_seed(0)
    model = PlainCNN(3, (4, 4, 4), 6, image_size=8, num_classes=3).eval()
    x = torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(model(x), model.features(x) @ model.classifier.weight.mT)
    assert (model.features(x) < 0).any()


def test_plain_cnn_computes_the_same_features_with_and_without_classifier():
    torch.manual_seed(0)
    with_classes = PlainCNN(3, (4, 4, 4), 6, image_size=8, num_classes=3).eval()
    without = PlainCNN(3, (4, 4, 4), 6, image_size=8).eval()
    state = {name: value for name, value in with_classes.state_dict().items() if not name.startswith("classifier")}
    without.load_state_dict(state)
    x = torch.rand(4, 3, 8, 8)
    assert torch.equal(without(x), with_classes.features(x))


@pytest.mark.parametrize("feature_dim", [6, None])
@pytest.mark.parametrize("num_classes", [None, 3])
def test_plain_cnn_feature_activation_is_applied_with_and_without_classifier(feature_dim, num_classes):
    torch.manual_seed(0)
    options = {"image_size": 8, "num_classes": num_classes, "norm": None, "activation": None}
    model = PlainCNN(3, (4, 4, 4), feature_dim, feature_activation=relu, **options)
    plain = PlainCNN(3, (4, 4, 4), feature_dim, **options)
    plain.load_state_dict(model.state_dict())
    x = torch.rand(4, 3, 8, 8)
    assert (plain.features(x) < 0).any()
    features = plain.features(x).clamp(min=0)
    torch.testing.assert_close(model.features(x), features)
    torch.testing.assert_close(model(x), features if num_classes is None else features @ model.classifier.weight.mT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 7}, "depth must be a multiple of the 3 stages, not 7"),
        ({"depth": 9, "large_stem": True, "image_size": 64}, "3 stages plus one for the large stem, not 9"),
        ({"depth": (2, 0, 1)}, "depth must be 3 integers >= 1, one per entry of widths"),
        ({"image_size": 4}, "image_size must be at least 8 in height and width, not 4"),
        ({"kernel_size": 2}, "kernel_size must be an odd integer, not 2"),
        ({"num_classes": 1}, "num_classes must be None or an integer >= 2, not 1"),
        ({"widths": ()}, "widths must be a sequence of 1 or more integers >= 1"),
        ({"widths": 64}, "widths must be a sequence of 1 or more integers >= 1, not 64"),
        ({"num_classes": "ten"}, "num_classes must be None or an integer >= 2, not 'ten'"),
    ],
)
def test_plain_cnn_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PlainCNN(**arguments)


def test_plain_cnn_first_stride_and_missing_last_pool_change_the_image_size():
    model = PlainCNN((1, 1), (4, 6), 5, image_size=(15, 13), first_stride=2, last_pool=False)
    # 15x13 becomes 8x7 by the stride and 4x3 by the only pool.
    assert model.feature.in_features == 6 * 4 * 3
    assert model(torch.rand(2, 3, 15, 13)).shape == (2, 5)
    with pytest.raises(ValueError, match="first_stride must be 1 with a large stem, not 2"):
        PlainCNN(5, (4, 4), large_stem=True, first_stride=2)


@pytest.mark.parametrize(
    ("name", "shape", "convolutions", "flat_dim", "feature_dim"),
    [
        ("mnist_cnn6", (1, 28, 28), [32] * 2 + [64] * 2 + [128] * 2, 128 * 3 * 3, 2),
        ("lsoftmax_cnn10", (1, 28, 28), [64] * 10, 64 * 3 * 3, 256),
        ("lsoftmax_cnn13", (3, 32, 32), [64] * 5 + [96] * 4 + [128] * 4, 128 * 4 * 4, 256),
        ("lsoftmax_cnn13_wide", (3, 32, 32), [96] * 5 + [192] * 4 + [384] * 4, 384 * 4 * 4, 512),
        ("lsoftmax_cnn17", (3, 112, 96), [64] * 5 + [256] * 12, 256 * 7 * 6, 512),
    ],
)
def test_networks_of_table_2_1_have_its_widths(name, shape, convolutions, flat_dim, feature_dim):
    model = MODELS[name]()
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [layer.out_channels for layer in layers] == convolutions
    assert {layer.kernel_size for layer in layers} == {(5, 5) if name == "mnist_cnn6" else (3, 3)}
    assert [layer.stride[0] for layer in layers] == [2 if name.endswith("17") else 1] + [1] * (len(layers) - 1)
    assert sum(isinstance(module, nn.MaxPool2d) for module in model.modules()) == 3
    assert sum(isinstance(module, nn.PReLU) for module in model.modules()) == len(layers)
    assert (model.feature.in_features, model.feature_dim) == (flat_dim, feature_dim)
    assert model.eval()(torch.rand(1, *shape)).shape == (1, feature_dim)
