"""The energy of a network as a regulariser: values, choice of layers, random batches, neuron weights."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import oracle
from hypersphere.energy import MHE, CoMHE, Orthonormal, data_dependent_energy, hyperspherical_energy
from hypersphere.functions.projection import Random
from hypersphere.heads import AngularHead, ShardedHead

from . import reference
from .networks import network, pyramid


def rows_of(net):
    """The neurons of the four layers of `network`, the last one being the output."""
    return [net[k].weight.detach().flatten(1).numpy() for k in (0, 3, 4, 5)]


@pytest.mark.parametrize(
    ("half_space", "distance", "power"), [(True, "euclidean", 2), (False, "angular", 1), (True, "angular", 0)]
)
def test_mhe_is_the_weighted_sum_of_layer_energies(half_space, distance, power):
    net = network()
    *hidden, output = rows_of(net)
    ours = MHE(net, hidden=0.5, output=3.0, half_space=half_space, power=power, distance=distance)()
    expected = sum(oracle.energy(w, power, distance, half_space) for w in hidden)
    assert ours.item() == pytest.approx(0.5 * expected + 3 * oracle.energy(output, power, distance), rel=1e-5)


def test_mhe_half_space_applies_to_the_named_layers():
    net = network()
    first, named, *others = rows_of(net)
    ours = MHE(net, hidden=1, half_space=["3"], output_layer="4")()
    expected = oracle.energy(named, 2, half_space=True) + sum(oracle.energy(w, 2) for w in (first, *others))
    assert ours.item() == pytest.approx(expected, rel=1e-5)


def test_mhe_output_zero_leaves_out_the_output_layer():
    net = network()
    expected = sum(oracle.energy(w, 2, half_space=True) for w in rows_of(net)[:-1])
    assert MHE(net, output=0)().item() == pytest.approx(expected, rel=1e-5)


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
    regularizer = MHE(model)
    assert [layer.name for layer in regularizer.selection.outputs] == ["head"]
    parametrizations.weight_norm(model["first"])
    seen = MHE(model)
    assert seen().item() == pytest.approx(regularizer().item())
    seen().backward()
    assert model["first"].parametrizations.weight.original1.grad.abs().sum() > 0
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    assert len(MHE(tied, output_layer=None).selection.hidden) == 1


def test_mhe_labels_select_the_data_dependent_energy():
    net, labels = network(), torch.tensor([0, 0, 4])
    regularizer = MHE(net, hidden=0)
    torch.testing.assert_close(regularizer(labels=labels), data_dependent_energy(net[5].weight, labels))


@pytest.mark.parametrize("make", [MHE, lambda *args, **options: CoMHE(*args, projection=Random(dim=4), **options)])
def test_mhe_and_comhe_labels_have_any_shape_and_ignored_values(make):
    net = network()
    rows, tokens = net[5].weight.detach().double().numpy(), torch.tensor([[3, 1, -100], [1, -100, -100]])
    expected = reference.data_dependent(rows, [3, 1, 1], 2)
    regularizer = make(net, hidden=0, batch=2)  # the batch does not apply to an output layer with labels
    value = regularizer(labels=tokens)
    assert value.item() == pytest.approx(expected, rel=1e-5)
    value.backward()
    assert net[5].weight.grad.abs().sum() > 0
    assert regularizer(labels=torch.full((2, 3), -100)).item() == 0
    padded = make(net, hidden=0, ignore_index=0)
    assert padded(labels=tokens.masked_fill(tokens < 0, 0)).item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"labels must be integers in \[0, 5\)"):
        padded(labels=tokens)
    with pytest.raises(ValueError, match="ignore_index must be an integer, not None"):
        make(net, ignore_index=None)


def test_mhe_random_batches_are_unbiased_and_resume():
    net = network()
    all_neurons, drawn = MHE(net, output=0), MHE(net, output=0, batch=4)
    values = [drawn().item() for _ in range(300)]
    assert np.mean(values) == pytest.approx(all_neurons().item(), abs=4 * np.std(values) / 300**0.5)
    torch.manual_seed(99)  # the draws do not depend on the global seed
    again = MHE(net, output=0, batch=4)
    assert [again().item() for _ in range(3)] == values[:3]
    again.load_state_dict(drawn.state_dict())
    assert again().item() == drawn().item()


def test_mhe_copied_with_its_model_follows_the_copy():
    net = network()
    regularizer = MHE(net)
    before = regularizer().item()
    _, of_copy = copy.deepcopy((net, regularizer))
    with torch.no_grad():
        net[3].weight.add_(torch.randn_like(net[3].weight))
    assert of_copy().item() == before != regularizer().item()


def test_mhe_as_a_part_of_its_model_is_copied_with_it():
    net = network()
    net.regularizer = MHE(net)
    assert copy.deepcopy(net).regularizer().item() == net.regularizer().item()


def test_mhe_has_the_dtype_of_the_model_and_at_least_float32():
    net = network()
    regularizer = MHE(net)
    net.double()
    assert regularizer().dtype == torch.float64
    net.bfloat16()
    assert regularizer().dtype == torch.float32


def test_mhe_holds_no_state():
    regularizer = MHE(network())
    assert not regularizer.state_dict()
    assert not list(regularizer.parameters())


def test_mhe_is_computed_without_autocast():
    regularizer = MHE(network())
    with torch.autocast("cpu", torch.bfloat16):
        value = regularizer()
    assert value.item() == pytest.approx(regularizer().item(), rel=1e-6)


def test_mhe_takes_a_wrapped_head_once_as_an_output():
    head = AngularHead(8, 5)
    model = nn.ModuleList([nn.Linear(4, 8), ShardedHead(head), AngularHead(8, 3)])
    selection = MHE(model).selection
    assert [layer.name for layer in selection.hidden] == ["0"]
    assert [layer.shape[1] for layer in selection.outputs] == [5, 3]
    expected = sum(oracle.energy(model[k].weight.detach().numpy(), 2) for k in (1, 2))
    assert MHE(model, hidden=0)().item() == pytest.approx(expected, rel=1e-5)


def test_regularizers_take_a_distributed_head_only_without_output(monkeypatch):
    model = nn.ModuleList([nn.Linear(4, 8), ShardedHead(AngularHead(8, 5)), AngularHead(8, 3)])
    monkeypatch.setattr(type(model[1].processes), "size", property(lambda processes: 2))
    hidden = oracle.energy(model[0].weight.detach().numpy(), 2, half_space=True)
    for make in (MHE, lambda *args, **options: CoMHE(*args, projection=Random(dim=4), **options)):
        regularizer = make(model, output=0)
        reasons = {skip.name: skip.reason for skip in regularizer.skipped}
        assert reasons == {"1": "its class vectors are distributed over 2 processes"}
        assert [layer.name for layer in regularizer.selection.outputs] == ["2"]
        with pytest.raises(ValueError, match="output must be 0 with '1', whose class vectors are distributed over"):
            make(model)
    assert MHE(model, output=0)().item() == pytest.approx(hidden, rel=1e-5)
    # Another head of the model can have a weight by its name.
    both = MHE(model, output=0, layer_weights={"2": 3.0})()
    expected = hidden + 3 * oracle.energy(model[2].weight.detach().numpy(), 2)
    assert both.item() == pytest.approx(expected, rel=1e-5)
    assert [layer.name for layer in Orthonormal(model).selection] == ["0"]
    with pytest.raises(ValueError, match="output must be False with '1', whose class vectors are distributed over"):
        Orthonormal(model, output=True)


def test_mhe_gradients_of_half_precision_saturate():
    w = torch.tensor([[1e-3, 0, 0], [1e-3, 4e-6, 0], [0, 0, 1e-3]], dtype=torch.float16, requires_grad=True)
    MHE({"w": w}, half_space=False)().backward()
    assert torch.isfinite(w.grad).all()
    assert w.grad.abs().max() == torch.finfo(torch.float16).max


def test_mhe_rejects_labels_of_a_head_with_several_centres():
    model = nn.ModuleDict({"body": nn.Linear(6, 5), "head": AngularHead(5, 4, centers=2)})
    assert torch.isfinite(MHE(model)())
    with pytest.raises(ValueError, match="labels need one class vector per class, but 'head' has several centres"):
        MHE(model)(labels=torch.tensor([0, 3]))


def test_mhe_labels_work_with_transposed_outputs():
    up, labels = nn.ConvTranspose1d(6, 4, 2), torch.tensor([0, 3])
    rows = up.weight.detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(MHE(up, output_layer="weight")(labels=labels), data_dependent_energy(rows, labels))
    with pytest.raises(ValueError, match="labels need exactly one output layer without groups; this model has 0"):
        MHE({"w": torch.randn(4, 3)})(labels=labels)
    grouped = nn.Conv1d(4, 6, 1, groups=2)
    with pytest.raises(ValueError, match="this model has one with 2 groups"):
        MHE(grouped, output_layer="weight")(labels=labels)


def test_mhe_defaults_are_those_of_the_source():
    net = pyramid()
    half, full = (sum(oracle.energy(net[k].weight.detach().numpy(), 2, half_space=h) for k in (0, 1)) for h in (1, 0))
    assert MHE(net, output=0)().item() == pytest.approx(half, rel=1e-5)
    assert MHE(net, output=0, half_space=False)().item() == pytest.approx(10 * full, rel=1e-5)
    only = nn.Linear(8, 4)
    expected = oracle.energy(only.weight.detach().numpy(), 2, half_space=True)  # a single layer is not an output
    assert MHE(only)().item() == pytest.approx(expected, rel=1e-5)


def test_mhe_layer_weights_replace_the_factors_of_matching_layers():
    net = network()
    energies = {k: oracle.energy(net[k].weight.detach().flatten(1).numpy(), 2, half_space=k != 5) for k in (0, 3, 4, 5)}
    ours = MHE(net, layer_weights={"3": 0.25, "[45]": 2.0, "*": 7.0})()
    assert ours.item() == pytest.approx(
        7 * energies[0] + 0.25 * energies[3] + 2 * (energies[4] + energies[5]), rel=1e-5
    )
    assert MHE(net, output=0, layer_weights={"[034]": 0.0})().item() == 0
    with pytest.raises(ValueError, match="layer_weights must be a mapping whose names or patterns match some of '0'"):
        MHE(net, layer_weights={"conv*": 1.0})
    with pytest.raises(ValueError, match="layer_weights must be finite numbers >= 0, not -1"):
        MHE(net, layer_weights={"3": -1})


@pytest.mark.parametrize("half_space", [False, True])
def test_mhe_neuron_weights_scale_the_directions(half_space):
    net, betas = network(), torch.linspace(0.5, 2, 12)
    weights = [None, betas.numpy(), betas.numpy()]
    ours = MHE(net, hidden=1, output=0, half_space=half_space, neuron_weights={"3": betas, "4": betas.tolist()})()
    energies = [
        oracle.energy(w, 2, half_space=half_space, weights=b) for w, b in zip(rows_of(net)[:-1], weights, strict=True)
    ]
    assert ours.item() == pytest.approx(sum(energies), rel=1e-5)


def test_mhe_neuron_weights_of_the_output_exclude_labels():
    net, betas = network(), np.linspace(0.5, 2, 5)
    regularizer = MHE(net, hidden=0, output=1, neuron_weights={"5": betas.tolist()})
    assert regularizer().item() == pytest.approx(oracle.energy(rows_of(net)[-1], 2, weights=betas), rel=1e-5)
    with pytest.raises(ValueError, match="labels cannot be combined with neuron_weights of the output layer '5'"):
        regularizer(labels=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"neuron_weights": {"3": torch.ones(5)}}, "neuron_weights must be 12 numbers for 3"),
        ({"neuron_weights": {"3": -torch.ones(12)}}, "neuron_weights must be positive and finite"),
        (
            {"neuron_weights": {"3": torch.ones(12)}, "distance": "angular"},
            "distance must be 'euclidean' when neuron_weights are given",
        ),
    ],
)
def test_mhe_neuron_weights_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        MHE(network(), **options)


def test_mhe_average_divides_by_the_number_of_hidden_layers():
    net = network()
    total, mean, output = (MHE(net, **options)().item() for options in ({}, {"average": True}, {"hidden": 0}))
    assert mean == pytest.approx((total - output) / 3 + output, rel=1e-5)


def test_mhe_batch_applies_to_the_output_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 40))
    regularizer = MHE(net, hidden=0, batch=10)
    values = [regularizer().item() for _ in range(200)]
    exact = oracle.energy(net[1].weight.detach().numpy(), 2)
    assert len(set(values)) > 100
    assert np.mean(values) == pytest.approx(exact, abs=4 * np.std(values) / 200**0.5)


def test_mhe_min_distance_pushes_near_duplicates_with_bounded_force():
    w = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    w[1] = w[0] + 1e-5
    gradients = []
    for min_distance in (None, 0.1):
        leaf = w.clone().requires_grad_()
        MHE({"w": leaf}, min_distance=min_distance)().backward()
        gradients.append(leaf.grad[:2].norm().item())
        assert (leaf.grad[1] @ (w[1] - w[0])).item() < 0
    assert gradients[0] > 1e9
    assert gradients[1] < 1e4


def test_mhe_takes_attention_gates_and_experts_and_embeddings_on_request():
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(20, 8),
            "encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            "memory": nn.LSTM(8, 6),
            "head": AngularHead(6, 4),
        }
    )
    regularizer = MHE(model)
    names = [layer.name for layer in regularizer.selection]
    for name in ("encoder.self_attn.q", "encoder.self_attn.k", "encoder.self_attn.v", "encoder.linear2"):
        assert name in names
    assert any(name.startswith("memory") for name in names)
    assert [layer.name for layer in regularizer.selection.outputs] == ["head"]
    assert {skip.name: skip.reason for skip in regularizer.skipped}["words"].startswith("an embedding")
    regularizer().backward()
    assert model["encoder"].self_attn.in_proj_weight.grad.abs().sum() > 0
    assert model["words"].weight.grad is None
    more = MHE(model, embedding=0.5)().item() - regularizer().item()
    assert more == pytest.approx(0.5 * oracle.energy(model["words"].weight.detach().numpy(), 2), rel=1e-4)


def test_mhe_report_prints_taken_and_skipped_layers(capsys):
    MHE(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 4)), report=True)
    text = capsys.readouterr().out
    assert "0  hidden     8 neurons of 27 numbers" in text
    assert "1: one neuron per set" in text


def test_mhe_repr_lists_each_layer_once():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    assert repr(MHE(model)).startswith("MHE(hidden=1.0 of [0, 2], half space, output=1.0 of 4,")
    assert repr(MHE(model, half_space=False)).startswith("MHE(hidden=10.0 of [0, 2], full space, output")
    assert "1 in half space, 10 in full space, of [0, 2], half space in [2]," in repr(MHE(model, half_space=["2"]))
