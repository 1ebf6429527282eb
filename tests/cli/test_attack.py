import json

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from .conftest import train


def accuracy(run, source, epsilon, count):
    """Return the accuracy of a run on images moved by ε along the gradient sign of the cross entropy of `source`."""
    victim, model = source.experiment(), run.experiment()
    x = (victim.data.validation.inputs[:count].float() / 255).requires_grad_()
    y = victim.data.validation.labels[:count]
    (slope,) = torch.autograd.grad(F.cross_entropy(victim.head.scores(victim.network(x)), y), x)
    moved = (x + epsilon * slope.sign()).clamp(0, 1)
    with torch.no_grad():
        return float((model.head.scores(model.network(moved)).argmax(1) == y).float().mean())


def test_attack_fgsm_matches_its_definition_white_box_and_transferred(plain, tanh, succeeds, tmp_path):
    words = ["--epsilon", "2/255,0.1", "--limit", "60", "--json", tmp_path / "a.json"]
    out = succeeds("attack", plain.folder, *words, "--plot", tmp_path / "a.png")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["epsilons"] == [2 / 255, 0.1]
    assert found["clean"] == pytest.approx(accuracy(plain, plain, 0.0, 60))
    assert found["accuracies"] == pytest.approx([accuracy(plain, plain, e, 60) for e in (2 / 255, 0.1)])
    assert found["accuracies"][1] < found["clean"]
    assert "60 test images; attacks crafted on the" in out
    with Image.open(tmp_path / "a.png") as image:
        assert image.text["Software"] == "written by hypersphere"
    succeeds("attack", plain.folder, "--source", tanh.folder, *words)
    moved = json.loads((tmp_path / "a.json").read_text())
    assert moved["transferred"]
    assert moved["accuracies"] == pytest.approx([accuracy(plain, tanh, e, 60) for e in (2 / 255, 0.1)])


def test_attack_bim_is_at_least_as_strong_as_fgsm(plain, succeeds, tmp_path):
    accuracies = []
    for name in ("fgsm", "bim"):
        succeeds("attack", plain.folder, "--attack", name, "--epsilon", "0.1", "--json", tmp_path / "a.json")
        accuracies += json.loads((tmp_path / "a.json").read_text())["accuracies"]
    assert accuracies[1] <= accuracies[0]


def test_attack_deepfool_fools_most_images(plain, succeeds, tmp_path):
    words = ["--attack", "deepfool", "--limit", "40", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    out = succeeds("attack", plain.folder, *words)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["fooled"] > 0.9
    assert 0 < found["median_linf"] < found["median_l2"]
    assert "median strength, l2" in out
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_attack_rejects_invalid_input_without_writing(plain, draw_images, fails, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {f"{kind}/{n}.png": 20 * n for kind in "ab" for n in range(3)}
    draw_images(tmp_path / "images", names)
    data = {"name": "image_folder", "path": str(tmp_path / "images"), "size": 12}
    other = train(tmp_path / "other", data=data, epochs=1)
    before = sorted(tmp_path.rglob("*"))
    for words, message in [
        (["--attack", "nonsense"], "--attack must be one of fgsm, bim, deepfool, not 'nonsense'"),
        (["--epsilon", "much"], "--epsilon must be numbers separated by commas, not 'much'"),
        (["--epsilon", "-1"], "epsilons must be a sequence of numbers >= 0"),
        (["--epsilon", "300"], "epsilon must be a number in [0, 1]"),
        (["--attack", "deepfool", "--norm", "l3"], "norm must be 'l2' or 'linf'"),
        (["--source", other.folder], "--source must be a run on inputs of shape (1, 8, 8), not (1, 12, 12)"),
        (
            ["--source", "nowhere"],
            "--source must be the folder of a run of `hypersphere train` (with a config.json), not",
        ),
        (["--norm", "linf"], "--norm must be omitted with --attack fgsm, not 'linf'"),
        (["--attack", "deepfool", "--epsilon", "0.1"], "--epsilon must be omitted with --attack deepfool, not '0.1'"),
        (["--plot", "a.pdf"], "--plot must be a file with suffix .png"),
    ]:
        assert message in fails(2, "attack", plain.folder, *words, "--json", "a.json")
    assert sorted(tmp_path.rglob("*")) == before
