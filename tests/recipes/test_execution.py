"""Training the rows of recipes: every recipe at the smallest scale, resuming, divergence, measurements."""

import math
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hypersphere.evaluation import Landscape
from hypersphere.recipes import (
    RECIPES,
    SCALES,
    Outcome,
    attacks,
    execute,
    open_set,
    opt_studies,
    read_records,
    read_tensors,
    run_name,
)
from hypersphere.recipes.execution import outcome_of_lines
from hypersphere.recipes.parts import compare_unseen
from hypersphere.robustness import accuracy_under
from hypersphere.training import Run, build_experiment
from hypersphere.training.components import MENUS
from hypersphere.training.config import Component, menus_of

IDS = (Path(__file__).parent / "ids.txt").read_text().split()
# Metrics of other rows of the recipe.
SOMETIMES = {"k_mean", "k_least", "k_most", "radius_factor_mean", "radius_factor_least", "radius_factor_most"}
ROTATED = ("OPT (CP)", "OPT (OGD)", "OPT (GS)")


@pytest.mark.filterwarnings("ignore:not projected")
@pytest.mark.parametrize("name", RECIPES)
def test_every_row_runs_at_the_smallest_scale(name, tmp_path):
    recipe = RECIPES[name]
    records = execute(recipe, tmp_path, scale="smoke", seeds=[0])
    assert [one.row for one in records] == [row.name for row in recipe.rows]
    for one in records:
        missing = {metric.key for metric in recipe.metrics if one.metrics.get(metric.key) is None}
        assert missing <= SOMETIMES, one.row
        assert set(recipe.figures) <= set(one.curves)
        if one.row.endswith(ROTATED) and not one.row.startswith("CLS"):
            first, *_, last = one.curves["energy"]
            assert last == pytest.approx(first, rel=1e-3), one.row
    assert not [path for path in tmp_path.rglob("seed-*") if path.is_dir()]  # no run folder is left


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.title
    assert recipe.reference
    assert recipe.note
    assert list(recipe.scales) == list(recipe.cost) == list(SCALES)
    assert set(recipe.covers) <= set(IDS)
    keys = {metric.key for metric in recipe.metrics}
    for row in recipe.rows:
        assert set(row.printed) <= keys
        assert set(row.at) <= set(SCALES)
        for scale in SCALES:
            config = recipe.config(row, scale)
            assert (config.epochs is None) != (config.steps is None)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_components_and_options_of_every_row_exist(name, scale):
    for row in RECIPES[name].rows:
        config = RECIPES[name].config(row, scale)
        for setting, menu in menus_of(type(config)).items():
            value = getattr(config, setting)
            for one in value if isinstance(value, tuple) else (value,):
                known = MENUS[menu].options(one.name)
                assert set(one.options) <= set(known), (row.name, setting)


def tiny(**options):
    """Return a recipe of one row that trains for two epochs."""
    recipe = RECIPES["digits"]
    return replace(recipe, rows=recipe.rows[:1], scales={"cpu": recipe.scales["smoke"]}, **options)


def test_interrupted_row_resumes_from_its_checkpoint(tmp_path):
    seen = []

    def watch(row, seed, fraction):
        seen.append(fraction)

    recipe, overrides = tiny(), {"epochs": 3, "save_every": 0.0}
    assert execute(recipe, tmp_path / "a", overrides=overrides, stop=lambda: len(seen) > 2, on_progress=watch) == []
    assert seen[-1] < 1
    (folder,) = (path for path in (tmp_path / "a").rglob("seed-0") if path.is_dir())
    saved = Run.open(folder).checkpoint().step
    assert saved > 0
    seen.clear()
    (resumed,) = execute(recipe, tmp_path / "a", overrides=overrides, on_progress=watch)
    assert seen[1] >= saved / 6  # the first steps are not repeated
    (straight,) = execute(recipe, tmp_path / "b", overrides=overrides)
    drop = {"seconds"}
    assert {k: v for k, v in resumed.metrics.items() if k not in drop} == {
        k: v for k, v in straight.metrics.items() if k not in drop
    }
    assert resumed.curves == straight.curves
    assert len(straight.curves["error"]) == 4  # before training and after each epoch
    assert len(straight.curves["loss"]) == 3


