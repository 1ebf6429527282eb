import errno
import json
from pathlib import Path

import pytest
import torch

from hypersphere.training import DamagedCheckpoint, Job, lock
from hypersphere.training.job_run import Run
from hypersphere.training.session import Session

SMALL = {
    "data": {"name": "digits", "limit": 40},
    "model": {"name": "mlp", "widths": [6]},
    "batch_size": 16,
    "epochs": 2,
}


def test_run_open_returns_what_create_wrote(tmp_path):
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
    with pytest.raises(ValueError, match="already holds a run"):
        Run.create(run.folder, job)
    assert Run.open(run.folder).start is None
    assert Run.open(Run.create(tmp_path / "other", job, start="somewhere").folder).start == "somewhere"


def test_run_alone_locks_the_folder(tmp_path):
    run = Run.create(tmp_path, Job())
    with (
        run.alone(),
        pytest.raises(ValueError, match="is in use by another training process"),
        Run.open(tmp_path).alone(),
    ):
        pass
    with run.alone():
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_run_alone_works_on_a_disk_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    run = Run.create(tmp_path, Job())
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with run.alone(), run.alone():
        pass


def test_run_open_and_create_reject_invalid_folders(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a run of `hypersphere train`: config.json: No such file"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must be a writable folder"):
        Run.create("/proc/nowhere", Job())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be a writable folder"):
        Run.create(tmp_path / "file", Job())
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", '{"format": 1}', '"format"', "\x00"])
def test_run_open_reports_damaged_settings(tmp_path, broken):
    (tmp_path / "config.json").write_text(broken)
    with pytest.raises(DamagedCheckpoint, match=r"config\.json is damaged"):
        Run.open(tmp_path)


def test_run_open_rejects_another_format(tmp_path):
    (tmp_path / "config.json").write_text('{"format": 2, "settings": {}, "made_with": {}}')
    with pytest.raises(ValueError, match="must have format 1, not 2"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1, "settings": {"epoch": 1}, "made_with": {}}')
    with pytest.raises(ValueError, match="epoch is not a setting of a job; did you mean epochs"):
        Run.open(tmp_path)


def test_run_log_and_metrics_round_trip(tmp_path):
    run = Run.create(tmp_path, Job())
    lines = [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "epoch", "epoch": 1, "energy": {"head": 1.5}}]
    for line in lines:
        run.log(line)
    run.log({"loss": float("nan"), "energy": {"head": float("inf")}})
    assert run.metrics() == [*lines, {"loss": None, "energy": {"head": None}}]
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "st')  # a write that was interrupted by a kill
    assert len(run.metrics()) == 3
    run.rewind(lambda line: line.get("kind") == "step")
    assert run.metrics() == lines[:1]
    path.write_text(whole.replace('{"kind": "epoch"', '{"kind": epoch"'))
    with pytest.raises(DamagedCheckpoint, match="line 2 of"):
        run.metrics()


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"kind": "step"}',
        '{"kind": "step", "step": "1"}',
        '{"kind": "epoch", "epoch": 1.5}',
        '{"kind": "other", "step": 1}',
        '{"kind": "step", "step": 1, "loss": "low"}',
        '{"kind": "epoch", "epoch": 1, "energy": [1]}',
        '{"kind": "epoch", "epoch": 1, "energy": {"head": "low"}}',
    ],
)
def test_run_metrics_reports_invalid_lines(tmp_path, line):
    run = Run.create(tmp_path, Job())
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(DamagedCheckpoint, match="line 1 of"):
        run.metrics()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("settings", []),
        ("settings", {"data": 3}),
        ("settings", {"epochs": "many"}),
        ("made_with", []),
        ("start", 3),
        ("data", {}),
        ("data", {"shape": [1, -8, 8], "type": "uint8", "classes": ["a"]}),
        ("data", {"shape": [1, 8, 8], "type": "uint8", "classes": []}),
    ],
)
def test_run_open_reports_settings_of_wrong_types(tmp_path, key, value):
    path = Run.create(tmp_path, Job()).path
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        Run.open(tmp_path)


def test_run_build_works_without_the_data(tmp_path):
    built = Job.of(SMALL).build()
    run = Run.create(tmp_path, built.job, outline=built.task.outline())
    session = Session(run, built)
    assert session.train()
    found = Run.open(tmp_path).assembly(Path("nowhere"), data=False)
    assert found.task.classes == built.task.classes
    assert not torch.equal(found.task.inputs[0], built.task.inputs[0])
    x, _ = next(built.test_batches())
    built.objective.eval()
    torch.testing.assert_close(found.network(x), built.network(x), rtol=0, atol=0)


def test_run_assembly_has_the_last_intact_weights(tmp_path):
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
    with pytest.raises(DamagedCheckpoint, match="no intact checkpoint in"):
        run.assembly()
