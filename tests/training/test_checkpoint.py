import contextlib
import errno
import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hypersphere as hs
from hypersphere.training.checkpoint import Checkpoint, Checkpoints, DamagedCheckpoint, _manifest_text, read_checkpoint
from hypersphere.training.random_state import RandomState

from . import nursery

FILES = ("weights.safetensors", "state.safetensors", "state.json", "manifest.json")
MANIFEST = FILES[-1]


def small(step=0):
    return {"layer": nn.Linear(3, 2)}, {"epoch": step, "noise": torch.randn(5)}


def same(a, b):
    """Return True if two states are equal in types, values and bits."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def silent(folder, keep=3):
    """Return checkpoints that fail the test if one is damaged."""
    return Checkpoints(folder, keep, on_damage=pytest.fail)


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


# --- round trips


class Odd(nn.Module):
    """A module with tied and overlapping tensors, unusual strides and dtypes, and extra state."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        memory = torch.randn(8)
        for name, buffer in {
            "left": memory[:5],
            "right": memory[3:],
            "wide": torch.randn(3, 1).expand(3, 4),
            "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "narrow": torch.randn(3).bfloat16(),
            "empty": torch.zeros(0, 3),
            "count": torch.tensor(2**40),
            "strange": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
            "truth": torch.tensor([True, False]),
            "complex": torch.randn(2, dtype=torch.complex128),
        }.items():
            self.register_buffer(name, buffer)
        self.extra = {"seen": 1, "names": ["a"]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_checkpoint_restores_all_tensors_and_extra_state_exactly(tmp_path):
    saved, fresh = Odd(), Odd()
    saved.extra = {"seen": 7, "names": ["b", "c"], "at": torch.arange(3)}
    path = silent(tmp_path).save(5, {"odd": saved, "empty": nn.ReLU()})
    fresh.wide = fresh.wide.clone()  # overlapping memory cannot be loaded into
    silent(tmp_path).latest().restore_({"odd": fresh, "empty": nn.ReLU()})
    ours, theirs = fresh.state_dict(), saved.state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert same(ours[key].contiguous(), value.contiguous()), key
    assert same(fresh.extra, saved.extra)
    assert fresh.second.weight is fresh.first.weight
    assert fresh.turned.stride() == saved.turned.stride()
    # tied weights are stored under both names
    assert {"odd.first.weight", "odd.second.weight"} <= set(load_file(path / FILES[0]))


def test_checkpoint_state_reads_only_the_requested_names(tmp_path):
    Checkpoints(tmp_path).save(1, {}, {"best": {"step": 1}, "moments": torch.zeros(2), "seconds": 2.5})
    checkpoint = Checkpoints(tmp_path).latest()
    assert checkpoint.state("best", "seconds", "other") == {"best": {"step": 1}, "seconds": 2.5}
    assert checkpoint.state().keys() == {"best", "moments", "seconds"}


def test_checkpoint_restores_states_exactly(tmp_path):
    big = torch.randn(1000, 1000)
    state = {
        "numbers": [1, -(2**70), 0.1, float("nan"), True, None, "text", b"bytes"],
        "nested": {"a": ({"b": torch.randn(2, 3).t()},), 3: 1.5},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({4: 2}),
        "kinds": [torch.float16, torch.Size([2, 3])],
        "view": big[:2],
        "parameter": nn.Parameter(torch.ones(2)),
        "default": defaultdict(list, a=[1]),
        "numpy": [numpy.float64(0.1), numpy.int64(3)],
    }
    path = silent(tmp_path).save(0, {}, state)
    found = silent(tmp_path).latest().state()
    for key in ("numbers", "nested", "ordered", "counter", "kinds", "view"):
        assert same(found[key], state[key]), key
    assert same(found["parameter"], torch.ones(2))
    assert same(found["default"], {"a": [1]})
    assert same(found["numpy"], [0.1, 3])
    assert (path / FILES[1]).stat().st_size < 50_000  # only the part of a view is saved


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": [1, lambda: 0]}, r"checkpoint\['state'\]\['it'\]\['a'\]\[1\] must be tensors, .*, not function"),
        (numpy.zeros(2), r"checkpoint\['state'\]\['it'\] must be .*, not ndarray"),
        (numpy.float32(1), r"not float32"),
        ({object(): 1}, r"a key of checkpoint\['state'\]\['it'\] must be"),
        (
            torch.zeros(2, device="meta"),
            r"checkpoint\['state'\]\['it'\] must be a plain tensor with data, not Tensor on meta",
        ),
    ],
)
def test_save_rejects_objects_that_need_a_pickle(tmp_path, value, name):
    with pytest.raises(ValueError, match=name):
        silent(tmp_path).save(0, {}, {"it": value})
    assert steps(tmp_path) == []


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.01, max_iter=2),
    "ogd": lambda p: hs.optim.OGD(p, 0.1),
    "ogd_adam": lambda p: hs.optim.OGDAdam(p, 0.1),
}
SCHEDULERS = {
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=20, cycle_momentum=False),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "multiplicative": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "multi_step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.3, cycle_momentum=False, scale_fn=lambda t: 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


START = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))[0]


def run(optimizer, schedule, count):
    """Take steps on a quadratic and return the parameter after each step."""
    parameter, seen = optimizer.param_groups[0]["params"][0], []
    target = torch.eye(4, dtype=parameter.dtype).flip(0)

    def closure():
        optimizer.zero_grad()
        loss = (parameter - target).square().sum()
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)
        schedule.step()
        seen.append((parameter.detach().clone(), optimizer.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [(name, "one_cycle") for name in OPTIMIZERS] + [("sgd", name) for name in SCHEDULERS if name != "one_cycle"],
)
def test_optimizers_and_schedulers_resume_exactly(tmp_path, optimizer, schedule):
    def make():
        module = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            module.weight.copy_(START)
        made = OPTIMIZERS[optimizer]([module.weight])
        return module, made, SCHEDULERS[schedule](made)

    whole = make()
    run(*whole[1:], 4)
    silent(tmp_path).save(4, {"module": whole[0]}, {"optimizer": whole[1], "scheduler": whole[2]})
    expected = run(*whole[1:], 6)
    for _ in range(2):  # a checkpoint can be restored more than once
        again = make()
        silent(tmp_path).latest().restore_({"module": again[0]}, {"optimizer": again[1], "scheduler": again[2]})
        for (ours, rate), (theirs, their_rate) in zip(run(*again[1:], 6), expected, strict=True):
            assert torch.equal(ours, theirs)
            assert rate == their_rate


def test_checkpoint_restores_a_gradient_scaler(tmp_path):
    saved, fresh = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    saved.scale(torch.ones(()))
    saved.update(1024.0)
    silent(tmp_path).save(0, {}, {"scaler": saved})
    silent(tmp_path).latest().restore_({}, {"scaler": fresh})
    assert same(fresh.state_dict(), saved.state_dict())
    assert fresh.get_scale() == 1024.0


def test_random_state_resumes_exactly(tmp_path):
    mine = torch.Generator().manual_seed(3)
    state = RandomState({"mine": mine})

    def draw():
        ours = [torch.randn(3), torch.randn(3, generator=mine)]
        return [*ours, random.gauss(0, 1), random.random(), numpy.random.normal()]  # noqa: NPY002

    draw()  # the generators of Python and NumPy now cache one normal number
    silent(tmp_path).save(0, {}, {"random": state})
    expected = draw()
    draw()
    silent(tmp_path).latest().restore_({}, {"random": state})
    assert same(draw(), expected)
    with pytest.raises(ValueError, match=r"state must be the state of the generators \['other'\]"):
        RandomState({"other": mine}).load_state_dict(state.state_dict())


def test_restore_rejects_modules_with_another_shape_dtype_or_name(tmp_path):
    silent(tmp_path).save(0, {"layer": nn.Linear(3, 2)})
    last = silent(tmp_path).latest()
    with pytest.raises(ValueError, match=r"layer does not match the saved module: .*size mismatch") as raised:
        last.restore_({"layer": nn.Linear(3, 3)})
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"layer.weight must be torch.float32 as saved, not torch.float64"):
        last.restore_({"layer": nn.Linear(3, 2).double()})
    with pytest.raises(ValueError, match=r"names must be among the saved names layer, not \['net'\]"):
        last.restore_({"net": nn.Linear(3, 2)})
    with pytest.raises(ValueError, match="modules must be names without dots"):
        silent(tmp_path).save(1, {"a.b": nn.Linear(3, 2)})


