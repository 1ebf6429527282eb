"""Parameter groups for weight decay."""

import pytest
import torch
from torch import nn

from hypersphere.heads import AngularHead, softmax
from hypersphere.optim import param_groups
from hypersphere.rotation import InputRotation, Stochastic, rotate_, rotation_parameters


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3))


class Directions(nn.Module):
    decay_free_parameters = ("weight",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8))
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "convert",
    [lambda m: rotate_(m, "cayley"), lambda m: rotate_(m, "gram_schmidt"), lambda m: Stochastic(m, 0.5)],
    ids=["cayley", "gram_schmidt", "stochastic"],
)
def test_param_groups_decay_everything_but_rotations(convert):
    net = model()
    convert(net)
    with torch.no_grad():
        for p in rotation_parameters(net):
            p += 0.1 * torch.randn_like(p)
    optimizer = torch.optim.SGD(param_groups(net, 0.5), lr=0.1)
    rotations = [p.detach().clone() for p in rotation_parameters(net)]
    last = net[-1].weight.detach().clone()
    for p in net.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(rotations, rotation_parameters(net), strict=True))
    torch.testing.assert_close(net[-1].weight.detach(), 0.95 * last)


def test_weight_decay_without_groups_changes_a_rotation():
    net = rotate_(model(), "cayley")
    free = rotation_parameters(net)[0]
    with torch.no_grad():
        free += 0.1
    before = net[0].weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)
    free.grad = torch.zeros_like(free)
    optimizer.step()
    assert (net[0].weight - before).abs().max() > 1e-4


def test_param_groups_contain_every_trained_parameter_once():
    net = nn.Sequential(rotate_(model()), Directions(), InputRotation(nn.Linear(3, 4)))
    groups = param_groups(net, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters() if p.requires_grad)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    exempt = {id(p) for p in groups[1]["params"]}
    assert id(net[1].weight) in exempt
    assert id(net[1].scale) not in exempt
    assert id(net[2].free) in exempt


def test_param_groups_exempt_weights_of_which_only_directions_matter(capsys):
    class Undeclared(AngularHead):
        """A head that does not name its weight among the parameters without decay."""

        decay_free_parameters = property(lambda self: (), lambda self, names: None)

    net = nn.ModuleList([nn.MultiheadAttention(8, 2), Undeclared(8, 3), softmax(8, 3)])
    decayed, exempt = (group["params"] for group in param_groups(net, 0.1, report=True))
    assert any(p is net[1].weight for p in exempt)
    assert any(p is net[2].weight for p in decayed)
    report = capsys.readouterr().out
    assert "1.weight: only directions matter" in report
    assert "0.in_proj_weight: 3 times 8 neurons of 8 numbers" in report


def test_param_groups_do_not_evaluate_parametrised_weights():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    param_groups(layer, 0.1)
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


def test_param_groups_options_include_biases_and_normalisations():
    def counts(**options):
        return [len(group["params"]) for group in param_groups(model(), 0.1, **options)]

    assert counts() == [3, 5]
    assert counts(bias=True) == [6, 2]
    assert counts(normalization=True) == [4, 4]
    assert counts(bias=True, normalization=True) == [8, 0]
    for decay in (-1, "x", None, float("inf")):
        with pytest.raises(ValueError, match="weight_decay must be"):
            param_groups(model(), decay)
    for nothing in (None, 3, [], model().parameters()):
        with pytest.raises(ValueError, match="model must be a module or a list of modules"):
            param_groups(nothing, 0.1)


def test_param_groups_report_names_every_parameter(capsys):
    net = rotate_(model(), "cayley")
    param_groups(net, 0.1, report=True)
    report = capsys.readouterr().out
    assert all(name in report for name, _ in net.named_parameters())
    assert "1.weight: parameter of a normalisation" in report
    assert "0.bias: bias" in report
    assert "0.parametrizations.weight.0.free.main: Rotation excludes it" in report
    assert "4.weight: 3 neurons of 8 numbers" in report
    assert report.index("frozen, in no group") < report.index("0.parametrizations.weight.original")


def test_param_groups_know_the_biases_of_attention_and_recurrent_layers():
    layers = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.LSTM(4, 3)])
    decayed, free = param_groups(layers, 0.1, bias=False)
    names = {id(parameter): name for name, parameter in layers.named_parameters()}
    assert sorted(names[id(p)] for p in free["params"]) == [
        "0.in_proj_bias",
        "0.out_proj.bias",
        "1.bias_hh_l0",
        "1.bias_ih_l0",
    ]
    assert not any("bias" in names[id(p)] for p in decayed["params"])
