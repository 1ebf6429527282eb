"""Every loop of the example trains rotations, and its adapter gives the trained model's outputs in the base model."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from processes import run_processes

FILE = Path(__file__).parents[2] / "examples" / "rotation_adapters.py"


def example():
    pytest.importorskip("transformers")
    specification = importlib.util.spec_from_file_location("rotation_adapters", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["rotation_adapters"] = module
    specification.loader.exec_module(module)
    return module


def check(module, model, folder):
    assert model is not None
    parameters = module.hs.rotation.rotation_parameters(model)
    assert all(float(p.detach().abs().max()) > 1e-3 for p in parameters)
    frozen = {id(p) for p in parameters}
    base = dict(module.base_model().named_parameters())
    for name, p in model.named_parameters():
        if id(p) not in frozen:
            plain = name.replace("parametrizations.weight.original", "weight")
            assert torch.equal(p, base[plain]), name
    assert module.largest_difference(model, folder) == 0


@pytest.mark.parametrize("name", ["with_trainer", "with_accelerate", "with_lightning", "with_checkpointing"])
def test_rotation_adapters_of_other_loops_load_into_the_base_model(name, tmp_path):
    package = {"with_lightning": "lightning"}.get(name, "accelerate")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    module = example()
    check(module, getattr(module, name)(str(tmp_path)), tmp_path)


@pytest.mark.slow
def test_rotation_adapters_of_compiled_models_load_into_the_base_model(tmp_path):
    module = example()
    model = module.with_compile(str(tmp_path), backend="aot_eager")
    check(module, model, tmp_path)
    eager = module.rotated_model()
    module.fit(eager)
    for ours, theirs in zip(*(module.hs.rotation.rotation_parameters(one) for one in (model, eager)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


def in_one_process(rank, folder):
    module = example()
    model = module.with_fsdp(folder)
    assert (model is not None) == (rank == 0)
    if rank == 0:
        check(module, model, folder)
        alone = module.rotated_model()
        module.fit(alone)  # all processes have the same batches, so the mean of their gradients is that of one
        pairs = zip(*(module.hs.rotation.rotation_parameters(one) for one in (model, alone)), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_rotation_adapters_of_fsdp_load_into_the_base_model(tmp_path):
    pytest.importorskip("transformers")
    run_processes(in_one_process, 2, tmp_path / "meeting", str(tmp_path / "adapter"))
    assert (tmp_path / "adapter").is_dir()  # what it holds is asserted in the first process