# --- which checkpoints exist


def test_save_keeps_the_last_checkpoints_and_allows_a_step_twice(tmp_path):
    for keep, left in ((1, ["step-00000009"]), (3, ["step-00000003", "step-00000006", "step-00000009"])):
        folder = tmp_path / str(keep)
        for step in (0, 3, 6, 9):
            silent(folder, keep).save(step, *small(step))
        assert steps(folder) == left
        for _ in range(3):
            path = silent(folder, keep).save(9, *small(42))
        assert path.name.startswith("step-00000009.")
        assert steps(folder) == [*left[:-1], path.name]
        assert silent(folder, keep).latest().state()["epoch"] == 42
    assert silent(tmp_path / "none").latest() is None
    silent(tmp_path / "five", 5).save(1, *small())
    silent(tmp_path / "five", 5).save(2, *small())
    silent(tmp_path / "five", 5).save(3, *small())
    assert len(steps(tmp_path / "five")) == 3


def test_save_removes_temporary_files_and_nothing_else(tmp_path):
    (tmp_path / ".step-00000001.abc.tmp").mkdir()
    (tmp_path / ".step-00000001.abc.tmp" / FILES[0]).write_text("half")
    (tmp_path / "step-notes").mkdir()
    assert silent(tmp_path).latest() is None
    silent(tmp_path).save(2, *small())
    assert steps(tmp_path) == ["step-00000002", "step-notes"]


def test_save_rejects_a_step_before_an_intact_checkpoint(tmp_path):
    silent(tmp_path, 1).save(9, *small())
    with pytest.raises(ValueError, match=r"step must be at least 9, because .*step-00000009 exists, not 3"):
        silent(tmp_path, 1).save(3, *small())
    assert steps(tmp_path) == ["step-00000009"]
    (tmp_path / "step-00000009" / FILES[1]).unlink()
    silent(tmp_path, 1).save(3, *small())
    assert steps(tmp_path) == ["damaged-step-00000009", "step-00000003"]
    assert silent(tmp_path).steps() == [3]


# --- damage


def damaged(path, how):
    raw = bytearray(path.read_bytes())
    if how == "flipped":
        raw[random.Random(0).randrange(len(raw))] ^= 1 << 3
    elif how == "short":
        del raw[-1:]
    elif how == "empty":
        raw.clear()
    elif how == "long":
        raw.append(0)
    path.write_bytes(raw)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["flipped", "short", "empty", "long", "missing"])
def test_latest_skips_a_damaged_checkpoint_with_a_warning(tmp_path, file, how):
    words = []
    checkpoints = Checkpoints(tmp_path, on_damage=words.append)
    for step in (1, 2, 3):
        checkpoints.save(step, *small(step))
    damaged(tmp_path / "step-00000003" / file, how)
    assert checkpoints.latest().state()["epoch"] == 2
    assert len(words) == 1
    assert words[0].startswith("step-00000003 is damaged: ")
    assert words[0].endswith("; using step-00000002 instead")
    with pytest.warns(UserWarning, match="step-00000003 is damaged"):
        Checkpoints(tmp_path).latest()
    checkpoints.save(4, *small(4))  # a damaged checkpoint is kept, but does not count as one of the last
    assert steps(tmp_path) == ["damaged-step-00000003", "step-00000001", "step-00000002", "step-00000004"]
    for step in (1, 2, 4):
        damaged(tmp_path / f"step-{step:08d}" / file, how)
    with pytest.raises(DamagedCheckpoint, match=r"no intact checkpoint in .*00000004 is damaged.*00000001 is damaged"):
        checkpoints.latest()


