"""Diagnostics of rotations, and the penalty of the relaxation OR."""

import pytest
import torch
from torch import nn

from hypersphere.rotation import (
    InputRotation,
    RotationPenalty,
    Stochastic,
    degrees_of_freedom,
    fold_,
    orthogonality_error,
    rotate_,
    rotation_parameters,
    rotation_states,
)

from .samples import cnn6, mlp, perturb_


def test_degrees_of_freedom_match_the_tables_of_the_paper():
    assert degrees_of_freedom(cnn6()) == 257_984  # 258K
    assert degrees_of_freedom(rotate_(cnn6(), "gram_schmidt")) == 1_358_527  # 1.36M
    model = rotate_(cnn6(), "free")  # OGD keeps R orthogonal
    assert degrees_of_freedom(model, on_group=rotation_parameters(model)) == 1_358_527
    model = cnn6()
    Stochastic(model, 0.25, method="gram_schmidt")
    assert degrees_of_freedom(model) == 90_871  # 90.9K
    head = InputRotation(nn.Linear(512, 1000, bias=False))
    assert degrees_of_freedom(head) == 130_816  # 131K of Table 12
    one = nn.Conv2d(64, 64, 3, bias=False)
    rotate_(one, "free", blocks=2, shared=True)
    assert degrees_of_freedom(one) == 82_944  # 82.9K of Table 19
    fold_(one)
    rotate_(one, "free", blocks=2)
    assert degrees_of_freedom(one) == 165_888  # 165.9K of Table 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["cayley", "exponential", "lowdin", "free"])
def test_measure_computes_half_precision_in_float32(method, dtype):
    model = rotate_(mlp().to(dtype), method)
    if method != "free":
        perturb_(model)
    assert orthogonality_error(model) < 1e-5
    state = rotation_states(model)["0"]
    assert state.orthogonality_error < 1e-5
    assert (state.generator_norm is None) == (method in ("lowdin", "free"))
    if method == "free":
        perturb_(model)
        (free, _), penalty = rotation_parameters(model), RotationPenalty(model)
        value = penalty()
        assert value.dtype == torch.float32
        exact = sum(torch.dist(p.mT.double() @ p.double(), torch.eye(len(p))) ** 2 for p in rotation_parameters(model))
        assert value.item() == pytest.approx(exact.item(), rel=1e-5)
        value.backward()
        assert free.grad.dtype == torch.float32  # parameters of half-precision layers are wider than their weights
    with pytest.raises(ValueError, match="weight must be a number >= 0, not 'a'"):
        RotationPenalty(model, "a")


def test_degrees_of_freedom_count_trained_rotations_only():
    model = nn.Sequential(rotate_(nn.Linear(6, 4, bias=False)), InputRotation(nn.Linear(4, 5, bias=False)))
    perturb_(model)
    assert degrees_of_freedom(model) == 15 + 6
    states = rotation_states(model)
    assert list(states) == ["0", "1"]
    assert states["1"].energy_drift < 1e-5
    assert states["1"].degrees_of_freedom == 6
    for p in rotation_parameters(model):
        p.requires_grad_(False)
    assert degrees_of_freedom(model) == 0


def test_orthogonality_error_rejects_a_plain_model():
    with pytest.raises(ValueError, match="model must be a rotated model"):
        orthogonality_error(mlp())


def test_penalty_includes_every_map_that_is_not_orthogonal():
    model = mlp()
    for layer, method in ((model[0], "free"), (model[2], "positive_definite"), (model[4], "cayley")):
        rotate_(layer, method)
    perturb_(model)
    errors = [r.mT @ r - torch.eye(len(r)) for r in (m[0].matrices() for m in weights(model)[:2])]
    expected = 0.1 * sum(error.square().sum() for error in errors)
    torch.testing.assert_close(RotationPenalty(model, 0.1)().detach(), expected)


def weights(model):
    return [model[i].parametrizations.weight for i in (0, 2, 4)]
