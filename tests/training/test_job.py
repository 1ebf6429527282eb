import inspect
import math
from pathlib import Path

import pytest
import torch

from hypersphere import data, heads
from hypersphere.data import Graph, LabelledImages, PointClouds
from hypersphere.training import Assembly, Job, Task, load_task, minimize, task
from hypersphere.training.job import REGULARIZERS
from hypersphere.training.job_network import INITIALIZATIONS, NETWORKS, OPERATORS
from hypersphere.training.job_optimizers import OPTIMIZERS
from hypersphere.training.job_rotating import ROTATIONS
from hypersphere.training.job_schedule import SCHEDULES
from hypersphere.training.task import TASKS

SMALL = {"name": "toy_cnn", "widths": [4, 4], "feature_dim": 4}
HIDDEN = {"name": "mlp", "widths": [8, 8]}
MENUS = {
    "data": TASKS,
    "model": NETWORKS,
    "operator": OPERATORS,
    "head": heads.PRESETS,
    "regularizer": REGULARIZERS,
    "rotation": ROTATIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}


def images(side=8, channels=1, count=10, classes=("a", "b"), seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, channels, side, side), dtype=torch.uint8, generator=generator)
    return LabelledImages(pixels, torch.arange(count) % len(classes), classes)


def points(count=8, size=64):
    return PointClouds(torch.randn(count, size, 3), torch.arange(count) % 2, ("a", "b"))


def graph(nodes=12):
    chosen = torch.arange(nodes) % 3
    edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    masks = [chosen == which for which in range(3)]
    return Graph(
        torch.rand(nodes, 5), torch.arange(nodes) % 2, torch.cat([edges, edges.flip(0)], 1), *masks, ("a", "b")
    )


def pictures(side=8, **more):
    one, other = images(side, **more), images(side, seed=1, **more)
    return Task(one.images, one.labels, other.images, other.labels, one.classes)


def trained(settings, given=None, steps=2):
    """Train the job for a few steps; check that all numbers are finite and that the parameters have changed."""
    job = Job.of({"model": SMALL, "batch_size": 5, "epochs": 1, **settings})
    assembly = Assembly(job, pictures() if given is None else given)
    before = [parameter.detach().clone() for parameter in assembly.objective.parameters()]
    losses = []

    def on_step(progress):
        assembly.after_step(progress.step)
        losses.append(progress.loss)

    minimize(
        assembly.objective.train(),
        assembly.batches,
        epochs=math.ceil(steps / len(assembly.batches)),
        optimizer=assembly.optimizer,
        scheduler=assembly.scheduler,
        on_step=on_step,
    )
    assert len(losses) >= steps
    assert all(map(math.isfinite, losses))
    after = list(assembly.objective.parameters())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assembly.objective.eval()
    with torch.no_grad():
        x, _ = next(assembly.test_batches())
        assert bool(torch.isfinite(assembly.head.scores(assembly.objective.features(x))).all())
    return assembly


# --- every entry of every menu


def fake(name, monkeypatch):
    """Replace the files of an entry of TASKS by a small data set."""
    if name in ("cora", "citeseer", "pubmed"):
        monkeypatch.setitem(data.DATASETS, name, lambda root: graph())
    elif name == "omniglot":
        monkeypatch.setattr(data, "omniglot", lambda root, split, size: images(size, count=20))
    elif name == "lfw":
        monkeypatch.setattr(data, "lfw", lambda root: images(8, 3, count=30))
    elif name == "image_folder":
        monkeypatch.setattr(data, "image_folder", lambda path, size, grey: images(12, 3))
    elif name != "digits":
        made = (lambda root, split: points()) if name == "modelnet10" else (lambda root, split: images(8, 3))
        monkeypatch.setitem(data.DATASETS, name, made)
        monkeypatch.setitem(TASKS, name, task._classification(name))


