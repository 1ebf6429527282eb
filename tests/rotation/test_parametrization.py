"""The parametrisation of a rotated layer: its cache, its gradients, compilation."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hypersphere.functions.orthogonal import ORTHOGONALS, Cayley
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation import Stochastic, fold_, orthogonality_error, rotate_, rotation_parameters, use_rotation_set


@dataclass(frozen=True)
class Counting(Cayley):
    """Cayley that counts the calls of its kernels."""

    tally: dict = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def forward_kernel(self, free, v):
        self.tally["forward"] += 1
        return super().forward_kernel(free, v)

    def backward_kernel(self, residuals, grad, *, needs_rows=True):
        self.tally["backward"] += 1
        return super().backward_kernel(residuals, grad, needs_rows=needs_rows)


@pytest.fixture
def counted():
    torch.manual_seed(0)
    method = Counting()
    layer = rotate_(nn.Linear(6, 6), method)
    with torch.no_grad():
        rotation_parameters(layer)[0].normal_(std=0.3)
    return layer, rotation_parameters(layer)[0], method.tally


def test_rotation_is_computed_once_per_step(counted):
    layer, free, tally = counted
    optimizer = torch.optim.SGD([free], lr=0.1)
    for step in range(1, 4):
        x = torch.randn(3, 6)
        with torch.no_grad():
            layer(x)
        layer(layer(layer(x))).sum().backward()
        assert tally == {"forward": step, "backward": step}
        optimizer.step()
        optimizer.zero_grad()


def test_rotation_is_cached_in_eval_mode(counted):
    layer, _, tally = counted
    layer.eval()
    for _ in range(5):
        layer(torch.randn(3, 6))
        with torch.no_grad():
            layer(torch.randn(3, 6))
        with torch.inference_mode():
            layer(torch.randn(3, 6))
    assert tally["forward"] == 1


def test_rotation_accumulates_gradients_of_several_backward_passes(counted):
    layer, free, tally = counted
    xs = torch.randn(3, 4, 6)
    for x in xs:
        layer(x).square().sum().backward()
    assert tally == {"forward": 1, "backward": 3}
    ours, free.grad = free.grad.clone(), None
    plain = Cayley()(free, layer.parametrizations.weight.original)
    sum((x @ plain.mT + layer.bias).square().sum() for x in xs).backward()
    torch.testing.assert_close(ours, free.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_rotation_works_whichever_grad_mode_comes_first(counted, first):
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
def test_rotation_notices_every_way_of_writing_parameters(counted, write):
    layer, free, _ = counted
    before = layer.weight.detach().clone()
    write(free)
    expected = Cayley()(free.detach(), layer.parametrizations.weight.original)
    torch.testing.assert_close(layer.weight.detach(), expected)
    assert not torch.allclose(layer.weight.detach(), before)


def test_rotation_survives_copying_conversion_and_loading(counted):
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


def test_rotation_supports_two_losses_and_activation_checkpointing(counted):
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


@pytest.mark.parametrize("method", [*ORTHOGONALS, *TRANSFORMS])
@pytest.mark.parametrize("reentrant", [True, False])
def test_rotation_can_be_read_first_inside_a_checkpoint(method, reentrant):
    torch.manual_seed(0)
    model = rotate_(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), method, learn_neurons=True)
    x, results = torch.randn(4, 6, requires_grad=True), []
    for run in (lambda m: checkpoint(m, x, use_reentrant=reentrant), lambda m: m(x)):
        twin = copy.deepcopy(model)  # without a cached weight
        run(twin).sum().backward()
        results.append([p.grad for p in twin.parameters()])
    torch.testing.assert_close(results[0], results[1])


def test_rotation_works_with_parametrize_cached_and_functional_call(counted):
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
def test_rotation_is_computed_in_float32_under_autocast(method):
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
    results = []
    for enabled in (True, False):
        twin = copy.deepcopy(model)  # without a cached weight
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            weight = twin[0].weight
            (weight * model[0].bias).sum().backward()
        results.append((weight.detach(), rotation_parameters(twin)[0].grad))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


def train_both(run, model, twin, x, steps=2):
    """Train `model`, called through `run`, and `twin` by gradient descent, and compare the gradients of each step."""
    for _ in range(steps):
        grads = []
        for module, call in ((model, run), (twin, twin)):
            call(x).square().sum().backward()
            grads.append([p.grad.clone() for p in module.parameters() if p.requires_grad])
            with torch.no_grad():
                for p in module.parameters():
                    if p.grad is not None:
                        p -= 0.05 * p.grad
                        p.grad = None
        torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)


def rotated_pair(convert):
    """Return a rotated model, a copy of it, and a batch."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 3))
    convert(model)
    with torch.no_grad():
        for p in rotation_parameters(model):
            p += 0.1 * torch.randn_like(p)
    return model, copy.deepcopy(model), torch.randn(5, 4, 4, 4)


CONVERSIONS = {
    **{name: lambda model, name=name: rotate_(model, name) for name in (*ORTHOGONALS, *TRANSFORMS)},
    "bounded": lambda model: rotate_(model, Cayley(bound=0.3)),
    "shared": lambda model: rotate_(model, "cayley", blocks=2, shared=True),
    "butterfly": lambda model: rotate_(model, "cayley", blocks=4, factors=2, where=lambda name, layer: name == "2"),
    "learned neurons": lambda model: rotate_(model, "exponential", blocks=2, learn_neurons=True),
    "stochastic": lambda model: Stochastic(model, 0.5, method="lowdin"),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_rotation_compiles_to_one_graph_and_trains_as_in_eager_mode(conversion):
    model, twin, x = rotated_pair(CONVERSIONS[conversion])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train_both(compiled, model, twin, x)
    torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.compile(fold_(model), backend="aot_eager", fullgraph=True)(x), twin(x))


