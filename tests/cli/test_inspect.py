import json
import re

import numpy as np
import pytest
import torch
from report.document import Checker
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from hypersphere import energy
from hypersphere.energy import _weight_files
from hypersphere.report import layer_table, print_table

from .conftest import train


def mean_energy(w, half_space):
    """Return the mean of 1/d² over ordered pairs of directions, from the definition."""
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


def test_inspect_file_matches_the_definition(weights, succeeds, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    out = succeeds("inspect", tmp_path / "w.safetensors", "--json", tmp_path / "w.json", "--pairs", "2")
    assert re.search(r"wide.weight +\| 6×5", out)
    assert re.search(r"conv.weight +\| 4×12", out)
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


def test_inspect_page_is_complete_and_self_contained(weights, succeeds, tmp_path):
    torch.save({"state": weights, "epoch": 3}, tmp_path / "w.pt")
    out = succeeds("inspect", tmp_path / "w.pt", "--html", tmp_path / "deep" / "w.html")
    assert out.rstrip().endswith("w.html")
    page = (tmp_path / "deep" / "w.html").read_text(encoding="utf-8")
    for word in ("state.wide.weight", "state.conv.weight", "Energy relative to random neurons", "Extreme pairs"):
        assert word in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    pairs = re.search("Extreme pairs</h2>.*?</table>", page, re.S)[0]
    assert pairs.count("state.wide.weight") == 1  # one row per layer
    rows = weights["wide.weight"].double().numpy()
    assert f":\N{NO-BREAK SPACE}{np.degrees(nearest_angle(rows)):.1f}°" in pairs
    for words in ("Nearest is the smallest angle", "Covering is the largest angle", "Rank is the effective number"):
        assert words in page


def test_inspect_run_shows_its_rotated_weights(rotated, succeeds, tmp_path):
    out = succeeds("inspect", rotated.folder, "--json", tmp_path / "r.json")
    assert "parametrizations" not in out
    found = {layer["name"]: layer for layer in json.loads((tmp_path / "r.json").read_text())["layers"]}
    experiment = rotated.experiment()
    modules = nn.ModuleDict({"network": experiment.network.body, "head": experiment.head})
    turned = {name: module for name, module in modules.named_modules() if hasattr(module, "parametrizations")}
    assert set(found) == {*turned, "head"}
    for name, module in turned.items():
        w = module.weight.detach().flatten(1).double().numpy()
        energies = {tuple(e[k] for k in ("power", "distance", "half_space")): e for e in found[name]["energies"]}
        assert energies[2, "euclidean", False]["value"] == pytest.approx(mean_energy(w, False), rel=1e-4)
        assert found[name]["separation"] == pytest.approx(nearest_angle(w), rel=1e-3)


def test_inspect_shows_the_checkpoint_of_a_step(succeeds, fails, tmp_path):
    run = train(tmp_path / "run", epochs=2, save_every=0, keep=9)
    first, *_, last = sorted(run.checkpoints().steps())
    written = []
    for step in (first, last, None):
        words = [] if step is None else ["--step", step]
        succeeds("inspect", run.folder, "--json", tmp_path / "r.json", *words)
        written.append(json.loads((tmp_path / "r.json").read_text())["layers"])
        (tmp_path / "r.json").unlink()
    assert written[0] != written[1] == written[2]
    save_file({"w": torch.eye(3)}, tmp_path / "w.safetensors")
    message = "--step must be omitted unless RUN is the folder of a run, not 3"
    assert message in fails(2, "inspect", tmp_path / "w.safetensors", "--step", 3)


def test_inspect_table_fits_a_terminal_and_shows_no_infinity(capsys):
    """The layers of toy_cnn: 3-d features, whose random energy is infinite, and long names."""
    sizes = {"stages.0": (32, 9), "stages.10": (32, 288), "stages.12": (128, 1152), "feature": (3, 1024)}
    layers = {f"network.{name}": torch.randn(size, generator=torch.Generator()) for name, size in sizes.items()}
    found = energy.inspect({**layers, "head": torch.randn(10, 3, generator=torch.Generator())})
    print_table(layer_table(found), Console(width=80, force_terminal=True, no_color=True))
    lines = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if "stages.10" in line]
    assert "32×288" in row
    assert "°" in row
    (head,) = [line for line in lines if line.strip().startswith("head")]
    assert head.count("–") == 2
    assert not any("inf" in line for line in lines if "finite" not in line)


def test_inspect_page_shows_norms_holes_and_orthogonality(succeeds, tmp_path):
    w = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 5.0], [0.0, 3.0, 4.0]])
    save_file({"few": w}, tmp_path / "w.safetensors")
    succeeds("inspect", tmp_path / "w.safetensors", "--html", tmp_path / "w.html", "--json", tmp_path / "w.json")
    html = (tmp_path / "w.html").read_text(encoding="utf-8")
    texts = Checker(html).texts
    for heading in ("largest hole", "orthogonality error", "mean norm", "smallest norm", "largest norm"):
        assert any(heading in words for words in texts["th"])
    assert texts["th"].count("random") == 0  # headings must be understandable without their neighbours
    for cell in ("4.250", "3.000", "5.000"):  # mean, smallest and largest norm
        assert cell in texts["td"]
    error = np.sqrt((0.6**2 + 0.8**2) / 6)
    assert f"{error:.3f}" in texts["td"]
    hole = json.loads((tmp_path / "w.json").read_text())["layers"][0]["hole_radius"]
    assert f"{np.degrees(hole):.1f}°" in texts["td"]
    save_file({"wide": torch.eye(4)}, tmp_path / "v.safetensors")
    succeeds("inspect", tmp_path / "v.safetensors", "--html", tmp_path / "v.html")
    assert "largest hole" not in (tmp_path / "v.html").read_text(encoding="utf-8")


def test_inspect_reports_damage_in_a_later_tensor(weights, fails, monkeypatch, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    whole = _weight_files._read_safetensors

    def broken(file):
        yield next(iter(whole(file)))
        raise _weight_files.UnreadableWeights(f"{file} cannot be opened as a file of weights")

    monkeypatch.setattr(_weight_files, "_read_safetensors", broken)
    assert "cannot be opened" in fails(3, "inspect", tmp_path / "w.safetensors")


def test_inspect_reads_the_folder_of_another_library(weights, succeeds, tmp_path):
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    assert re.search(r"wide.weight +\| 6×5", succeeds("inspect", tmp_path))


def test_inspect_escapes_control_characters_in_names(succeeds, tmp_path):
    save_file({"evil\x1b[2Jname": torch.eye(4)}, tmp_path / "w.safetensors")
    out = succeeds("inspect", tmp_path / "w.safetensors")
    assert "\x1b" not in out
    assert "evil" in out


class Evil:
    def __reduce__(self):
        return (open, ("ran", "w"))


def test_inspect_rejects_files_that_are_not_weights(weights, fails, monkeypatch, tmp_path):
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
    assert "not 'nothing.pt', which does not exist" in fails(2, "inspect", "nothing.pt")
    (tmp_path / "notes.txt").write_text("no weights")
    assert "must be a .safetensors file or one of .pt" in fails(2, "inspect", "notes.txt")
    save_file({"bias": torch.zeros(3)}, "thin.safetensors")
    assert "must have a layer with at least two finite neurons" in fails(2, "inspect", "thin.safetensors")
    assert "--html must be a file with suffix .html" in fails(2, "inspect", "whole.safetensors", "--html", "page.txt")
    assert not (tmp_path / "page.html").exists()