def test_run_of_other_settings_is_not_resumed(tmp_path):
    recipe = tiny()
    execute(recipe, tmp_path, stop=lambda: True)
    changed = replace(recipe, base={**recipe.base, "batch_size": 50})
    (record,) = execute(changed, tmp_path)
    assert record.config["batch_size"] == 50
    assert record.metrics["diverged"] == 0


def work(rank, port, out):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    records = execute(tiny(), out, overrides={"epochs": 2})
    assert execute(tiny(), out, overrides={"epochs": 2}) == records
    dist.destroy_process_group()


def test_two_processes_write_one_record_that_agrees_with_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.set_forkserver_preload(["hypersphere.recipes", "sklearn.datasets"])
    mp.start_processes(work, (port, tmp_path / "two"), nprocs=2, start_method="forkserver")
    (one,) = execute(tiny(), tmp_path / "one", overrides={"epochs": 2})
    (two,) = read_records(tmp_path / "two", run_name("digits", {"epochs": 2}))
    assert two.machine == f"{one.machine}, 2 processes"
    assert two.curves["loss"] == pytest.approx(one.curves["loss"], rel=1e-3)
    assert two.metrics["energy"] == pytest.approx(one.metrics["energy"], rel=1e-3)
    assert read_tensors(tmp_path / "two", two)["features"].shape == (500, 3)


def test_diverged_row_is_marked_and_has_no_error(tmp_path):
    messages = []
    (record,) = execute(tiny(), tmp_path, overrides={"optimizer": {"name": "sgd", "lr": 1e30}}, say=messages.append)
    assert record.metrics["diverged"] == 1
    assert "error" not in record.metrics
    assert messages[0].startswith("Softmax, seed 0: ")


def test_measure_gets_the_trained_experiment_its_options_and_the_data_root(tmp_path):
    seen = []

    def measure(experiment, run, *, size, data_root):
        time.sleep(0.5)
        seen.append((size, data_root, experiment.objective.training, run.metrics()[-1]["epoch"]))
        return Outcome({"value": 1.0}, {"c": [math.nan]}, {"t": experiment.head.weight})

    recipe = tiny(measure=measure)
    recipe = replace(recipe, base={**recipe.base, "measure": {"size": 2}})
    (record,) = execute(recipe, tmp_path, overrides={"measure.size": 3}, data_root=tmp_path)
    assert seen == [(3, tmp_path, False, 1)]
    assert record.metrics["value"] == 1.0
    assert record.seconds > record.metrics["seconds"] + 0.4  # the record includes the measurement
    assert record.curves["c"] == [None]
    assert record.config["measure"] == {"size": 3}
    assert read_tensors(tmp_path, record)["t"].shape == (10, 3)


def test_outcome_of_lines_converts_to_per_cent_and_skips_epochs_without_validation():
    lines = [
        {"kind": "validation", "epoch": 0, "step": 0, "accuracy": 0.1, "energy": {"a": 2.0, "head": 5.0}},
        {"kind": "step", "step": 1, "loss": 9.0},
        {"kind": "epoch", "epoch": 1, "step": 1, "loss": 3.0, "seconds": 1.0},
        {"kind": "epoch", "epoch": 2, "step": 2, "loss": 1.0, "accuracy": None, "energy": {"a": 1.0, "head": None}},
    ]
    outcome = outcome_of_lines(lines)
    assert outcome.curves["loss"] == [1.0]
    assert outcome.curves["error"] == [90.0, pytest.approx(math.nan, nan_ok=True)]
    assert outcome.curves["energy"] == [2.0, pytest.approx(math.nan, nan_ok=True)]
    assert outcome_of_lines([{"kind": "epoch", "epoch": 1, "loss": 1, "verification.eer": 0.25}]).metrics == {
        "verification.eer": 25.0
    }
    assert outcome_of_lines([]).metrics == {}


