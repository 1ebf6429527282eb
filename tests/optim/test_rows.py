"""RowSGD and RowAdamW against the optimisers of torch and against NumPy, one row at a time."""

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hypersphere.heads import ShardedHead, arcface
from hypersphere.optim import Hyperball, RowAdamW, RowSGD
from hypersphere.optim import rows as rows_module

SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]
ADAM_OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.2},
    {"betas": (0.0, 0.0)},
]
PAIRS = [
    *[(partial(RowSGD, lr=0.1, **options), partial(torch.optim.SGD, lr=0.1, **options)) for options in SGD_OPTIONS],
    *[
        (partial(RowAdamW, lr=0.01, **options), partial(torch.optim.AdamW, lr=0.01, **options))
        for options in ADAM_OPTIONS
    ],
]
OPTIMIZERS = [partial(RowSGD, lr=0.1, momentum=0.9, weight_decay=0.1), partial(RowAdamW, lr=0.05, weight_decay=0.1)]
NAMES = ["RowSGD", "RowAdamW"]


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(torch.as_tensor(rows)[None], values, shape, check_invariants=False)


def draw(generator, count, rate):
    """Return the rows of a step: each with the given probability, and at least one."""
    drawn = (torch.rand(count, generator=generator) < rate).nonzero().flatten()
    return drawn if len(drawn) else torch.tensor([0])


@pytest.mark.parametrize(("make", "make_dense"), PAIRS)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_row_optimizers_equal_dense_ones_if_all_rows_are_drawn(make, make_dense, layout):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(12, 5, generator=generator), torch.randn(12, generator=generator)
    parameters, references = ([nn.Parameter(t.clone()) for t in (weight, bias)] for _ in range(2))
    optimizer, dense = make(parameters), make_dense(references)
    for _ in range(80):
        for p, q in zip(parameters, references, strict=True):
            q.grad = torch.randn(q.shape, generator=generator)
            q.grad[3] = 0.0
            # All rows in another order.
            order = torch.randperm(12, generator=generator)
            p.grad = q.grad.clone() if layout == "dense" else sparse(order, q.grad[order], q.shape)
        optimizer.step()
        dense.step()
    for p, q in zip(parameters, references, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("make", "make_dense"), PAIRS)
