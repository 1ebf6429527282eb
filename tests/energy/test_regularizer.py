"""What all regularisers of neurons share: layers, steps, schedules, state."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from hypersphere import rotation
from hypersphere.energy import (
    MHE,
    SRIP,
    CoMHE,
    NeuronRegularizer,
    Orthogonal,
    Orthonormal,
    StepResult,
    Warmup,
    data_dependent_energy,
    hyperspherical_energy,
    minimize,
    random_energy,
)
from hypersphere.energy._regularizer import seeded_generator
from hypersphere.functions.projection import Adversarial, AnglePreserving, Random

from .networks import network, pyramid


def test_mhe_works_compiled():
    net = network()
    compiled = torch.compile(MHE(net), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), MHE(net)())


def test_comhe_draws_the_same_projections_compiled():
    net = network()
    projected = CoMHE(net, projection=Random(dim=4))
    expected = [projected().item() for _ in range(2)]
    compiled = torch.compile(CoMHE(net, projection=Random(dim=4)), backend="aot_eager")
    assert [compiled().item() for _ in range(2)] == pytest.approx(expected, rel=1e-4)


def test_comhe_regularizes_a_data_parallel_model():
    net = network()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        regulariser = CoMHE(parallel, projection=AnglePreserving(dim=4))
        (parallel(torch.randn(2, 4, 4, 4)).square().mean() + regulariser()).backward()
        assert net[0].weight.grad.abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", [MHE, Orthonormal, SRIP, lambda net: CoMHE(net, projection=Random(dim=4))])
def test_regularizers_name_weights_that_are_not_finite(make):
    net = network()
    regulariser = make(net)
    with torch.no_grad():
        net[3].weight[2, 1] = float("nan")
    with pytest.raises(ValueError, match="weight of 3 must be finite, but row 2 is not"):
        regulariser()


@pytest.mark.parametrize(
    "make",
    [
        SRIP,
        lambda net: CoMHE(net, projection=AnglePreserving(dim=4)),
        lambda net: CoMHE(net, projection=Adversarial(dim=4)),
        lambda net: MHE(net, batch=4),
    ],
)
def test_regularizers_keep_their_state_if_a_step_fails(make):
    net = pyramid()
    regulariser = make(net)
    regulariser()
    before = {name: value.clone() for name, value in regulariser.state_dict().items()}
    weight = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weight of 0 must be finite"):
        regulariser()
    for name, value in regulariser.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.no_grad():
        net[0].weight.copy_(weight)
    assert torch.isfinite(regulariser())


class Adapted(nn.Module):
    """A layer with an adapter, built as such libraries do."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.in_features = base, base.in_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    @property
    def weight(self):
        return self.base_layer.weight


def test_an_adapted_layer_counts_once_without_its_adapter():
    selection = MHE(nn.Sequential(Adapted(nn.Linear(8, 6)), nn.Linear(6, 4))).selection
    assert [layer.name for layer in selection] == ["0.base_layer", "1"]


