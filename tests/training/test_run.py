import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from hypersphere import _files as files_module
from hypersphere.data import DataSplit, TensorSource
from hypersphere.training import Config, DamagedCheckpoint, Run, Trainer
from hypersphere.training.build import build

SMALL = {
    "data": {"name": "digits", "limit": 40},
    "model": {"name": "mlp", "widths": [6]},
    "batch_size": 16,
    "epochs": 2,
}


def test_run_open_returns_what_create_wrote(tmp_path):
    config = Config.of({**SMALL, "head": {"name": "arcface", "s": 20.0}})
    run = Run.create(tmp_path / "new" / "run", config)
    again = Run.open(tmp_path / "new" / "run")
    assert again.config == config == run.config
    assert again.made_with == run.made_with
    assert again.made_with["torch"] == torch.__version__
    content = json.loads((run.folder / "config.json").read_text())
    assert content["format"] == 2
    assert Config.of(content["config"]) == config
    assert content["complete"]["head"]["m"] == 0.5  # with all defaults, for readers
    assert [path.name for path in run.folder.iterdir()] == ["config.json"]
    assert run.metrics() == []
    with pytest.raises(ValueError, match="already holds a run"):
        Run.create(run.folder, config)
    assert Run.open(run.folder).weights is None
    assert Run.open(Run.create(tmp_path / "other", config, weights="somewhere").folder).weights == "somewhere"


def test_run_takes_no_folder_with_parts_of_another_run(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ValueError, match="holds checkpoints of a run without its config"):
        Run.create(tmp_path, Config())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds checkpoints and metrics\.jsonl of a run without its config"):
        Run.create(tmp_path, Config())
    checkpoint.rename(checkpoint.with_name(".step-00000010"))  # a checkpoint that was never finished
    with pytest.raises(ValueError, match=r"holds metrics\.jsonl of a run without its config"):
        Run.create(tmp_path, Config())
    (tmp_path / "metrics.jsonl").unlink()
    Run.create(tmp_path, Config())


def test_run_stores_the_absolute_path_of_initial_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.safetensors").touch()
    Run.create("second", Config.of(SMALL), weights="first.safetensors")
    assert Run.open("second").weights == str(tmp_path / "first.safetensors")


def test_run_locked_refuses_a_second_process(tmp_path):
    run = Run.create(tmp_path, Config())
    with (
        run.locked(),
        pytest.raises(ValueError, match="is in use by another training process"),
        Run.open(tmp_path).locked(),
    ):
        pass
    with run.locked():
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", ".lock"}


def test_run_lock_survives_a_change_of_the_config(tmp_path):
    """The config is replaced by another file; the lock must still hold."""
    run = Run.create(tmp_path, Config.of({"epochs": 1}))
    with run.locked():
        longer = run.with_config(Config.of({"epochs": 2}))
        with pytest.raises(ValueError, match="is in use by another training process"), longer.locked():
            pass
    assert Run.open(tmp_path).config.epochs == 2


def test_run_locked_works_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    run = Run.create(tmp_path, Config())
    monkeypatch.setattr(files_module.fcntl, "flock", refuse)
    with run.locked(), run.locked():
        assert Run.open(tmp_path).config == run.config


def test_run_open_and_create_reject_invalid_folders(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not the folder of a run: config.json: No such file"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must be a writable folder"):
        Run.create("/proc/nowhere", Config())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be a writable folder"):
        Run.create(tmp_path / "file", Config())
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("broken", ["", "{", "[]", "{}", '{"format": 2}', '"format"', "\x00", "[" * 10**5])
def test_run_open_reports_damaged_settings(tmp_path, broken):
    (tmp_path / "config.json").write_text(broken)
    with pytest.raises(DamagedCheckpoint, match=r"config\.json is damaged"):
        Run.open(tmp_path)


