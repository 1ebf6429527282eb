"""Layers of low rank and their factors."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hypersphere.energy import MHE, factors, low_rank_

from .networks import network, pyramid


def test_low_rank_neurons_have_the_rank_and_formula():
    net = low_rank_(network(), rank=4)
    assert torch.linalg.matrix_rank(net[3].weight).item() == 4
    low_rank_factors = factors(net)
    assert {name: tuple(y.shape) for name, y in low_rank_factors.items()}["3.first"] == (12, 4)
    p1, (y1, y2) = net[3].parametrizations.weight[0].left, (low_rank_factors["3.first"], low_rank_factors["3.second"])
    expected = (y2.T @ torch.linalg.inv(p1 @ y2.T) @ y1.T).T  # (E.23), columns are neurons
    torch.testing.assert_close(net[3].weight, expected, atol=1e-4, rtol=1e-3)
    MHE(low_rank_factors)().backward()
    assert all(y.grad.abs().sum() > 0 for y in low_rank_factors.values())
    with pytest.raises(ValueError, match=r"rank must be an integer from 1 to 6, .* in 0"):
        low_rank_(network(), rank=7)


def test_low_rank_starts_at_the_best_approximation_and_changes_all_or_nothing():
    net, full_rank = pyramid(), pyramid()
    low_rank_(net, 6)
    left, values, right = torch.linalg.svd(full_rank[0].weight.detach(), full_matrices=False)
    best = left[:, :6] * values[:6] @ right[:6]
    torch.testing.assert_close(net[0].weight, best, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="0 must be a layer whose weight has no parametrisation yet"):
        low_rank_(net, 6)
    net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"rank must be an integer from 1 to 4, .* in 1"):
        low_rank_(net, 6)
    assert not parametrize.is_parametrized(net[0])


def test_low_rank_with_a_random_basis_starts_at_the_best_approximation():
    net, original = pyramid(), pyramid()
    low_rank_(net, 6, basis="random", generator=torch.Generator().manual_seed(0))
    u, values, vh = torch.linalg.svd(original[0].weight.detach(), full_matrices=False)
    torch.testing.assert_close(net[0].weight, u[:, :6] * values[:6] @ vh[:6], atol=1e-4, rtol=1e-3)
    p1 = net[0].parametrizations.weight[0].left
    y1, y2 = factors(net)["0.first"], factors(net)["0.second"]
    assert not torch.allclose(p1, y2)
    expected = (y2.T @ torch.linalg.inv(p1 @ y2.T) @ y1.T).T  # (E.23), columns are neurons
    torch.testing.assert_close(net[0].weight, expected, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="basis must be 'svd' or 'random'"):
        low_rank_(pyramid(), 2, basis="pca")


class Columns(nn.Module):
    """A square linear layer that stores its neurons in columns, as `Conv1D` of Hugging Face."""

    def __init__(self, size):
        super().__init__()
        self.nx, self.nf = size, size
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return x @ self.weight


def test_low_rank_refuses_a_square_weight_with_neurons_in_columns():
    with pytest.raises(
        ValueError, match="0 must be a layer without groups that stores its neurons in the first dimension"
    ):
        low_rank_(nn.Sequential(Columns(8), nn.Linear(8, 3)), rank=2)


def test_low_rank_warns_if_the_output_layer_is_not_recognised():
    def model():
        return nn.ModuleDict({"to_classes": nn.Linear(8, 4), "body": nn.Conv1d(3, 8, 3)})

    with pytest.warns(
        UserWarning, match="^no output layer was recognised in ModuleDict, so all layers count as hidden"
    ):
        assert len(factors(low_rank_(model(), rank=2))) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = low_rank_(model(), rank=2, output_layer="to_classes")
        assert list(factors(named)) == ["body.first", "body.second"]
        assert len(factors(low_rank_(model(), rank=2, output_layer=None))) == 4


def test_factors_of_cells_have_the_names_of_their_weights():
    net = low_rank_(nn.Sequential(nn.RNNCell(6, 5), nn.Linear(5, 3)), rank=2, where=lambda name, _: name == "0")
    assert len(factors(net)) == 2 * len(
        [n for n, m in net.named_modules() if isinstance(m, parametrize.ParametrizationList)]
    )
