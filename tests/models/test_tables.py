"""Every network has the layers and the number of parameters that its source prints."""

import math

import pytest
import torch
from torch import nn

from hypersphere.models import GCN, MODELS, PointNet


def on_meta(name, **arguments):
    """Build a network without memory for its weights."""
    with torch.device("meta"):
        return MODELS[name](**arguments)


def count(model, kinds=None):
    """Count the parameters of all modules, or of modules of these classes."""
    modules = [m for m in model.modules() if kinds is None or isinstance(m, kinds)]
    return sum(p.numel() for m in modules for p in m.parameters(recurse=False))


WEIGHTS = (nn.Conv1d, nn.Conv2d, nn.Linear)

PRINTED = [  # name, arguments, classes of layers counted, exact number, printed number and its unit
    ("opt_cnn6", {"num_classes": 100}, WEIGHTS, 257_984, "258", 1e3),  # OPT paper, table 10
    ("wide_cnn9", {"num_classes": 100}, WEIGHTS, 2_992_832, "2.99", 1e6),
    ("resnet18", {"num_classes": 1000}, None, 11_689_512, "11.7", 1e6),
    ("resnet34", {"num_classes": 1000}, None, 21_797_672, "21.8", 1e6),  # same as torchvision
    ("resnet50", {"num_classes": 1000}, None, 25_557_032, "25.6", 1e6),
    ("resnet20", {"num_classes": 10}, None, 269_722, "0.27", 1e6),  # He et al. 2016, table 6
    ("resnet32", {"num_classes": 10}, None, 464_154, "0.46", 1e6),
]


@pytest.mark.parametrize(("name", "arguments", "kinds", "exact", "printed", "unit"), PRINTED, ids=lambda v: str(v))
def test_number_of_parameters_is_the_printed_one(name, arguments, kinds, exact, printed, unit):
    assert count(on_meta(name, **arguments), kinds) == exact
    digits = len(printed.partition(".")[2])
    assert round(exact / unit, digits) == float(printed)


def test_pointnet_has_the_printed_number_of_parameters():
    with torch.device("meta"):
        plain, with_tnets = (count(PointNet(transforms=t), WEIGHTS) + 256 * 40 for t in (False, True))
    assert (round(plain / 1e6, 1), round(with_tnets / 1e6, 1)) == (0.8, 3.5)  # Qi et al. 2017, table 6


def test_classifier_and_neurons_have_the_sizes_of_the_opt_paper():
    model = on_meta("wide_cnn9", num_classes=100)
    assert count(model.classifier) == 25_600  # OPT paper, text of table 11
    neuron_dims = [m.weight.flatten(1).shape[1] for m in on_meta("opt_cnn6").stages if isinstance(m, nn.Conv2d)]
    assert neuron_dims == [27] + [576] * 5
    assert math.floor(576**2 / 100) / 10 == 331.7  # table F.4, which truncates instead of rounding


def convs(model):
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


