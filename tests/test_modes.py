import ast
from pathlib import Path

import pytest
from torch import nn

import hypersphere
from hypersphere._modes import evaluation_mode


def modes(*modules):
    return [part.training for module in modules for part in module.modules()]


def test_evaluation_mode_restores_every_submodule():
    shared = nn.Dropout()
    first, second = nn.Sequential(shared, nn.Linear(2, 2).eval()), nn.Sequential(shared, nn.BatchNorm1d(2))
    before = modes(first, second)
    with evaluation_mode(first, second):
        assert not any(modes(first, second))
    assert modes(first, second) == before


def test_evaluation_mode_restores_modes_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with pytest.raises(RuntimeError, match="stop"), evaluation_mode(model):
        raise RuntimeError("stop")
    assert modes(model) == [True, True, False]


def test_evaluation_mode_ignores_what_is_not_a_module():
    model = nn.Dropout()
    with evaluation_mode(abs, None, model, "text"):
        assert not model.training
    assert model.training


def test_evaluation_mode_does_not_call_overridden_methods():
    class Merging(nn.Module):
        def train(self, mode=True):
            raise AssertionError("train must not be called")

    model = Merging()
    with evaluation_mode(model):
        assert not model.training
    assert model.training


def test_evaluation_mode_is_the_only_place_that_sets_the_flag():
    package = Path(hypersphere.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            sets_flag = any(isinstance(target, ast.Attribute) and target.attr == "training" for target in targets)
            assert not sets_flag or path.name == "_modes.py", f"{path.relative_to(package)}:{node.lineno}"
