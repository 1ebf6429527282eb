import pytest
import torch
from torch import nn

from hypersphere.heads import a_softmax, softmax
from hypersphere.models.weights import load_matching_weights_


def parts(seed, classes=3):
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    body[1].running_mean.normal_()
    network = nn.Module()
    network.body = body
    return network, softmax(2, classes)


def named(network, head):
    own = {f"network.{name}": value.clone() for name, value in network.state_dict().items()}
    return own | {f"head.{name}": value.clone() for name, value in head.state_dict().items()}


RENAMED = {
    "an objective": lambda name: name,
    "a checkpoint": lambda name: f"objective.{name}",
    "a network": lambda name: name.removeprefix("network."),
    "a body": lambda name: name.removeprefix("network.body."),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_load_matching_weights_understands_names_of_all_kinds_of_files(kind):
    theirs, ours = named(*parts(1)), parts(2)
    if kind in ("a network", "a body"):
        theirs = {name: value for name, value in theirs.items() if name.startswith("network.")}
    drawn = ours[1].weight.clone()
    found = load_matching_weights_(*ours, {RENAMED[kind](name): value for name, value in theirs.items()})
    now = named(*ours)
    assert set(found.loaded) == set(theirs)
    assert all(torch.equal(now[name], value) for name, value in theirs.items())
    assert found.unused == ()
    assert found.initialized == (() if "head.weight" in theirs else ("head.weight",))
    assert torch.equal(ours[1].weight, drawn) == ("head.weight" not in theirs)


def test_load_matching_weights_reports_what_does_not_match():
    network, head = parts(1, classes=7)
    theirs = {**named(network, head), "network.body.0.weight": torch.ones(6, 4), "network.extra": torch.ones(2)}
    theirs["regularizers.0.count"] = torch.ones(())
    ours = parts(2)
    before = named(*ours)
    found = load_matching_weights_(*ours, theirs)
    assert found.initialized == ("network.body.0.weight", "head.weight")
    assert set(found.unused) == {
        "network.body.0.weight (6×4, not 5×4)",
        "head.weight (7×2, not 3×2)",
        "network.extra",
    }
    now = named(*ours)
    for name in before:
        expected = before if name in found.initialized else theirs
        assert torch.equal(now[name], expected[name]), name
    words = str(found)
    assert words.startswith("loaded 8 tensors (network.body.0.bias, ")
    assert "and 2 more); randomly initialised: network.body.0.weight, head.weight; not loaded: " in words


def test_load_matching_weights_loads_a_head_completely_or_not_at_all():
    head = a_softmax(2, 3, annealing=None)
    source = {"head.weight": torch.ones(3, 2), "head.steps": torch.tensor(9)}
    ours = parts(2)[0], nn.ParameterDict({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"none of the initial weights matches: the file has head\.weight"):
        load_matching_weights_(*ours, source)
    assert not ours[1]["weight"].any()
    head.register_buffer("steps", torch.tensor(0))
    found = load_matching_weights_(ours[0], head, source)
    assert found.loaded == ("head.weight",)
    assert found.unused == ("head.steps",)
    assert head.steps == 0


def test_load_matching_weights_rejects_buffers_without_weights():
    network, head = parts(1)
    with pytest.raises(ValueError, match="none of the initial weights matches"):
        load_matching_weights_(network, head, {"network.body.1.running_mean": torch.ones(5)})
    assert not torch.equal(network.body[1].running_mean, torch.ones(5))
    with pytest.raises(ValueError, match="the file has nothing; the model has network"):
        load_matching_weights_(network, head, {})
