"""The parametrisation of a rotated layer: when it is computed, its gradients, compilation."""

import copy
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hypersphere.functions.orthogonal import ORTHOGONALS, Cayley, Householder
from hypersphere.functions.transform import TRANSFORMS
from hypersphere.rotation import (
    BlockLayout,
    Rotation,
    Stochastic,
    fold_,
    orthogonality_error,
    rotate_,
    rotation_parameters,
    use_rotation_set,
)
from hypersphere.training import embed


@dataclass(frozen=True)
class Counting(Householder):
    """Householder reflections, with counted calls of the kernels."""

    tally: dict = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def forward_kernel(self, free, v):
        self.tally["forward"] += 1
        return super().forward_kernel(free, v)

    def backward_kernel(self, free, v, residuals, grad, *, needs_rows=True):
        self.tally["backward"] += 1
        return super().backward_kernel(free, v, residuals, grad, needs_rows=needs_rows)


@pytest.fixture
def counted():
    torch.manual_seed(0)
    method = Counting()
    layer = rotate_(nn.Linear(6, 6), method)
    with torch.no_grad():
        rotation_parameters(layer)[0].add_(torch.randn(6, 6), alpha=0.3)
    return layer, rotation_parameters(layer)[0], method.tally


def expected_weight(layer):
    """Return the weight of a counted layer, computed from its current parameters and neurons."""
    return Householder()(rotation_parameters(layer)[0], layer.parametrizations.weight.original)


def test_rotation_rejects_dropout_of_some_dimensions():
    with pytest.raises(ValueError, match=r"^dropout must be 0 if only some dimensions are rotated, not 0\.5$"):
        Rotation(Cayley(), BlockLayout(2), dimensions=torch.tensor([0, 3]), dropout=0.5, like=torch.randn(4, 4))


def test_rotation_is_computed_once_per_read(counted):
    layer, free, tally = counted
    optimizer = torch.optim.SGD([free], lr=0.1)
    for step in range(1, 4):
        layer(torch.randn(3, 6)).sum().backward()
        assert tally == {"forward": step, "backward": step}
        optimizer.step()
        optimizer.zero_grad()
    layer(layer(torch.randn(3, 6)))
    assert tally["forward"] == 5