def test_seeded_generator_differs_from_the_stream_of_manual_seed():
    first = torch.randn(4, generator=seeded_generator(0, 0))
    assert not torch.equal(first, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    firsts = {tuple(torch.rand(2, generator=seeded_generator(a, b)).tolist()) for a in range(-9, 9) for b in range(20)}
    assert len(firsts) == 360


@pytest.mark.parametrize("make", [SRIP, lambda net: CoMHE(net, projection=AnglePreserving(dim=4))])
def test_regularizers_resume_float64_state_exactly(make):
    net = pyramid(torch.float64)
    regulariser, resumed = make(net), make(net)
    regulariser()
    resumed.load_state_dict(regulariser.state_dict())
    assert resumed().item() == regulariser().item()


class Counted(nn.Module):
    """Counts how often it is evaluated."""

    calls = 0

    def forward(self, w):
        Counted.calls += 1
        return 2 * w


def test_regularizers_evaluate_parametrisations_once():
    net = pyramid()
    for layer in net:
        parametrize.register_parametrization(layer, "weight", Counted())
    regularizers = (
        MHE,
        lambda net: Orthonormal(net, output=True),
        lambda net: SRIP(net, output=True),
        lambda net: CoMHE(net, projection=Random(dim=4)),
    )
    for make in regularizers:
        Counted.calls = 0
        regulariser = make(net)
        assert Counted.calls == 3
        regulariser()
        assert Counted.calls == 6
    layer = parametrizations.spectral_norm(nn.Linear(6, 5))
    before = layer.parametrizations.weight[0]._u.clone()
    MHE(layer)
    assert torch.equal(before, layer.parametrizations.weight[0]._u)
    assert layer.parametrizations.weight[0].training


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MHE(nn.ReLU()), "model must have a layer of two or more neurons, but it has no layers"),
        (lambda: MHE({}), "model must have a layer of two or more neurons, but it has no layers"),
        (
            lambda: MHE(nn.Linear(3, 4), half_space=True, output_layer="weight"),
            "half_space must be False if the only layer",
        ),
        (lambda: MHE(network(), half_space=["5"]), "half_space must not name the output layer '5'"),
        (
            lambda: MHE(network(), half_space=["conv"]),
            "half_space must be None, a bool or a list of some",
        ),
        (lambda: MHE(network(), output_layer="conv"), "output_layer must be 'auto', None or one of '0'"),
        (lambda: MHE(network(), output_layer=3), "output_layer must be 'auto', None, a name or several names, not 3"),
        (lambda: MHE(network(), embedding=3), "embedding must be 0 for a model without embeddings, not 3"),
        (lambda: CoMHE(network(), embedding=0.5), "embedding must be 0 for a model without embeddings, not 0.5"),
        (lambda: Orthonormal(network(), report=3), "report must be a bool, not 3"),
        (
            lambda: Orthonormal(nn.Linear(3, 4), output_layer="weight"),
            "every layer is skipped .*the output layer, which is left out by default",
        ),
        (lambda: MHE(network(), hidden=-1), "hidden must be None or a number >= 0"),
        (lambda: MHE({"w": torch.ones(3)}), "w must be a floating-point tensor"),
        (lambda: MHE(nn.Sequential(nn.LazyLinear(3))), "0: its weight is not initialised: run a batch"),
        (lambda: CoMHE(network(), projection="fourier"), "projection must be one of 'random'"),
        (lambda: CoMHE(nn.Linear(40, 4), output_layer="weight"), "model must be one with a hidden layer"),
        (lambda: Orthonormal(network(), -1), "weight must be a number >= 0"),
    ],
)
def test_regularizers_reject_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: MHE(None),
            r"model must be a module, a mapping from names to tensors, or \(name, tensor\) pairs, not 'None",
        ),
        (lambda: MHE(torch.ones(3, 3)), "model must be a module, a mapping"),
        (lambda: MHE([torch.ones(3, 3)]), "model must be a module, a mapping"),
        (lambda: MHE("foo"), "model must be a module, .* not 'foo'"),
        (lambda: MHE(pyramid(), half_space="0"), "half_space must be None, a bool or a list"),
        (lambda: MHE(pyramid(), hidden="1"), "hidden must be None or a number >= 0, not '1'"),
        (lambda: MHE(pyramid(), batch=2.5), "batch must be None or an integer >= 2, not 2.5"),
        (lambda: MHE(pyramid(), seed=1.5), "seed must be an integer of 64 bits, not 1.5"),
        (lambda: CoMHE(pyramid(), half_space=["0"]), "half_space must be a bool"),
        (lambda: Random(4.0), "dim must be an integer >= 2, not 4.0"),
        (lambda: minimize(7.0, 3), "n must be an integer, not 7.0"),
        (lambda: minimize(2, 1, half_space=True), "d must be at least 2"),
        (lambda: hyperspherical_energy(np.ones((3, 3))), "w must be a floating-point matrix"),
        (lambda: random_energy(1, 5), "n must be at least 2"),
        (lambda: random_energy(5, 5, 2, "chord"), "distance must be 'euclidean' or 'angular'"),
        (lambda: random_energy(5, 5, torch.exp), "power must be a number >= 0 or a kernel"),
        (
            lambda: data_dependent_energy(torch.tensor([[1.0, 0], [math.nan, 1]]), torch.tensor([0])),
            "w must be finite, but row 1 is not",
        ),
    ],
)
def test_arguments_are_named_in_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()