def test_row_optimizers_move_each_row_like_a_dense_optimizer_of_its_steps(make, make_dense):
    """Every row is the parameter of a dense optimiser that sees only the steps in which the row is drawn."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    p, singles = nn.Parameter(weight.clone()), [nn.Parameter(row.clone()) for row in weight]
    optimizer, alone = make([p]), [make_dense([single]) for single in singles]
    for step in range(60):
        for group in [optimizer.param_groups[0], *(one.param_groups[0] for one in alone)]:
            group["lr"] = 0.1 / (1 + step)
        rows = draw(generator, 10, 0.3)
        grad = torch.randn(len(rows), 4, generator=generator, dtype=torch.float64)
        p.grad = sparse(rows, grad, p.shape)
        before = p.detach().clone()
        optimizer.step()
        others = torch.ones(10, dtype=torch.bool).index_fill(0, rows, False)
        assert torch.equal(p[others], before[others])
        for row, g in zip(rows.tolist(), grad, strict=True):
            singles[row].grad = g
            alone[row].step()
    torch.testing.assert_close(p.detach(), torch.stack([single.detach() for single in singles]), rtol=0, atol=1e-12)


def test_row_sgd_equals_its_formula():
    rate, mu, decay = 0.1, 0.9, 0.05
    generator = np.random.default_rng(0)
    w, b = generator.normal(size=(6, 3)), np.zeros((6, 3))
    p = nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = RowSGD([p], lr=rate, momentum=mu, weight_decay=decay)
    for _ in range(50):
        rows = np.flatnonzero(generator.random(6) < 0.4)
        grad = generator.normal(size=(len(rows), 3))
        p.grad = sparse(rows, torch.from_numpy(grad), p.shape)
        optimizer.step()
        for row, g in zip(rows, grad, strict=True):
            b[row] = mu * b[row] + g + decay * w[row]
            w[row] = w[row] - rate * b[row]
    np.testing.assert_allclose(p.detach().numpy(), w, rtol=0, atol=1e-13)


def test_row_adamw_equals_its_formula():
    rate, (first, second), eps, decay = 0.05, (0.9, 0.999), 1e-8, 0.1
    generator = np.random.default_rng(0)
    w = generator.normal(size=(6, 3))
    m, v, t = np.zeros((6, 3)), np.zeros((6, 3)), np.zeros(6)
    p = nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = RowAdamW([p], lr=rate, betas=(first, second), eps=eps, weight_decay=decay)
    for _ in range(50):
        rows = np.flatnonzero(generator.random(6) < 0.4)
        grad = generator.normal(size=(len(rows), 3))
        p.grad = sparse(rows, torch.from_numpy(grad), p.shape)
        optimizer.step()
        for row, g in zip(rows, grad, strict=True):
            t[row] += 1
            m[row] = first * m[row] + (1 - first) * g
            v[row] = second * v[row] + (1 - second) * g**2
            u = m[row] / (1 - first ** t[row]) / (np.sqrt(v[row] / (1 - second ** t[row])) + eps)
            w[row] = (1 - rate * decay) * w[row] - rate * u
    np.testing.assert_allclose(p.detach().numpy(), w, rtol=0, atol=1e-13)
    assert optimizer.state[p]["steps"].tolist() == t.tolist()


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_add_the_gradients_of_repeated_rows(make):
    repeated, single = (nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    repeated.grad = sparse([2, 0, 2], torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]]), (4, 2))
    single.grad = sparse([0, 2], torch.tensor([[5.0, 6.0], [4.0, 6.0]]), (4, 2))
    for p in (repeated, single):
        make([p]).step()
    assert torch.equal(repeated, single)
    assert torch.equal(repeated[[1, 3]], torch.ones(2, 2))


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_count_rows_with_zero_gradient_as_drawn(make):
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = make([p])
    p.grad = sparse([1], torch.ones(1, 2), (3, 2))
    optimizer.step()
    before = p.detach().clone()
    p.grad = sparse([1, 2], torch.zeros(2, 2), (3, 2))
    optimizer.step()
    assert torch.equal(p[0], torch.ones(2))
    assert (p[1] < before[1]).all()  # momentum and decay
    assert (p[2] < 1).all()  # decay
    assert torch.isfinite(p).all()
    p.grad = sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2), (3, 2))
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_optimizers_resume_bit_for_bit(make, dtype):
    """There are more steps than bfloat16 can count, to which torch would convert the counts."""

    def start():
        p = nn.Parameter(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).to(dtype))
        return p, make([p])

    def run(p, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            rows = draw(generator, 40, 0.9)
            p.grad = sparse(rows, torch.randn(len(rows), 4, generator=generator).to(dtype), p.shape)
            optimizer.step()

    expected, optimizer = start()
    run(expected, optimizer, range(380))
    interrupted, other = start()
    run(interrupted, other, range(340))
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    resumed, optimizer = start()
    with torch.no_grad():
        resumed.copy_(interrupted)
    optimizer.load_state_dict(torch.load(file))
    run(resumed, optimizer, range(340, 380))
    assert torch.equal(resumed, expected)
    state = optimizer.state[resumed]
    assert all(len(value) == 40 for value in state.values())
    assert {value.dtype for value in state.values()} <= {torch.float32, torch.int32}


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_row_optimizers_compute_in_float32(make, dtype):
    """One step of a half-precision parameter is the rounded step of the same parameter in float32."""
    weight = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    grad = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    half, wide = nn.Parameter(weight.clone()), nn.Parameter(weight.float())
    half.grad, wide.grad = grad, grad.float()
    for p in (half, wide):
        make([p]).step()
    assert torch.equal(half, wide.to(dtype))


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        storages = {address(t) for t in inputs}
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor) and address(t) not in storages:
                self.largest = max(self.largest, (t._values() if t.is_sparse else t).numel())
        return result


def address(t):
    return t._values().untyped_storage().data_ptr() if t.is_sparse else t.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_allocate_memory_for_drawn_rows_only(make, monkeypatch):
    p = nn.Parameter(torch.zeros(2_000, 16))
    rows = torch.arange(0, 2_000, 50)
    optimizer = make([p])
    for blocks in (False, True):
        if blocks:
            monkeypatch.setattr(rows_module, "_BLOCK", 16 * 10)
        p.grad = sparse(rows, torch.ones(len(rows), 16), p.shape).coalesce()
        optimizer.step()  # allocates the state the first time
        with LargestTensor() as seen:
            optimizer.step()
        assert seen.largest == (10 if blocks else len(rows)) * 16
    # Large gradients are processed in blocks, too.
    p.grad = torch.ones_like(p)
    with LargestTensor() as seen:
        optimizer.step()
    assert seen.largest == 16 * 10


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_do_not_depend_on_the_size_of_blocks(make, monkeypatch):
    results = []
    for block in (2**20, 12, 1):
        monkeypatch.setattr(rows_module, "_BLOCK", block)
        p = nn.Parameter(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)))
        optimizer, generator = make([p]), torch.Generator().manual_seed(1)
        for _ in range(5):
            rows = draw(generator, 30, 0.5)
            p.grad = sparse(rows, torch.randn(len(rows), 4, generator=generator), p.shape)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_train_a_head_with_sampled_classes(make):
    torch.manual_seed(0)
    head = ShardedHead(arcface(4, 60, s=4.0), sample=0.2)
    optimizer = make(head.parameters())
    x, y = torch.randn(5, 4), torch.arange(5)
    first = head.eval()(x, y).item()
    head.train()
    for _ in range(30):
        before = head.weight.detach().clone()
        optimizer.zero_grad()
        head(x, y).backward()
        drawn = set(head.weight.grad.coalesce().indices()[0].tolist())
        optimizer.step()
        assert set((head.weight != before).any(1).nonzero().flatten().tolist()) == drawn
    assert len(drawn) < 60
    assert head.eval()(x, y).item() < first


@pytest.mark.parametrize(("make", "make_dense"), [PAIRS[3], PAIRS[5]], ids=NAMES)
def test_row_optimizers_with_all_classes_sampled_equal_dense_training(make, make_dense):
    torch.manual_seed(0)
    plain = arcface(4, 20, s=4.0).double()
    sampled, full = ShardedHead(plain, sample=1.0), copy.deepcopy(plain)
    optimizer, dense = make(sampled.parameters()), make_dense(full.parameters())
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8)
    for _ in range(50):
        for head, one in ((sampled, optimizer), (full, dense)):
            one.zero_grad()
            head(x, y).backward()
            one.step()
    torch.testing.assert_close(sampled.weight, full.weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_accept_scalars_closures_and_schedulers(make):
    scale, frozen = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2))
    optimizer = make([scale, frozen])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = scale.square()
        loss.backward()
        return loss

    losses = []
    for _ in range(5):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[0] == 4.0
    assert losses[-1] < losses[0]
    assert scale.shape == ()
    assert torch.equal(frozen, torch.ones(2))


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_row_optimizers_step_on_spheres(make):
    """Hyperball stores its radii in the state of the row optimiser."""
    p = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    start, before, state = p.detach().norm(dim=1), p.detach().clone(), None
    for step in range(4):
        optimizer = Hyperball(make([p]), per="row")
        if state is not None:
            optimizer.load_state_dict(state)
        p.grad = sparse([1, 4], torch.randn(2, 4, generator=torch.Generator().manual_seed(step)), p.shape)
        optimizer.step()
        state = optimizer.state_dict()
    assert (p != before).any(1).nonzero().flatten().tolist() == [1, 4]
    torch.testing.assert_close(p.detach().norm(dim=1), start)


def test_row_optimizers_work_with_a_gradient_scaler():
    embedding = nn.Embedding(6, 4, sparse=True)
    twin = copy.deepcopy(embedding)
    optimizer, other = (RowSGD(one.parameters(), lr=0.1, momentum=0.9) for one in (embedding, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for rows in (torch.tensor([1, 2, 2]), torch.tensor([2, 5])):
        optimizer.zero_grad()
        other.zero_grad()
        scaler.scale(embedding(rows).square().sum()).backward()
        twin(rows).square().sum().backward()
        scaler.step(optimizer)
        scaler.update()
        other.step()
    torch.testing.assert_close(embedding.weight, twin.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: RowSGD(p, lr=-1.0), "lr must be a number >= 0, not -1.0"),
        (lambda p: RowSGD(p, lr=0.1, momentum=1.0), r"momentum must be a number in \[0, 1\), not 1.0"),
        (lambda p: RowSGD(p, lr=0.1, nesterov=True), "momentum must be a positive number with nesterov, not 0.0"),
        (lambda p: RowAdamW(p, weight_decay=-0.1), "weight_decay must be a number >= 0, not -0.1"),
        (lambda p: RowAdamW(p, betas=(0.9, 1.0)), r"betas must be two numbers in \[0, 1\), not \(0.9, 1.0\)"),
        (lambda p: RowAdamW(p, eps=0.0), "eps must be a positive number, not 0.0"),
    ],
)
def test_row_optimizers_reject_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(2, 2))])


def test_row_optimizers_reject_gradients_that_are_sparse_in_columns():
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="sparse in rows"):
        RowSGD([p], lr=0.1).step()
