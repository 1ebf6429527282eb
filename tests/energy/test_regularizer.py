"""What all regularisers of neurons share: arguments, gradients, state, and what a new one needs."""

import inspect
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations, parametrize

from hypersphere import rotation
from hypersphere.energy import (
    MHE,
    SRIP,
    CoMHE,
    LayerPenalty,
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
from hypersphere.energy._regularizer import RegularizerOptions
from hypersphere.functions.projection import Adversarial, AnglePreserving, Random

from .networks import network, pyramid


def test_mhe_works_compiled():
    net = network()
    compiled = torch.compile(MHE(net), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), MHE(net)())


def test_comhe_regularizes_a_data_parallel_model():
    net = network()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        regularizer = CoMHE(parallel, projection=AnglePreserving(dim=4))
        (parallel(torch.randn(2, 4, 4, 4)).square().mean() + regularizer()).backward()
        assert net[0].weight.grad.abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", [MHE, Orthonormal, SRIP, lambda net: CoMHE(net, projection=Random(dim=4))])
def test_regularizers_name_weights_that_are_not_finite(make):
    net = network()
    regularizer = make(net)
    with torch.no_grad():
        net[3].weight[2, 1] = float("nan")
    with pytest.raises(ValueError, match="weight of 3 must be finite, but row 2 is not"):
        regularizer()


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
    regularizer = make(net)
    regularizer()
    before = {name: value.clone() for name, value in regularizer.state_dict().items()}
    weight = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weight of 0 must be finite"):
        regularizer()
    for name, value in regularizer.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.no_grad():
        net[0].weight.copy_(weight)
    assert torch.isfinite(regularizer())


@pytest.mark.parametrize("make", [SRIP, lambda net: CoMHE(net, projection=AnglePreserving(dim=4))])
def test_regularizers_resume_float64_state_exactly(make):
    net = pyramid(torch.float64)
    regularizer, resumed = make(net), make(net)
    regularizer()
    resumed.load_state_dict(regularizer.state_dict())
    assert resumed().item() == regularizer().item()


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
        regularizer = make(net)
        assert Counted.calls == 3
        regularizer()
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
        (lambda: MHE(network(), hidden=-1), "hidden must be None or a finite number >= 0"),
        (lambda: MHE(network(), hidden=math.inf), "hidden must be None or a finite number >= 0, not inf"),
        (lambda: MHE(network(), output=math.nan), "output must be a finite number >= 0, not nan"),
        (lambda: MHE(network(), layer_weights={"0": math.inf}), "layer_weights must be finite numbers >= 0, not inf"),
        (lambda: MHE(network(), hidden=10**400), "hidden must be None or a finite number >= 0, not 10000"),
        (lambda: MHE(network(), neuron_weights={"0": "a"}), "neuron_weights must be 6 numbers for 0, not 'a'"),
        (lambda: MHE(network(), every=0), "every must be an integer >= 1, not 0"),
        (lambda: MHE(network(), every=1e30), r"every must be an integer >= 1, not 1e\+30"),
        (lambda: MHE(network(), hidden=1e39)(), r"must be finite, but is inf .* and the largest factor 1e\+39"),
        (lambda: MHE(network(), schedule=lambda step: 1e39)(), r"must be finite, .* and the largest factor 1e\+39"),
        (lambda: MHE({"w": torch.ones(3)}), "w must be a floating-point tensor"),
        (lambda: MHE(nn.Sequential(nn.LazyLinear(3))), "0: its weight is not initialised: run a batch"),
        (lambda: CoMHE(network(), projection="fourier"), "projection must be one of 'random'"),
        (lambda: CoMHE(nn.Linear(40, 4), output_layer="weight"), "model must be one with a hidden layer"),
        (lambda: Orthonormal(network(), -1), "weight must be a finite number >= 0"),
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
        (lambda: MHE(pyramid(), hidden="1"), "hidden must be None or a finite number >= 0, not '1'"),
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
def test_regularizers_and_energies_name_arguments_in_errors(make, words):
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
    net = pyramid().double()  # the float32 energy of close pairs depends on the order of summation
    regularizer = make(net)
    before = {name: value.clone() for name, value in regularizer.state_dict().items()}
    parameters = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    model = WithRegularizer(net, regularizer)
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, ()))(parameters)
    for name, value in regularizer.state_dict().items():
        assert torch.equal(value, before[name])
    regularizer().backward()
    torch.testing.assert_close(gradients["net.0.weight"], net[0].weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [MHE, Orthonormal, lambda net, **o: CoMHE(net, projection=Random(dim=4), **o)])