@pytest.mark.parametrize("name", TASKS)
def test_job_trains_on_every_task(name, monkeypatch):
    fake(name, monkeypatch)
    spec = {
        "name": name,
        **({"path": "anywhere"} if name == "image_folder" else {"limit": 20} if name == "digits" else {}),
    }
    found = load_task(spec)
    assert len(found.inputs) == len(found.labels)
    assert set(found.labels.tolist()) <= set(range(len(found.classes)))
    model = SMALL
    if found.graph is not None:
        model = {"name": "gcn", "hidden": 4} if "hidden" in inspect.signature(NETWORKS["gcn"]).parameters else "gcn"
    elif found.inputs.ndim == 3:
        model = "pointnet"
    trained({"data": spec, "model": model}, found)


def narrow(name):
    """Return the network with four channels everywhere, and data for it."""
    factory = NETWORKS[name]
    if name.startswith("pointnet"):  # PointNet++ samples 512 centres
        one = points(*((4, 512) if name == "pointnet2" else ()))
        return {"name": name}, Task(one.points, one.labels, one.points, one.labels, one.classes)
    if name == "gcn":
        one = graph()
        train, test = one.train.nonzero().flatten(), one.test.nonzero().flatten()
        return {"name": name}, Task(train, one.labels[train], test, one.labels[test], one.classes, one)
    widths = inspect.signature(factory).parameters["widths"].default
    side = 32 if getattr(factory, "keywords", {}).get("large_stem") else 16
    return {"name": name, "widths": [4] * len(widths)}, pictures(side, channels=3)


@pytest.mark.parametrize("name", NETWORKS)
def test_job_trains_every_network(name):
    model, given = narrow(name)
    trained({"model": model}, given)


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name in OPERATORS for model in (SMALL, HIDDEN) if (name, model) != ("sphere_norm", HIDDEN)],
)
def test_job_trains_every_operator(name, model):
    trained({"operator": name, "model": model})


def test_job_rejects_sphere_norm_without_convolutions():
    with pytest.raises(ValueError, match="conv"):
        trained({"operator": "sphere_norm", "model": HIDDEN})


@pytest.mark.parametrize("name", heads.PRESETS)
def test_job_trains_every_head(name):
    trained({"head": name})


@pytest.mark.parametrize("name", REGULARIZERS)
def test_job_trains_every_regularizer(name):
    trained(
        {"regularizer": {"name": name, **({"projection": {"name": "random", "dim": 3}} if name == "comhe" else {})}}
    )


