"""OGD and OGDAdam: descent on the orthogonal group."""

import copy

import pytest
import torch
from torch import nn

from hypersphere.optim import OGD, OGDAdam
from hypersphere.rotation import fold_, orthogonality_error, rotate_, rotation_parameters, rotation_states


def rotation(d, seed=0, dtype=torch.float32):
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return (q * torch.linalg.det(q).sign() if d % 2 else q).to(dtype)


def error(u):
    return (u.double().mT @ u.double() - torch.eye(u.shape[-1], dtype=torch.float64)).abs().max().item()


def test_ogd_step_follows_the_cayley_curve_downhill():
    u0, g = rotation(6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    rate = 1e-3
    u = nn.Parameter(u0.clone())
    u.grad = g.clone()
    OGD([u], lr=rate, momentum=0.0, restore_every=None).step()
    m = -g
    w_hat = m @ u0.mT - 0.5 * u0 @ (u0.mT @ m @ u0.mT)
    w = w_hat - w_hat.mT
    eye = torch.eye(6, dtype=torch.float64)
    curve = torch.linalg.solve(eye - rate / 2 * w, (eye + rate / 2 * w) @ u0)
    torch.testing.assert_close(u.detach(), curve, atol=1e-9, rtol=0)
    assert ((u.detach() - u0) * g).sum() < 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda p: OGD(p, lr=0.05), lambda p: OGDAdam(p, lr=0.02)], ids=["OGD", "OGDAdam"])
def test_ogd_converges_and_stays_orthogonal_for_two_thousand_steps(make):
    target = torch.matrix_exp(
        0.4 * (lambda s: s - s.mT)(torch.randn(16, 16, generator=torch.Generator().manual_seed(2)))
    )
    u = nn.Parameter(torch.eye(16))
    optimizer = make([u])
    noise = torch.Generator().manual_seed(0)
    for step in range(2000):
        scale = 1.0 if step < 1500 else 0.0
        u.grad = 2 * (u.detach() - target) + scale * torch.randn(16, 16, generator=noise)
        optimizer.step()
    assert error(u.detach()) <= 1e-4
    assert (u.detach() - target).norm() < 0.05 * target.norm()


def test_ogd_guard_limits_steps_with_and_without_restoring():
    torch.manual_seed(0)
    for every, bound in ((1, 1e-2), (None, 1.0)):
        u = nn.Parameter(torch.eye(8))
        optimizer = OGD([u], lr=10.0, restore_every=every, guard=0.25)
        for _ in range(50):
            u.grad = 1e4 * torch.randn(8, 8)
            optimizer.step()
        assert torch.isfinite(u).all()
        assert error(u.detach()) < bound
    u = nn.Parameter(torch.eye(4))
    u.grad = torch.zeros(4, 4)
    for optimizer in (OGD([u], lr=0.1), OGDAdam([u], lr=0.1)):
        optimizer.step()
        assert torch.equal(u.detach(), torch.eye(4))


@pytest.mark.parametrize("kind", [OGD, OGDAdam])
def test_ogd_stays_orthogonal_after_every_long_step(kind):
    torch.manual_seed(0)
    u = nn.Parameter(torch.eye(12).repeat(3, 1, 1))
    optimizer = kind([u], lr=0.3)
    for scale in (1.0, 0.1, 1e4, 0.02, 3.0) * 3:
        u.grad = scale * torch.randn(3, 12, 12)
        optimizer.step()
        assert error(u.detach()) < 1e-4


def test_ogd_keeps_the_energy_while_the_loss_diverges():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    rotate_(model, "free")
    optimizer, x = OGD(rotation_parameters(model), lr=0.1), torch.randn(64, 16)
    for _ in range(23):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert all(state.energy_drift < 1e-5 for state in rotation_states(model).values())


@pytest.mark.parametrize("adaptive", [False, True])
def test_ogd_moves_each_block_of_a_batch_separately(adaptive):
    make = (lambda p: OGDAdam(p, lr=0.1)) if adaptive else (lambda p: OGD(p, lr=0.1))
    grads = torch.randn(5, 3, 4, 4)
    together, alone = nn.Parameter(torch.eye(4).repeat(3, 1, 1)), nn.Parameter(torch.eye(4))
    both, one = make([together]), make([alone])
    for g in grads:
        together.grad, alone.grad = g.clone(), g[1].clone()
        both.step()
        one.step()
    torch.testing.assert_close(together[1], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2])
def test_ogd_trains_a_model_next_to_another_optimiser(blocks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    rotate_(model, "free", blocks=blocks)
    matrices = rotation_parameters(model)
    on_group = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in on_group]
    optimizers = OGD(matrices, lr=0.05), torch.optim.Adam(rest, lr=1e-2)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    losses = []
    for _ in range(200):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert orthogonality_error(model) <= 1e-4
    out = model(x)
    torch.testing.assert_close(fold_(model)(x), out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [OGD, OGDAdam])
def test_ogd_state_resumes_exactly(kind):
    def run(steps, state=None, start=0):
        u = nn.Parameter(torch.eye(5) if state is None else state[0].clone())
        optimizer = kind([u], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state[1])
        for i in range(start, start + steps):
            u.grad = torch.randn(5, 5, generator=torch.Generator().manual_seed(i))
            optimizer.step()
        return u.detach(), copy.deepcopy(optimizer.state_dict())

    assert torch.equal(run(7, run(5), 5)[0], run(12)[0])