def test_regularizers_with_every_are_zero_at_other_steps(make):
    regularizer = make(pyramid(), every=3)
    assert [regularizer().item() > 0 for _ in range(7)] == [True, False, False, True, False, False, True]
    rare = make(pyramid(), every=10**30)
    assert [rare().item() > 0 for _ in range(3)] == [True, False, False]


# A peek starts from the updated tensor, so its value differs from that of the step.
@pytest.mark.parametrize(
    ("make", "rel"),
    [
        (MHE, 0),
        (Orthonormal, 0),
        (lambda net, **options: MHE(net, batch=4, **options), 0),
        (lambda net, **options: CoMHE(net, projection=Random(dim=4), **options), 0),
        (lambda net, **options: CoMHE(net, projection=AnglePreserving(dim=4), **options), 1e-3),
        (SRIP, 0.2),
    ],
)
@pytest.mark.parametrize("auto_advance", [True, False])
def test_regularizers_with_every_return_their_value_to_a_call_without_a_step(make, rel, auto_advance):
    regularizer = make(pyramid(), every=3, auto_advance=auto_advance)
    computed = []
    for _ in range(5):
        value = regularizer().item()
        computed += [value] if value else []
        with torch.no_grad():
            seen = regularizer().item()
        assert seen == pytest.approx(computed[-1], rel=rel)
        assert regularizer.eval()().item() == seen
        regularizer.train()
        if not auto_advance:
            regularizer.advance()
    assert len(computed) == 2


def test_comhe_with_every_shows_the_bases_of_the_last_computed_step():
    regularizer = CoMHE(pyramid(), projection=Random(dim=4), every=3)
    regularizer()
    first = regularizer.bases()["0"]
    regularizer()
    assert torch.equal(regularizer.bases()["0"], first)


def test_regularizers_population_is_a_deprecated_name_of_selection():
    regularizer = MHE(network())
    with pytest.warns(DeprecationWarning, match="MHE.population is deprecated, use MHE.selection instead"):
        assert regularizer.population is regularizer.selection


def test_comhe_labels_select_the_data_dependent_energy_of_the_output():
    net, labels = pyramid(), torch.tensor([[0, 3], [-100, 1]])
    regularizer = CoMHE(net, hidden=0, projection=Random(dim=4))
    torch.testing.assert_close(regularizer(labels=labels), data_dependent_energy(net[2].weight, labels))


def test_regularizers_positional_labels_are_deprecated():
    net, token_ids = pyramid(), torch.tensor([0, 1])
    regularizer = MHE(net)
    with pytest.warns(DeprecationWarning, match="MHE takes no inputs of the model, only labels") as caught:
        value = regularizer(token_ids)
    assert caught[0].filename == __file__
    torch.testing.assert_close(value, regularizer(labels=token_ids))
    with pytest.raises(ValueError, match="pass one positional argument at most, the labels"):
        regularizer(token_ids, labels=token_ids)


KINDS = [MHE, CoMHE, LayerPenalty, Orthonormal, Orthogonal, SRIP]
SHARED = ("layer_weights", "schedule", "every", "output_layer", "where", "auto_advance", "report")