def test_run_open_names_a_config_of_another_library(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(DamagedCheckpoint, match=r"not the file of a run: it has no format number$"):
        Run.open(tmp_path)


def test_run_open_rejects_another_format(tmp_path):
    (tmp_path / "config.json").write_text('{"format": 1, "settings": {}, "made_with": {}}')
    with pytest.raises(ValueError, match=r"was trained with hypersphere 0\.1; open it with that version$"):
        Run.open(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 3}')
    with pytest.raises(ValueError, match="must have format 2, not 3"):
        Run.open(tmp_path)


def test_run_log_and_metrics_round_trip(tmp_path):
    run = Run.create(tmp_path, Config())
    lines = [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "epoch", "epoch": 1, "energy": {"head": 1.5}}]
    for line in lines:
        run.log(line)
    run.log({"loss": float("nan"), "energy": {"head": float("inf")}})
    assert run.metrics() == [*lines, {"loss": None, "energy": {"head": None}}]
    path = tmp_path / "metrics.jsonl"
    content = path.read_text()
    path.write_text(content + '{"kind": "st')  # a write that was interrupted by a kill
    assert len(run.metrics()) == 3
    run.rewind(lambda line: line.get("kind") == "step")
    assert run.metrics() == lines[:1]
    path.write_text(content.replace('{"kind": "epoch"', '{"kind": epoch"'))
    with pytest.warns(UserWarning, match=r"line 2 of .* is damaged and ignored"):
        assert len(run.metrics()) == 2


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
    run = Run.create(tmp_path, Config())
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    messages = []
    assert run.metrics(on_damage=messages.append) == []
    assert len(messages) == 1
    assert "line 1 of" in messages[0]


OUTLINE = {"shape": [1, 8, 8], "dtype": "uint8", "classes": ["a"]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config", []),
        ("config", {"data": 3}),
        ("config", {"epochs": "many"}),
        ("config", {"epoch": 1}),
        ("made_with", []),
        ("weights", 3),
        ("data", {}),
        ("data", {"outline": {**OUTLINE, "shape": [1, -8, 8]}, "fingerprint": None}),
        ("data", {"outline": {**OUTLINE, "shape": [10**9, 10**9]}, "fingerprint": None}),
        ("data", {"outline": {**OUTLINE, "shape": [2**28, 2]}, "fingerprint": None}),
        ("data", {"outline": {**OUTLINE, "shape": [1] * 1000}, "fingerprint": None}),
        ("data", {"outline": {**OUTLINE, "classes": []}, "fingerprint": None}),
        ("data", {"outline": OUTLINE, "fingerprint": "abc"}),
    ],
)
def test_run_open_reports_settings_of_wrong_types(tmp_path, key, value):
    path = Run.create(tmp_path, Config()).path
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        Run.open(tmp_path)


def trained(folder, settings=None, **more):
    experiment = build(Config.of({**SMALL, **(settings or {})}), **more)
    run = Run.of(folder, experiment)
    trainer = Trainer(experiment, run)
    assert trainer.train()
    return trainer


def test_run_builds_the_network_without_the_data(tmp_path):
    trainer = trained(tmp_path)
    opened = Run.open(tmp_path).experiment(Path("nowhere"), with_data=False)
    assert opened.data.classes == trainer.experiment.data.classes
    assert not torch.equal(opened.data.train.inputs[0], trainer.experiment.data.train.inputs[0])
    x = trainer.experiment.data.validation.inputs
    trainer.experiment.objective.eval()
    torch.testing.assert_close(opened.network(x), trainer.experiment.network(x), rtol=0, atol=0)


def test_run_experiment_has_the_last_intact_weights(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        Run.create(tmp_path / "empty", Config.of(SMALL)).experiment()
    trainer = trained(tmp_path / "run", {"save_every": 0})
    run = trainer.run
    weights = trainer.experiment.objective.state_dict()
    opened = Run.open(run.folder).experiment()
    assert not opened.objective.training
    assert all(torch.equal(opened.objective.state_dict()[key], value) for key, value in weights.items())
    earlier = run.experiment(step=5)
    assert any(not torch.equal(earlier.objective.state_dict()[key], value) for key, value in weights.items())
    with pytest.raises(ValueError, match="step must be one of 4, 5, 6, not 2"):
        run.experiment(step=2)
    with pytest.raises(ValueError, match=r"has no best checkpoint; set validation\.best to a metric"):
        run.experiment(step="best")
    *_, last = sorted((run.folder / "checkpoints").iterdir())
    (last / "weights.safetensors").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"step-00000006 is damaged: .*; using step-00000005 instead"):
        older = run.experiment()
    assert all(
        torch.equal(older.objective.state_dict()[key], value) for key, value in earlier.objective.state_dict().items()
    )
    for other in (run.folder / "checkpoints").iterdir():
        (other / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="no intact checkpoint in"):
        run.experiment()


# --- the data of a run


