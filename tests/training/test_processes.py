from types import SimpleNamespace

import pytest
import torch

from hypersphere.training import processes


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        (None, None, "gpu"),
        (None, 2, "gpu:2"),
        ("gpu", 2, "gpu:2"),
        ("gpu", None, "gpu"),
        ("gpu:1", 2, "gpu:1"),
        ("cpu", 2, "cpu"),
    ],
)
def test_choose_device_uses_the_local_rank(name, rank, expected, monkeypatch):
    used = []

    def device(chosen):
        kind, _, number = chosen.partition(":")
        return SimpleNamespace(type=kind, index=int(number) if number else None, name=chosen)

    monkeypatch.setattr(torch, "device", device)
    monkeypatch.setattr(torch, "zeros", lambda shape, device: torch.ones(()))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device("gpu"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    assert processes.choose_device(name, rank).name == expected
    assert used == [int(number) for number in expected.split(":")[1:]]


def test_process_group_creates_no_group_for_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes.process_group("cpu") as device:
        assert device == torch.device("cpu")
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("message", "ended"),
    [("Gloo connectFullMesh failed", True), ("one of them has ended", True), ("mat1 and mat2 do not fit", False)],
)
def test_other_process_ended_recognises_failed_collectives(message, ended):
    assert processes.other_process_ended(RuntimeError(message)) is ended