def documented_arguments(kind):
    """Return the text that the section "Args" of a class has for each argument."""
    arguments = re.search(r"^Args:\n((?: {4}.+\n?)+)", inspect.cleandoc(kind.__doc__), re.MULTILINE)[1]
    return dict(re.findall(r"^ {4}(?:\*\*)?(\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE))


@pytest.mark.parametrize("kind", KINDS)
def test_regularizers_have_the_shared_options_in_their_signature(kind):
    signature = inspect.signature(kind).parameters
    assert [p for p in signature if p in SHARED] == list(SHARED) == list(RegularizerOptions.__annotations__)
    assert "options" not in signature
    assert "output" in signature
    assert not {"roles", "min_length", "needs_counter"} & set(signature)
    abstract = inspect.signature(NeuronRegularizer).parameters
    for name in SHARED:
        assert signature[name] == abstract[name]  # name, annotation, default, and that it is a keyword
        assert signature[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_mhe_and_comhe_have_the_same_options_of_the_energy():
    mhe, comhe = (inspect.signature(kind).parameters for kind in (MHE, CoMHE))
    different = {"hidden", "half_space"}  # None means the values of the paper of MHE
    assert set(comhe) - set(mhe) == {"projection", "shared"}
    assert all(mhe[name] == comhe[name] for name in set(mhe) - different)


@pytest.mark.parametrize("kind", [NeuronRegularizer, *KINDS])
def test_regularizers_document_all_arguments(kind):
    documented = documented_arguments(kind)
    passed_on = re.findall(r"`(\w+)`", documented.pop("options", ""))
    assert passed_on in ([], [*SHARED, "NeuronRegularizer"])
    assert {*documented, *passed_on} - {"NeuronRegularizer"} == set(inspect.signature(kind).parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_regularizers_pass_every_shared_option_on(kind):
    class Penalty(kind):
        def penalty(self, w):
            return w.square().sum((-2, -1))

    with_where = {"where": lambda name, module: name != "1"}
    options = {"layer_weights": {"0": 0.5}, "schedule": Warmup(4), "every": 3, "output_layer": None, **with_where}
    regularizer = Penalty(pyramid(), auto_advance=False, report=False, **options)
    assert [(layer.name, layer.role) for layer in regularizer.selection] == [("0", "hidden"), ("2", "hidden")]
    assert (regularizer.layer_weights, regularizer.schedule, regularizer.every) == ({"0": 0.5}, Warmup(4), 3)
    assert not regularizer.counter.auto_advance


@pytest.mark.parametrize("kind", [MHE, CoMHE, Orthonormal, Orthogonal, SRIP])
def test_regularizers_name_themselves_for_an_unknown_argument(kind):
    message = rf"^{kind.__name__} has no option 'shcedule'; did you mean schedule\?"
    with pytest.raises(TypeError, match=message):
        kind(pyramid(), shcedule=None)
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__} has no option 'strength'. Options: model, .*schedule, every"
    ):
        kind(pyramid(), strength=1.0)


@pytest.mark.parametrize(
    "kind",
    [
        MHE,
        Orthonormal,
        Orthogonal,
        SRIP,
        partial(CoMHE, projection=Random(dim=4)),
        partial(CoMHE, projection=AnglePreserving(dim=4)),
    ],
)
def test_regularizers_do_not_compute_layers_of_weight_zero(kind):
    net = pyramid()
    factors = {name: 0.0 if name == "0" else 1.0 for name in ("0", "1")}
    expected = kind(net, layer_weights=factors)().item()
    with torch.no_grad():
        net[0].weight.fill_(math.inf)  # 0·∞ would be NaN
    assert kind(net, layer_weights=factors)().item() == expected


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MHE, {"batch": 4}), (CoMHE, {"projection": Random(dim=4), "batch": 4}), (CoMHE, {"projection": Random(dim=4)})],
)
def test_regularizers_layers_of_weight_zero_do_not_change_the_draws_of_others(kind, options):
    torch.manual_seed(0)
    first, second = torch.randn(9, 6, dtype=torch.float64), torch.randn(8, 7, dtype=torch.float64)

    def values(first_weight, second_weight):
        weights = {"first": first_weight, "second": second_weight}
        regularizer = kind({"first": first, "second": second}, layer_weights=weights, **options)
        return torch.stack([regularizer() for _ in range(3)])

    assert len(values(1.0, 1.0).unique()) == 3  # random
    torch.testing.assert_close(values(1.0, 0.0) + values(0.0, 1.0), values(1.0, 1.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [MHE, SRIP, partial(CoMHE, projection=Random(dim=4))])
def test_regularizers_repr_shows_the_steps_if_they_are_not_the_defaults(kind):
    plain = repr(kind(pyramid())).removesuffix(")")
    text = repr(kind(pyramid(), every=3, schedule=Warmup(4), auto_advance=False))
    assert text == f"{plain}, every=3, schedule=Warmup(steps=4, start=0.0), auto_advance=False)"


@pytest.mark.parametrize("kind", [MHE, CoMHE, Orthonormal, Orthogonal, SRIP])
@pytest.mark.parametrize("name", ["zz", ["0", "zz"]])
def test_regularizers_name_the_argument_output_layer(kind, name):
    with pytest.raises(ValueError, match=r"^output_layer must be 'auto', None or one of '0', '1', '2', not 'zz'"):
        kind(pyramid(), output_layer=name)


def test_layer_penalty_needs_one_method():
    class RowNorms(LayerPenalty):
        def penalty(self, w):
            return w.square().sum((-2, -1))

    net = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    norms = [layer.weight.square().sum() for layer in net]
    penalty = RowNorms(net, 2.0, layer_weights={"2": 0.5}, every=2)
    torch.testing.assert_close(penalty(), 2 * (norms[0] + norms[1]) + norms[2] / 2)
    assert penalty().item() == 0
    assert repr(penalty) == "RowNorms(weight=2.0 of [0, 1, 2], every=2)"
    assert {"weight", "output", "every"} <= set(inspect.signature(RowNorms).parameters)


def test_layer_penalty_has_weight_one_by_default():
    class SquaredNorm(LayerPenalty):
        def penalty(self, w):
            return w.square().sum((-2, -1))

    weight = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert SquaredNorm({"w": weight})().item() == 25
    for kind in (Orthonormal, Orthogonal, SRIP):
        assert kind({"w": weight}).weight == 1e-5  # the value of the sources


@pytest.mark.parametrize(
    ("reduce", "shape"),
    [(lambda w: w.norm(dim=-1), r"\(1, 1, 6\)"), (lambda w: w.square().sum(), r"\(\)"), (lambda w: 0.0, "'float'")],
)
def test_layer_penalty_of_a_wrong_shape_is_rejected(reduce, shape):
    class RowNorms(LayerPenalty):
        def penalty(self, w):
            return reduce(w)

    words = r"RowNorms.penalty must be one number per set of neurons, of shape \(1, 1\) for w of shape \(1, 1, 6, 4\)"
    with pytest.raises(ValueError, match=f"{words}, not {shape}"):
        RowNorms(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))()


