"""Class weights, smoothing, ignored rows and reductions, against torch's own cross entropy on the logits."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere.heads import PRESETS, AngularHead, Annealing, Ramp

SOFTMAX_KIN = [name for name in PRESETS if name not in ("sphereface2", "sphereface_plus")]


def problem(batch=7, dim=5, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (batch,), generator=generator)


@pytest.mark.parametrize("name", SOFTMAX_KIN)
def test_the_loss_is_cross_entropy_of_the_logits_with_the_same_gradients(name):
    x, y = problem()
    head = PRESETS[name](5, 4).double().eval()
    x.requires_grad_()
    ours = torch.autograd.grad(head(x, y), (x, head.weight))
    theirs = torch.autograd.grad(F.cross_entropy(head.logits(x, y), y), (x, head.weight))
    assert head(x, y).item() == pytest.approx(F.cross_entropy(head.logits(x, y), y).item(), rel=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [False, True])
def test_options_are_torchs(weighted, smoothing, reduction, ignored):
    x, y = problem()
    y = y.index_fill(0, torch.tensor([1, 4]), -100) if ignored else y
    weights = torch.tensor([0.5, 1.0, 2.0, 0.0]) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    for margin, bias in itertools.product([None, "additive_angle"], [False, True]):
        head = AngularHead(5, 4, radius=8.0, margin=margin, bias=bias, class_weights=weights, **options).double()
        if bias:
            torch.nn.init.normal_(head.bias)
        expected = F.cross_entropy(
            head.logits(x, y), y, weight=None if weights is None else weights.double(), **options
        )
        torch.testing.assert_close(head(x, y), expected, atol=1e-12, rtol=1e-10)
        parameters = list(head.parameters())
        for a, b in zip(
            torch.autograd.grad(head(x, y).sum(), parameters),
            torch.autograd.grad(expected.sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_plain_softmax_is_linear_and_cross_entropy():
    x, y = problem()
    head = hs.heads.softmax(5, 4, bias=True).double()
    torch.nn.init.normal_(head.bias)
    torch.testing.assert_close(head(x, y), F.cross_entropy(F.linear(x, head.weight, head.bias), y), rtol=1e-12, atol=0)


def test_rows_that_are_all_ignored_cost_nothing():
    x, y = problem()
    head = hs.heads.arcface(5, 4).double()
    loss = head(x, torch.full_like(y, -100))
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()


def test_ramp_strengthens_the_margin_step_by_step_and_resumes():
    x, y = problem()
    head = AngularHead(5, 4, radius=8.0, margin="additive_cosine", ramp=Ramp(steps=4)).double()
    plain = head.scores(x).gather(1, y[:, None])
    for step in range(6):
        m = 0.35 * min(1, step / 4)
        torch.testing.assert_close(plain - head.logits(x, y).gather(1, y[:, None]), torch.full_like(plain, 8 * m))
        head(x, y)
    again = AngularHead(5, 4, radius=8.0, margin="additive_cosine", ramp=Ramp(steps=4)).double()
    again.load_state_dict(head.state_dict())
    assert again(x, y).item() == head(x, y).item()


def test_logits_leave_the_schedule_to_the_caller():
    x, y = problem()
    head = hs.heads.a_softmax(5, 4, annealing=Annealing()).double()
    head.logits(x, y)
    assert head.steps.item() == 0
    head.advance()
    assert head.steps.item() == 1
    hs.heads.softmax(5, 4).advance()  # nothing to advance


def test_schedules_start_anew_with_the_parameters():
    with torch.device("meta"):
        head = hs.heads.AngularHead(5, 4, margin="norm_adaptive", ramp=Ramp())
    head.to_empty(device="cpu").reset_parameters()
    assert head.steps.item() == 0
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_the_eager_ones_over_several_steps(backend):
    x, y = torch.randn(6, 8), torch.randint(5, (6,))
    steep = Annealing(start=10, gamma=10.0, end=0)
    head = AngularHead(8, 5, margin="multiplicative", annealing=steep, label_smoothing=0.1, bias=True)
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=True, backend=backend)
    for _ in range(3):
        for h in (head, twin):
            h.zero_grad()
        compiled(x, y).backward()
        twin(x, y).backward()
        torch.testing.assert_close(head.weight.grad, twin.weight.grad, atol=1e-5, rtol=1e-4)
    assert head.steps.item() == 3


@pytest.mark.parametrize("name", PRESETS)
def test_scores_export_and_copies_are_independent(name):
    head = PRESETS[name](5, 4).eval()
    x = torch.randn(3, 5)

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, x):
            return self.head.scores(x)

    exported = torch.export.export(Scores(), (x,)).module()
    torch.testing.assert_close(exported(x), head.scores(x))
    twin = copy.deepcopy(head)
    torch.testing.assert_close(twin.scores(x), head.scores(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert head.weight.any()


def test_learned_k_is_a_parameter_of_the_head():
    x, y = problem()
    k = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    head = AngularHead(5, 4, angular=hs.angular.Sigmoid(k)).double()
    assert "angular_k" in dict(head.named_parameters())
    head(x, y).backward()
    slow = F.cross_entropy(head.scores(x), y)
    (expected,) = torch.autograd.grad(slow, k)
    torch.testing.assert_close(k.grad, expected)
    twin = copy.deepcopy(head)
    assert twin.angular.k is twin.angular_k
    assert twin.angular_k is not k


def test_types_come_back():
    y = torch.tensor([0, 1])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 5).to(dtype)
        pure, mixed = hs.heads.arcface(5, 4).to(dtype), hs.heads.arcface(5, 4)
        for head, expected in ((pure, dtype), (mixed, torch.promote_types(dtype, torch.float32))):
            assert head.scores(x).dtype == head.logits(x, y).dtype == head(x, y).dtype == expected


def test_weights_that_are_not_finite_are_named():
    x, y = problem()
    head = hs.heads.arcface(5, 4, s=8.0).double()
    with torch.no_grad():
        head.weight[2, 1] = float("nan")
    with pytest.raises(ValueError, match="weight must be finite, but row 2"):
        head(x, y)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"class_weights": torch.ones(3)}, "class_weights must be 4 finite numbers >= 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be a number in \[0, 1\)"),
        ({"reduction": "max"}, "reduction must be one of 'mean', 'sum', 'none'"),
        ({"energy_weight": -1}, "energy_weight must be a number >= 0"),
        ({"margin": "additive_angle", "annealing": 5}, "annealing must be a schedule or None, not 5"),
        ({"ignore_index": "a"}, "ignore_index must be an integer"),
        ({"energy_weight": 1.0, "reduction": "none"}, "reduction must be 'mean' with an energy or norm weight"),
        ({"radius": True}, "radius must be 'feature' or a positive number"),
        ({"gradient": "normalized"}, "gradient must be 'true' or 'detached' unless"),
    ],
)
def test_bad_arguments_name_themselves(arguments, words):
    with pytest.raises(ValueError, match=words):
        AngularHead(5, 4, **arguments)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "sphereface2"])
def test_every_preset_takes_the_options_of_a_loss(name):
    x, y = problem()
    y = y.index_fill(0, torch.tensor([1]), -1)
    options = {"label_smoothing": 0.1, "ignore_index": -1, "class_weights": torch.tensor([0.5, 1.0, 2.0, 1.0])}
    head = PRESETS[name](5, 4, **options).double().eval()
    expected = F.cross_entropy(
        head.logits(x, y), y, weight=options["class_weights"].double(), label_smoothing=0.1, ignore_index=-1
    )
    loss = head(x, y)
    if head.energy_weight:
        loss = loss - head.energy_weight * hs.energy.data_dependent_energy(head.weight, y[y >= 0])
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


def test_sphereface2_takes_a_ramp_ignored_rows_and_reductions():
    x, y = problem()
    head = hs.heads.sphereface2(5, 4, ramp=Ramp(steps=2), ignore_index=-1, reduction="none").double()
    rows = head(x, y.index_fill(0, torch.tensor([1]), -1))
    assert rows.shape == (7,)
    assert rows[1] == 0
    with pytest.raises(TypeError, match="label_smoothing"):
        hs.heads.sphereface2(5, 4, label_smoothing=0.1)


def test_presets_tell_themselves_apart():
    assert len({repr(make(5, 4)) for make in PRESETS.values()}) == len(PRESETS) - 1  # w_softmax(cosine) is the modified
    assert repr(hs.heads.modified_softmax(5, 4)) == repr(hs.heads.w_softmax(5, 4))
    assert "energy_weight=1.0" in repr(hs.heads.sphereface_plus(5, 4))


@pytest.mark.parametrize("name", PRESETS)
def test_a_refused_batch_changes_nothing_in_any_head(name):
    x, y = problem()
    head = PRESETS[name](5, 4).double()
    before = copy.deepcopy(head.state_dict())
    x[2, 1] = float("nan")
    with pytest.raises(ValueError, match="x must be finite, but row 2"):
        head(x, y)
    assert all(torch.equal(before[key], value) for key, value in head.state_dict().items())


def test_one_row_says_nothing_of_a_deviation():
    x, y = problem()
    head = hs.heads.adaface(5, 4).double()
    head(x, y.index_fill(0, torch.arange(1, 7), -100))
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)


@pytest.mark.parametrize("name", ["adaface", "sphereface_plus", "sphereface_r", "sphereface2", "ga_softmax"])
def test_compiled_losses_with_ignored_rows_are_the_eager_ones(name):
    torch._dynamo.reset()  # other tests may have used up the number of versions of one forward
    x, y = torch.randn(6, 8), torch.tensor([0, -100, 2, 3, -100, 1])
    head = PRESETS[name](8, 5)
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y), twin(x, y))
    for key, value in head.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key])


def test_a_ramp_acts_on_a_margin_of_ones_own():
    x, y = problem()
    head = AngularHead(5, 4, radius=8.0, margin=lambda c: c - 0.4, ramp=Ramp(steps=4)).double()
    gap = lambda: (head.scores(x) - head.logits(x, y)).sum().item() / len(x)  # noqa: E731
    assert gap() == pytest.approx(0)
    head.advance()
    assert gap() == pytest.approx(8 * 0.1)


def test_weights_that_are_not_finite_are_named_by_scores_and_logits_too():
    x, y = problem()
    head = hs.heads.arcface(5, 4).double()
    with torch.no_grad():
        head.weight[3, 0] = float("inf")
    for call in (lambda: head.scores(x), lambda: head.logits(x, y)):
        with pytest.raises(ValueError, match="weight must be finite, but row 3"):
            call()


def test_what_is_no_tensor_is_named():
    x, y = problem()
    head = hs.heads.softmax(5, 4).double()
    with pytest.raises(ValueError, match="x must be a tensor of features, not 'ndarray'"):
        head(x.numpy(), y)
    with pytest.raises(ValueError, match="y must be a tensor of labels, not 'list'"):
        head(x, y.tolist())