@pytest.mark.parametrize("name", ROTATIONS)
def test_job_trains_every_rotation(name):
    trained({"rotation": {"name": name, **({"every": 2} if name == "stochastic" else {})}, "model": HIDDEN}, steps=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_job_trains_with_every_optimizer(name):
    trained({"optimizer": {"name": name, "weight_decay": 1e-3, "decay_everything": True, "clip": 1.0}})


@pytest.mark.parametrize("name", SCHEDULES)
def test_job_trains_with_every_schedule(name):
    trained({"schedule": name})


@pytest.mark.parametrize("name", INITIALIZATIONS)
def test_job_uses_every_initialization(name):
    trained({"model": {**SMALL, "init": name, "init_mean": 0.1}, "optimizer": {"name": "sgd", "lr": 1e-3}})


@pytest.mark.parametrize(
    "settings",
    [
        {"operator": {"name": "tanh", "angular": "sigmoid", "learn_k": "layer", "learn_radius": "filter"}},
        {"operator": {"name": "sphere", "angular": {"name": "sigmoid", "k": 0.3}, "project_every": 1, "layers": "all"}},
        {"operator": {"name": "linear", "weighted_gradients": True}},
        {"rotation": {"name": "cayley", "output": True, "hidden": False}},
        {
            "rotation": {"name": "cayley", "blocks": 2, "whole_first": True},
            "optimizer": {"name": "sgd", "rotation_lr": 0.5},
        },
        {"rotation": "descent", "optimizer": {"name": "adam", "rotation_lr": 0.01}},
        {"head": {"name": "a_softmax", "annealing": {"start": 10.0, "end": 0.0}, "label_smoothing": 0.1}},
        {"head": {"name": "am_softmax", "class_weights": [1.0, 2.0], "reduction": "sum"}},
        {"augment": {"shift": 1, "mirror": True}, "precision": "bfloat16"},
        {"head": {"name": "arcface", "sharded": True}},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_job_combines_components(settings):
    trained(settings)


# --- invalid names and options


@pytest.mark.parametrize("part", sorted(MENUS))
def test_job_suggests_the_closest_name(part):
    name = next(name for name in list(MENUS[part])[1:] if name not in ("gcn",))
    wrong = name[:-1] + "_" + name[-1]
    with pytest.raises(ValueError, match=f"{part}.name must be one of .*not '{wrong}'; did you mean {name}\\?"):
        Job.of({part: wrong}).build()
    with pytest.raises(ValueError, match=rf"{part}\.nonsense_option is not an option"):
        Job.of({"data": {"name": "digits", "limit": 20}, part: {"name": _fitting(part), "nonsense_option": 1}}).build()


def _fitting(part):
    return {"data": "digits", "model": "toy_cnn", "operator": "ball"}.get(part, next(iter(MENUS[part])))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"epoch": 2}, "epoch is not a setting of a job; did you mean epochs?"),
        ({"epochs": 0}, "epochs must be an integer >= 1, not 0"),
        ({"epochs": True}, "epochs must be an integer"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"precision": "half"}, "precision must be one of float32, bfloat16"),
        ({"compile": "yes"}, "compile must be true or false"),
        ({"augment": {"shfit": 1}}, "augment.shfit is not an option of augment; did you mean shift?"),
        ({"augment": {"shift": 1.5}}, "augment.shift must be an integer >= 0"),
        ({"augment": {"mirror": 1}}, "augment.mirror must be true or false"),
        ({"head": {"m": 4}}, "head must be a mapping with a name"),
        ({"head": 3}, "head must be a mapping with a name and options, not 3"),
        ({"epochs": {"name": 3}}, "epochs must be a plain value"),
        ({"head": {"name": "softmax", "bias": {1, 2}}}, "settings must consist of numbers"),
    ],
)
def test_job_rejects_invalid_settings(settings, match):
    with pytest.raises(ValueError) as caught:
        Job.of(settings)
    assert match in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"head": {"name": "softmax", "reduction": "none"}}, "head.reduction must be 'mean' or 'sum'"),
        ({"head": {"name": "softmax", "sharded": 1}}, "head.sharded must be true or false"),
        ({"operator": {"name": "ball", "project_every": 0}}, "operator.project_every must be None or an integer"),
        ({"operator": {"name": "ball", "aplha": 2}}, "operator.aplha is not an option of ball; did you mean alpha?"),
        ({"model": "gcn"}, "model.name must be 'gcn' on a graph, and another model otherwise"),
        ({"model": "pointnet"}, "model.name must be a pointnet on points, and another model otherwise"),
        ({"model": {"name": "toy_cnn", "conv": 1}}, "without conv, linear and num_classes"),
        ({"model": {"name": "toy_cnn", "norm": "layer"}}, "model.norm must be one of batch, group, none"),
        ({"optimizer": {"name": "sgd", "clip": 0}}, "optimizer.clip must be None or a positive number"),
        (
            {"optimizer": {"name": "sgd", "decay_everything": "false"}},
            "decay_everything must be true or false, not 'false'",
        ),
        ({"optimizer": {"name": "sgd", "nesterov": "False"}}, "optimizer.nesterov must be true or false, not 'False'"),
        ({"model": {"name": "toy_cnn", "standardize": "no"}}, "model.standardize must be true or false, not 'no'"),
    ],
)
def test_job_rejects_what_cannot_be_built(settings, match):
    with pytest.raises(ValueError) as caught:
        Assembly(Job.of(settings), pictures())
    assert match in str(caught.value)


@pytest.mark.parametrize("count", [1, 0])
def test_job_rejects_classes_with_too_few_images(count, monkeypatch):
    monkeypatch.setattr(
        data, "image_folder", lambda path, size, grey: images(count=2 * count, classes=("a", "b") * count)
    )
    with pytest.raises(ValueError, match=r"data must be (at least two images per class|at least one class)"):
        load_task({"name": "image_folder", "path": "anywhere"})


