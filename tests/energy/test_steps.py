"""The steps of regularisers: every kind of call, then the situations that lead there; random draws by step."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hypersphere.energy import MHE, SRIP, CoMHE, NeuronRegularizer, StepResult, Warmup
from hypersphere.energy._steps import seeded_generator
from hypersphere.functions.projection import Adversarial, AnglePreserving, Random

from .networks import pyramid


class Learner(NeuronRegularizer):
    """Record the steps of its calls. A learned number grows by 1 per step."""

    def __init__(self, model, **options):
        super().__init__(model, roles=("hidden",), min_length=1, needs_counter=True, **options)
        self.register_buffer("learned", torch.tensor(0.0))
        self.calls = []

    def factor(self, layer):
        return 1.0

    def compute(self, labels, step):
        self.calls.append(step)
        learned = step.buffers["learned"] + (step.kind != "peek")
        return StepResult([learned * self.selection[0].rows().sum()], {"learned": learned})

    @property
    def state(self):
        return int(self.steps), self.learned.item()


def learner_after_two_steps(*, auto_advance, started):
    """Return a learner with steps = 2 and learned = 2. If `started`, its third step has begun: learned = 3."""
    learner = Learner(pyramid(), auto_advance=auto_advance)
    for _ in range(2):
        learner()
        if not auto_advance:
            learner.advance()
    if started:
        learner()
    learner.calls.clear()
    return learner


def call_inside(place, learner, gradients):
    """Call a regulariser in a forward pass, during a backward pass, or inside a transform of torch.func."""

    def call(x):
        with torch.set_grad_enabled(gradients):
            learner()
        return x

    if place == "backward":
        x = torch.ones((), requires_grad=True)
        x.register_hook(call)
        x.backward()
    elif place == "transform":
        torch.func.grad(call)(torch.ones(()))
    else:
        call(None)


# auto_advance, started: the numbers of the current and the next step, `learned` before the current step and now
STATES = {
    (True, False): {"current": 1, "next": 2, "before": 1, "now": 2},
    (False, False): {"current": 2, "next": 2, "before": 2, "now": 2},
    (False, True): {"current": 2, "next": 2, "before": 2, "now": 3},
}


@pytest.mark.parametrize(("auto_advance", "started"), STATES)
@pytest.mark.parametrize("place", ["forward", "backward", "transform"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_step_counter_assigns_a_step_to_every_kind_of_call(training, gradients, place, auto_advance, started):
    state = STATES[auto_advance, started]
    learner = learner_after_two_steps(auto_advance=auto_advance, started=started).train(training)
    assert learner.state == (2, state["now"])

    call_inside(place, learner, gradients)

    if not training or not gradients:
        expected = ("peek", state["current"], state["now"])
    elif place != "forward" or started:
        expected = ("repeat", state["current"], state["before"])
    else:
        expected = ("new", state["next"], state["now"])
    (step,) = learner.calls
    assert (step.kind, step.number, step.buffers["learned"].item()) == expected
    is_new = step.kind == "new"
    assert learner.learned.item() == state["now"] + is_new
    assert int(learner.steps) == 2 + (is_new and auto_advance)
    if not auto_advance:
        learner.advance()
        assert int(learner.steps) == 3


@pytest.mark.parametrize("auto_advance", [True, False])
def test_step_counter_shows_a_peek_the_last_step_that_is_not_skipped(auto_advance):
    learner = Learner(pyramid(), auto_advance=auto_advance, every=3)
    seen = []
    for _ in range(5):
        learner()
        with torch.no_grad():
            learner()
        seen.append(learner.calls[-1].number)
        if not auto_advance:
            learner.advance()
    assert seen == [0, 0, 0, 3, 3]


def test_step_counter_starts_at_zero_for_every_kind_of_call():
    for auto_advance, training, place in itertools.product((True, False), (True, False), ("forward", "transform")):
        learner = Learner(pyramid(), auto_advance=auto_advance).train(training)
        call_inside(place, learner, gradients=True)
        assert learner.calls[0].number == 0
        assert learner.calls[0].buffers["learned"].item() == 0


def test_step_counter_repeats_the_step_that_an_error_interrupted():
    learner = learner_after_two_steps(auto_advance=True, started=False)
    weight = learner.selection[0].tensor
    original = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="weight of 0 must be finite"):
        learner()
    assert learner.state == (2, 2)
    with torch.no_grad():
        weight.copy_(original)
    learner()
    assert [step.number for step in learner.calls] == [2, 2]
    assert learner.state == (3, 3)


def test_step_counter_does_not_store_updates_of_a_skipped_step():
    learner = Learner(pyramid(), every=2)
    for _ in range(4):
        learner()
    assert [step.number for step in learner.calls] == [0, 2]
    assert learner.state == (4, 2)


def test_step_counter_advances_only_without_auto_advance():
    with pytest.raises(ValueError, match=r"advance\(\) needs auto_advance=False"):
        Learner(pyramid()).advance()


@pytest.mark.parametrize("auto_advance", [True, False])
def test_step_counter_starts_a_step_after_loading_a_state_dict(auto_advance):
    source = learner_after_two_steps(auto_advance=auto_advance, started=not auto_advance)
    target = Learner(pyramid(), auto_advance=auto_advance)
    target()
    target.load_state_dict(source.state_dict())
    loaded = target.state
    assert loaded == source.state
    target()
    step = target.calls[-1]
    assert (step.kind, step.number, step.buffers["learned"].item()) == ("new", 2, loaded[1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_step_counter_of_a_copy_continues_independently(duplicate):
    learner = learner_after_two_steps(auto_advance=False, started=True)
    twin = duplicate(learner)
    twin()
    assert (twin.calls[0].kind, twin.calls[0].buffers["learned"].item()) == ("repeat", 2)
    twin.advance()
    twin()
    assert twin.state == (3, 4)
    assert learner.state == (2, 3)


# The regularisers of the library, which all use the counter -----------------------------------------------------------

COUNTING = [
    lambda net, **options: MHE(net, batch=4, **options),
    lambda net, **options: CoMHE(net, projection=Random(dim=4), **options),
    lambda net, **options: CoMHE(net, projection=AnglePreserving(dim=4), **options),
    lambda net, **options: CoMHE(net, projection=Adversarial(dim=4), **options),
    lambda net, **options: CoMHE(net, projection=AnglePreserving(dim=4, form="angle"), distance="angular", **options),
]
LEARNING = [*COUNTING, SRIP]


@pytest.mark.parametrize("make", COUNTING)
def test_regularizers_do_not_count_steps_without_gradients_or_in_eval_mode(make):
    regularizer = make(pyramid())
    regularizer()
    state = {name: value.clone() for name, value in regularizer.state_dict().items()}
    with torch.no_grad():
        first = regularizer().item()
    regularizer.eval()
    assert regularizer().item() == first
    assert all(torch.equal(value, state[name]) for name, value in regularizer.state_dict().items())
    assert int(regularizer.steps) == 1


@pytest.mark.parametrize("make", LEARNING)
def test_regularizers_repeat_a_step_in_activation_checkpointing(make):
    plain_net, net = pyramid(), pyramid()
    plain, checkpointed = make(plain_net), make(net)
    for _ in range(3):
        for model in (plain_net, net):
            model.zero_grad()
        value = plain()
        value.backward()
        repeated = checkpoint(checkpointed, use_reentrant=False)
        repeated.backward()
        assert repeated.item() == value.item()
        torch.testing.assert_close(net[0].weight.grad, plain_net[0].weight.grad, rtol=1e-6, atol=0)
    for name, state in plain.state_dict().items():
        assert torch.equal(checkpointed.state_dict()[name], state)


@pytest.mark.parametrize("make", LEARNING)
def test_regularizers_repeat_a_step_until_it_is_advanced(make):
    automatic, manual = make(pyramid()), make(pyramid(), auto_advance=False)
    for _ in range(3):
        expected = automatic().item()
        assert [manual().item() for _ in range(2)] == [expected] * 2
        manual.advance()


@pytest.mark.slow
def test_comhe_compiled_draws_the_same_projections():
    net = pyramid()
    projected = CoMHE(net, projection=Random(dim=4))
    expected = [projected().item() for _ in range(3)]
    compiled = torch.compile(CoMHE(net, projection=Random(dim=4)), backend="aot_eager")
    assert [compiled().item() for _ in range(3)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_comhe_compiled_repeats_the_step_of_activation_checkpointing():
    regularizer = CoMHE(pyramid(), projection=Random(dim=4))
    compiled = torch.compile(regularizer, backend="aot_eager")
    for _ in range(2):
        checkpoint(compiled, use_reentrant=False).backward()
    assert int(regularizer.steps) == 2


def test_mhe_schedule_scales_the_value_and_resumes():
    net = pyramid()
    constant = MHE(net)().item()
    scheduled = MHE(net, schedule=Warmup(steps=2))
    assert [scheduled().item() for _ in range(4)] == pytest.approx([0, constant / 2, constant, constant])
    resumed = MHE(net, schedule=lambda step: 10.0 * step)
    resumed.load_state_dict(scheduled.state_dict())
    assert resumed().item() == pytest.approx(40 * constant)
    for value in (-1, float("nan"), float("inf")):
        words = f"schedule must be a callable that returns finite numbers >= 0, not {value}"
        with pytest.raises(ValueError, match=words):
            MHE(net, schedule=lambda step, value=value: value)()
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        Warmup(steps=0)


def test_seeded_generator_differs_from_the_stream_of_manual_seed():
    first = torch.randn(4, generator=seeded_generator(0, 0))
    assert not torch.equal(first, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    firsts = {tuple(torch.rand(2, generator=seeded_generator(a, b)).tolist()) for a in range(-9, 9) for b in range(20)}
    assert len(firsts) == 360
