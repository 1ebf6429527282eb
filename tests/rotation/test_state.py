"""What survives: folding and going on, several sets of rotations, saving and loading, devices without float64."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hypersphere.rotation import Stochastic, fold_, measure, rotate_, rotation_parameters, use

from .test_rotate import mlp, shake_


def test_fold_and_go_on_keeps_outputs_and_parameters():
    model = rotate_(mlp(), "lowdin")
    shake_(model)
    x, parameters = torch.randn(4, 10), rotation_parameters(model)
    y = model(x)
    fold_(model, keep=True)
    torch.testing.assert_close(model(x), y, atol=1e-6, rtol=0)
    assert all(a is b for a, b in zip(parameters, rotation_parameters(model), strict=True))
    assert measure(model)["0"].energy_drift == 0
    assert torch.equal(parameters[0].detach(), torch.eye(10))


def test_several_rotation_sets_over_one_set_of_neurons():
    model, x = rotate_(mlp()), torch.randn(4, 10)
    start = model(x)
    use(model, "other")
    torch.testing.assert_close(model(x), start)
    with torch.no_grad():
        model[0].parametrizations.weight[0].parameter.add_(0.3)
    turned = model(x)
    assert (turned - start).abs().max() > 1e-3
    use(model, "main")
    assert torch.equal(model(x), start)
    use(model, "other")
    with pytest.raises(ValueError, match="keep must be False where there are several sets"):
        fold_(model, keep=True)
    torch.testing.assert_close(fold_(model)(x), turned, atol=1e-6, rtol=0)


def test_the_set_in_use_is_part_of_the_state():
    model, x = rotate_(mlp()), torch.randn(4, 10)
    assert not any("active" in key for key in model.state_dict())  # one set needs no name
    use(model, "other")
    shake_(model)
    turned, state = model(x), model.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    use(model, "main")
    assert (model(x) - turned).abs().max() > 1e-3
    model.load_state_dict(state)
    assert torch.equal(model(x), turned)
    assert torch.equal(copy.deepcopy(model)(x), turned)
    fresh = rotate_(mlp())
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"'other' in use, but there is only 'main': call use\(model, 'other'\)"):
            fresh.load_state_dict(state, strict=strict)
    use(fresh, "other")
    use(fresh, "main")
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), turned)
    use(model, "main")
    rest = rotate_(mlp()).load_state_dict(model.state_dict(), strict=False)
    assert [key.rsplit(".", 1)[1] for key in rest.unexpected_keys] == ["other", "other"]


def test_folding_and_measuring_go_to_the_host_where_a_device_has_no_float64(monkeypatch):
    model, expected, x = mlp(), mlp(), torch.randn(4, 10)
    for m in (model, expected):
        Stochastic(m, 0.5, every=1, generator=torch.Generator().manual_seed(0)).step()
        rotate_(m[4], "lowdin")
        shake_(m)
    fold_(expected, keep=True)
    errors = measure(expected)
    double, host, hosted = torch.Tensor.double, torch.Tensor.cpu, []

    def without_float64(tensor):
        if not any(tensor is other for other in hosted):
            raise TypeError("this device has no float64")
        return double(tensor)

    def to_host(tensor):
        hosted.append(host(tensor).clone())
        return hosted[-1]

    monkeypatch.setattr(torch.Tensor, "double", without_float64)
    monkeypatch.setattr(torch.Tensor, "cpu", to_host)
    fold_(model, keep=True)
    assert hosted
    assert measure(model) == errors
    monkeypatch.undo()
    torch.testing.assert_close(model(x), expected(x), atol=0, rtol=0)


FRESH = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from rotation.test_rotate import mlp
from hypersphere.rotation import Stochastic, fold_, rotate_, use

def several(model):
    rotate_(model)
    for name in ("third", "second", "main"):
        use(model, name)

saved = torch.load(sys.argv[1])
makers = {"whole": lambda m: rotate_(m, "gram_schmidt"), "partial": lambda m: Stochastic(m, 0.5, 3), "several": several}
for key, convert in makers.items():
    model = mlp()
    convert(model)
    model.load_state_dict(saved[key])
    torch.testing.assert_close(model(saved["x"]), saved[key + "_y"], atol=1e-6, rtol=0)
    torch.testing.assert_close(fold_(model)(saved["x"]), saved[key + "_y"], atol=1e-6, rtol=0)
print("same")
"""


def test_saved_trained_and_loaded_in_a_fresh_process_and_folded(tmp_path):
    saved = {"x": torch.randn(4, 10)}
    whole, partial, several = rotate_(mlp(), "gram_schmidt"), mlp(), rotate_(mlp())
    stochastic = Stochastic(partial, 0.5, 3)
    for name in ("second", "third", "second"):  # which is in use at the end is saved too, by name
        use(several, name)
    for key, model in (("whole", whole), ("partial", partial), ("several", several)):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(7):
            optimizer.zero_grad()
            model(saved["x"]).square().sum().backward()
            optimizer.step()
            if key == "partial":
                stochastic.step(optimizer)
        saved |= {key: model.state_dict(), key + "_y": model(saved["x"]).detach()}
    torch.save(saved, tmp_path / "model.pt")
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "model.pt"), tests], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "same", done.stderr
