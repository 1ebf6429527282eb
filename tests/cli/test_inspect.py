import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn


def mean_energy(w, half_space):
    """The mean of 1/d² over ordered pairs of directions, by the definition."""
    w = w / np.linalg.norm(w, axis=1, keepdims=True)
    w = np.concatenate([w, -w]) if half_space else w
    pairs = [1 / ((a - b) ** 2).sum() for i, a in enumerate(w) for j, b in enumerate(w) if i != j]
    return np.mean(pairs)


def nearest_angle(w):
    w = w / np.linalg.norm(w, axis=1, keepdims=True)
    return np.arccos((w @ w.T - 2 * np.eye(len(w))).max())


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "wide.weight": torch.randn(6, 5, generator=generator),
        "conv.weight": torch.randn(4, 3, 2, 2, generator=generator),
        "bias": torch.zeros(6),
        "broken": torch.full((3, 3), torch.nan),
    }


def test_a_file_of_weights(weights, succeeds, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    out = succeeds("inspect", tmp_path / "w.safetensors", "--json", tmp_path / "w.json", "--pairs", "2")
    assert re.search(r"wide.weight +\| 6 x 5", out)
    assert re.search(r"conv.weight +\| 4 x 12", out)
    assert "broken: not finite" in out
    found = {layer["name"]: layer for layer in json.loads((tmp_path / "w.json").read_text())["layers"]}
    for name, layer in found.items():
        assert len(layer["nearest"]) == 2
        for half_space in (False, True):
            (value,) = (
                energy["value"]
                for energy in layer["energies"]
                if (energy["power"], energy["distance"], energy["half_space"]) == (2, "euclidean", half_space)
            )
            rows = weights[name].flatten(1).double().numpy()
            assert value == pytest.approx(mean_energy(rows, half_space), rel=1e-4)


def test_the_page_holds_all_and_asks_for_nothing(weights, succeeds, tmp_path):
    torch.save({"state": weights, "epoch": 3}, tmp_path / "w.pt")
    out = succeeds("inspect", tmp_path / "w.pt", "--html", tmp_path / "deep" / "w.html")
    assert out.rstrip().endswith("w.html")
    page = (tmp_path / "deep" / "w.html").read_text(encoding="utf-8")
    for word in ("state.wide.weight", "state.conv.weight", "Energy beside that of random neurons", "Pairs that stand"):
        assert word in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)


def test_a_run_shows_its_rotated_weights(rotated, succeeds, tmp_path):
    out = succeeds("inspect", rotated.folder, "--json", tmp_path / "r.json")
    assert "parametrizations" not in out
    found = {layer["name"]: layer for layer in json.loads((tmp_path / "r.json").read_text())["layers"]}
    assembly = rotated.assembly()
    modules = nn.ModuleDict({"network": assembly.network.body, "head": assembly.head})
    turned = {name: module for name, module in modules.named_modules() if hasattr(module, "parametrizations")}
    assert set(found) == {*turned, "head"}
    for name, module in turned.items():
        w = module.weight.detach().flatten(1).double().numpy()
        energies = {tuple(e[k] for k in ("power", "distance", "half_space")): e for e in found[name]["energies"]}
        assert energies[2, "euclidean", False]["value"] == pytest.approx(mean_energy(w, False), rel=1e-4)
        assert found[name]["separation"] == pytest.approx(nearest_angle(w), rel=1e-3)


class Evil:
    def __reduce__(self):
        return (open, ("ran", "w"))


def test_what_is_no_file_of_weights(weights, fails, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Evil()}, "evil.pt")
    save_file(weights, "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(content[:-9])
    (tmp_path / "text.pth").write_text("no weights")
    for name in ("evil.pt", "half.safetensors", "text.pth"):
        assert "cannot be opened as a file of weights, without running code" in fails(
            3, "inspect", name, "--html", "page.html"
        )
    fails(3, "inspect", ".")  # a folder of safetensors, one of them damaged
    assert not (tmp_path / "ran").exists()
    assert "not found" in fails(2, "inspect", "nothing.pt")
    (tmp_path / "notes.txt").write_text("no weights")
    assert "must be a .safetensors file or one of .pt" in fails(2, "inspect", "notes.txt")
    save_file({"bias": torch.zeros(3)}, "thin.safetensors")
    assert "one with a matrix of two finite neurons" in fails(2, "inspect", "thin.safetensors")
    assert "--html must be a file that ends in .html" in fails(2, "inspect", "whole.safetensors", "--html", "page.txt")
    assert not (tmp_path / "page.html").exists()