# --- data


def test_image_folder_path_is_relative_to_the_data_root(monkeypatch):
    asked = []

    def read(path, size, grey):
        asked.append(path)
        return images(12, 3)

    monkeypatch.setattr(data, "image_folder", read)
    for path, root in (("photos", Path("/data")), ("photos", None), ("/own/photos", Path("/data"))):
        load_task({"name": "image_folder", "path": path}, root)
    assert asked == [Path("/data/photos"), Path("photos"), Path("/own/photos")]


def test_task_docstring_names_all_options():
    docstring = TASKS["digits"].__doc__
    assert docstring.startswith("Handwritten digits")
    for option in ("limit", "pool", "keep", "rising", "held_out", "seed"):
        assert f"`{option}`" in docstring
    with pytest.raises(ValueError, match=r"data\.rising must be true or false, not 'yes'"):
        load_task({"name": "digits", "rising": "yes"})


def test_network_standardizes_constant_points_to_finite_values():
    one = PointClouds(torch.ones(4, 64, 3), torch.arange(4) % 2, ("a", "b"))
    given = Task(one.points, one.labels, one.points, one.labels, one.classes)
    assembly = Assembly(Job.of({"model": {"name": "pointnet", "standardize": True}}), given)
    assert assembly.network.deviation.item() == 1
    assert bool(torch.isfinite(assembly.network.eval()(one.points)).all())


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        ({"name": "sgd"}, 0.1),
        ({"name": "adam"}, 1e-3),
        ({"name": "adam", "lr": 0.02}, 0.02),
        ({"name": "adamw", "rotation_lr": 0.3}, 0.3),
    ],
)
def test_ogd_uses_the_learning_rate_of_the_optimizer(optimizer, rate):
    job = Job.of({"model": HIDDEN, "rotation": "descent", "optimizer": optimizer, "schedule": "constant"})
    *_, last = Assembly(job, pictures()).optimizer.optimizers
    assert last.param_groups[0]["lr"] == rate


# --- settings


def test_job_settings_round_trip():
    job = Job.of({"head": "arcface", "model": {"name": "mlp", "widths": (3, 4)}, "augment": {"shift": 2}, "seed": 7})
    assert job.head == {"name": "arcface"}
    assert job.model["widths"] == [3, 4]
    assert Job.of(job.settings()) == job
    assert Job.of({}) == Job()
    changed = job.settings()
    changed["head"]["m"] = 1
    assert job.head == {"name": "arcface"}


def test_job_results_depend_only_on_the_seed():
    one, other, third = (trained({"seed": seed, "rotation": "stochastic", "model": HIDDEN}) for seed in (3, 3, 4))
    state, same, different = (a.objective.state_dict() for a in (one, other, third))
    assert all(torch.equal(state[key], same[key]) for key in state)
    assert any(not torch.equal(state[key], different[key]) for key in state)


def test_the_default_job_learns_digits():
    job = Job.of({"model": {"name": "toy_cnn", "widths": [8, 8], "feature_dim": 8}, "epochs": 4})
    assembly = job.build()
    history = minimize(
        assembly.objective.train(),
        assembly.batches,
        epochs=4,
        optimizer=assembly.optimizer,
        scheduler=assembly.scheduler,
    )
    assert history[-1].loss < history[0].loss / 2


def test_job_names_missing_and_unknown_options():
    def message(settings):
        with pytest.raises(ValueError, match=r".") as caught:
            Job.of(settings).build()
        return str(caught.value)

    assert message({"data": {"name": "image_folder"}}) == "data.path is required for image_folder"
    assert message({"optimizer": {"name": "adamw", "clip": "abc"}}) == (
        "optimizer.clip must be None or a number >= 0, not 'abc'"
    )
    assert "weight_decay, decay_everything, clip, rotation_lr" in message({"optimizer": {"name": "sgd", "x": 1}})
    assert "did you mean sharded?" in message({"head": {"name": "softmax", "shard": True}})
    assert "did you mean init_mean?" in message({"model": {"name": "toy_cnn", "init_means": 1}})
