"""Fixed classifiers: their class vectors, losses and state."""

import copy

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs

from .samples import problem


@pytest.mark.parametrize(("dim", "classes"), [(4, 5), (9, 5), (1, 2), (30, 31)])
def test_fixed_simplex_has_equal_cosines(dim, classes):
    head = hs.heads.fixed(dim, classes).double()
    cosines = head.weight @ head.weight.mT
    expected = torch.full_like(cosines, -1 / (classes - 1)).fill_diagonal_(1)
    torch.testing.assert_close(cosines, expected, atol=1e-6, rtol=0)


def test_fixed_energy_is_that_of_the_minimum():
    torch.manual_seed(0)
    head = hs.heads.fixed(3, 12, vectors="energy")
    pairs = torch.pdist(head.weight.double())
    assert (1 / pairs).sum().item() == pytest.approx(49.165253, rel=1e-5)  # the icosahedron


def test_fixed_head_is_a_softmax_of_cosines_whose_vectors_are_a_buffer():
    x, y = problem(8, 5, 6)
    x.requires_grad_()
    head = hs.heads.fixed(5, 6, s=9.0, margin=hs.margin.AdditiveCosine(0.2)).double()
    assert not list(head.parameters())
    assert set(head.state_dict()) == {"weight"}
    scores = 9 * hs.sphere.cosines(x, head.weight)
    expected = F.cross_entropy(scores - 9 * 0.2 * F.one_hot(y, 6).double(), y)
    torch.testing.assert_close(head(x, y), expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(torch.autograd.grad(head(x, y), x), torch.autograd.grad(expected, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    weight = head.weight.clone()
    head.reset_parameters()
    assert torch.equal(head.weight, weight)
    other = hs.heads.fixed(5, 6, vectors=torch.randn(6, 5)).double()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.weight, weight)
    assert torch.equal(copy.deepcopy(head).weight, weight)
    assert head.to(torch.float32).weight.dtype == torch.float32


def test_fixed_head_takes_vectors_of_the_user():
    vectors = torch.randn(6, 5)
    head = hs.heads.fixed(5, 6, vectors=3 * vectors)
    torch.testing.assert_close(head.weight, hs.sphere.normalize(vectors))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hs.heads.fixed(3, 6),
            r"in_features must be at least num_classes - 1 = 5 for the simplex \(use vectors='energy' instead\), not 3",
        ),
        (
            lambda: hs.heads.fixed(8, 6, vectors="cube"),
            "vectors must be 'simplex', 'energy' or a tensor of class vectors",
        ),
        (lambda: hs.heads.fixed(8, 6, vectors=torch.ones(5, 8)), r"vectors must be of shape \(6, 8\), not \(5, 8\)"),
        (lambda: hs.heads.fixed(8, 6, vectors=torch.zeros(6, 8)), "vectors must be class vectors other than zero"),
        (lambda: hs.heads.fixed(8, 6, centers=2), "centers must be 1 with fixed class vectors, not 2"),
        (
            lambda: hs.heads.ShardedHead(hs.heads.fixed(8, 6).to("meta")),
            "head must be one whose fixed class vectors are not on the meta device, not 'FixedHead'",
        ),
    ],
)
def test_fixed_rejects_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