PLAIN = {
    "spherenet_cnn3": (3, (64, 96, 128), 256),
    "spherenet_cnn9": (9, (64, 96, 128), 256),
    "spherenet_cnn18": (18, (64, 96, 128), 256),
    "spherenet_cnn45": (45, (64, 96, 128), 256),
    "spherenet_cnn60": (60, (64, 96, 128), 256),
    "spherenet_cnn69": (69, (64, 96, 128), 256),
    "decoupled_cnn9": (9, (64, 128, 256), 512),
    "attack_cnn9": (9, (32, 64, 128), 256),
    "mhe_cnn6": (6, (64, 128, 256), 256),
    "mhe_cnn15": (15, (64, 128, 256), 256),
    "opt_cnn9": (9, (64, 64, 64), 64),
    "small_cnn3": (3, (32, 64, 64), 64),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_networks_have_the_layers_of_their_tables(name):
    depth, widths, feature_dim = PLAIN[name]
    model = on_meta(name)
    assert [c.out_channels for c in convs(model)] == [w for w in widths for _ in range(depth // 3)]
    assert {c.kernel_size for c in convs(model)} == {(3, 3)}
    assert model.feature.in_features == widths[-1] * 16
    assert model.feature_dim == model.feature.out_features == feature_dim
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == (name != "attack_cnn9")


SPHEREFACE = {4: [1, 1, 1, 1], 10: [1, 3, 5, 1], 20: [3, 5, 9, 3], 36: [5, 9, 17, 5], 64: [7, 17, 33, 7]}


@pytest.mark.parametrize("depth", SPHEREFACE)
def test_sphereface_networks_have_the_layers_of_their_table(depth):
    model = on_meta(f"sphereface{depth}")
    layers = convs(model)
    assert len(layers) == depth
    assert [sum(c.out_channels == w for c in layers) for w in (64, 128, 256, 512)] == SPHEREFACE[depth]
    assert [c.out_channels for c in layers if c.stride == (2, 2)] == [64, 128, 256, 512]
    assert model.feature.in_features == 512 * 7 * 6
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert sum(isinstance(m, nn.PReLU) for m in model.modules()) == depth  # there is none after FC1


def test_residual_networks_have_the_depth_in_their_names():
    for name in ("resnet18", "resnet20", "resnet32", "resnet34", "modified_resnet18", "wide_resnet18"):
        weights = [c for c in convs(on_meta(name)) if c.kernel_size != (1, 1)]
        assert len(weights) + 1 == int(name[-2:]), name  # the classifier is the last layer
    widths = {name: sorted({c.out_channels for c in convs(on_meta(name))}) for name in MODELS if "resnet" in name}
    # The 1×1 convolutions of bottleneck units count; the four of the projections do not.
    assert len(convs(on_meta("resnet50"))) - 4 + 1 == 50
    assert widths["spherenet_resnet32"] == [64, 96, 128]
    assert widths["wide_resnet32"] == [96, 192, 384]
    assert widths["modified_resnet18"] == [128, 256, 512, 1024]
    assert widths["wide_resnet18"] == [256, 512, 768, 1024]


INPUTS = {
    "mnist_cnn6": (1, 28, 28),
    "cnn10": (3, 224, 224),
    "few_shot_cnn4": (3, 84, 84),
    "resnet18": (3, 224, 224),
    "resnet50": (3, 224, 224),
    "modified_resnet18": (3, 224, 224),
    "sphereface4": (3, 112, 96),
    "sphereface64": (3, 112, 96),
    "mlp": (1, 28, 28),
    "pointnet": (1024, 3),
    "pointnet_transforms": (1024, 3),
    "pointnet2": (1024, 3),
    "spherenet_cnn69": (3, 32, 32),
    "resnet32": (3, 32, 32),
}
FEATURES = {"few_shot_cnn4": 1600, "mnist_cnn6": 2, "modified_resnet18": 1024, "sphereface64": 512, "cnn10": 256}
FEATURES |= {"resnet50": 2048}


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_networks_map_inputs_of_the_sources_to_features(name):
    model = on_meta(name)
    features = model(torch.zeros(2, *INPUTS[name], device="meta"))
    assert features.shape == (2, model.feature_dim)
    assert model.feature_dim == FEATURES.get(name, model.feature_dim)


def test_cnn10_and_cnn4_have_the_layers_of_their_tables():
    ten, four = on_meta("cnn10"), on_meta("few_shot_cnn4", num_classes=5)
    assert [c.out_channels for c in convs(ten)] == [64] * 4 + [128] * 3 + [256] * 3
    assert (convs(ten)[0].kernel_size, convs(ten)[0].stride, ten.feature.in_features) == ((7, 7), (2, 2), 256 * 49)
    assert [c.out_channels for c in convs(four)] == [64] * 4
    assert four(torch.zeros(1, 3, 84, 84, device="meta")).shape == (1, 5)


def test_generator_and_discriminator_have_the_layers_of_table_d5():
    generator, discriminator = on_meta("generator"), on_meta("discriminator")
    layers = [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in convs(discriminator)]
    assert layers == [
        (3, 64, 3, 1),
        (64, 64, 4, 2),
        (64, 128, 3, 1),
        (128, 128, 4, 2),
        (128, 256, 3, 1),
        (256, 256, 4, 2),
        (256, 512, 3, 1),
    ]
    assert discriminator.score.in_features == 512 * 16
    transposed = [(m.in_channels, m.out_channels) for m in generator.modules() if isinstance(m, nn.ConvTranspose2d)]
    assert transposed == [(512, 256), (256, 128), (128, 64)]
    images = generator(torch.zeros(2, 128, device="meta"))
    assert images.shape == (2, 3, 32, 32)
    assert discriminator(images).shape == (2,)


def test_gcn_has_the_weights_of_its_formula():
    with torch.device("meta"):
        assert count(GCN(1433, num_classes=7)) == 1433 * 16 + 16 * 7  # Cora, no biases


def test_registered_arguments_can_be_replaced():
    assert MODELS["spherenet_cnn9"](widths=(2, 2, 2), feature_dim=4).feature_dim == 4
