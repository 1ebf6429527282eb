"""S-OPT and CLS-OPT."""

import pytest
import torch
from torch import nn

from hypersphere.heads import a_softmax
from hypersphere.rotation import InputRotation, Stochastic, degrees_of_freedom, fold_, rotated_layers

from . import reference
from .test_rotate import mlp, shake_


def neurons(layer):
    return layer.parametrizations.weight.original


def test_only_the_drawn_dimensions_are_turned_and_the_first_layer_as_a_whole():
    model = mlp()
    v = model[2].weight.detach().clone()
    Stochastic(model, 0.25, generator=torch.Generator().manual_seed(0))
    shake_(model)
    first, second = [turning for _, _, turning in rotated_layers(model)]
    assert first.dimensions is None
    assert len(second.dimensions) == len(set(second.dimensions.tolist())) == 4
    moved = (model[2].weight - v).abs().amax(0) > 1e-6
    assert moved.nonzero().flatten().tolist() == second.dimensions.tolist()
    r = second.matrices()
    torch.testing.assert_close(model[2].weight[:, second.dimensions], v[:, second.dimensions] @ r.mT)
    x = torch.randn(3, 10)
    y = model(x)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)


def test_gradient_through_the_drawn_dimensions():
    torch.manual_seed(0)
    model = mlp().double()
    Stochastic(model, 5, method="lowdin", whole_first=False)
    shake_(model)
    _, layer, turning = next(iter(rotated_layers(model)))
    neurons(layer).requires_grad_()
    g = torch.randn_like(layer.weight)
    ours = torch.autograd.grad((layer.weight * g).sum(), [turning.parameter, neurons(layer)])
    free, v = turning.parameter.detach().requires_grad_(), neurons(layer).detach().requires_grad_()
    u, _, vh = torch.linalg.svd(free)
    w = v.clone()
    w[:, turning.dimensions] = v[:, turning.dimensions] @ (u @ vh).mT
    torch.testing.assert_close(ours, torch.autograd.grad((w * g).sum(), [free, v]))


@pytest.mark.parametrize("method", ["cayley", "gram_schmidt", "lowdin"])
def test_folding_keeps_the_output_and_starts_again_elsewhere(method):
    model, x = mlp(), torch.randn(5, 10)
    stochastic = Stochastic(model, 0.5, every=3, method=method)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    second = list(rotated_layers(model))[1][2]
    seen = set(second.dimensions.tolist())
    for step in range(1, 40):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        y = model(x)
        assert stochastic.step(optimizer) == (step % 3 == 0)
        torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-5)
        if step % 3 == 0:
            assert torch.equal(second.parameter.detach(), second.identity())
            assert second.parameter not in optimizer.state
        seen |= set(second.dimensions.tolist())
    assert seen == set(range(16))


def test_energy_is_the_same_to_rounding_after_ten_thousand_folds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 2))
    start = reference.energy(model[0].weight.detach().double().numpy())
    norms = model[0].weight.detach().double().norm(dim=1)
    stochastic = Stochastic(model, 0.25, every=1, method="gram_schmidt", whole_first=False)
    _, layer, turning = next(iter(rotated_layers(model)))
    first, eye = neurons(layer).clone(), turning.identity()
    for _ in range(10_000):
        with torch.no_grad():
            turning.parameter.copy_(eye + 0.5 * torch.randn_like(eye))
        stochastic.step()
    assert (neurons(layer) - first).abs().max() > 0.1
    end = neurons(layer).double()  # folding in float32 would change the energy by 2e-6 and the norms by 7e-5
    assert reference.energy(end.numpy()) == pytest.approx(start, rel=5e-7)
    torch.testing.assert_close(end.norm(dim=1), norms, rtol=5e-6, atol=0)


def test_state_resumes_with_the_same_dimensions():
    def run(steps, resume=None):
        model = mlp()
        stochastic = Stochastic(model, 0.5, every=2, generator=torch.Generator().manual_seed(5))
        if resume:
            model.load_state_dict(resume[0])
            stochastic.load_state_dict(resume[1])
        drawn = []
        for _ in range(steps):
            stochastic.step()
            drawn.append(list(rotated_layers(model))[1][2].dimensions.tolist())
        return drawn, ({k: v.clone() for k, v in model.state_dict().items()}, stochastic.state_dict())

    whole, _ = run(8)
    half, state = run(3)
    rest, _ = run(5, state)
    assert half + rest == whole
    assert any("dimensions" in key for key in state[0])


def test_shares_numbers_and_mappings():
    def counts(fraction):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
        Stochastic(model, fraction)
        return [turning.layout.size for _, _, turning in rotated_layers(model)]

    assert counts(0.25) == [16, 4, 4]
    assert counts(6) == [16, 6, 6]
    assert counts({"1": 0.5, "2": 3}) == [16, 8, 3]
    assert counts(1.0) == [16, 16, 16]


