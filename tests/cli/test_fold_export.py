import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hypersphere.layers import DecoupledLinear, equivalent_weight
from hypersphere.models import export as exporting
from hypersphere.training import Run

from .conftest import train


def outputs(run):
    experiment = run.experiment()
    x = experiment.data.validation.inputs[:40].float() / 255
    with torch.no_grad():
        features = experiment.network(x)
        return x.numpy(), features.numpy(), experiment.head.scores(features).numpy()


def test_fold_makes_a_rotated_run_plain(rotated, succeeds, fails, tmp_path):
    out = succeeds("fold", rotated.folder, "--out", tmp_path / "plain")
    folded = Run.open(tmp_path / "plain")
    assert folded.config.rotation.name == "none"
    assert folded.config.head == rotated.config.head
    for before, after in zip(outputs(rotated), outputs(folded), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    assert not any("parametrizations" in name for name in weights)
    assert weights["network.body.stages.0.weight"].shape == (4, 1, 3, 3)
    assert "folded 5 rotated and 0 decoupled layers" in out
    assert (
        succeeds("evaluate", tmp_path / "plain", "--bootstrap", 0).splitlines()[1:]
        == succeeds("evaluate", rotated.folder, "--bootstrap", 0).splitlines()[1:]
    )
    assert "plain has no best checkpoint" in fails(2, "evaluate", tmp_path / "plain", "--step", "best")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("weighting", [None, "linear"])
def test_fold_replaces_linear_operators_by_convolutions(weighting, succeeds, tmp_path):
    operator = {"name": "linear", "alpha": 1.5, "weighting": weighting}
    run = train(tmp_path / "run", operator=operator, rotation="householder", epochs=1)
    assert "folded 5 rotated and 4 decoupled layers" in succeeds("fold", run.folder)
    folded = Run.open(run.folder / "folded")
    assert type(folded.experiment().network.body.stages[0]) is torch.nn.Conv2d
    for before, after in zip(outputs(run), outputs(folded), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
    if weighting is None:
        rows = load_file(folded.folder / "model.safetensors")["network.body.stages.2.weight"].flatten(1)
        np.testing.assert_allclose(rows.norm(dim=1), 1.5, rtol=1e-5)


@pytest.mark.slow
def test_fold_keeps_operators_that_depend_on_patch_norms(fails, succeeds, tanh, tmp_path):
    line = fails(2, "fold", tanh.folder)
    assert "cannot be folded: 4 layers with the operator 'tanh', which depends on the norm of each patch" in line
    both = train(tmp_path / "both", operator="sphere_norm", rotation="cayley", epochs=1)
    assert "not folded: 4 layers with the operator 'sphere_norm'" in succeeds("fold", both.folder)
    folded = Run.open(both.folder / "folded")
    assert folded.config.operator.name == "sphere_norm"
    for before, after in zip(outputs(both), outputs(folded), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("angular", ["linear", "sigmoid"])
def test_equivalent_weight_is_none_for_other_angular_activations(angular):
    assert equivalent_weight(DecoupledLinear(4, 3, magnitude="linear", angular=angular)) is None


def test_fold_rejects_plain_runs_and_occupied_folders(plain, rotated, fails, tmp_path, monkeypatch):
    assert "cannot be folded: all its layers are plain" in fails(2, "fold", plain.folder)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    assert "--out must be a new or an empty folder" in fails(2, "fold", rotated.folder, "--out", tmp_path / "there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "mine"]
    (tmp_path / "there" / "mine").unlink()
    monkeypatch.chdir(tmp_path / "there")
    assert "--out must be another folder than the current one, not '.'" in fails(
        2, "fold", rotated.folder, "--out", "."
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotated", "tanh"])
def test_export_to_torch_computes_the_same_outputs(name, request, succeeds, tmp_path):
    run = request.getfixturevalue(name)
    out = succeeds("export", run.folder, "--to", "torch", "--out", tmp_path / "m.pt2")
    assert "N x 1 x 8 x 8" in out
    x, features, scores = outputs(run)
    with torch.no_grad():
        found = torch.export.load(tmp_path / "m.pt2").module()(torch.from_numpy(x))
    np.testing.assert_allclose(found[0], features, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[1], scores, rtol=1e-3, atol=1e-4)
    card = json.loads((tmp_path / "m.pt2.json").read_text())
    assert card["input"]["shape"] == ["N", 1, 8, 8]
    assert (card["input"]["dtype"], card["input"]["range"], card["input"]["channels"]) == ("float32", [0, 1], "grey")
    assert card["outputs"][0]["shape"] == ["N", 6]
    assert card["classes"] == [str(digit) for digit in range(10)]
    succeeds("export", run.folder, "--to", "torch", "--out", tmp_path / "m.pt2")  # its own files are replaced


def test_export_reads_pixels_as_bytes(plain, succeeds, tmp_path):
    succeeds("export", plain.folder, "--to", "torch", "--out", tmp_path / "m.pt2", "--input", "uint8")
    _, features, _ = outputs(plain)
    with torch.no_grad():
        found = torch.export.load(tmp_path / "m.pt2").module()(plain.experiment().data.validation.inputs[:40])
    np.testing.assert_allclose(found[0], features, rtol=1e-3, atol=1e-4)
    assert json.loads((tmp_path / "m.pt2.json").read_text())["input"]["range"] == [0, 255]


def test_export_does_not_replace_files_of_others(plain, fails, tmp_path):
    for name in ("m.pt2", "m.pt2.json"):
        (tmp_path / name).write_text("mine")
        line = fails(2, "export", plain.folder, "--to", "torch", "--out", tmp_path / "m.pt2")
        assert f"{tmp_path / name} exists and was not written by this command" in line
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


@pytest.mark.filterwarnings("ignore")
def test_export_to_onnx_computes_the_same_outputs(rotated, succeeds):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    succeeds("export", rotated.folder)
    session = onnxruntime.InferenceSession(rotated.folder / "model.onnx", providers=["CPUExecutionProvider"])
    x, features, scores = outputs(rotated)
    found = session.run(["features", "scores"], {"inputs": x})
    np.testing.assert_allclose(found[0], features, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[1], scores, rtol=1e-3, atol=1e-4)


def test_export_writes_no_file_if_outputs_differ(plain, fails, monkeypatch, tmp_path):
    read = exporting._program_reader
    wrong = lambda path, names: lambda x: [1.01 * part for part in read(path, names)(x)]  # noqa: E731
    monkeypatch.setattr(exporting, "_program_reader", wrong)
    line = fails(2, "export", plain.folder, "--to", "torch", "--out", tmp_path / "m.pt2")
    assert "exported outputs must be within 0.0001 of those of the model" in line
    assert list(tmp_path.iterdir()) == []


def test_export_reports_a_failing_exporter_in_one_line(plain, fails, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("no such operator\nand much more")

    monkeypatch.setattr(exporting, "_write_program", fail)
    line = fails(2, "export", plain.folder, "--to", "torch", "--out", tmp_path / "m.pt2")
    assert line.endswith("cannot be exported to torch: no such operator\n")
    assert list(tmp_path.iterdir()) == []


def test_export_names_missing_packages_and_invalid_options(plain, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "this needs onnxscript: pip install 'torch-hypersphere[onnx]'" in fails(2, "export", plain.folder)
    assert "--to must be one of onnx, torch, not 'caffe'" in fails(2, "export", plain.folder, "--to", "caffe")
    assert "--out must be a file with suffix .onnx" in fails(2, "export", plain.folder, "--out", "m.pt2")
