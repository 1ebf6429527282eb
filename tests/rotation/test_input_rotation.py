"""`InputRotation`: rotate inputs instead of weights (CLS-OPT)."""

import pytest
import torch
from torch import nn

from hypersphere.heads import a_softmax
from hypersphere.rotation import InputRotation, degrees_of_freedom, fold_

from .samples import left_unchanged, mlp, perturb_


def test_input_rotation_equals_weight_rotation_and_folds():
    torch.manual_seed(0)
    layer = nn.Linear(6, 9)
    v, x = layer.weight.detach().clone(), torch.randn(4, 6)
    rotated = InputRotation(layer, "gram_schmidt")
    perturb_(rotated)
    r = rotated.method(rotated.free.detach())
    torch.testing.assert_close(rotated(x), x @ (v @ r.mT).mT + layer.bias)
    y = rotated(x)
    y.sum().backward()
    assert rotated.free.grad.abs().sum() > 0
    assert layer.weight.grad is None
    model = nn.Sequential(rotated)
    torch.testing.assert_close(fold_(model)(x), y, atol=1e-6, rtol=0)
    assert model[0] is layer
    assert layer.weight.requires_grad


def test_input_rotation_with_a_seed_stores_no_rows():
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


def test_input_rotation_with_a_seed_survives_conversion_and_loading():
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
        with pytest.raises(RuntimeError, match="saved with seed=7, but this module has seed=8"):
            InputRotation(nn.Linear(8, 20), seed=8).load_state_dict(state, strict=strict)
    layer = nn.Linear(8, 2000)
    nn.init.zeros_(layer.weight)
    assert InputRotation(layer, seed=1).module.weight.std().item() == pytest.approx(8**-0.5, rel=0.02)
    assert [name for name, _ in fold_(nn.Sequential(one)).named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [None, 7])
def test_input_rotation_wraps_a_half_precision_layer(dtype, seed):
    layer = InputRotation(nn.Linear(8, 20, dtype=dtype), seed=seed)
    perturb_(layer)
    assert (layer.rows.dtype, layer.free.dtype) == (dtype, torch.float32)
    x = torch.randn(3, 8).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    r = layer.method(layer.free.detach())
    expected = x.float() @ r @ layer.rows.float().mT + layer.module.bias.float()
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert layer.free.grad.abs().max() > 0
    assert layer.fold().weight.dtype == dtype


@pytest.mark.parametrize("seed", [None, 5])
def test_input_rotation_loads_a_state_dict_of_version_0_1(seed):
    one, two = (nn.Sequential(InputRotation(nn.Linear(8, 20), seed=seed)) for _ in range(2))
    perturb_(one)
    state = one.state_dict()
    state["0.free"] = state.pop("0.rotation.free.main")
    two.load_state_dict(state)
    x = torch.randn(3, 8)
    assert torch.equal(two(x), one(x))


def test_input_rotation_turn_is_deprecated():
    layer, x = InputRotation(nn.Linear(4, 3)), torch.randn(2, 4)
    with pytest.warns(DeprecationWarning, match="use InputRotation.rotate"):
        assert torch.equal(layer.turn(x), layer.rotate(x))


def test_input_rotation_in_several_places_is_folded_once():
    class Sum(nn.Module):
        def __init__(self, *parts):
            super().__init__()
            self.a, self.b = parts

        def forward(self, x):
            return self.a(x) + self.b(x)

    x = torch.randn(3, 8)
    for wrap in (lambda i: i, nn.Sequential):
        one = InputRotation(nn.Linear(8, 5))
        perturb_(one)
        model = Sum(wrap(one), wrap(one))
        y = model(x)
        torch.testing.assert_close(fold_(model)(x), y, atol=1e-5, rtol=0)
        assert not any(isinstance(module, InputRotation) for module in model.modules())
        assert torch.equal(one.fold()(x), one(x))


def test_input_rotation_rejects_what_it_cannot_fold():
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
    with pytest.raises(ValueError, match="seed must be None or an integer, not 'a'"):
        InputRotation(nn.Linear(8, 5), seed="a")
    with pytest.raises(ValueError, match="block_size must be None or a divisor of 8, the length of a row, not 3"):
        InputRotation(nn.Linear(8, 5), block_size=3)
    with pytest.raises(ValueError, match="block_size must be None with blocks=2, because the two exclude each other"):
        InputRotation(nn.Linear(8, 5), blocks=2, block_size=4)


def test_input_rotation_rejects_a_module_without_a_plain_weight():
    model = mlp()
    with left_unchanged(model), pytest.raises(ValueError, match="module must be a layer with a plain weight"):
        InputRotation(model)