def test_neuron_regularizer_needs_a_factor_and_terms():
    class NormPenalty(NeuronRegularizer):
        def __init__(self, model, layer_weights=None):
            super().__init__(model, roles=("hidden",), min_length=1, needs_counter=False, layer_weights=layer_weights)

        def factor(self, layer):
            return self.layer_weights.get(layer.name, 1.0)

        def compute(self, labels, step):
            return StepResult([self.factor(layer) * layer.rows().square().sum() for layer in self.selection])

    net = pyramid()
    first, second = (net[k].weight.square().sum() for k in (0, 1))
    torch.testing.assert_close(NormPenalty(net, {"1": 0.5})(), first + second / 2)
    torch.testing.assert_close(NormPenalty(net)(), first + second)


# Which layers a regulariser takes ------------------------------------------------------------------------------------


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


def test_mhe_counts_an_adapted_layer_once_without_its_adapter():
    selection = MHE(nn.Sequential(Adapted(nn.Linear(8, 6)), nn.Linear(6, 4))).selection
    assert [layer.name for layer in selection] == ["0.base_layer", "1"]


def rotation_gradient(regularizer, net):
    """Return the largest gradient that a regulariser gives to the parameters of a model."""
    trained = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(regularizer(), trained, allow_unused=True)
    return max(gradient.abs().max().item() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize(
    "regularizer",
    [
        partial(MHE, output=0),
        partial(Orthonormal, weight=1.0),
        partial(Orthogonal, weight=1.0),
        partial(Orthogonal, weight=1.0, normalize=False),
        partial(SRIP, weight=1.0),
        partial(CoMHE, output=0, projection=Random(dim=1000)),  # larger than the layers, so that none is projected
    ],
)
def test_regularizer_warns_about_rotated_layers_in_which_it_is_constant(regularizer):
    net = rotation.rotate_(pyramid(), spread=0.3)
    with pytest.warns(UserWarning, match="the regulariser is constant in 0, 1"):
        constant = regularizer(net)
    assert rotation_gradient(constant, net) < 1e-5


def test_comhe_does_not_warn_about_rotated_layers_that_it_projects(recwarn):
    net = rotation.rotate_(pyramid(), spread=0.3)
    regularizer = CoMHE(net, output=0, projection=Random(dim=4))
    assert not recwarn.list
    assert rotation_gradient(regularizer, net) > 1e-2


def test_layer_penalty_of_unknown_invariance_does_not_warn_about_rotated_layers(recwarn):
    class Entries(LayerPenalty):
        def penalty(self, w):
            return w.abs().sum((-2, -1))  # a rotation changes the sum of absolute values

    net = rotation.rotate_(pyramid(), spread=0.3)
    regularizer = Entries(net)
    assert not recwarn.list
    assert rotation_gradient(regularizer, net) > 1e-2


@pytest.mark.parametrize(("method", "options"), [("free", {}), ("cayley", {"learn_neurons": True})])
def test_mhe_does_not_warn_about_layers_whose_angles_change(method, options, recwarn):
    MHE(rotation.rotate_(pyramid(), method, **options))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("make", "constant"),
    [
        (partial(MHE, hidden=0.0), None),
        (partial(MHE, hidden=0.0, layer_weights={"1": 1.0}), "1"),
        (partial(MHE, layer_weights={"0": 0.0}), "1"),
        (partial(Orthonormal, weight=0.0), None),
        (partial(Orthonormal, layer_weights={"1": 0.0}), "0"),
    ],
)
def test_regularizers_do_not_warn_about_rotated_layers_without_weight(make, constant, recwarn):
    make(rotation.rotate_(pyramid()))
    reason = "rotations do not change the angles between neurons, so the regulariser is constant in"
    assert [str(one.message) for one in recwarn] == ([f"{reason} {constant}"] if constant else [])