def test_read_checkpoint_detects_every_flipped_bit_and_truncation(tmp_path):
    path = silent(tmp_path).save(7, *small())
    chance = random.Random(1)
    for file in FILES:
        whole = (path / file).read_bytes()
        every = len(whole) * 8 if file == MANIFEST else 150
        with (path / file).open("r+b", buffering=0) as opened:
            for at in chance.sample(range(len(whole) * 8), every):
                byte = whole[at // 8]
                os.pwrite(opened.fileno(), bytes([byte ^ 1 << at % 8]), at // 8)
                with pytest.raises(DamagedCheckpoint):
                    read_checkpoint(path, 7)
                os.pwrite(opened.fileno(), bytes([byte]), at // 8)
        for length in chance.sample(range(len(whole)), 30):
            (path / file).write_bytes(whole[:length])
            with pytest.raises(DamagedCheckpoint):
                read_checkpoint(path, 7)
        (path / file).write_bytes(whole)
    assert isinstance(read_checkpoint(path, 7), Checkpoint)
    with pytest.raises(DamagedCheckpoint, match="the step is 7, not 8"):
        read_checkpoint(path, 8)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def reseal(path):
    """Recompute the manifest for changed files, as an attacker would."""
    import hashlib

    manifest = json.loads((path / MANIFEST).read_text())
    manifest.pop("sha256")
    for name, entry in manifest["files"].items():
        raw = (path / name).read_bytes()
        entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    (path / MANIFEST).write_text(_manifest_text(manifest))


@pytest.mark.parametrize("write", [lambda o, p: p.write_bytes(pickle.dumps(o, 2)), torch.save], ids=["pickle", "torch"])
def test_read_checkpoint_never_runs_a_malicious_pickle(tmp_path, write):
    words, trap = [], tmp_path / "trap"
    checkpoints = Checkpoints(tmp_path / "run", on_damage=words.append)
    checkpoints.save(1, *small(1))
    path = checkpoints.save(2, *small(2))
    write({"modules": {}, "state": Malicious(trap)}, path / FILES[1])
    reseal(path)
    assert checkpoints.latest().step == 1
    assert "not a checkpoint" in words[0]
    with pytest.raises(DamagedCheckpoint):
        Checkpoint(path, 2, {}).state()
    assert not trap.exists()


def test_read_checkpoint_reports_foreign_files_as_damage(tmp_path):
    path = silent(tmp_path).save(1, *small())
    whole = (path / FILES[0]).read_bytes()
    (path / FILES[0]).write_bytes(b"\xff" * len(whole))
    reseal(path)
    with pytest.raises(DamagedCheckpoint, match="not a checkpoint"):
        silent(tmp_path).latest()
    for text in (
        "[]",
        "null",
        "{}",
        '{"sha256": 1}',
        "[" * 100_000,
        _manifest_text({}),
        _manifest_text({"format": 2, "step": 1}),
    ):
        (path / MANIFEST).write_text(text)
        with pytest.raises(DamagedCheckpoint):
            silent(tmp_path).latest()


def test_checkpoint_of_another_format_is_reported_and_never_deleted(tmp_path):
    for step in (1, 2):
        path = silent(tmp_path).save(step, *small())
    theirs = {"format": 3, "step": 2, "made_with": {"hypersphere": "9.0"}}
    (path / MANIFEST).write_text(_manifest_text(theirs))
    with pytest.raises(ValueError, match=r"step-00000002 has format 3, not 2; .* that wrote it, 9\.0") as raised:
        silent(tmp_path).latest()
    assert not isinstance(raised.value, DamagedCheckpoint)
    with pytest.raises(ValueError, match="has format 3, not 2"):
        silent(tmp_path, 1).save(1, *small())
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    for step in (2, 5, 6):  # also not because it is old
        silent(tmp_path, 1).save(step, *small())
    assert steps(tmp_path) == ["step-00000002", "step-00000006"]


def refused(monkeypatch, number):
    """Let the system refuse to open any file for reading."""

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_read_errors_are_not_damage_and_delete_nothing(tmp_path, monkeypatch, number):
    checkpoints = silent(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, *small(step))
    with monkeypatch.context() as patch:
        refused(patch, number)
        words = rf"step-00000002 cannot be read: {os.strerror(number)}"
        with pytest.raises(OSError, match=words) as raised:
            checkpoints.latest()
        assert raised.value.errno == number
        with pytest.raises(OSError, match=f"the checkpoint of step 1 cannot be saved in .*{words}"):
            checkpoints.save(1, *small())
    assert checkpoints.latest().step == 2
    checkpoints.save(3, *small())
    assert steps(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_too_many_open_files_are_not_damage(tmp_path):
    """Safetensors then reports a missing file, and torch raises its own error."""
    resource = pytest.importorskip("resource")
    silent(tmp_path).save(1, *small())
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, limits[1]))
    said = set()
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        while True:  # with zero, one, two… free descriptors
            try:
                silent(tmp_path).latest()
            except OSError as error:
                said.add(str(error.errno) if error.errno else str(error))
            else:
                break
            os.close(held.pop())
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert str(errno.EMFILE) in said
    assert steps(tmp_path) == ["step-00000001"]


def test_damaged_checkpoints_are_kept_and_never_used(tmp_path):
    words = []
    checkpoints = Checkpoints(tmp_path, 2, on_damage=words.append)
    checkpoints.save(1, *small())
    for step in (2, 3, 3, 4):
        (checkpoints.save(step, *small()) / FILES[1]).write_bytes(b"")
        assert checkpoints.latest().step == 1
    checkpoints.save(5, *small())
    assert steps(tmp_path) == ["damaged-step-00000003.1", "damaged-step-00000004", "step-00000001", "step-00000005"]
    assert silent(tmp_path).latest().step == 5


def test_restore_of_state_from_weights_only_is_rejected(tmp_path):
    layer = nn.Linear(2, 2)
    silent(tmp_path).save(1, {"layer": layer})
    with pytest.raises(ValueError, match=r"step-00000001 holds weights only, so .* build_experiment"):
        silent(tmp_path).latest().restore_({"layer": layer}, {"optimizer": torch.optim.SGD(layer.parameters())})
    silent(tmp_path).latest().restore_({"layer": layer})


def test_save_flushes_new_folders(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    silent(tmp_path / "run" / "checkpoints").save(1, *small())
    assert {str(tmp_path), str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints")} <= set(flushed)


@pytest.mark.parametrize("large", ["module", "state"])
def test_save_on_a_full_disk_keeps_existing_checkpoints(tmp_path, large):
    resource = pytest.importorskip("resource")
    silent(tmp_path).save(1, *small())
    module = nn.Linear(200, 200) if large == "module" else nn.Linear(2, 2)
    state = {"noise": torch.randn(200, 200)} if large == "state" else {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="the checkpoint of step 2 cannot be saved in ") as raised:
            silent(tmp_path).save(2, {"module": module}, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value)
    assert steps(tmp_path) == ["step-00000001"]
    assert silent(tmp_path).latest().step == 1


def test_save_reports_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match=r"the checkpoint of step 2 cannot be saved in .*file") as raised:
            silent(folder).save(2, *small())
        assert "\n" not in str(raised.value)


# --- resuming


def final(folder):
    return silent(folder).latest().weights(), silent(folder).latest().state()


def test_training_stopped_after_any_step_gives_identical_results(tmp_path):
    nursery.train(tmp_path / "whole")
    weights, state = final(tmp_path / "whole")
    total = nursery.EPOCHS * nursery.BATCHES
    for stops in ([1], [4], [5], [6], [7, 8, 9], [10, 11], [14], [15], range(1, total)):
        folder = tmp_path / str(stops)
        for stop in [*stops, None]:
            nursery.train(folder, stop)
        assert silent(folder).latest().step == total
        ours, our_state = final(folder)
        assert same(ours, weights), stops
        for key in ("optimizer", "scheduler", "random", "data"):
            assert same(our_state[key], state[key]), (stops, key)


@pytest.fixture(scope="module")
def process():
    here, pipe = Path(nursery.__file__).parent, subprocess.PIPE
    command = [sys.executable, "-m", "nursery"]
    with subprocess.Popen(command, cwd=here, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()
    assert process.returncode == 0


def children(process, mode, folder):
    """Let the nursery fork and kill children; yield the outcome of each while it waits."""

    def say(words):
        process.stdin.write(f"{words}\n")
        process.stdin.flush()

    say(f"{mode} {folder}")
    for word in map(str.strip, process.stdout):
        if word != "end":
            yield word
        say("go on")
        if word == "end":
            return


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("mode", ["random", "events"])
def test_kill_at_any_moment_leaves_an_intact_checkpoint(tmp_path, process, mode):
    before, kills, halves, folder = -1, 0, 0, tmp_path / "run"
    for word in children(process, mode, tmp_path):
        assert word == "killed" or (word, mode) == ("done", "events")
        kills += word == "killed"
        halves += len(list(folder.glob(".*")))
        last = silent(folder).latest()
        if last is None:
            assert before == -1
            continue
        assert last.step >= before
        before = last.step
        module, state = nursery.content(last.step)
        assert same(last.weights()["module"], dict(module.state_dict()))
        assert same(last.state(), state)
    if word == "done":
        assert steps(folder) == [f"step-{before - 1:08d}", f"step-{before:08d}"]
    assert kills >= 15
    assert halves >= 1  # at least this number of kills came during a save
    assert before >= 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_training_killed_repeatedly_gives_identical_results(tmp_path, process):
    words = list(children(process, "train", tmp_path))
    assert words[0] == words[-1] == "done"
    assert len(words) >= 3
    weights, state = final(tmp_path / "whole")
    ours, our_state = final(tmp_path / "run")
    assert same(ours, weights)
    assert same(our_state, state)


# --- position in the data


def orders(data):
    return [y.tolist() for _, y in data]


def batches(seed, size=4, shuffled=True):
    return hs.training.Batches(
        torch.arange(10), torch.arange(10), size, torch.Generator().manual_seed(seed) if shuffled else None
    )


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_batches_resume_in_the_middle_of_an_epoch(taken, shuffled):
    data = batches(1, shuffled=shuffled)
    orders(data)
    iteration = iter(data)
    for _ in range(taken):
        next(iteration)
    state = data.state_dict()
    rest = orders(iteration)
    following = [orders(data), orders(data)]
    again = batches(2, shuffled=shuffled)
    again.load_state_dict(state)
    assert same(again.state_dict(), state)  # the state can be saved again immediately
    assert orders(again) == rest
    assert len(rest) == 3 - taken
    assert [orders(again), orders(again)] == following


def test_batches_resume_twice_in_one_epoch_with_a_shared_generator():
    data = batches(1)
    expected, seen = orders(data), []
    data = batches(1)
    for _ in range(3):
        iteration = iter(data)
        seen.append(next(iteration)[1].tolist())
        torch.rand(5, generator=data.generator)  # another user of the generator
        now = data.generator.get_state()
        other = batches(9)
        other.load_state_dict(data.state_dict())
        assert torch.equal(other.generator.get_state(), now)
        data = other
    assert seen == expected


def test_batches_reject_the_state_of_other_data():
    with pytest.raises(ValueError, match=r"state must be a state of the same data, with .*'batch_size': 5"):
        batches(0, size=5).load_state_dict(batches(0).state_dict())
    with pytest.raises(ValueError, match=r"state must be a state of batches with {'shuffled': False}"):
        batches(0, shuffled=False).load_state_dict(batches(0).state_dict())


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"modules": []},
        {"modules": {}, "state": 3},
        {"modules": {}, "state": {"a": {"$": "tensor", "key": "missing"}}},
        {"modules": {}, "state": {"a": {"$": "dtype", "name": "load"}}},
        {"modules": {}, "state": {"a": {"$": "object"}}},
        {"modules": {}, "state": {"a": {"$": "tuple"}}},
    ],
)
def test_read_checkpoint_reports_invalid_content_with_valid_checksums(tmp_path, content):
    path = Checkpoints(tmp_path).save(1, {"module": nn.Linear(2, 2)}, {})
    (path / "state.json").write_text(json.dumps(content))
    reseal(path)
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(path, 1)


def test_checkpoints_report_any_error_to_the_other_processes(tmp_path):
    """They would wait forever for a process that raised an error without reporting it."""

    class Broken:
        def state_dict(self):
            raise RuntimeError("no state")

    gathered = []

    def all_gather_objects(value):
        gathered.append(value)
        return [value, (None, None)]

    checkpoints = Checkpoints(tmp_path)
    checkpoints.processes = SimpleNamespace(rank=0, size=2, all_gather_objects=all_gather_objects)
    with pytest.raises(RuntimeError, match=r"^no state$"):
        checkpoints.save(1, {}, {"broken": Broken()})
    assert str(gathered[-1][1]) == "process 0: no state"
    checkpoints.processes.all_gather_objects = lambda value: [value, (None, RuntimeError("process 1: no state"))]
    with pytest.raises(RuntimeError, match=r"^process 1: no state$"):
        checkpoints.save(1, {})
