"""The conditioning of a linear layer and of a cosine layer (thesis, section 3.2.3, lemmas 1 and 2)."""

import pytest
import torch
from torch import nn

from hypersphere import sphere
from hypersphere.layers import DecoupledLinear
from hypersphere.optim import project_weights_

N, M, K = 6, 5, 3
SCALES = (1.0, 2.0, 4.0, 8.0)


def unit_factors(seed=0):
    random = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(size, K, generator=random, dtype=torch.float64) for size in (N, M))
    return nn.functional.normalize(u), nn.functional.normalize(v)


def eigenvalues(objective, u, v):
    def of_vector(x):
        return objective(x[: N * K].view(N, K), x[N * K :].view(M, K))

    hessian = torch.func.hessian(of_vector)(torch.cat([u.flatten(), v.flatten()]))
    return torch.linalg.eigvalsh(hessian)


def restricted_condition_number(objective, u, v, zeros):
    """λ_max over the smallest nonzero eigenvalue, given the number of zero eigenvalues."""
    values = eigenvalues(objective, u, v).abs().sort().values
    assert values[zeros - 1] < 1e-6 * values[zeros]
    return (values[-1] / values[zeros]).item()


def objectives(seed=0):
    """G = ½‖F − UVᵀ‖² and G_S = ½‖F − cos(U, V)‖² at F = UVᵀ, for rows of norm 1 (3.7 and 3.8)."""
    u, v = unit_factors(seed)
    target = u @ v.mT

    def linear(a, b):
        return 0.5 * (target - a @ b.mT).square().sum()

    def cosine(a, b):
        return 0.5 * (target - sphere.cosines(a, b)).square().sum()

    return u, v, linear, cosine


@pytest.mark.parametrize("seed", range(3))
def test_linear_layer_condition_number_grows_at_least_as_the_squared_scale(seed):
    """Lemma 1. UVᵀ does not change under U → UA, V → VA⁻ᵀ, so K² eigenvalues are zero."""
    u, v, linear, _ = objectives(seed)
    numbers = [restricted_condition_number(linear, c * u, v / c, zeros=K * K) for c in SCALES]
    assert all(after >= 0.5 * c**2 * numbers[0] for c, after in zip(SCALES, numbers, strict=True))
    assert eigenvalues(linear, 8 * u, v / 8)[-1] > 0.5 * 64 * eigenvalues(linear, u, v)[-1]


@pytest.mark.parametrize("seed", range(3))
def test_cosine_layer_condition_number_grows_with_the_scale_unless_rows_are_renormalised(seed):
    """Lemma 2 is false as printed: the cosine does not change with the scale, but its derivatives do.

    The block of U falls as c⁻² and that of V grows as c², so the condition number grows as c⁴. Zero eigenvalues: the
    norms of N + M rows and K(K−1)/2 rotations.
    """
    u, v, _, cosine = objectives(seed)
    zeros = N + M + K * (K - 1) // 2
    numbers = [restricted_condition_number(cosine, c * u, v / c, zeros) for c in SCALES]
    assert numbers[3] / numbers[2] == pytest.approx(16, rel=0.1)
    assert numbers[3] > 100 * numbers[0]
    # The proof sets D_U = D_V = I, that is, it renormalises the rows after every step. Then nothing changes.
    for c in SCALES:
        rescaled = nn.functional.normalize(c * u), nn.functional.normalize(v / c)
        torch.testing.assert_close(eigenvalues(cosine, *rescaled), eigenvalues(cosine, u, v), atol=1e-9, rtol=0)


def test_weight_projection_renormalises_the_rows_of_a_cosine_layer():
    u, v, _, cosine = objectives()
    layer = DecoupledLinear(K, N, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(8 * u)
    torch.testing.assert_close(layer(v).mT.detach(), u @ v.mT)
    assert eigenvalues(cosine, layer.weight.detach(), v)[-1] != pytest.approx(eigenvalues(cosine, u, v)[-1])
    project_weights_(layer)
    torch.testing.assert_close(eigenvalues(cosine, layer.weight.detach(), v), eigenvalues(cosine, u, v))