def test_rotation_compiles_with_inductor():
    torch._dynamo.reset()
    layer = rotate_(nn.Linear(6, 6, bias=False), "exponential")
    train_both(torch.compile(layer, fullgraph=True), layer, copy.deepcopy(layer), torch.randn(3, 6))


def test_exponential_operators_pass_opcheck():
    free, v, g = torch.randn(2, 15), torch.randn(2, 4, 6), torch.randn(2, 6, 4).mT
    operators = torch.ops.hypersphere
    for operator, arguments in ((operators.exponential, (free, v)), (operators.exponential_gradient, (free, v, g))):
        assert set(torch.library.opcheck(operator.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("method", ["gram_schmidt", "householder", "lowdin", "exponential", "neumann"])
def test_rotation_compiles_with_ill_conditioned_parameters(method):
    """A graph cannot read values to choose an algorithm, so its algorithm must be stable for all parameters."""
    torch._dynamo.reset()
    layer = rotate_(nn.Linear(8, 8, bias=False), method)
    (free,) = rotation_parameters(layer)
    with torch.no_grad():
        if free.ndim == 1:
            free.normal_(std=20.0, generator=torch.Generator().manual_seed(0))
        else:
            free.copy_(torch.diag(torch.logspace(0, -5, 8)) + torch.ones(8, 8).triu(1) * 1e-3)
    weight = torch.compile(lambda: layer.weight, backend="aot_eager", fullgraph=True)()
    v = layer.parametrizations.weight.original
    torch.testing.assert_close(weight @ weight.mT, v @ v.mT, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight, layer.weight, atol=1e-3, rtol=0)


def test_use_is_seen_by_a_compiled_model():
    model, twin, x = rotated_pair(rotate_)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for m in (model, twin):
        use_rotation_set(m, "other")
    torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)
    for m in (model, twin):
        use_rotation_set(m, "main")
    torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)


def test_rotation_gradient_uses_the_dimensions_of_the_forward_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 2))
    stochastic = Stochastic(model, 0.5, every=1, whole_first=False)
    (free,) = rotation_parameters(model)
    with torch.no_grad():
        free.normal_()
    x, results = torch.randn(5, 12), []
    for redraw in (False, True):
        out = model(x).square().sum()
        if redraw:
            stochastic.step()
        out.backward()
        results.append(free.grad.clone())
        free.grad = None
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


@pytest.mark.parametrize("method", ["free", "lowdin", Cayley(bound=0.2), "positive_definite"])
def test_rotation_gradient_refers_to_the_forward_pass_after_a_step_or_a_fold(method):
    torch.manual_seed(0)
    layer = rotate_(nn.Linear(6, 5), method)
    (free,), x = rotation_parameters(layer), torch.randn(3, 6)
    neurons = layer.parametrizations.weight.original.detach().clone()
    with torch.no_grad():
        free += 0.3 * torch.randn_like(free)
    layer(x).square().sum().backward()
    expected, free.grad = free.grad.clone(), None
    out = layer(x).square().sum()
    with torch.no_grad():
        free += 1.0
    out.backward()
    torch.testing.assert_close(free.grad, expected, atol=0, rtol=0)
    free.grad = None
    out = layer(x).square().sum()
    before = free.detach().clone()
    fold_(layer, keep=True)
    out.backward()
    after = free.grad.clone()
    layer.parametrizations.weight.original.data.copy_(neurons)
    free.data.copy_(before)
    free.grad = None
    layer(x).square().sum().backward()
    torch.testing.assert_close(after, free.grad, atol=0, rtol=0)


def test_rotation_notices_changed_dimensions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 2))
    Stochastic(model, 3, whole_first=False)
    rotation = model[0].parametrizations.weight[0]
    with torch.no_grad():
        rotation.parameter.normal_()
    before = model[0].weight.detach().clone()
    rotation.dimensions = (rotation.dimensions + 1) % 12
    assert not torch.equal(model[0].weight, before)


def test_rotation_compares_cached_inputs_that_are_not_aligned_words():
    """Inputs are compared as 64-bit words where their memory allows it, and value by value otherwise."""
    for d, dtype in ((3, torch.float32), (3, torch.bfloat16), (4, torch.float64)):
        layer = rotate_(nn.Linear(d, 5).to(dtype))
        (free,) = rotation_parameters(layer)
        buffer = torch.zeros(free.numel() + 1, dtype=dtype)
        free.data = buffer[1:]  # the memory starts at an odd offset
        before = layer.weight.detach().clone()
        assert layer.weight is layer.weight
        free.data[-1] += 0.5
        assert not torch.equal(layer.weight, before)


def test_rotation_keeps_no_residuals_in_inference():
    layer = rotate_(nn.Linear(6, 5), "exponential").eval()
    rotation = layer.parametrizations.weight[0]
    with torch.no_grad():
        layer(torch.randn(2, 6))
        assert rotation._cache.residuals is None
        layer.train()(torch.randn(2, 6))
    assert rotation._cache.residuals is not None


def test_rotation_keeps_the_memory_format():
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    rotate_(conv, "cayley", spread=0.3)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    y = conv(torch.ones(1, 4, 5, 5))
    y.sum().backward()
    fold_(conv)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(conv(torch.ones(1, 4, 5, 5)), y)