REGULARIZERS = [
    MHE,
    lambda model: MHE(model, distance="angular", half_space=False, power=1),
    lambda model: CoMHE(model, projection=Random(dim=3, views=2)),
    lambda model: CoMHE(model, projection=AnglePreserving(dim=3, rate=1.0)),
    lambda model: Orthonormal(model, 1.0),
    lambda model: Orthogonal(model, 1.0),
    lambda model: SRIP(model, 1.0),
]


@pytest.mark.parametrize("make", REGULARIZERS)
def test_regularizers_are_twice_differentiable(make):
    w = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda w: make({"w": w})(), (w,))
    assert gradgradcheck(lambda w: make({"w": w})(), (w,))


class WithRegularizer(nn.Module):
    def __init__(self, net, regularizer):
        super().__init__()
        self.net, self.regularizer = net, regularizer

    def forward(self):
        return self.regularizer()


@pytest.mark.parametrize("make", REGULARIZERS)
def test_regularizers_work_under_torch_func(make):
    net = pyramid()
    regularizer = make(net)
    before = {name: value.clone() for name, value in regularizer.state_dict().items()}
    parameters = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    model = WithRegularizer(net, regularizer)
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, ()))(parameters)
    for name, value in regularizer.state_dict().items():
        assert torch.equal(value, before[name])
    regularizer().backward()
    torch.testing.assert_close(gradients["net.0.weight"], net[0].weight.grad, rtol=1e-4, atol=1e-6)


COUNTING = [
    lambda net, **options: MHE(net, batch=4, **options),
    lambda net, **options: CoMHE(net, projection=Random(dim=4), **options),
    lambda net, **options: CoMHE(net, projection=AnglePreserving(dim=4), **options),
    lambda net, **options: CoMHE(net, projection=Adversarial(dim=4), **options),
    lambda net, **options: CoMHE(net, projection=AnglePreserving(dim=4, form="angle"), distance="angular", **options),
]


@pytest.mark.parametrize("make", COUNTING)
def test_steps_are_not_counted_without_gradients_or_in_eval_mode(make):
    regularizer = make(pyramid())
    regularizer()
    state = {name: value.clone() for name, value in regularizer.state_dict().items()}
    with torch.no_grad():
        first = regularizer().item()
    regularizer.eval()
    assert regularizer().item() == first
    assert all(torch.equal(value, state[name]) for name, value in regularizer.state_dict().items())
    assert int(regularizer.steps) == 1


@pytest.mark.parametrize("make", COUNTING)
def test_activation_checkpointing_repeats_the_same_step(make):
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
    assert int(checkpointed.steps) == 3


@pytest.mark.parametrize("make", COUNTING)
def test_accumulation_repeats_a_step_until_it_is_advanced(make):
    automatic, manual = make(pyramid()), make(pyramid(), auto_advance=False)
    for _ in range(3):
        expected = automatic().item()
        assert [manual().item() for _ in range(2)] == [expected] * 2
        manual.advance()
    with pytest.raises(ValueError, match="auto_advance must be False if steps are counted by calling advance"):
        automatic.advance()


def test_schedule_scales_the_regularizer_and_resumes():
    net = pyramid()
    constant = MHE(net)().item()
    scheduled = MHE(net, schedule=Warmup(steps=2))
    assert [scheduled().item() for _ in range(4)] == pytest.approx([0, constant / 2, constant, constant])
    resumed = MHE(net, schedule=lambda step: 10.0 * step)
    resumed.load_state_dict(scheduled.state_dict())
    assert resumed().item() == pytest.approx(40 * constant)
    with pytest.raises(ValueError, match="schedule must be a callable that returns numbers >= 0, not -1"):
        MHE(net, schedule=lambda step: -1)()
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        Warmup(steps=0)


@pytest.mark.parametrize("make", [MHE, Orthonormal, lambda net, **o: CoMHE(net, projection=Random(dim=4), **o)])
def test_every_computes_the_regularizer_only_at_every_kth_step(make):
    regularizer = make(pyramid(), every=3)
    assert [regularizer().item() > 0 for _ in range(7)] == [True, False, False, True, False, False, True]


