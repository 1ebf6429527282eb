"""Training in several processes agrees with training in one, and resumes in another number of processes."""

import json

import pytest
import torch
import torch.distributed as dist

from hypersphere.training import Config, Run, Trainer, build, build_experiment
from hypersphere.training.distributed import SharedGradScaler
from processes import run_processes

BASE = {
    "data": {"name": "digits", "limit": 200},
    "model": {"name": "mlp", "widths": [32, 16], "norm": "none"},
    "optimizer": {"name": "sgd", "lr": 0.05},
    "schedule": "constant",
    "batch_size": 50,
    "steps": 6,
    "log_every": 1,
    "validation": {"energy": False},
}
CASES = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "coupled": {"head": "sphereface_plus"},
    "weighted": {"head": {"name": "softmax", "class_weights": [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0]}},
    "sharded": {"head": {"name": "arcface", "sharded": True}},
    "synced": {"model": {"name": "mlp", "widths": [32, 16], "norm": "batch"}, "sync_batch_norm": True},
    "fsdp": {"parallel": "fsdp"},
    "averaged": {"ema": 0.5, "head": {"name": "arcface", "sharded": True}},
}


def train(settings, folder, resume):
    settings = dict(settings)
    build.META_HEAD_SIZE = settings.pop("large_head", build.META_HEAD_SIZE)
    config = Config.of(settings)
    experiment = build_experiment(config)
    if dist.is_initialized() and dist.get_rank() > 0:
        dist.barrier()  # the first process creates the folder
    run = Run.open(folder) if (folder / "config.json").exists() else Run.of(folder, experiment)
    if dist.is_initialized() and dist.get_rank() == 0:
        dist.barrier()
    trainer = Trainer(experiment, run)
    if resume:
        assert trainer.resume() is not None
    trainer.train()


def worker(rank, settings, folder, resume):
    train(settings, folder, resume)


def run(size, settings, folder, resume=False):
    if size == 1:
        train(settings, folder, resume)
        return
    run_processes(worker, size, folder.parent, settings, folder, resume)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_steps_of_one(tmp_path, case):
    settings = {**BASE, **CASES[case]}
    run(1, settings, tmp_path / "one")
    run(2, settings, tmp_path / "two")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6
    assert two == pytest.approx(one, rel=2e-4)
    assert len(set(one)) == 6  # training moves


def train_frozen(rank, settings):
    experiment = build_experiment(Config.of(settings))
    norms = [module for module in experiment.network.modules() if hasattr(module, "running_mean")]
    before = [norm.running_mean.clone() for norm in norms]
    Trainer(experiment).train()
    assert [norm.training for norm in norms] == [False, True]
    assert [torch.equal(norm.running_mean, old) for norm, old in zip(norms, before, strict=True)] == [True, False]


@pytest.mark.parametrize("change", [{}, {"sync_batch_norm": True}, {"parallel": "fsdp"}], ids=str)
def test_frozen_batch_norm_keeps_its_statistics_in_two_processes(tmp_path, change):
    model = {"name": "mlp", "widths": [32, 16], "norm": "batch"}
    run_processes(train_frozen, 2, tmp_path, {**BASE, "model": model, "freeze": ["body.layers.1.*"], **change})


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_average_the_weights_of_one(tmp_path, parallel):
    validation = {"every": 2, "every_unit": "steps", "energy": False}
    settings = {**BASE, "ema": 0.5, "parallel": parallel, "validation": validation}
    run(1, settings, tmp_path / "one")
    run(2, {**settings, "steps": 3}, tmp_path / "two")
    run(2, settings, tmp_path / "two", resume=True)
    one, two = Run.open(tmp_path / "one"), Run.open(tmp_path / "two")
    accuracies = [[line["accuracy"] for line in each.metrics() if "accuracy" in line] for each in (one, two)]
    assert accuracies[0][:1] == pytest.approx(accuracies[1][:1], abs=1e-6)
    assert accuracies[0][-2:] == pytest.approx(accuracies[1][-2:], abs=1e-6)
    averages = [each.checkpoint().weights()["ema"] for each in (one, two)]
    assert averages[0].keys() == averages[1].keys()
    for name, average in averages[0].items():
        torch.testing.assert_close(average, averages[1][name], rtol=1e-4, atol=1e-6)


def overflow_in_one(rank, folder):
    """Scale back gradients that overflow in the second process only, and store the weight and the scale."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), SharedGradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum() if rank == 0 else weight.sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    (folder / f"{rank}.json").write_text(json.dumps([weight.tolist(), scaler.get_scale()]))


def test_scaler_skips_a_step_in_all_processes_if_one_overflows(tmp_path):
    run_processes(overflow_in_one, 2, tmp_path, tmp_path)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[[1.0, 1.0], 2.0]] * 2


def test_two_processes_validate_batches_that_are_too_small_for_both(tmp_path):
    """Of a batch of three, the second process repeats two rows, because each needs two. They must not count."""
    settings = {**BASE, "steps": 2, "validation": {"batch_size": 3, "protocols": ["accuracy", "retrieval"]}}
    run(1, settings, tmp_path / "one")
    run(2, settings, tmp_path / "two")
    one, two = (Run.open(tmp_path / name).metrics()[-1] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in ("accuracy", "top5", "retrieval.recall1", "retrieval.map_at_r"):
        assert two[name] == pytest.approx(one[name], abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sharded", "fsdp"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_run_resumes_in_another_number_of_processes(tmp_path, case, before, after):
    settings = {**BASE, **CASES[case]}
    run(1, settings, tmp_path / "whole")
    run(before, {**settings, "steps": 3}, tmp_path / "run")
    run(after, settings, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=2e-4)


@pytest.mark.slow
def test_large_head_resumes_although_no_process_holds_all_class_vectors(tmp_path):
    settings = {**BASE, **CASES["sharded"], "large_head": 0}
    run(2, settings, tmp_path / "whole")
    run(3, {**settings, "steps": 3}, tmp_path / "run")
    run(2, settings, tmp_path / "run", resume=True)
    # The rows are drawn in the same blocks for every number of processes.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=2e-4)
