"""State dicts of version 0.1 load into the networks of today. The lists of keys were written by that version."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from hypersphere.models import Autoencoder, Level, PlainCNN, PointNet, PointNet2, TransformNet, relu


def plain_cnn(feature_dim=4, **arguments) -> PlainCNN:
    return PlainCNN(3, (2, 2, 2), feature_dim, image_size=8, num_classes=3, norm=None, **arguments)


# By name: a function that makes the network, and the keys of its state dict in version 0.1.
OLD_KEYS = {
    "cnn": (
        lambda: plain_cnn(feature_activation=relu),
        """
        stages.0.weight stages.3.weight stages.6.weight feature.weight classifier.1.weight
        """,
    ),
    "cnn with PReLU": (
        lambda: plain_cnn(activation=nn.PReLU, feature_activation=nn.PReLU, bias=True),
        """
        stages.0.weight stages.0.bias stages.1.weight stages.3.weight stages.3.bias stages.4.weight
        stages.6.weight stages.6.bias stages.7.weight feature.weight feature.bias classifier.0.weight
        classifier.1.weight classifier.1.bias
        """,
    ),
    "cnn without fully connected layer": (
        lambda: plain_cnn(None),
        """
        stages.0.weight stages.3.weight stages.6.weight classifier.0.weight
        """,
    ),
    "cnn without activation": (
        lambda: plain_cnn(activation=None),
        """
        stages.0.weight stages.2.weight stages.4.weight feature.weight classifier.0.weight
        """,
    ),
    "autoencoder": (
        lambda: Autoencoder(1, (2, 3)),
        """
        before.0.weight before.0.bias before.1.weight before.1.bias before.1.running_mean before.1.running_var
        before.1.num_batches_tracked code.weight decoder.0.weight decoder.0.bias decoder.1.weight decoder.1.bias
        decoder.1.running_mean decoder.1.running_var decoder.1.num_batches_tracked decoder.3.weight
        decoder.3.bias
        """,
    ),
    "transform net": (
        lambda: TransformNet(3, (4,), (5,), norm=None),
        """
        points.0.weight whole.0.weight matrix.weight matrix.bias
        """,
    ),
    "pointnet": (
        lambda: PointNet(per_point=(4, 4, 6), hidden=(5, 4), norm=None),
        """
        early.0.weight early.2.weight late.0.weight whole.0.weight whole.2.weight
        """,
    ),
    "pointnet with transforms": (
        lambda: PointNet(transforms=True, per_point=(4, 4, 6), hidden=(5, 4), norm=None),
        """
        turn_points.points.0.weight turn_points.points.2.weight turn_points.points.4.weight
        turn_points.whole.0.weight turn_points.whole.2.weight turn_points.matrix.weight turn_points.matrix.bias
        turn_features.points.0.weight turn_features.points.2.weight turn_features.points.4.weight
        turn_features.whole.0.weight turn_features.whole.2.weight turn_features.matrix.weight
        turn_features.matrix.bias early.0.weight early.2.weight late.0.weight whole.0.weight whole.3.weight
        """,
    ),
    "pointnet++": (
        lambda: PointNet2((Level(3, 0.5, 2, (4,)),), (5,), (6, 4)),
        """
        nets.0.0.weight nets.0.1.weight nets.0.1.bias nets.0.1.running_mean nets.0.1.running_var
        nets.0.1.num_batches_tracked nets.1.0.weight nets.1.1.weight nets.1.1.bias nets.1.1.running_mean
        nets.1.1.running_var nets.1.1.num_batches_tracked tail.0.weight tail.1.weight tail.1.bias
        tail.1.running_mean tail.1.running_var tail.1.num_batches_tracked tail.4.weight tail.5.weight
        tail.5.bias tail.5.running_mean tail.5.running_var tail.5.num_batches_tracked
        """,
    ),
}


@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "submodule"])
@pytest.mark.parametrize("name", OLD_KEYS)
def test_state_dicts_of_version_0_1_load(name, wrap):
    make, old_keys = OLD_KEYS[name]
    torch.manual_seed(0)
    source, target = make(), make()
    # Renaming did not change the order of submodules, so the n-th key of today has the n-th old name.
    values = source.state_dict().values()
    old_state = {f"net.{key}" if wrap else key: value for key, value in zip(old_keys.split(), values, strict=True)}
    old_names = list(old_state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (nn.ModuleDict({"net": target}) if wrap else target).load_state_dict(old_state)
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value), key
    assert list(old_state) == old_names  # the caller's dict does not change


@pytest.mark.parametrize("name", OLD_KEYS)
def test_current_state_dicts_load_into_copies_without_a_warning(name):
    model = OLD_KEYS[name][0]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            doubled = {key: 2 * value for key, value in model.state_dict().items()}
            twin.load_state_dict(doubled)
            torch.testing.assert_close(dict(twin.state_dict()), doubled, rtol=0, atol=0)


def test_copies_accept_old_names_too():
    make, old_keys = OLD_KEYS["pointnet"]
    source = make()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(source)))
    twin.load_state_dict(
        {key: 2 * value for key, value in zip(old_keys.split(), source.state_dict().values(), strict=True)}
    )
    assert torch.equal(twin.point_mlp1[0].weight, 2 * source.point_mlp1[0].weight)


def test_plain_cnn_warns_if_the_old_network_had_another_activation():
    state = dict(zip(OLD_KEYS["cnn"][1].split(), plain_cnn().state_dict().values(), strict=True))
    with pytest.warns(UserWarning, match="build the network with feature_activation=relu"):
        plain_cnn().load_state_dict(state)
    prelu = plain_cnn(activation=nn.PReLU, feature_activation=nn.PReLU, bias=True)
    state = dict(zip(OLD_KEYS["cnn with PReLU"][1].split(), prelu.state_dict().values(), strict=True))
    with (
        pytest.warns(UserWarning, match="had an activation before the classifier"),
        pytest.raises(RuntimeError, match=r"Unexpected key.*feature_activation\.0\.weight"),
    ):
        plain_cnn(activation=nn.PReLU, bias=True).load_state_dict(state)


def test_missing_and_unknown_keys_are_still_errors():
    model = PointNet(per_point=(4, 4, 6), hidden=(5, 4), norm=None)
    with pytest.raises(RuntimeError, match=r"Missing key.*point_mlp1\.0\.weight"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*earlier\.0\.weight"):
        model.load_state_dict({**model.state_dict(), "earlier.0.weight": torch.zeros(1)})