def test_input_side_equals_weight_side_and_folds():
    torch.manual_seed(0)
    layer = nn.Linear(6, 9)
    v, x = layer.weight.detach().clone(), torch.randn(4, 6)
    side = InputRotation(layer, "gram_schmidt")
    shake_(side)
    r = side.method(side.free.detach())
    torch.testing.assert_close(side(x), x @ (v @ r.mT).mT + layer.bias)
    y = side(x)
    y.sum().backward()
    assert side.free.grad.abs().sum() > 0
    assert layer.weight.grad is None
    model = nn.Sequential(side)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)
    assert model[0] is layer
    assert layer.weight.requires_grad


def test_class_vectors_from_a_seed_cost_neither_optimiser_state_nor_disk():
    torch.manual_seed(0)
    head = InputRotation(a_softmax(16, 5000), seed=3)
    assert degrees_of_freedom(head) == 120
    assert sum(t.numel() for t in head.state_dict().values() if t.is_floating_point()) == 121  # and the spread
    optimizer = torch.optim.Adam(p for p in head.parameters() if p.requires_grad)
    x, y = torch.randn(8, 16), torch.randint(5000, (8,))
    first = None
    for _ in range(20):
        optimizer.zero_grad()
        loss = head(x, y)
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    assert loss.item() < first
    assert sum(t.numel() for s in optimizer.state.values() for t in s.values()) <= 3 * 120
    twin = InputRotation(a_softmax(16, 5000), seed=3)
    assert not torch.equal(twin.module.weight, head.module.weight)  # drawn with another head's spread
    twin.load_state_dict(head.state_dict())
    scores = head.scores(x)
    assert torch.equal(twin.module.weight, head.module.weight)
    assert torch.equal(twin.scores(x), scores)
    assert head.logits(x, y).shape == (8, 5000)
    plain = head.fold()
    torch.testing.assert_close(plain.scores(x), scores, atol=1e-5, rtol=1e-5)
    assert isinstance(plain.weight, nn.Parameter)


def test_rows_from_a_seed_survive_types_devices_and_loading():
    torch.manual_seed(0)
    one = InputRotation(nn.Linear(8, 20), seed=7)
    rows, x = one.module.weight.clone(), torch.randn(3, 8)
    assert torch.equal(one.half().float().module.weight, rows)
    state = one.state_dict()
    with torch.device("meta"):
        two = InputRotation(nn.Linear(8, 20), seed=7)
    two.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(two(x), one(x))
    three = InputRotation(nn.Linear(8, 20, device="meta"), seed=7)
    three.load_state_dict(state, assign=True)
    assert torch.equal(three(x), one(x))
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="saved with seed=7, but this one has seed=8"):
            InputRotation(nn.Linear(8, 20), seed=8).load_state_dict(state, strict=strict)
    layer = nn.Linear(8, 2000)
    nn.init.zeros_(layer.weight)
    assert InputRotation(layer, seed=1).module.weight.std().item() == pytest.approx(8**-0.5, rel=0.02)
    assert [name for name, _ in fold_(nn.Sequential(one)).named_parameters()] == ["0.weight", "0.bias"]


def test_an_input_rotation_in_several_places_is_folded_once():
    class Sum(nn.Module):
        def __init__(self, *parts):
            super().__init__()
            self.a, self.b = parts

        def forward(self, x):
            return self.a(x) + self.b(x)

    x = torch.randn(3, 8)
    for wrap in (lambda i: i, nn.Sequential):
        one = InputRotation(nn.Linear(8, 5))
        shake_(one)
        model = Sum(wrap(one), wrap(one))
        y = model(x)
        torch.testing.assert_close(fold_(model)(x), y, atol=1e-5, rtol=0)
        assert not any(isinstance(module, InputRotation) for module in model.modules())
        assert torch.equal(one.fold()(x), one(x))


def test_what_an_input_rotation_cannot_be_folded_for():
    head = InputRotation(nn.Linear(8, 5, bias=False))
    with pytest.raises(ValueError, match="keep must be False where a model holds an InputRotation"):
        fold_(nn.Sequential(head), keep=True)
    tied = nn.Embedding(5, 8)
    tied.weight = head.module.weight
    with pytest.raises(ValueError, match="the rows of '1' cannot be folded, because another layer shares them"):
        fold_(nn.Sequential(tied, head))
    with torch.no_grad():
        head.free.fill_(float("nan"))
    with pytest.raises(ValueError, match="must be finite"):
        fold_(nn.Sequential(head))
    with pytest.raises(ValueError, match="seed must be None or a whole number, not 'a'"):
        InputRotation(nn.Linear(8, 5), seed="a")