def test_transferred_attacks_are_computed_on_another_network(tmp_path, monkeypatch):
    calls = []

    def recorded(*arguments, source=None):
        calls.append((arguments[0], source))
        return accuracy_under(*arguments, source=source)

    monkeypatch.setattr(attacks, "accuracy_under", recorded)
    execute(attacks.RECIPE, tmp_path, scale="smoke", rows=["baseline"], seeds=[0])
    victim, source = calls[-1]
    pairs = zip(victim.parameters(), source.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs if a.dim() > 1)


def test_faces_of_seed_k_are_those_of_fold_k():
    config = open_set.LFW.config("Softmax", "cpu", seed=2)
    assert config.data.options == {"split": "fold", "fold": 2, "at_least": 3, "size": [56, 48]}
    assert config.optimizer.options["decay_everything"]


def test_open_set_heads_accept_ramps_and_annealing_as_settings():
    overrides = {"head.ramp": {"steps": 400}}
    experiment = build_experiment(open_set.LFW.config("ArcFace (s=30, m=0.5)", "smoke", overrides))
    assert experiment.head.ramp.steps == 400
    experiment = build_experiment(open_set.LFW.config("A-Softmax (m=4)", "smoke", {"head.annealing.gamma": 0.3}))
    assert (experiment.head.annealing.gamma, experiment.head.annealing.start) == (0.3, 100)


def test_compare_unseen_is_perfect_for_one_hot_features():
    labels = torch.arange(20).repeat_interleave(20)
    assert compare_unseen(torch.eye(20)[labels], labels) == {"accuracy": 100, "eer": 0, "tar": 100, "rank1": 100}


def test_digits_energy_row_is_trained_with_energy(tmp_path):
    weights = {"regularizers.0.output": 0.0}, {"regularizers.0.output": 10.0}
    options = {"scale": "smoke", "rows": ["A-Softmax + energy"]}
    (plain,), (repelled,) = (execute(RECIPES["digits"], tmp_path, overrides=one, **options) for one in weights)
    assert repelled.metrics["energy"] < plain.metrics["energy"]
    assert repelled.curves["loss"][0] > plain.curves["loss"][0] + 1


def test_source_energy_reproduces_the_printed_energies():
    # For random directions the mean of 1/(1 − cos²) is (d−2)/(d−3). There are 64 neurons and their 64 negatives.
    def expected(d):
        return (128 * 126 / 2 * (d - 2) / (d - 3) + 128 / 4) / (128 * 127)

    total = expected(27) + 5 * expected(576) + expected(1024)
    assert opt_studies.source_energy(Component("he"), 0) == pytest.approx(total, abs=1e-3)
    recipe = opt_studies.INITIAL_ENERGY
    for row in recipe.rows:
        if "source_energy" in row.printed:
            computed = opt_studies.source_energy(recipe.config(row).init, 0)
            assert computed == pytest.approx(row.printed["source_energy"], abs=3e-3)


def test_rotated_class_vectors_have_the_degrees_of_freedom_of_a_rotation(tmp_path):
    (record,) = execute(opt_studies.OMNIGLOT, tmp_path, scale="smoke", rows=["CLS-OPT (CP)"], seeds=[0])
    assert record.metrics["head_parameters"] == 8 * 7 / 2


def test_on_ring_is_the_mean_at_a_distance():
    axis = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    bowl = Landscape(axis, axis, {"loss": axis[:, None].square() + axis.square()}, {"loss": 0.0})
    assert opt_studies.on_ring(bowl, "loss", 0.5) == pytest.approx(0.25, abs=1e-3)
    assert math.isnan(opt_studies.on_ring(bowl, "loss", 9.0))