@pytest.mark.parametrize("kind", [OGD, OGDAdam])
@pytest.mark.parametrize("size", [1e-30, 1e18, 1e20, 1e30, 1e37])
def test_ogd_stays_finite_and_moves_for_gradients_of_any_size(kind, size):
    u = nn.Parameter(torch.eye(6))
    optimizer = kind([u], lr=0.1)
    for i in range(4):
        direction = torch.randn(6, 6, generator=torch.Generator().manual_seed(i))
        u.grad = size * (direction / direction.abs().max())
        optimizer.step()
        assert error(u.detach()) < 1e-4
    assert all(torch.isfinite(value).all() for value in optimizer.state[u].values() if isinstance(value, torch.Tensor))
    if size > 1 or kind is OGDAdam:
        assert (u.detach() - torch.eye(6)).abs().max() > 0.05


def test_ogd_adam_does_not_depend_on_the_scale_of_gradients():
    results = []
    for size in (1.0, 2.0**70):
        u = nn.Parameter(torch.eye(6))
        optimizer = OGDAdam([u], lr=0.1)
        for i in range(4):
            u.grad = size * torch.randn(6, 6, generator=torch.Generator().manual_seed(i))
            optimizer.step()
        results.append(u.detach())
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)


def test_ogd_adam_loads_a_state_with_squares():
    u = nn.Parameter(torch.eye(3))
    optimizer = OGDAdam([u], lr=0.1)
    u.grad = torch.ones(3, 3).triu()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["square"] = state["state"][0].pop("rms").square()
    optimizer.load_state_dict(state)
    assert optimizer.state[u]["rms"].item() == pytest.approx((0.01 * 6) ** 0.5)
    assert "square" not in optimizer.state[u]


def test_ogd_calls_closures_and_rejects_invalid_input():
    u = nn.Parameter(torch.eye(3))
    assert OGD([u], lr=0.1).step(lambda: 3.0) == 3.0
    for make, message in (
        (lambda: OGD([nn.Parameter(torch.zeros(3, 4))], lr=0.1), r"params must be square matrices.*not \(3, 4\)"),
        (lambda: OGD([u], lr=0), "lr must be a positive number, not 0"),
        (lambda: OGD([u], lr=0.1, momentum=1), "momentum must be a number in"),
        (lambda: OGD([u], lr=0.1, guard=0), "guard must be"),
        (lambda: OGD([u], lr=0.1, restore_every=0), "restore_every must be"),
        (lambda: OGDAdam([u], lr=0.1, betas=(0.9, 1.0)), "betas must be"),
        (lambda: OGDAdam([u], lr=0.1, betas=0.9), "betas must be two numbers"),
        (lambda: OGDAdam([u], lr=0.1, betas=(0.9, 0.9, 0.9)), "betas must be two numbers"),
        (lambda: OGD([u], lr=None), "lr must be a positive number, not None"),
        (lambda: OGD([u], lr=0.1, restore_every=2.5), "restore_every must be None or an integer >= 1, not 2.5"),
        (lambda: OGD([nn.Parameter(torch.ones(3, 3))], lr=0.1), r"params must be orthogonal matrices, but max .* is 3"),
        (lambda: OGD([u], lr=0.1).add_param_group({"params": nn.Parameter(torch.ones(2, 3))}), "params must be square"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("kind", [OGD, OGDAdam])
def test_ogd_state_resumes_exactly_in_half_precision(kind):
    start = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))[0].bfloat16()
    goal = torch.eye(6).flip(0).bfloat16()

    def go(p, optimizer, steps):
        for _ in range(steps):
            p.grad = p.detach() - goal
            optimizer.step()

    p = torch.nn.Parameter(start.clone())
    optimizer = kind([p], 0.1)
    go(p, optimizer, 5)
    saved = copy.deepcopy((p.detach(), optimizer.state_dict()))
    go(p, optimizer, 5)
    q = torch.nn.Parameter(saved[0])
    resumed = kind([q], 0.1)
    resumed.load_state_dict(saved[1])
    go(q, resumed, 5)
    assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [OGD, OGDAdam])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_ogd_rejects_gradients_that_are_not_finite_before_the_step(kind, value):
    model = rotate_(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)), "free", blocks=2)
    named = [(name, p) for name, p in model.named_parameters() if name.endswith("free.main")]
    (_, first), (_, second) = named
    for params, name in (([first, second], r"params\[1\]"), (named, r"1\.parametrizations\.weight\.0\.free\.main")):
        optimizer = kind(params, lr=0.1)
        for p in (first, second):
            p.grad = torch.randn(2, 3, 3)
        optimizer.step()
        before, state = second.detach().clone(), copy.deepcopy(optimizer.state[second])
        second.grad[1, 2, 0] = value
        with pytest.raises(ValueError, match=rf"^gradients of {name} must be finite, but 1 of 18 entries of their"):
            optimizer.step()
        assert torch.equal(second, before)
        torch.testing.assert_close(optimizer.state[second], state, rtol=0, atol=0)


def test_ogd_reads_no_values_of_the_device_in_a_short_step(monkeypatch):
    reads, convert = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: reads.append(tensor) or convert(tensor))
    for every, count in ((None, 0), (10, 1)):
        u = nn.Parameter(torch.eye(4))
        optimizer = OGD([u], lr=1e-4, restore_every=every)
        u.grad = torch.randn(4, 4)
        reads.clear()
        optimizer.step()
        assert len(reads) == count
