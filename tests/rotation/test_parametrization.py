"""When the rotated weight is computed, and that it is always the right one."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hypersphere.functions.orthogonal import Cayley
from hypersphere.rotation import fold_, orthogonality_error, rotate_, rotation_parameters


@dataclass(frozen=True)
class Counting(Cayley):
    """Cayley, with a tally of its work."""

    tally: dict = field(default_factory=lambda: {"apply": 0, "pull": 0})

    def apply(self, free, v):
        self.tally["apply"] += 1
        return super().apply(free, v)

    def pull(self, memory, gradient, *, rows=True):
        self.tally["pull"] += 1
        return super().pull(memory, gradient, rows=rows)


@pytest.fixture
def counted():
    torch.manual_seed(0)
    method = Counting()
    layer = rotate_(nn.Linear(6, 6), method)
    with torch.no_grad():
        rotation_parameters(layer)[0].normal_(std=0.3)
    return layer, rotation_parameters(layer)[0], method.tally


def test_computed_once_a_step_however_often_it_is_read(counted):
    layer, free, tally = counted
    optimizer = torch.optim.SGD([free], lr=0.1)
    for step in range(1, 4):
        x = torch.randn(3, 6)
        with torch.no_grad():
            layer(x)
        layer(layer(layer(x))).sum().backward()
        assert tally == {"apply": step, "pull": step}
        optimizer.step()
        optimizer.zero_grad()


def test_not_computed_in_eval_after_the_first_use(counted):
    layer, _, tally = counted
    layer.eval()
    for _ in range(5):
        layer(torch.randn(3, 6))
        with torch.no_grad():
            layer(torch.randn(3, 6))
        with torch.inference_mode():
            layer(torch.randn(3, 6))
    assert tally["apply"] == 1


def test_gradients_accumulate_over_backwards_without_another_factorisation(counted):
    layer, free, tally = counted
    xs = torch.randn(3, 4, 6)
    for x in xs:
        layer(x).square().sum().backward()
    assert tally == {"apply": 1, "pull": 3}
    ours, free.grad = free.grad.clone(), None
    plain = Cayley()(free, layer.parametrizations.weight.original)
    sum((x @ plain.mT + layer.bias).square().sum() for x in xs).backward()
    torch.testing.assert_close(ours, free.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_mode_may_come_first(counted, first):
    layer, free, _ = counted
    with first():
        layer(torch.randn(2, 6))
    layer(torch.randn(2, 6)).sum().backward()
    assert free.grad.abs().sum() > 0
    with torch.no_grad():
        assert not layer.weight.requires_grad
    assert layer.weight.requires_grad
    free.requires_grad_(False)
    assert not layer.weight.requires_grad
    free.requires_grad_(True)
    assert layer.weight.requires_grad


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.add_(0.1),
        lambda p: p.detach().add_(0.1),
        lambda p: p.detach().numpy().__iadd__(0.1),
        lambda p: setattr(p, "data", p.data + 0.1),
        lambda p: torch.nn.utils.vector_to_parameters(p.detach().flatten() + 0.1, [p]),
    ],
    ids=["data", "detach", "numpy", "swap", "vector"],
)
def test_no_way_of_writing_goes_unnoticed(counted, write):
    layer, free, _ = counted
    before = layer.weight.detach().clone()
    write(free)
    expected = Cayley()(free.detach(), layer.parametrizations.weight.original)
    torch.testing.assert_close(layer.weight.detach(), expected)
    assert not torch.allclose(layer.weight.detach(), before)


def test_copies_moves_and_loads(counted):
    layer, _, _ = counted
    layer(torch.randn(2, 6)).sum().backward()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        rotation_parameters(twin)[0].zero_()
    assert not torch.allclose(twin.weight, layer.weight)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)
    assert layer.double().weight.dtype == torch.float64
    assert layer.half().weight.dtype == torch.float16
    assert rotation_parameters(layer)[0].dtype == torch.float16
    layer.weight.float().sum().backward()
    assert rotate_(nn.Linear(4, 3, device="meta")).weight.is_meta


def test_two_losses_two_backwards_and_a_checkpoint(counted):
    layer, free, _ = counted
    x = torch.randn(4, 6)
    one, two = layer(x).sum(), layer(x).square().sum()
    one.backward()
    two.backward()
    both, free.grad = free.grad.clone(), None
    for reentrant in (True, False):
        inputs = x.clone().requires_grad_()
        out = checkpoint(lambda t: layer(layer(t)), inputs, use_reentrant=reentrant)
        out.sum().backward()
        again, free.grad = free.grad.clone(), None
        layer(layer(x)).sum().backward()
        torch.testing.assert_close(again, free.grad)
        free.grad = None
    (layer(x).sum() + layer(x).square().sum()).backward()
    torch.testing.assert_close(both, free.grad, atol=1e-5, rtol=1e-5)


def test_torchs_own_cache_and_functional_call_work_too(counted):
    layer, free, _ = counted
    with parametrize.cached():
        assert layer.weight is layer.weight
    x = torch.randn(2, 6)
    name = next(name for name, p in layer.named_parameters() if p is free)
    other = free.detach() + 0.2
    y = torch.func.functional_call(layer, {name: other}, (x,))
    expected = x @ Cayley()(other, layer.parametrizations.weight.original).mT + layer.bias
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(layer(x), x @ Cayley()(free, layer.parametrizations.weight.original).mT + layer.bias)


@pytest.mark.parametrize("method", ["gram_schmidt", "lowdin", "cayley", "exponential", "householder"])
def test_autocast_factorises_in_float32(method):
    torch.manual_seed(0)
    model = rotate_(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), method)
    x = torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
            assert model[0].weight.dtype == torch.float32
        y.float().square().sum().backward()
        optimizer.step()
    assert orthogonality_error(model) < 1e-5


@pytest.mark.parametrize("method", ["gram_schmidt", "lowdin", "cayley", "exponential"])
def test_compiled_models_agree_with_eager_ones(method):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = rotate_(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)), method)
    with torch.no_grad():
        for p in rotation_parameters(model):
            p += 0.1 * torch.randn_like(p)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(5, 2, 4, 4)
    for _ in range(3):
        grads = []
        for module, run in ((model, compiled), (twin, twin)):
            run(x).square().sum().backward()
            grads.append([p.grad.clone() for p in module.parameters() if p.requires_grad])
            with torch.no_grad():
                for p in module.parameters():
                    if p.grad is not None:
                        p -= 0.05 * p.grad
                        p.grad = None
        torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.compile(fold_(model), backend="aot_eager", fullgraph=True)(x), twin(x))
