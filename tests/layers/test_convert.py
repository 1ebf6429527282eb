"""Conversion of models, ours and others', to decoupled layers and back."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from hypersphere.functions.magnitude import Linear
from hypersphere.layers import (
    DecoupledConv2d,
    DecoupledLinear,
    SphereNorm,
    conversion_plan,
    convert_,
    equivalent_weight,
    fold_operator_,
    revert_,
    shared_k,
)
from hypersphere.rotation import fold_, rotate_


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 16), nn.Linear(16, 5)
    )


def images():
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def test_convert_keeps_parameters_and_skips_the_output_layer():
    model = small().eval()
    parameters, before = dict(model.named_parameters()), model(images())
    assert convert_(model, magnitude="ball", angular="linear") is model
    assert [type(m).__name__ for m in model] == [
        "DecoupledConv2d",
        "BatchNorm2d",
        "ReLU",
        "Flatten",
        "DecoupledLinear",
        "Linear",
    ]
    assert all(parameters[name] is p for name, p in model.named_parameters())
    fresh = DecoupledConv2d(3, 8, 3, magnitude="ball", angular="linear")
    fresh.load_state_dict(model[0].state_dict())
    assert torch.equal(fresh(images()), model[0](images()))
    revert_(model)
    assert type(model[0]) is nn.Conv2d
    assert type(model[4]) is nn.Linear
    assert "magnitude" not in vars(model[0])
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert torch.equal(model(images()), before)


def test_convert_to_the_inner_product_keeps_outputs():
    model = small().eval()
    before = model(images())
    convert_(model, magnitude="inner_product", angular="cosine", where=lambda name, module: True)
    assert torch.equal(model(images()), before)


def test_convert_with_a_predicate_a_root_layer_and_learned_numbers():
    model = convert_(small(), where=lambda name, module: name == "5")
    assert isinstance(model[5], DecoupledLinear)
    assert type(model[0]) is nn.Conv2d
    alone = convert_(nn.Conv1d(2, 3, 3), magnitude="tanh", learn_radius="filter")
    assert alone.log_radius.shape == (3,)
    assert set(revert_(alone).state_dict()) == {"weight", "bias"}
    k = shared_k()
    model = convert_(small(), angular="sigmoid", learn_k=k)
    assert model[0].log_k is model[4].log_k is k
    model(images()).sum().backward()
    assert k.grad is not None


def test_convert_keeps_optimisers_hooks_and_copies():
    model = small()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    convert_(model)
    before = model[0].weight.detach().clone()
    model(images()).sum().backward()
    optimiser.step()
    assert calls == [1]
    assert not torch.equal(before, model[0].weight)
    other = copy.deepcopy(model)
    assert torch.equal(other.eval()(images()), model.eval()(images()))
    assert type(revert_(other)[0]) is nn.Conv2d


def test_convert_keeps_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.encode, self.decode = nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
            self.encode.weight = self.decode.weight = self.embed.weight

    model = convert_(Tied(), where=lambda name, module: True)
    assert model.encode.weight is model.decode.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    assert len(list(revert_(model).parameters())) == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda m: parametrizations.weight_norm(m[4]),
            "it is parametrised: remove the parametrisation first (torch.nn.utils.parametrize, hypersphere.rotation)",
        ),
        (
            lambda m: nn.utils.spectral_norm(m[4]),
            "it does not own its weight: a hook computes it (weight_norm, spectral_norm, pruning)",
        ),
        (
            lambda m: m.__setitem__(4, nn.LazyLinear(16)),
            "it has no weight yet: run a batch through the model first",
        ),
    ],
    ids=["parametrised", "hook", "lazy"],
)
@pytest.mark.filterwarnings("ignore")
def test_convert_skips_layers_that_do_not_own_a_weight_unless_they_are_chosen(spoil, reason):
    model = small()
    spoil(model)
    kind = type(model[4])
    plan = conversion_plan(model)
    assert plan.converted == ("0",)
    assert {skip.name: skip.reason for skip in plan.skipped}["4"] == reason
    for function in (convert_, conversion_plan):
        with pytest.raises(ValueError, match=f"^where must exclude '4': {re.escape(reason)}$"):
            function(model, where=lambda name, module: True)
    assert type(model[0]) is nn.Conv2d
    convert_(model)
    assert isinstance(model[0], DecoupledConv2d)
    assert type(model[4]) is kind
    with pytest.raises(ValueError, match="none of its other layers is chosen; call revert_ first to convert decoupled"):
        convert_(model)


def test_convert_names_the_plan_if_no_layer_is_chosen():
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 2, 3)), nn.Flatten(), nn.Linear(2, 2))
    message = (
        r"^model must have a layer to convert, but none of its convolutions and linear layers is chosen; "
        r"conversion_plan\(model\) gives the reasons$"
    )
    with pytest.raises(ValueError, match=message):
        convert_(model)


def test_convert_with_invalid_settings_leaves_the_model_unchanged():
    for settings, message in (
        ({"magnitude": "cube"}, "magnitude must be one of 'sphere'.*not 'cube'"),
        ({"learn_radius": "layer"}, "learn_radius must be None for Sphere"),
        ({"angular": "sigmoid", "learn_k": "net"}, "learn_k must be None, 'layer', 'filter' or a parameter"),
    ):
        model = small()
        with pytest.raises(ValueError, match=message):
            convert_(model, **settings)
        assert type(model[0]) is nn.Conv2d
        assert type(model[4]) is nn.Linear
        assert not hasattr(model[0], "magnitude")
    model = small()
    message = r"^learn_k must be None, 'layer', 'filter' or a parameter with 1 or 16 entries, not \(8,\)$"
    with pytest.raises(ValueError, match=message):  # fits the first layer, not the second
        convert_(model, angular="sigmoid", learn_k=nn.Parameter(torch.zeros(8)))
    assert type(model[0]) is nn.Conv2d


@pytest.mark.parametrize(("name", "nearest"), [("angle", "angular"), ("wher", "where"), ("learn_kk", "learn_k")])
def test_convert_suggests_the_nearest_option(name, nearest):
    model = small()
    with pytest.raises(TypeError, match=rf"^convert_ has no option '{name}'; did you mean {nearest}\?$"):
        convert_(model, **{name: "linear"})
    assert type(model[0]) is nn.Conv2d


def test_convert_skips_custom_forwards_and_layers_that_are_not_called():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.ModuleDict(
        {
            "in": nn.Linear(4, 4),
            "shifted": Shifted(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "out": nn.Linear(4, 2),
        }
    )
    convert_(model)
    assert isinstance(model["in"], DecoupledLinear)
    with pytest.raises(ValueError, match="none of its other layers is chosen; call revert_ first to convert decoupled"):
        convert_(model)
    assert type(model["shifted"]) is Shifted
    assert isinstance(model["attention"].out_proj, DecoupledLinear)
    revert_(model)
    convert_(model, where=lambda name, module: name == "in")
    assert not isinstance(model["attention"].out_proj, DecoupledLinear)
    with pytest.raises(
        ValueError, match=r"^where must exclude 'shifted': Shifted overrides forward, which would be lost$"
    ):
        convert_(model, where=lambda name, module: name == "shifted")
    message = "^where must exclude 'attention.out_proj': its parent reads its weight without calling it$"
    with pytest.raises(ValueError, match=message):
        convert_(model, where=lambda name, module: name == "attention.out_proj")


def test_convert_vision_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config).eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x).logits
    convert_(model, magnitude="tanh", learn_radius="layer")
    converted = [name for name, module in model.named_modules() if isinstance(module, DecoupledConv2d)]
    assert len(converted) == sum(isinstance(m, nn.Conv2d) for m in model.modules()) > 3
    assert type(model.classifier[-1]) is nn.Linear
    assert not torch.allclose(model(x).logits, before)
    model.train()(x).logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.load_state_dict(model.state_dict())
    revert_(model)
    assert not any(isinstance(m, DecoupledConv2d) for m in model.modules())
    convert_(model, magnitude="inner_product")
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=16,
            patch_size=8,
        )
    )
    convert_(vit, magnitude="linear")
    assert sum(isinstance(m, DecoupledLinear) for m in vit.modules()) >= 6
    assert torch.isfinite(vit(torch.randn(1, 3, 16, 16)).logits).all()


class HiddenOutput(nn.Module):
    """A model whose output layer has no usual name and is not its last layer."""

    def __init__(self):
        super().__init__()
        self.to_classes = nn.Linear(8, 2)
        self.body = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU())


def test_convert_warns_if_the_output_layer_is_not_recognised():
    names = ("to_classes", "body.0")
    with pytest.warns(UserWarning, match="^no output layer was recognised in HiddenOutput, so all layers count as"):
        assert conversion_plan(HiddenOutput()).converted == names
    with pytest.warns(UserWarning, match="^no output layer was recognised in HiddenOutput, so all layers count as"):
        assert isinstance(convert_(HiddenOutput()).to_classes, DecoupledLinear)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert conversion_plan(HiddenOutput(), lambda *_: True).converted == names
        assert conversion_plan(HiddenOutput(), output_layer=None).converted == names
        plan = conversion_plan(HiddenOutput(), output_layer="to_classes")
        assert plan.converted == ("body.0",)
        assert plan.skipped[0].reason == "it is the output layer"
        assert isinstance(convert_(nn.Linear(3, 4)), DecoupledLinear)  # may be hidden or an output
    with pytest.raises(ValueError, match=r"^output_layer must be 'auto', None or one of 'to_classes', 'body\.0', not"):
        convert_(HiddenOutput(), output_layer="classes")


def test_convert_graph_network_of_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = geometric.GCNConv(6, 8), geometric.GCNConv(8, 3)

        def forward(self, x, edges):
            return self.second(self.first(x, edges).relu(), edges)

    torch.manual_seed(0)
    model, x = GCN(), torch.randn(5, 6)
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    before, weight, kind = model(x, edges), model.first.lin.weight, type(model.first.lin)
    convert_(model, output_layer="second.lin")
    assert isinstance(model.first.lin, DecoupledLinear)
    assert model.first.lin.weight is weight
    assert not isinstance(model.second.lin, DecoupledLinear)
    torch.testing.assert_close(
        model.first.lin(x), nn.functional.cosine_similarity(x[:, None], weight[None], dim=2), atol=1e-6, rtol=1e-5
    )
    model(x, edges).sum().backward()
    assert weight.grad.abs().sum() > 0
    revert_(model)
    assert type(model.first.lin) is kind
    assert torch.equal(model(x, edges), before)


def test_revert_refuses_parametrised_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    convert_(model)
    rotate_(model, output=True)
    x = torch.rand(1, 3, 4, 4)
    before = model(x)
    message = (
        r"^model must have no parametrised decoupled layers, but '0' is parametrised: "
        r"fold it \(hypersphere.rotation.fold_\) or remove its parametrisation first$"
    )
    with pytest.raises(ValueError, match=message):
        revert_(model)
    assert torch.equal(model(x), before)
    assert type(revert_(fold_(model))[0]) is nn.Conv2d


def test_revert_leaves_sphere_norm_unchanged():
    model = nn.Sequential(SphereNorm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    x = torch.rand(1, 3, 8, 8)
    before = model[0](x)
    convert_(model, where=lambda name, _: name == "1")
    assert type(revert_(model)[1]) is nn.Conv2d
    assert torch.equal(model[0](x), before)
    message = "^layer must be a Conv1d, Conv2d, Conv3d or Linear layer of torch, not 'BatchNorm2d'$"
    with pytest.raises(ValueError, match=message):
        SphereNorm(nn.BatchNorm2d(3))


class ScaledLinear(nn.Module):
    """Has the attributes of a linear layer, and computes twice its output if `twice` is True."""

    def __init__(self, twice):
        super().__init__()
        self.in_channels, self.out_channels, self.twice = 3, 2, twice
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (2 if self.twice else 1) * nn.functional.linear(x, self.weight, self.bias)


def test_convert_keeps_the_classes_of_other_libraries_after_an_error():
    def without_alpha(w_norm, x_norm):
        return x_norm

    without_alpha.uses_weight_norm = False
    model = nn.ModuleDict({"plain": ScaledLinear(False), "last": nn.Linear(3, 2)})
    with pytest.raises(ValueError, match="learn_k must be"):
        convert_(model, angular="sigmoid", learn_k="network")
    assert type(model["plain"]) is ScaledLinear
    with pytest.raises(ValueError, match="which has no alpha"):  # after the layer has been converted
        convert_(model, magnitude=without_alpha, scale="keep")
    assert type(model["plain"]) is ScaledLinear


def test_convert_takes_only_modules_that_compute_a_linear_layer():
    model = nn.ModuleDict({"scaled": ScaledLinear(True), "plain": ScaledLinear(False), "last": nn.Linear(3, 2)})
    convert_(model)
    assert isinstance(model["scaled"], ScaledLinear)
    assert isinstance(model["plain"], DecoupledLinear)
    assert model["plain"].in_features == 3


@pytest.mark.parametrize("make", [lambda: ScaledLinear(False), lambda: nn.Linear(3, 2), lambda: nn.Conv1d(3, 2, 1)])
def test_revert_removes_all_attributes_that_convert_added(make):
    model = nn.Sequential(make())
    before = dict(vars(model[0]))
    kind, names = type(model[0]), {key: list(before[key]) for key in ("_parameters", "_buffers", "_modules")}
    options = {"magnitude": "tanh", "learn_radius": "filter", "angular": "sigmoid", "learn_k": "layer"}
    convert_(model, where=lambda name, module: True, **options)
    layer = revert_(model)[0]
    assert type(layer) is kind
    assert vars(layer).keys() == before.keys()
    assert {key: list(vars(layer)[key]) for key in names} == names
    assert layer.weight.shape[:2] == (2, 3)


def test_conversion_plan_lists_converted_and_skipped_layers_with_reasons(capsys):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.up = nn.ConvTranspose2d(4, 4, 2)
            self.attention = nn.MultiheadAttention(4, 2)
            self.table = nn.Embedding(7, 4)
            self.memory = nn.LSTM(4, 4)
            self.classifier = nn.Linear(4, 2)

    model = Encoder()
    plan = conversion_plan(model)
    assert plan.converted == ("stem", "up", "attention", "attention.out_proj")
    reasons = {skip.name: skip.reason for skip in plan.skipped}
    assert reasons["classifier"] == "it is the output layer"
    assert reasons["memory.weight_ih_l0.i"] == "LSTM computes its gates in one operation of torch"
    without = conversion_plan(model, where=lambda name, _: name == "stem")
    assert {skip.name: skip.reason for skip in without.skipped}["attention"] == "excluded by `where`"
    assert reasons["table"] == "Embedding is not a convolution or linear layer"
    convert_(model, report=True)
    assert capsys.readouterr().out.strip() == str(plan)
    assert isinstance(model.stem, DecoupledConv2d)
    again = {skip.name: skip.reason for skip in conversion_plan(model).skipped}
    assert again["stem"] == "it is decoupled already"
    assert conversion_plan(model, where=lambda name, _: name == "classifier").converted == ("classifier",)


@pytest.mark.parametrize("h", ["sphere", "ball", "tanh", "linear", "seg", "log", "mix"])
@pytest.mark.parametrize("weighting", [None, "linear"])
@pytest.mark.parametrize("g", ["cosine", "linear"])
def test_convert_with_calibration_keeps_the_scale_of_every_layer(h, weighting, g):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 5))
    with torch.no_grad():
        model[0].weight.mul_(20)
        model[2].weight.mul_(0.1)
    x = torch.randn(16, 3, 5, 5)
    inputs = [x, model[:2](x)]
    before = [
        (model[i](v) - model[i].bias.view(-1, 1, 1)).square().mean().sqrt() for i, v in zip((0, 2), inputs, strict=True)
    ]
    convert_(model, magnitude=h, angular=g, weighting=weighting, scale="keep", calibration=x)
    after = [
        (model[i](v) - model[i].bias.view(-1, 1, 1)).square().mean().sqrt() for i, v in zip((0, 2), inputs, strict=True)
    ]
    torch.testing.assert_close(torch.stack(after), torch.stack(before), rtol=1e-4, atol=0)
    assert model.training


def test_convert_with_calibration_sets_the_mean_patch_norm():
    model, x = small(), images()
    convert_(model, magnitude="tanh", learn_radius="layer", scale="keep", calibration=(x,))
    norms = nn.functional.conv2d(x.square(), torch.ones(1, 3, 3, 3)).sqrt()
    assert model[0].mean_norm.item() == pytest.approx(norms.mean().item(), rel=1e-5)
    assert int(model[0].num_batches_tracked) == 1


def test_convert_with_calibration_reads_inputs_before_they_are_overwritten():
    class Residual(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            self.layer, self.inplace = nn.Conv2d(3, 3, 3, padding=1), inplace

        def forward(self, x):
            x = x * 2
            y = self.layer(x)
            return y + (x.clamp_(0, 0.1) if self.inplace else x.clamp(0, 0.1))

    alphas = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = Residual(inplace)
        convert_(model, magnitude="linear", scale="keep", calibration=images())
        alphas.append(model.layer.magnitude.alpha)
    assert alphas[0] == alphas[1]


def test_convert_can_keep_filter_norms_without_calibration():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    norms = [layer.weight.detach().flatten(1).norm(dim=1) for layer in model]
    convert_(model, magnitude="seg", scale="keep")
    for layer, norm in zip(model, norms, strict=True):
        factor = norm.square().mean().sqrt().item()
        assert layer.magnitude.alpha == pytest.approx(factor, rel=1e-5)
        assert layer.magnitude.beta == pytest.approx(0.5 * factor, rel=1e-5)
    assert convert_(small(), weighting="linear", scale="keep")[0].magnitude.alpha == 1


def test_convert_refuses_unusable_scales():
    with pytest.raises(ValueError, match="scale must be None or 'keep', not 'yes'"):
        convert_(small(), scale="yes")
    with pytest.raises(ValueError, match=r"^calibration must be None unless scale='keep', not"):
        convert_(small(), calibration=images())
    model = small()
    with pytest.raises(ValueError, match=r"^scale must be None for .*, which has no alpha, not 'keep'$"):
        convert_(model, magnitude=lambda w, x: x, scale="keep", calibration=images())
    assert type(model[0]) is nn.Conv2d
    with pytest.raises(ValueError, match=r"^calibration must be an input of the model, which fails with it: .*chan"):
        convert_(model, scale="keep", calibration=images()[:, :2])
    assert type(model[0]) is nn.Conv2d
    with pytest.raises(ValueError, match=r"^the calibration input does not reach layer 'unused'$"):
        convert_(Branch(), scale="keep", calibration=images())


class Branch(nn.Module):
    """A model that does not call one of its layers."""

    def __init__(self):
        super().__init__()
        self.called, self.unused = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 2, 3)

    def forward(self, x):
        return self.called(x)


def test_calibration_accepts_layers_that_are_called_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(self.first(input=x).relu())

    torch.manual_seed(0)
    model, x = Keyword(), torch.randn(16, 6)
    before = model.first(x) - model.first.bias
    convert_(model, magnitude="tanh", scale="keep", calibration=x)
    assert model(x).shape == (16, 3)
    after = model.first(x) - model.first.bias
    torch.testing.assert_close(after.pow(2).mean(), before.pow(2).mean())


def test_converted_transposed_convolution_names_a_bad_input():
    model = convert_(nn.Sequential(nn.ConvTranspose1d(3, 4, 3), nn.Flatten(), nn.Linear(24, 2)))
    with pytest.raises(ValueError, match="input must be a tensor of a floating-point dtype"):
        model[0]([[1.0, 2.0]])


# Folding decoupled layers into layers of torch

INNER_PRODUCTS = {
    "inner product": {"magnitude": "inner_product"},
    "linear": {"magnitude": "linear"},
    "scaled": {"magnitude": Linear(alpha=2.5)},
    "scaled and weighted": {"magnitude": Linear(alpha=2.5), "weighting": "linear"},
}


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        DecoupledConv2d(3, 4, 3, **options), nn.ReLU(), nn.Flatten(), DecoupledLinear(36, 2, **options)
    )


@pytest.mark.parametrize("kind", INNER_PRODUCTS)
def test_fold_operator_keeps_the_responses_of_inner_products(kind):
    model, x = network(**INNER_PRODUCTS[kind]), images()
    before = model(x)
    assert fold_operator_(model) == 2
    assert [type(module) for module in model] == [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Linear]
    torch.testing.assert_close(model(x), before)
    assert fold_operator_(model) == 0


@pytest.mark.parametrize("options", [{"magnitude": "tanh"}, {"magnitude": "linear", "angular": "linear"}])
def test_fold_operator_leaves_a_model_with_another_response_unchanged(options):
    model = network(**INNER_PRODUCTS["scaled"])
    model[3] = DecoupledLinear(36, 2, **options)
    state = copy.deepcopy(model.state_dict())
    assert equivalent_weight(model[3]) is None
    assert fold_operator_(model) == 0
    assert isinstance(model[0], DecoupledConv2d)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", INNER_PRODUCTS)
def test_fold_operator_leaves_a_model_with_a_parametrised_layer_unchanged(kind):
    model, x = network(**INNER_PRODUCTS[kind]), images()
    parametrizations.weight_norm(model[3])
    before, state = model(x), copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^model must have no parametrised decoupled layers, but '3' is parametrised: fold it"
    ):
        fold_operator_(model)
    assert parametrize.is_parametrized(model[3])
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def tied(first, second):
    """Return a model of two layers with the same weight."""
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second})


def linear(alpha):
    return DecoupledLinear(4, 4, bias=False, magnitude=Linear(alpha=alpha))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Embedding(7, 4), DecoupledLinear(4, 7, bias=False, magnitude="linear")),
        lambda: (DecoupledLinear(4, 7, bias=False, magnitude="linear"), nn.Linear(4, 7)),
        lambda: (linear(1.0), linear(2.0)),
    ],
    ids=["embedding", "linear layer", "other scale"],
)
def test_fold_operator_refuses_to_change_a_tied_weight(layers):
    model = tied(*layers())
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^layer 'first' must not share its weight, but it shares it with 'second', and folding"
    ):
        fold_operator_(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert any(isinstance(layer, DecoupledLinear) for layer in model.values())


def test_fold_operator_refuses_weights_that_share_their_memory():
    first, second = linear(1.0), linear(2.0)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"^layer '0' must not share its weight, but it shares it with '1'"):
        fold_operator_(nn.Sequential(first, second))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Embedding(7, 4), DecoupledLinear(4, 7, bias=False, magnitude="inner_product")),
        lambda: (linear(2.0), linear(2.0)),
    ],
    ids=["inner product", "same scale"],
)
def test_fold_operator_keeps_ties_of_layers_that_need_the_same_weight(layers):
    model = tied(*layers())
    x = torch.randn(3, 4)
    before = model["second"](x)
    assert fold_operator_(model) > 0
    assert model["first"].weight is model["second"].weight
    torch.testing.assert_close(model["second"](x), before)


def test_fold_operator_refuses_tied_attention_with_different_operators():
    model = nn.ModuleDict({"first": nn.MultiheadAttention(4, 2), "second": nn.MultiheadAttention(4, 2)})
    model["second"].in_proj_weight = model["first"].in_proj_weight
    convert_(model, where=lambda name, _: name == "first", magnitude="linear")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="layer 'first' must not share its weight, but it shares it with 'second'"):
        fold_operator_(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    convert_(model, where=lambda name, _: name == "second", magnitude="linear")
    assert fold_operator_(model) == 6
    assert model["first"].in_proj_weight is model["second"].in_proj_weight


def test_equivalent_weight_is_available_under_its_old_name():
    with pytest.warns(DeprecationWarning, match="layers.plain_weight is deprecated, use .*equivalent_weight instead"):
        from hypersphere.layers import plain_weight
    assert plain_weight is equivalent_weight
