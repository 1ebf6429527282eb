import json

import pytest
import torch

from hypersphere.training import DamagedCheckpoint, Job
from hypersphere.training.run import Run
from hypersphere.training.session import Session

SMALL = {
    "data": {"name": "digits", "limit": 40},
    "model": {"name": "mlp", "widths": [6]},
    "batch_size": 16,
    "epochs": 2,
}


def test_a_run_is_what_was_written(tmp_path):
    job = Job.of({**SMALL, "head": {"name": "arcface", "s": 20.0}})
    run = Run.create(tmp_path / "new" / "run", job)
    again = Run.open(tmp_path / "new" / "run")
    assert again.job == job == run.job
    assert again.made_with == run.made_with
    assert again.made_with["torch"] == torch.__version__
    content = json.loads((run.folder / "config.json").read_text())
    assert content["format"] == 1
    assert Job.of(content["settings"]) == job
    assert [path.name for path in run.folder.iterdir()] == ["config.json"]
    assert run.metrics() == []
    with pytest.raises(ValueError, match="has a run already"):
        Run.create(run.folder, job)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is no run of `hypersphere train`: config.json: No such file"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must be a folder that can be written"):
        Run.create("/proc/nowhere", Job())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be a folder that can be written"):
        Run.create(tmp_path / "file", Job())
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", '{"format": 1}', '"format"', "\x00"])
def test_damaged_settings(tmp_path, broken):
    (tmp_path / "config.json").write_text(broken)
    with pytest.raises(DamagedCheckpoint, match=r"config\.json is damaged"):
        Run.open(tmp_path)


def test_settings_of_another_format(tmp_path):
    (tmp_path / "config.json").write_text('{"format": 2, "settings": {}, "made_with": {}}')
    with pytest.raises(ValueError, match="must be of format 1, not 2"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1, "settings": {"epoch": 1}, "made_with": {}}')
    with pytest.raises(ValueError, match="epoch is no setting of a job; did you mean epochs"):
        Run.open(tmp_path)


def test_numbers_are_kept_line_by_line(tmp_path):
    run = Run.create(tmp_path, Job())
    lines = [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "epoch", "epoch": 1, "energy": {"head": 1.5}}]
    for line in lines:
        run.log(line)
    run.log({"loss": float("nan"), "energy": {"head": float("inf")}})
    assert run.metrics() == [*lines, {"loss": None, "energy": {"head": None}}]
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "st')  # a write that a kill cut off
    assert len(run.metrics()) == 3
    run.rewind(lambda line: line.get("kind") == "step")
    assert run.metrics() == lines[:1]
    path.write_text(whole.replace('{"kind": "epoch"', '{"kind": epoch"'))
    with pytest.raises(DamagedCheckpoint, match="line 2 of"):
        run.metrics()


def test_an_assembly_has_the_weights_of_the_last_good_checkpoint(tmp_path):
    run = Run.create(tmp_path, Job.of(SMALL))
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        run.assembly()
    session = Session(run, run.job.build(), save_every=0)
    assert session.train()
    trained = session.assembly.objective.state_dict()
    found = Run.open(tmp_path).assembly()
    assert not found.objective.training
    assert all(torch.equal(found.objective.state_dict()[key], value) for key, value in trained.items())
    *_, last = sorted((tmp_path / "checkpoints").iterdir())
    (last / "weights.safetensors").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="step-00000006 is damaged: .*; using step-00000005 instead"):
        older = run.assembly()
    assert any(not torch.equal(older.objective.state_dict()[key], value) for key, value in trained.items())
    for other in (tmp_path / "checkpoints").iterdir():
        (other / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="no good checkpoint in"):
        run.assembly()
