"""Hyperball against its formula in NumPy, around every optimiser of torch."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from hypersphere.heads import arcface
from hypersphere.optim import OPTIMIZERS, Hyperball, Muon, Scheduler
from hypersphere.optim.schedules import Constant

SHAPES = {"linear": (5, 7), "convolution": (4, 3, 3, 3), "bias": (5,), "scale": ()}


def make_parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES.values()]
    return [nn.Parameter((0.3 * draw).to(dtype)) for draw in draws]


def set_gradients(parameters, step, seed=1):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def norms(w, per):
    """Norms of a matrix or of its rows, in the shape of the matrix up to sizes of 1."""
    axes = tuple(range(1, w.ndim)) if per == "row" else None
    return np.sqrt(np.sum(w * w, axis=axes, keepdims=True))


def move(w, u, rho, rate, per):
    """ρ·norm(W − η·ρ·norm(u)), literally."""
    moved = w - rate * rho * u / norms(u, per)
    return rho * moved / norms(moved, per)


@pytest.mark.parametrize("per", ["matrix", "row"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hyperball_sgd_equals_the_formula(per, dtype):
    rate, mu = 0.1, 0.9
    parameters = make_parameters(dtype)
    weights = [p.detach().double().numpy().copy() for p in parameters]
    radii, momenta = [norms(w, per) for w in weights], [np.zeros_like(w) for w in weights]
    optimizer = Hyperball(torch.optim.SGD(parameters, lr=rate, momentum=mu), per=per)
    for step in range(12):
        set_gradients(parameters, step)
        grads = [p.grad.double().numpy() for p in parameters]
        optimizer.step()
        momenta = [mu * b + g for b, g in zip(momenta, grads, strict=True)]
        weights = [
            move(w, b, rho, rate, per) if w.ndim >= 2 else w - rate * b
            for w, b, rho in zip(weights, momenta, radii, strict=True)
        ]
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6}.get(dtype, 50 * torch.finfo(dtype).eps)
    for p, w in zip(parameters, weights, strict=True):
        np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=0, atol=tolerance * max(np.abs(w).max(), 1))


def test_hyperball_adamw_equals_the_formula_and_ignores_weight_decay_of_matrices():
    rate, (first, second), eps, decay = 0.02, (0.9, 0.999), 1e-8, 0.1
    parameters = make_parameters()
    weights = [p.detach().numpy().copy() for p in parameters]
    radii = [norms(w, "matrix") for w in weights]
    means, squares = ([np.zeros_like(w) for w in weights] for _ in range(2))
    optimizer = Hyperball(torch.optim.AdamW(parameters, lr=rate, weight_decay=decay))
    for step in range(1, 61):
        set_gradients(parameters, step)
        optimizer.step()
        for i, p in enumerate(parameters):
            g = p.grad.numpy()
            means[i] = first * means[i] + (1 - first) * g
            squares[i] = second * squares[i] + (1 - second) * g * g
            u = means[i] / (1 - first**step) / (np.sqrt(squares[i] / (1 - second**step)) + eps)
            if weights[i].ndim >= 2:
                weights[i] = move(weights[i], u, radii[i], rate, "matrix")
            else:
                weights[i] = (1 - rate * decay) * weights[i] - rate * u
    for p, w in zip(parameters, weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=0, atol=1e-12)


OPTIONS = {"asgd": {"lambd": 0.0}, "sgd": {"momentum": 0.9}}


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS, "muon", "torch muon"}))
@pytest.mark.parametrize("per", ["matrix", "row"])
def test_hyperball_follows_the_direction_of_every_optimizer(name, per):
    """The reference is the difference of weights before and after a step of the optimiser alone."""
    makers = OPTIMIZERS | {"muon": Muon, "torch muon": torch.optim.Muon}

    def make(parameters):
        return makers[name](parameters, lr=0.05, **OPTIONS.get(name, {}))

    matrices_only = slice(1) if name == "torch muon" else slice(None)
    parameters, references = make_parameters()[matrices_only], make_parameters()[matrices_only]
    optimizer, alone = Hyperball(make(parameters), per=per), make(references)
    for group in alone.param_groups:
        group["weight_decay"] = 0.0 if "weight_decay" in group else None
    for group in optimizer.param_groups:  # plain parameters of both have none
        group["weight_decay"] = 0.0 if "weight_decay" in group else None
    radii = [norms(p.detach().numpy(), per) for p in references]
    for step in range(4):
        set_gradients(parameters, step)
        set_gradients(references, step)
        before = [p.detach().numpy().copy() for p in references]
        optimizer.step()
        alone.step()
        for p, q, w, rho in zip(parameters, references, before, radii, strict=True):
            if q.ndim >= 2:
                with torch.no_grad():
                    q.copy_(torch.from_numpy(move(w, w - q.detach().numpy(), rho, 0.05, per)))
                torch.testing.assert_close(p, q, rtol=0, atol=1e-7 if "muon" in name else 1e-10)
            else:
                assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per", ["matrix", "row"])
def test_hyperball_keeps_norms_over_many_steps(per, dtype):
    parameters = make_parameters(dtype)[:2]
    before = [norms(p.detach().double().numpy(), per) for p in parameters]
    optimizer = Hyperball(torch.optim.AdamW(parameters, lr=0.05, eps=1e-4), per=per)  # float16 has no 1e-8
    for step in range(300):
        set_gradients(parameters, step)
        optimizer.step()
    for p, rho in zip(parameters, before, strict=True):
        ratio = norms(p.detach().double().numpy(), per) / rho
        assert np.abs(ratio - 1).max() < (1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


def test_hyperball_turns_by_the_same_angle_for_any_norm_and_gradient():
    rate = 0.01
    for size in (1e-3, 1.0, 1e4):
        for scale in (1e-6, 1.0, 1e6):
            w = size * torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
            p = nn.Parameter(w.clone())
            p.grad = scale * torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)  # perpendicular to w
            Hyperball(torch.optim.SGD([p], lr=rate)).step()
            cosine = float((p.detach() * w).sum() / (p.detach().norm() * w.norm()))
            assert cosine == pytest.approx(np.cos(np.arctan(rate)), rel=1e-12)


def test_hyperball_leaves_matrices_without_update_unchanged():
    parameters = make_parameters(torch.float32)
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    parameters[1].grad = None
    optimizer = Hyperball(torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0))
    optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(parameters, before, strict=True))
    assert "radius" not in optimizer.state[parameters[1]]
    set_gradients(parameters, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(parameters, before, strict=True))
    row = nn.Parameter(torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
    row.grad = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    Hyperball(torch.optim.SGD([row], lr=0.1), per="row").step()
    assert torch.equal(row[0], torch.tensor([3.0, 4.0]))
    assert not torch.equal(row[1], torch.ones(2))


def test_hyperball_trains_matrices_that_are_zero_like_the_base_optimizer():
    zero, base = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))
    optimizer = Hyperball(torch.optim.AdamW([zero], lr=0.1, weight_decay=0.1))
    alone = torch.optim.AdamW([base], lr=0.1, weight_decay=0.1)
    for step in range(5):
        for p in (zero, base):
            set_gradients([p], step)
        if step == 3:  # a new optimiser knows from the state that there is no radius
            state = optimizer.state_dict()
            optimizer = Hyperball(torch.optim.AdamW([zero]))
            optimizer.load_state_dict(state)
        optimizer.step()
        alone.step()
    assert zero.any()
    assert torch.equal(zero, base)
    assert optimizer.state[zero]["radius"] is None


def test_hyperball_trains_zero_rows_and_keeps_the_norms_of_others():
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    p, base = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    optimizer, alone = Hyperball(torch.optim.SGD([p], lr=0.1), per="row"), torch.optim.SGD([base], lr=0.1)
    for step in range(3):
        set_gradients([p], step)
        set_gradients([base], step)
        optimizer.step()
        alone.step()
    torch.testing.assert_close(p[0], base[0])
    torch.testing.assert_close(p[1].norm(), torch.tensor(5.0))


def test_hyperball_measures_the_radius_at_the_first_step():
    layer = nn.Linear(4, 3)
    optimizer = Hyperball(torch.optim.SGD(layer.parameters(), lr=0.1))
    nn.init.constant_(layer.weight, 2.0)  # for example weights loaded after the optimiser was made
    layer(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.norm(), torch.tensor(2 * 12**0.5))


def test_hyperball_options_of_groups_override_the_default():
    matrix, rows, plain = (nn.Parameter(0.5 * torch.ones(3, 4)) for _ in range(3))
    reference = nn.Parameter(plain.detach().clone())
    optimizer = Hyperball(torch.optim.SGD([{"params": [matrix]}, {"params": [rows], "per": "row"}], lr=0.3))
    optimizer.add_param_group({"params": [plain], "per": None, "lr": 0.1})
    alone = torch.optim.SGD([reference], lr=0.1)
    for step in range(3):
        for p in (matrix, rows, plain, reference):
            set_gradients([p], step)
        optimizer.step()
        alone.step()
    torch.testing.assert_close(matrix.norm(), torch.tensor(3**0.5))
    assert (matrix.norm(dim=1) - 1).abs().max() > 0.01
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))
    assert torch.equal(plain, reference)
    assert [group["per"] for group in optimizer.param_groups] == ["matrix", "row", None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, Muon], ids=lambda make: make.__name__)
def test_hyperball_resumes_bit_for_bit(make, dtype):
    def start():
        parameters = make_parameters(dtype)
        return parameters, Hyperball(make(parameters, lr=0.01), per="row" if make is torch.optim.SGD else "matrix")

    def run(parameters, optimizer, steps):
        for step in steps:
            set_gradients(parameters, step)
            optimizer.step()

    parameters, optimizer = start()
    run(parameters, optimizer, range(10))
    continued, interrupted = start()
    run(continued, interrupted, range(5))
    file = io.BytesIO()
    torch.save(interrupted.state_dict(), file)
    file.seek(0)
    resumed, other = start()
    with torch.no_grad():
        for p, q in zip(resumed, continued, strict=True):
            p.copy_(q)
    other.load_state_dict(torch.load(file))
    assert other.state[resumed[0]]["radius"].dtype == torch.float32
    run(resumed, other, range(5, 10))
    assert all(torch.equal(p, q) for p, q in zip(parameters, resumed, strict=True))


def test_hyperball_loads_a_state_of_the_base_optimizer():
    parameters = make_parameters()
    alone = torch.optim.AdamW(parameters, lr=0.01)
    set_gradients(parameters, 0)
    alone.step()
    optimizer = Hyperball(torch.optim.AdamW(parameters, lr=0.5), per="row")
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    radius = parameters[0].detach().norm(dim=1)
    set_gradients(parameters, 1)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.state[parameters[0]]["step"] == 2
    torch.testing.assert_close(parameters[0].detach().norm(dim=1), radius)


def test_hyperball_can_be_copied_and_pickled_with_its_model():
    layer = nn.Linear(4, 3)
    optimizer = Hyperball(torch.optim.AdamW(layer.parameters(), lr=0.1))
    x = torch.randn(5, 4)

    def train(layer, optimizer):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight

    train(layer, optimizer)
    twins = [copy.deepcopy((layer, optimizer)), pickle.loads(pickle.dumps((layer, optimizer)))]
    expected = train(layer, optimizer)
    assert all(torch.equal(train(*twin), expected) for twin in twins)


def test_hyperball_works_with_schedulers_and_zero_grad():
    parameters = make_parameters()
    optimizer = Hyperball(torch.optim.SGD(parameters, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    set_gradients(parameters, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups is optimizer.base_optimizer.param_groups
    assert optimizer.base_optimizer.param_groups[0]["lr"] == 0.05
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.randn_like(before)
    parameters[0].grad -= (parameters[0].grad * before).sum() / before.square().sum() * before
    optimizer.step()
    cosine = (parameters[0].detach() * before).sum() / before.square().sum()
    assert float(cosine) == pytest.approx(np.cos(np.arctan(0.05)), rel=1e-10)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    Scheduler([optimizer], Constant(warmup=0.5), 10)
    assert optimizer.base_optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1)


def test_hyperball_evaluates_a_closure_once_with_the_weights():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer = Hyperball(torch.optim.SGD(layer.parameters(), lr=0.1))
    expected, calls = layer(x).square().mean().item(), []

    def closure():
        calls.append(layer.weight.detach().clone())
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    before = layer.weight.detach().clone()
    assert optimizer.step(closure).item() == expected
    assert len(calls) == 1
    assert torch.equal(calls[0], before)
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("fused", [False, True])
def test_hyperball_works_with_a_gradient_scaler(fused):
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    twin, x = copy.deepcopy(layer), torch.randn(16, 8)
    optimizer = Hyperball(torch.optim.AdamW(layer.parameters(), lr=0.01, fused=fused))
    other = Hyperball(torch.optim.AdamW(twin.parameters(), lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        for model, one in ((layer, optimizer), (twin, other)):
            one.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            if one is optimizer:
                scaler.scale(loss).backward()
            elif step != 2:
                loss.backward()
        if step == 2:
            layer.weight.grad[0, 0] = float("inf")
            before = layer.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:  # the scaler skips this step
            assert torch.equal(layer.weight, before)
        else:
            other.step()
    torch.testing.assert_close(layer.weight, twin.weight, rtol=0, atol=1e-4)
    assert optimizer.state[layer.weight]["step"] == 3


def test_hyperball_calls_step_hooks_with_the_weights():
    head = arcface(4, 3)
    optimizer = Hyperball(torch.optim.SGD(head.parameters(), lr=0.1), per="row")
    head.advance_with(optimizer)
    norms_seen = []
    optimizer.register_step_post_hook(lambda *_: norms_seen.append(head.weight.detach().norm(dim=1)))
    before = head.weight.detach().norm(dim=1)
    head(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).backward()
    optimizer.step()
    torch.testing.assert_close(norms_seen, [before])


def test_hyperball_restores_the_weights_if_the_base_optimizer_fails():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise RuntimeError("failed")

    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    optimizer = Hyperball(Failing(layer.parameters(), lr=0.1))
    layer(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="failed"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


def test_hyperball_accepts_sparse_gradients_and_other_memory_formats():
    embedding = nn.Embedding(10, 4, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = Hyperball(torch.optim.SGD(embedding.parameters(), lr=0.1), per="row")
    embedding(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    moved = (embedding.weight != before).any(1).nonzero().flatten().tolist()
    assert moved == [1, 3]
    torch.testing.assert_close(embedding.weight.norm(dim=1), before.norm(dim=1))
    for make in (torch.optim.AdamW, Muon):
        torch.manual_seed(0)
        convolution = nn.Conv2d(3, 6, 3)
        last = copy.deepcopy(convolution).to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 5, 5)
        for model in (convolution, last):
            optimizer = Hyperball(make(model.parameters(), lr=0.1))
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(convolution.weight, last.weight, rtol=0, atol=1e-3)


def test_hyperball_keeps_working_if_parameters_change_their_dtype():
    layer = nn.Linear(4, 3)
    optimizer = Hyperball(torch.optim.SGD(layer.parameters(), lr=0.1))
    for dtype in (torch.float32, torch.float64):
        layer.to(dtype)
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        layer(torch.randn(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        assert layer.weight.dtype == dtype
        torch.testing.assert_close(layer.weight.norm(), before.norm())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("per", ["matrix", "row"])
def test_hyperball_steps_distributed_tensors_like_plain_ones(per):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = make_parameters()[0]
        sharded = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
        optimizers = [Hyperball(torch.optim.AdamW([p], lr=0.1), per=per) for p in (plain, sharded)]
        for step in range(3):
            set_gradients([plain], step)
            sharded.grad = distribute_tensor(plain.grad.clone(), mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(sharded.full_tensor(), plain)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Hyperball(p), "base_optimizer must be an optimiser of torch.optim"),
        (lambda p: Hyperball(torch.optim.LBFGS(p)), "other than LBFGS, not 'LBFGS'"),
        (lambda p: Hyperball(torch.optim.SGD(p), per="column"), "per must be 'matrix', 'row' or None, not 'column'"),
        (lambda p: Hyperball(torch.optim.SGD([{"params": p, "per": 1}])), "per must be .* not 1"),
        (lambda p: Hyperball(torch.optim.SGD(p[:1])).add_param_group({"params": p[1:], "per": 1}), "per must be"),
    ],
)
def test_hyperball_rejects_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_parameters())


def test_hyperball_with_an_invalid_option_leaves_the_optimizer_unchanged():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="per"):
        Hyperball(optimizer, per="bad")
    assert "per" not in optimizer.defaults
    Hyperball(optimizer, per="matrix")