def photos(folder, people=("ann", "bob", "eve"), each=6):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for place, person in enumerate(people):
        (folder / person).mkdir(parents=True)
        for number in range(each):
            pixels = torch.randint(1 + 50 * place, (8, 8), generator=generator) + 50 * place  # files of various sizes
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / person / f"{number}.png")
    return {"data": {"name": "image_folder", "path": str(folder), "held_out": 2}, "normalize": "centered"}


def rename_class(folder):
    (folder / "ann").rename(folder / "zoe")


def swap_classes(folder):
    (folder / "ann").rename(folder / "x")
    (folder / "bob").rename(folder / "ann")
    (folder / "x").rename(folder / "bob")


def move_file(folder):
    (folder / "ann" / "5.png").rename(folder / "ann" / "0a.png")


def remove_file(folder):
    (folder / "ann" / "5.png").unlink()


def change_file(folder):
    (folder / "ann" / "5.png").write_bytes((folder / "eve" / "0.png").read_bytes() + b"more")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename_class, "class 'ann' is now 'bob'"),
        (swap_classes, "changed"),
        (move_file, "changed"),
        (remove_file, "the number of .* samples changed from"),
        (change_file, "changed"),
    ],
)
def test_run_rejects_data_that_have_changed(change, reason, tmp_path):
    settings = photos(tmp_path / "photos")
    trained(tmp_path / "run", settings)
    Run.open(tmp_path / "run").experiment()  # the same data
    change(tmp_path / "photos")
    match = f"^the data have changed since .*run was created: .*{reason}"
    with pytest.raises(ValueError, match=match):
        Run.open(tmp_path / "run").experiment()
    experiment = build(Config.of({**SMALL, **settings}))
    with pytest.raises(ValueError, match=match):
        Trainer(experiment, Run.open(tmp_path / "run")).resume()
    Run.open(tmp_path / "run").experiment(with_data=False)  # needs no data


def test_run_discard_deletes_the_events_of_tensorboard(tmp_path):
    run = Run.create(tmp_path, Config.of(SMALL))
    (tmp_path / "tensorboard").mkdir()
    for name in ("events.out.tfevents.1.host.2.0", "mine.txt"):
        (tmp_path / "tensorboard" / name).touch()
    run.discard()
    assert [path.name for path in tmp_path.rglob("*")] == ["tensorboard", "mine.txt"]


def test_run_opens_without_the_file_of_a_protocol(tmp_path):
    settings = {"validation": {"protocols": [{"name": "verification", "pairs": str(tmp_path / "absent.bin")}]}}
    with pytest.raises(FileNotFoundError, match=r"absent.bin not found"):
        Trainer(build(Config.of({**SMALL, **settings})))
    photos(tmp_path / "photos")
    images = [path.read_bytes() for path in sorted((tmp_path / "photos").glob("*/*.png"))]
    pairs = [images[place] for pair in zip(range(16), range(1, 17), strict=True) for place in pair] * 3
    (tmp_path / "absent.bin").write_bytes(pickle.dumps((pairs, [True, False] * 24)))
    trained(tmp_path / "run", settings)
    (tmp_path / "absent.bin").unlink()
    assert repr(Run.open(tmp_path / "run").experiment(with_data=False).validation)


def test_run_rejects_other_tensors(tmp_path):
    def split(seed):
        pixels = torch.randint(256, (20, 1, 8, 8), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        source = TensorSource(pixels, torch.arange(20) % 2, ("a", "b"))
        return DataSplit(source, source)

    run = trained(tmp_path, split=split(0)).run
    run.require_same_data(split(0))
    with pytest.raises(ValueError, match="the contents of the training data changed"):
        run.require_same_data(split(1))


# --- foreign code


def test_run_imports_foreign_code_only_if_it_is_trusted(tmp_path, monkeypatch):
    module = f"own_code_{os.getpid()}"
    (tmp_path / f"{module}.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    feature_dim = 4\n"
        "    def __init__(self, in_features):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(in_features, 4)\n"
        "    def forward(self, x):\n"
        "        return self.linear(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trainer = trained(tmp_path / "run", {"model": f"{module}:Net"})
    run = Run.open(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"names code outside hypersphere \(model {module}:Net\).*trust_code=True"):
        run.experiment()
    opened = run.experiment(trust_code=True)
    assert torch.equal(opened.network.body.linear.weight, trainer.experiment.network.body.linear.weight)