def test_rotation_is_computed_once_inside_cached(counted):
    layer, free, tally = counted
    x = torch.randn(3, 6)
    layer(layer(layer(x))).sum().backward()
    expected, free.grad = free.grad.clone(), None
    tally |= {"forward": 0, "backward": 0}
    with parametrize.cached():  # a weight that is used three times, as in a recurrent or tied layer
        layer(layer(layer(x))).sum().backward()
    assert tally == {"forward": 1, "backward": 1}
    torch.testing.assert_close(free.grad, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_embed_computes_a_rotation_once_and_leaves_nothing_stale(counted, mode):
    layer, free, tally = counted
    batches = [(torch.randn(3, 6), torch.zeros(3)) for _ in range(4)]
    for _ in range(2):
        tally["forward"] = 0
        with mode():
            features, _ = embed(layer, batches)
        assert tally["forward"] == 1
        with torch.no_grad():
            x = torch.cat([x for x, _ in batches])
            torch.testing.assert_close(features.clone(), x @ expected_weight(layer).mT + layer.bias)
            free += 0.5
    layer(batches[0][0]).sum().backward()
    assert free.grad.abs().sum() > 0


def test_rotation_keeps_nothing_between_reads(counted):
    layer, _, _ = counted
    rotation = layer.parametrizations.weight[0]
    before = dict(vars(rotation))
    layer(torch.randn(2, 6)).sum().backward()
    assert vars(rotation) == before


def test_rotation_accumulates_gradients_of_several_backward_passes(counted):
    layer, free, tally = counted
    xs = torch.randn(3, 4, 6)
    for x in xs:
        layer(x).square().sum().backward()
    assert tally == {"forward": 3, "backward": 3}
    ours, free.grad = free.grad.clone(), None
    plain = expected_weight(layer)
    sum((x @ plain.mT + layer.bias).square().sum() for x in xs).backward()
    torch.testing.assert_close(ours, free.grad, atol=1e-4, rtol=1e-4)


def test_rotation_gradient_can_be_computed_twice_with_retain_graph(counted):
    layer, free, _ = counted
    value = layer(torch.randn(4, 6)).square().sum()
    value.backward(retain_graph=True)
    first = free.grad.clone()
    value.backward()
    torch.testing.assert_close(free.grad, 2 * first)


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
    torch.testing.assert_close(layer.weight.detach(), expected_weight(layer).detach())
    assert not torch.allclose(layer.weight.detach(), before)


def test_rotation_survives_copying_conversion_and_loading(counted):
    layer, _, _ = counted
    layer(torch.randn(2, 6)).sum().backward()
    rotation = pickle.loads(pickle.dumps(layer.parametrizations.weight[0]))
    assert torch.equal(rotation(layer.parametrizations.weight.original), layer.weight)
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
        twin = copy.deepcopy(model)
        run(twin).sum().backward()
        results.append([p.grad for p in twin.parameters()])
    torch.testing.assert_close(results[0], results[1])


def test_rotation_works_with_functional_call(counted):
    layer, free, _ = counted
    x = torch.randn(2, 6)
    name = next(name for name, p in layer.named_parameters() if p is free)
    other = free.detach() + 0.2
    y = torch.func.functional_call(layer, {name: other}, (x,))
    expected = x @ Householder()(other, layer.parametrizations.weight.original).mT + layer.bias
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(layer(x), x @ expected_weight(layer).mT + layer.bias)


@pytest.mark.parametrize("method", ["gram_schmidt", "lowdin", "cayley", "neumann", "exponential", "householder"])
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
        twin = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            weight = twin[0].weight
            value = (weight * model[0].bias).sum()
            # torch advises against a backward pass under autocast; that of the kernels disables it.
            if ORTHOGONALS[method].has_kernels:
                value.backward()
        if not ORTHOGONALS[method].has_kernels:
            value.backward()
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


@pytest.mark.slow
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
    layer = rotate_(nn.Linear(6, 6, bias=False), "exponential")
    train_both(torch.compile(layer, fullgraph=True), layer, copy.deepcopy(layer), torch.randn(3, 6))


def test_exponential_operators_pass_opcheck():
    free, v, g = torch.randn(2, 15), torch.randn(2, 4, 6), torch.randn(2, 6, 4).mT
    operators = torch.ops.hypersphere
    for operator, arguments in ((operators.exponential, (free, v)), (operators.exponential_gradient, (free, v, g))):
        assert set(torch.library.opcheck(operator.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gram_schmidt", "householder", "lowdin", "exponential", "neumann"])
def test_rotation_compiles_with_ill_conditioned_parameters(method):
    """A graph cannot read values to choose an algorithm, so its algorithm must be stable for all parameters."""
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


def test_embed_of_a_compiled_model_sees_new_parameters():
    model = rotate_(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
    model.compile(backend="aot_eager")
    x = torch.randn(4, 3, 6)
    for _ in range(3):
        features, _ = embed(model, [(part, torch.zeros(3)) for part in x])
        torch.testing.assert_close(features, model.forward(x.flatten(0, 1)).detach())
        with torch.no_grad():
            rotation_parameters(model)[0].add_(0.3)


@pytest.mark.slow
def test_use_is_seen_by_a_compiled_model():
    model, twin, x = rotated_pair(rotate_)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for m in (model, twin):
        use_rotation_set(m, "other", create=True)
    torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)
    for m in (model, twin):
        use_rotation_set(m, "main")
    torch.testing.assert_close(compiled(x), twin(x), atol=1e-5, rtol=1e-5)


def test_rotation_gradient_uses_the_dimensions_of_the_forward_pass():
    """`DistributedDataParallel` writes to buffers in every forward pass, so also between two of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 2))
    Stochastic(model, 0.5, whole_first=False)
    (free,), rotation = rotation_parameters(model), model[0].parametrizations.weight[0]
    with torch.no_grad():
        free.normal_()
    x, results = torch.randn(5, 12), []
    for redraw in (False, True):
        out = model(x).square().sum()
        if redraw:
            rotation.dimensions.copy_((rotation.dimensions + 1) % 12)
        out.backward()
        results.append(free.grad.clone())
        free.grad = None
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


@pytest.mark.parametrize("method", [*ORTHOGONALS, *TRANSFORMS])
@pytest.mark.parametrize("change", ["step", "fold"])
def test_rotation_gradient_after_a_change_is_that_of_the_forward_pass_or_an_error(method, change):
    torch.manual_seed(0)
    layer, x = rotate_(nn.Linear(6, 5), method, spread=0.3), torch.randn(3, 6)
    (free,) = rotation_parameters(layer)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), free)
    value = layer(x).square().sum()
    if change == "fold":
        fold_(layer, keep=True)
    else:
        with torch.no_grad():
            free += 1.0
    failure = None
    try:
        (gradient,) = torch.autograd.grad(value, free)
    except RuntimeError as error:  # as for any operation of torch that saved its input
        failure = str(error)
    if failure is None:
        torch.testing.assert_close(gradient, expected, atol=0, rtol=0)
    else:
        assert "modified by an inplace operation" in failure


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


def test_rotation_keeps_the_memory_format():
    conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    rotate_(conv, "cayley", spread=0.3)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    y = conv(torch.ones(1, 4, 5, 5))
    y.sum().backward()
    fold_(conv)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(conv(torch.ones(1, 4, 5, 5)), y)