def test_rotated_layers_give_a_warning_because_their_energy_is_constant():
    net = rotation.rotate_(pyramid())
    with pytest.warns(UserWarning, match="the regulariser is constant in 0, 1"):
        regularizer = MHE(net, output=0)
    before = regularizer()
    before.backward()
    assert max(p.grad.abs().max().item() for p in net.parameters() if p.grad is not None) < 1e-5


def test_skipped_layers_have_a_reason():
    net = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 6), nn.Linear(6, 4))
    reasons = [(skip.name, skip.reason) for skip in MHE(net).skipped]
    assert reasons == [("0", "one neuron per set"), ("1", "neurons of 1 number")]


def test_population_is_a_deprecated_name_of_selection():
    regularizer = MHE(network())
    with pytest.warns(DeprecationWarning, match="MHE.population is deprecated, use MHE.selection instead"):
        assert regularizer.population is regularizer.selection


def test_output_layer_last_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use 'auto' instead"):
        MHE(pyramid(), output_layer="last")


def test_loading_a_state_dict_starts_a_new_step():
    first, second = (CoMHE(pyramid(), projection=AnglePreserving(dim=4), auto_advance=False) for _ in range(2))
    first()
    state = {name: value.clone() for name, value in first.state_dict().items()}
    expected = first()  # repeats the step from its start
    second()
    second.load_state_dict(state)
    assert second().item() != expected.item()  # a step from the loaded basis
    torch.testing.assert_close(second.initial_value("basis_8", "repeat"), state["basis_8"])


def test_comhe_labels_select_the_data_dependent_energy_of_the_output():
    net, labels = pyramid(), torch.tensor([[0, 3], [-100, 1]])
    regularizer = CoMHE(net, hidden=0, projection=Random(dim=4))
    torch.testing.assert_close(regularizer(labels=labels), data_dependent_energy(net[2].weight, labels))


def test_positional_labels_are_deprecated():
    net, token_ids = pyramid(), torch.tensor([0, 1])
    regularizer = MHE(net)
    with pytest.warns(DeprecationWarning, match="MHE takes no inputs of the model, only labels") as caught:
        value = regularizer(token_ids)
    assert caught[0].filename == __file__
    torch.testing.assert_close(value, regularizer(labels=token_ids))
    with pytest.raises(ValueError, match="labels must be the only argument"):
        regularizer(token_ids, labels=token_ids)


@pytest.mark.parametrize("kind", [MHE, CoMHE, Orthonormal, Orthogonal, SRIP])
def test_signature_lists_the_shared_options(kind):
    parameters = inspect.signature(kind).parameters
    shared = {"layer_weights", "schedule", "every", "output_layer", "where", "auto_advance", "report", "output"}
    assert shared < set(parameters)
    assert not {"options", "roles", "shortest", "needs_counter", "draws"} & set(parameters)


@pytest.mark.parametrize("kind", [MHE, CoMHE, Orthonormal, Orthogonal, SRIP])
def test_regularizers_name_themselves_and_the_nearest_argument_for_an_unknown_one(kind):
    message = f"^{kind.__name__} got an unexpected keyword argument 'shcedule'; did you mean 'schedule'\\?$"
    with pytest.raises(TypeError, match=message):
        kind(pyramid(), shcedule=None)
    with pytest.raises(TypeError, match=f"^{kind.__name__} got an unexpected keyword argument 'qqq'$"):
        kind(pyramid(), qqq=1.0)


def test_a_new_regularizer_needs_a_factor_and_a_sum():
    class NormPenalty(NeuronRegularizer):
        def __init__(self, model, **options):
            super().__init__(model, roles=("hidden",), shortest=1, needs_counter=False, **options)

        def factor(self, layer):
            return self.layer_weights.get(layer.name, 1.0)

        def compute(self, labels, step, call):
            return StepResult(sum(self.factor(layer) * layer.rows().square().sum() for layer in self.selection))

    net = pyramid()
    first, second = (net[k].weight.square().sum() for k in (0, 1))
    torch.testing.assert_close(NormPenalty(net, layer_weights={"1": 0.5})(), first + second / 2)
    assert "every" in inspect.signature(NormPenalty).parameters
