import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import oracle
from hypersphere.energy import MHE, data_dependent_energy, hyperspherical_energy
from hypersphere.heads import AngularHead, ShardedHead

from . import reference
from .networks import network, pyramid


def test_mhe_is_the_sum_of_layer_energies():
    net = network()
    weights = [net[k].weight.detach().flatten(1).numpy() for k in (0, 3, 4, 5)]
    for half_space, distance, power in ((True, "euclidean", 2), (False, "angular", 1), (True, "angular", 0)):
        ours = MHE(net, hidden=0.5, output=3.0, half_space=half_space, power=power, distance=distance)()
        hidden = sum(oracle.energy(w, power, distance, half_space) for w in weights[:-1])
        expected = 0.5 * hidden + 3 * oracle.energy(weights[-1], power, distance)
        assert ours.item() == pytest.approx(expected, rel=1e-5)
    named = MHE(net, hidden=1, half_space=["3"], output_layer="4")()
    full = [oracle.energy(w, 2) for w in weights]
    assert named.item() == pytest.approx(
        full[0] + oracle.energy(weights[1], 2, half_space=True) + full[2] + full[3], rel=1e-5
    )
    assert MHE(net, output=0)().item() == pytest.approx(
        sum(oracle.energy(w, 2, half_space=True) for w in weights[:-1]), rel=1e-5
    )


def test_mhe_gradients_equal_those_of_separate_energies():
    net = network()
    MHE(net)().backward()
    ours = [p.grad for p in net.parameters() if p.ndim > 1]
    net.zero_grad()
    by_hand = [hyperspherical_energy(net[k].weight, half_space=True) for k in (0, 3, 4)]
    (sum(by_hand) + hyperspherical_energy(net[5].weight)).backward()
    for mine, expected in zip(ours, (p.grad for p in net.parameters() if p.ndim > 1), strict=True):
        torch.testing.assert_close(mine, expected)


def test_mhe_handles_groups_transposed_filters_and_single_neurons():
    net = nn.ModuleDict(
        {
            "grouped": nn.Conv1d(6, 8, 3, groups=2),
            "up": nn.ConvTranspose2d(4, 6, 2, groups=2),
            "depthwise": nn.Conv2d(5, 5, 3, groups=5),
            "score": nn.Linear(9, 1),
        }
    )
    ours = MHE(net, hidden=1, half_space=False, output_layer=None)
    assert [(skip.name, skip.reason) for skip in ours.skipped] == [
        ("depthwise", "one neuron per set"),
        ("score", "one neuron per set"),
    ]
    grouped = [oracle.energy(part.flatten(1).detach().numpy(), 2) for part in net["grouped"].weight.chunk(2)]
    up = [oracle.energy(np.array(s), 2) for s in reference.neurons_of_transposed(net["up"].weight.detach().numpy(), 2)]
    assert ours().item() == pytest.approx(np.mean(grouped) + np.mean(up), rel=1e-5)


def test_mhe_handles_heads_parametrised_and_tied_weights():
    model = nn.ModuleDict({"head": AngularHead(6, 4), "first": nn.Linear(8, 6)})
    regulariser = MHE(model)
    assert [layer.name for layer in regulariser.selection.outputs] == ["head"]
    parametrizations.weight_norm(model["first"])
    seen = MHE(model)
    assert seen().item() == pytest.approx(regulariser().item())
    seen().backward()
    assert model["first"].parametrizations.weight.original1.grad.abs().sum() > 0
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    assert len(MHE(tied, output_layer=None).selection.hidden) == 1


def test_mhe_labels_select_the_data_dependent_energy():
    net, labels = network(), torch.tensor([0, 0, 4])
    regulariser = MHE(net, hidden=0)
    torch.testing.assert_close(regulariser(labels), data_dependent_energy(net[5].weight, labels))


def test_mhe_random_batches_are_unbiased_and_resume():
    net = network()
    whole, drawn = MHE(net, output=0), MHE(net, output=0, batch=4)
    values = [drawn().item() for _ in range(300)]
    assert np.mean(values) == pytest.approx(whole().item(), abs=4 * np.std(values) / 300**0.5)
    torch.manual_seed(99)  # the global seed has no say
    again = MHE(net, output=0, batch=4)
    assert [again().item() for _ in range(3)] == values[:3]
    again.load_state_dict(drawn.state_dict())
    assert again().item() == drawn().item()


def test_mhe_follows_copies_moves_and_dtypes():
    net = network()
    regulariser = MHE(net)
    before = regulariser().item()
    model, of_copy = copy.deepcopy((net, regulariser))
    with torch.no_grad():
        net[3].weight.add_(torch.randn_like(net[3].weight))
    assert of_copy().item() == before != regulariser().item()
    model.double()
    assert of_copy().dtype == torch.float64
    model.bfloat16()
    assert of_copy().dtype == torch.float32
    assert not regulariser.state_dict()
    assert not list(regulariser.parameters())
    net.regulariser = regulariser  # a part of the model it looks at
    assert copy.deepcopy(net).regulariser().item() == regulariser().item()
    with torch.autocast("cpu", torch.bfloat16):
        value = regulariser()
    assert value.item() == pytest.approx(regulariser().item(), rel=1e-6)


def test_mhe_takes_a_wrapped_head_once_as_an_output(monkeypatch):
    head = AngularHead(8, 5)
    model = nn.ModuleList([nn.Linear(4, 8), ShardedHead(head), AngularHead(8, 3)])
    selection = MHE(model).selection
    assert [layer.name for layer in selection.hidden] == ["0"]
    assert [layer.shape[1] for layer in selection.outputs] == [5, 3]
    expected = sum(oracle.energy(model[k].weight.detach().numpy(), 2) for k in (1, 2))
    assert MHE(model, hidden=0)().item() == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(type(model[1].processes), "size", property(lambda processes: 2))
    skipped = {skip.name: skip.reason for skip in MHE(model).skipped}
    assert skipped["1"] == "its class vectors are distributed over 2 processes"


def test_mhe_gradients_of_half_precision_saturate():
    w = torch.tensor([[1e-3, 0, 0], [1e-3, 4e-6, 0], [0, 0, 1e-3]], dtype=torch.float16, requires_grad=True)
    MHE({"w": w}, half_space=False)().backward()
    assert torch.isfinite(w.grad).all()
    assert w.grad.abs().max() == torch.finfo(torch.float16).max


def test_mhe_labels_work_with_transposed_outputs():
    up, labels = nn.ConvTranspose1d(6, 4, 2), torch.tensor([0, 3])
    rows = up.weight.detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(MHE(up, output_layer="weight")(labels), data_dependent_energy(rows, labels))
    with pytest.raises(ValueError, match="labels must be None unless there is one output layer"):
        MHE({"w": torch.randn(4, 3)})(labels)


def test_mhe_defaults_are_those_of_the_source():
    net = pyramid()
    half, full = (sum(oracle.energy(net[k].weight.detach().numpy(), 2, half_space=h) for k in (0, 1)) for h in (1, 0))
    assert MHE(net, output=0)().item() == pytest.approx(half, rel=1e-5)
    assert MHE(net, output=0, half_space=False)().item() == pytest.approx(10 * full, rel=1e-5)
    only = nn.Linear(8, 4)
    expected = oracle.energy(only.weight.detach().numpy(), 2, half_space=True)  # a single layer is not an output
    assert MHE(only)().item() == pytest.approx(expected, rel=1e-5)