@pytest.mark.parametrize("kind", [MHE, Orthonormal])
def test_regularizers_do_not_call_an_overridden_factor_before_they_are_complete(kind):
    class Scaled(kind):
        def __init__(self, model):
            super().__init__(model)
            self.scale = 2.0

        def factor(self, layer):
            return self.scale * super().factor(layer)

    torch.testing.assert_close(Scaled(pyramid())(), 2 * kind(pyramid())())


def test_mhe_skipped_layers_have_a_reason():
    net = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 6), nn.Linear(6, 4))
    reasons = [(skip.name, skip.reason) for skip in MHE(net).skipped]
    assert reasons == [("0", "one neuron per set"), ("1", "neurons of 1 number")]


def test_mhe_output_layer_last_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use 'auto' instead"):
        last = MHE(pyramid(), output_layer="last")
    assert [layer.role for layer in last.selection] == [layer.role for layer in MHE(pyramid()).selection]


def test_mhe_does_not_take_an_unknown_module_for_a_distributed_head():
    unknown = type("distributed over", (nn.Module,), {})()  # the reason to skip it contains the name of its type
    unknown.rows = nn.Parameter(torch.ones(3, 3))
    net = nn.Sequential(nn.Linear(5, 6), unknown, nn.Linear(6, 4))
    assert [skip.name for skip in MHE(net).skipped] == ["1.rows"]


def test_regularizers_accept_the_old_name_of_min_length():
    class NormPenalty(NeuronRegularizer):
        def __init__(self, model):
            super().__init__(model, roles=("hidden",), shortest=1, needs_counter=False)

        def factor(self, layer):
            return 1.0

        def compute(self, labels, step):
            return StepResult([layer.rows().square().sum() for layer in self.selection])

    with pytest.warns(DeprecationWarning, match="the argument shortest is deprecated, use min_length instead"):
        assert NormPenalty(pyramid())().item() > 0
