"""Checkpoints of tensors that are divided among processes load into any other number of processes."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from hypersphere.heads import ShardedHead, arcface, fixed
from hypersphere.training.checkpoint import Checkpoints
from processes import run_processes

CLASSES, DIM = 11, 4
LAYOUTS = [(2, 1), (1, 2), (2, 3)]


def build(kind):
    """Return modules with divided parameters and the optimiser of all of them."""
    torch.manual_seed(3)
    backbone, head = nn.Linear(6, DIM), arcface(DIM, CLASSES, bias=False)
    if kind == "fixed":
        head = fixed(DIM, CLASSES, vectors="energy")
    if kind in ("head", "fixed"):
        modules = {"objective": nn.ModuleDict({"network": backbone, "head": ShardedHead(head)})}
    else:
        body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        if dist.is_initialized():
            from torch.distributed.fsdp import fully_shard

            fully_shard(body[0])
            fully_shard(body)
        modules = {"objective": body}
    parameters = [p for module in modules.values() for p in module.parameters()]
    return modules, torch.optim.AdamW(parameters, lr=0.01)


def loss_of(modules):
    """Return a loss that does not depend on the number of processes."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(5))
    y = torch.arange(12) % CLASSES
    objective = modules["objective"]
    if isinstance(objective, nn.ModuleDict):
        # All processes have all samples; the loss of the copies is that of the samples.
        return objective["head"](objective["network"](x), y)
    return nn.functional.cross_entropy(objective(x), y)


def train(modules, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(modules)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def worker(rank, kind, folder, save):
    modules, optimizer = build(kind)
    checkpoints = Checkpoints(folder, on_damage=pytest.fail)
    if save:
        train(modules, optimizer, 3)
        checkpoints.save(3, modules, {"optimizer": optimizer, "epoch": 1})
    else:
        checkpoint = checkpoints.latest()
        checkpoint.restore_(modules, {"optimizer": optimizer})
        assert checkpoint.state()["epoch"] == 1
    losses = train(modules, optimizer, 4)
    if rank == 0:
        (folder.parent / f"losses-{'saved' if save else 'loaded'}.json").write_text(json.dumps(losses))


def run(size, kind, folder, save):
    if size == 1:
        worker(0, kind, folder, save)
    else:
        run_processes(worker, size, folder.parent, kind, folder, save)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "fixed", "fsdp"])
@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_checkpoint_resumes_in_another_number_of_processes(tmp_path, kind, before, after):
    folder = tmp_path / "checkpoints"
    run(before, kind, folder, True)
    run(after, kind, folder, False)
    saved, loaded = (json.loads((tmp_path / f"losses-{name}.json").read_text()) for name in ("saved", "loaded"))
    assert loaded == pytest.approx(saved, rel=1e-5)
    assert len(set(saved)) == len(saved)  # training moves


def test_each_process_writes_only_its_rows(tmp_path):
    folder = tmp_path / "checkpoints"
    run(2, "head", folder, True)
    rows = {}
    for path in sorted((folder / "step-00000003").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            rows[path.name] = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert rows["weights.safetensors"]["objective.head.weight"] == [6, DIM]
    assert rows["weights-1.safetensors"] == {"objective.head.weight": [5, DIM]}
    assert sorted(rows["state-1.safetensors"].values()) == [[5, DIM], [5, DIM]]  # both moments of AdamW


def test_damaged_rows_of_another_process_are_detected(tmp_path):
    folder = tmp_path / "checkpoints"
    run(2, "head", folder, True)
    path = folder / "step-00000003" / "weights-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the SHA-256 of weights-1\.safetensors"):
        Checkpoints(folder).latest()


def test_plain_head_reads_the_weights_of_a_sharded_one(tmp_path):
    folder = tmp_path / "checkpoints"
    run(2, "head", folder, True)
    modules = {"objective": nn.ModuleDict({"network": nn.Linear(6, DIM), "head": arcface(DIM, CLASSES, bias=False)})}
    Checkpoints(folder).latest().restore_(modules)
    sharded, _ = build("head")
    Checkpoints(folder).latest().restore_(sharded)
    torch.testing.assert_close(modules["objective"]["head"].weight, sharded["objective"]["head"].weight)
