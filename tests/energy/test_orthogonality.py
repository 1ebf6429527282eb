"""Orthogonality regularisers, compared with their formulas."""

import numpy as np
import pytest
import torch

from hypersphere.energy import SRIP, Orthogonal, Orthonormal

from .networks import network, pyramid


def test_orthogonality_agrees_with_numpy():
    net = network()
    gram = [w @ w.T for w in (net[k].weight.detach().flatten(1).double().numpy() for k in (0, 3, 4, 5))]
    orthonormal = sum(((g - np.eye(len(g))) ** 2).sum() for g in gram)
    unnormalized = sum(((g - np.diag(np.diag(g))) ** 2).sum() for g in gram)
    cosines = [g / np.sqrt(np.outer(np.diag(g), np.diag(g))) for g in gram]
    squared_cosines = sum(((c - np.eye(len(c))) ** 2).sum() for c in cosines)
    spectral = sum(np.linalg.norm(g - np.eye(len(g)), 2) for g in gram)
    assert Orthonormal(net, 0.5, output=True)().item() == pytest.approx(0.5 * orthonormal, rel=1e-4)
    assert Orthogonal(net, 0.5, output=True)().item() == pytest.approx(0.5 * squared_cosines, rel=1e-4)
    unscaled = Orthogonal(net, 0.5, output=True, normalize=False)
    assert unscaled().item() == pytest.approx(0.5 * unnormalized, rel=1e-4)
    without_output = ((gram[-1] - np.eye(len(gram[-1]))) ** 2).sum()
    assert Orthonormal(net, 0.5)().item() == pytest.approx(0.5 * (orthonormal - without_output), rel=1e-4)
    srip = SRIP(net, 0.5, output=True)
    for _ in range(200):
        value = srip()
    assert value.item() == pytest.approx(0.5 * spectral, rel=1e-3)
    resumed = SRIP(net, 0.5, output=True, seed=5)
    resumed.load_state_dict(srip.state_dict())
    assert resumed().item() == pytest.approx(value.item(), rel=1e-5)
    exact = sum(srip.penalty(net[k].weight.flatten(1)) for k in (0, 3, 4, 5))
    assert exact.item() == pytest.approx(spectral, rel=1e-5)
    value.backward()
    exact = torch.linalg.matrix_norm(net[3].weight @ net[3].weight.T - torch.eye(12), 2)
    (expected,) = torch.autograd.grad(0.5 * exact, net[3].weight)
    torch.testing.assert_close(net[3].weight.grad, expected, atol=2e-3, rtol=0)


def test_srip_recovers_from_an_orthonormal_layer():
    w = torch.eye(5)
    regularizer = SRIP({"w": w}, 1.0, iterations=9)
    assert regularizer().item() == 0
    w.mul_(2)
    assert regularizer().item() == pytest.approx(3)


@pytest.mark.parametrize("make", [Orthonormal, lambda net: Orthogonal(net, normalize=False), SRIP])
def test_orthogonality_names_the_layer_that_overflows(make):
    net = pyramid()
    with torch.no_grad():
        net[1].weight.mul_(1e25)
    with pytest.raises(ValueError, match=r"although all weights are: the largest entry is .*e\+24, in 1, and"):
        make(net)()


def test_orthogonality_default_weights_are_those_of_the_source():
    net = pyramid()
    for kind in (Orthonormal, Orthogonal, SRIP):
        assert kind(net).weight == 1e-5


def test_orthogonality_excludes_the_output_layer_by_default():
    regularizer = Orthonormal(pyramid())
    assert [layer.name for layer in regularizer.selection] == ["0", "1"]
    assert [(skip.name, skip.reason) for skip in regularizer.skipped] == [
        ("2", "the output layer, which is left out by default")
    ]
    assert len(Orthonormal(pyramid(), output=True).selection) == 3


def test_orthogonal_does_not_depend_on_the_norms_of_neurons():
    w = torch.randn(5, 4)
    scaled = w * torch.tensor([[0.1], [1.0], [3.0], [10.0], [0.5]])
    first, second = (Orthogonal({"w": x}, 1.0)().item() for x in (w, scaled))
    assert first == pytest.approx(second, rel=1e-5)


def test_orthogonality_layer_weights_replace_the_factor():
    net = pyramid()
    values = [Orthonormal({"w": net[k].weight.detach()}, 1.0)().item() for k in (0, 1)]
    ours = Orthonormal(net, 2.0, layer_weights={"1": 5.0})()
    assert ours.item() == pytest.approx(2 * values[0] + 5 * values[1], rel=1e-5)
