"""Which layers a regulariser takes."""

import pytest
import torch
from torch import nn

from hypersphere import rotation
from hypersphere.energy import MHE, CoMHE
from hypersphere.functions.projection import Random

from .networks import pyramid


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


def test_mhe_and_comhe_warn_about_rotated_layers_whose_energy_is_constant():
    net = rotation.rotate_(pyramid())
    with pytest.warns(UserWarning, match="the regulariser is constant in 0, 1"):
        CoMHE(net, output=0, projection=Random(dim=4))
    with pytest.warns(UserWarning, match="the regulariser is constant in 0, 1"):
        regularizer = MHE(net, output=0)
    before = regularizer()
    before.backward()
    assert max(p.grad.abs().max().item() for p in net.parameters() if p.grad is not None) < 1e-5


@pytest.mark.parametrize(("method", "options"), [("free", {}), ("cayley", {"learn_neurons": True})])
def test_mhe_does_not_warn_about_layers_whose_angles_change(method, options, recwarn):
    MHE(rotation.rotate_(pyramid(), method, **options))
    assert not recwarn.list


def test_mhe_skipped_layers_have_a_reason():
    net = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 6), nn.Linear(6, 4))
    reasons = [(skip.name, skip.reason) for skip in MHE(net).skipped]
    assert reasons == [("0", "one neuron per set"), ("1", "neurons of 1 number")]


def test_mhe_output_layer_last_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use 'auto' instead"):
        MHE(pyramid(), output_layer="last")


def test_mhe_does_not_take_an_unknown_module_for_a_distributed_head():
    unknown = type("distributed over", (nn.Module,), {})()  # the reason to skip it contains the name of its type
    unknown.rows = nn.Parameter(torch.ones(3, 3))
    net = nn.Sequential(nn.Linear(5, 6), unknown, nn.Linear(6, 4))
    assert [skip.name for skip in MHE(net).skipped] == ["1.rows"]
