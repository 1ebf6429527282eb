import inspect
import math
import sys

import pytest
import torch
from torch import nn

from hypersphere import data, heads, layers_of, models
from hypersphere.data import DataSplit, Graph, LabelledImages, PointClouds, TensorSource
from hypersphere.energy import Orthonormal
from hypersphere.functions.magnitude import MAGNITUDES
from hypersphere.layers import SphereNorm
from hypersphere.layers.decoupled import DecoupledLayer
from hypersphere.models import INITIALIZATIONS
from hypersphere.optim import OPTIMIZERS, SCHEDULES
from hypersphere.rotation import rotation_parameters
from hypersphere.rotation.rotate import METHODS
from hypersphere.training import Config, Trainer, minimize
from hypersphere.training import build as build_module
from hypersphere.training.build import ADVERSARIES, REGULARIZERS, build
from hypersphere.training.components import MENUS, complete_settings
from hypersphere.training.network import NETWORKS, OPERATORS
from hypersphere.training.rotations import ROTATIONS

SMALL = {"name": "toy_cnn", "widths": [4, 4], "feature_dim": 4}
HIDDEN = {"name": "mlp", "widths": [8, 8]}


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
    return DataSplit(TensorSource.of(images(side, **more)), TensorSource.of(images(side, seed=1, **more)))


def clouds(*arguments):
    return DataSplit(TensorSource.of(points(*arguments)), TensorSource.of(points(*arguments)))


def nodes():
    one = graph()
    train, test = one.train.nonzero().flatten(), one.test.nonzero().flatten()
    parts = (TensorSource(rows, one.labels[rows], one.classes) for rows in (train, test))
    return DataSplit(*parts, graph=one)


def trained(settings, given=None, steps=2):
    """Train for a few steps; check that all numbers are finite and that the parameters have changed."""
    config = Config.of({"model": SMALL, "batch_size": 5, "epochs": 1, "log_every": 1, **settings})
    experiment = build(config, split=pictures() if given is None else given)
    before = [parameter.detach().clone() for parameter in experiment.objective.parameters()]
    losses = []
    experiment.config = Config.of(
        {**experiment.config.settings(), "epochs": None, "steps": max(steps, experiment.steps)}
    )
    trainer = Trainer(experiment, on_step=lambda one: losses.append(float(one.progress.loss)))
    trainer.steps = experiment.config.steps
    assert trainer.train()
    assert len(losses) >= steps
    assert all(map(math.isfinite, losses))
    after = list(experiment.objective.parameters())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    experiment.objective.eval()
    with torch.no_grad():
        assert bool(torch.isfinite(experiment.head.scores(experiment.embed()[0].to(experiment.device))).all())
    return experiment


# --- every entry of every menu


def narrow(name):
    """Return the network with four channels everywhere, and data for it."""
    if name.startswith("pointnet"):  # PointNet++ samples 512 centres
        return {"name": name}, clouds(*((4, 512) if name == "pointnet2" else ()))
    if name == "gcn":
        return {"name": name}, nodes()
    if name.startswith(("iresnet", "mobilefacenet")):
        return {"name": name}, pictures(16 if name.startswith("iresnet") else 112, channels=3, count=4)
    if name.endswith("vit"):
        return {"name": name, "dim": 8, "depth": 1, "heads": 2}, pictures(16, channels=3)
    widths = inspect.signature(NETWORKS[name]).parameters["widths"].default
    side = 32 if getattr(NETWORKS[name], "keywords", {}).get("large_stem") else 16
    return {"name": name, "widths": [4] * len(widths)}, pictures(side, channels=3)


QUICK = [name for name in NETWORKS if not name.startswith(("iresnet", "mobilefacenet_", "auto"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_experiment_trains_every_network(name):
    model, given = narrow(name)
    experiment = trained({"model": model}, given)
    features, labels = experiment.embed()
    assert features.shape == (len(given.validation), experiment.network.feature_dim)
    assert torch.equal(labels, given.validation.labels)


@pytest.mark.parametrize("model", [SMALL, HIDDEN], ids=["convolutions", "linear"])
@pytest.mark.parametrize("name", OPERATORS)
def test_experiment_trains_every_operator(name, model):
    if name == "sphere_norm" and model is HIDDEN:
        pytest.skip("a norm of convolutions")
    network = trained({"operator": name, "model": model}).network
    decoupled = [layer for layer in network.modules() if isinstance(layer, DecoupledLayer)]
    norms = [layer for layer in network.modules() if isinstance(layer, SphereNorm)]
    count = 4 if model is SMALL else 2
    assert len(norms) == (count if name == "sphere_norm" else 0)
    magnitude = MAGNITUDES.get("sphere" if name == "sphere_norm" else name)
    assert [type(layer.magnitude) for layer in decoupled] == [magnitude] * (count if magnitude else 0)


def assert_loss_of(experiment, head):
    """Compare the loss of the trained head with that of another one with the same weights."""
    features, labels = experiment.embed()
    ours = experiment.head.eval()
    head.load_state_dict((ours.head if isinstance(ours, heads.ShardedHead) else ours).state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(features, labels), head.eval()(features, labels))


@pytest.mark.parametrize("name", [*heads.PRESETS, *heads.BASELINES])
def test_experiment_trains_every_head(name):
    three = pictures(classes=("a", "b", "c"))  # adacos needs three classes
    experiment = trained({"head": {"name": name}}, three if name == "adacos" else None)
    assert_loss_of(experiment, MENUS["head"][name](4, len(experiment.data.classes)))


@pytest.mark.parametrize(
    "options",
    [
        {"name": "arcface", "centers": 3},
        {"name": "softmax", "centers": 2, "bias": True},
        {"name": "arcface", "hard_negatives": 5, "hard_margin": 0.06},
        {"name": "arcface", "interclass_filter": 0.8},
        {"name": "arcface", "class_sizes": [5, 3, 2]},
        {"name": "am_softmax", "m": [0.1, 0.2, 0.3]},
        {"name": "magface", "m_low": 0.3, "penalty": 10},
        {"name": "curricularface", "momentum": 0.9},
        {"name": "adacos", "dynamic": False},
        {"name": "elasticface", "sigma": 0.1},
        {"name": "sphereface2", "variant": "A"},
        {"name": "fixed", "vectors": "simplex"},
        {"name": "fixed", "vectors": "energy", "s": 10, "margin": "additive_cosine"},
        {"name": "arcface", "centers": 3, "sharded": True, "sample": 0.5},
    ],
    ids=str,
)
def test_experiment_trains_heads_with_options(options):
    experiment = trained({"head": options}, pictures(classes=("a", "b", "c")))
    given = {key: value for key, value in options.items() if key not in ("name", "sharded", "sample")}
    given = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in given.items()}
    assert_loss_of(experiment, MENUS["head"][options["name"]](4, 3, **given))


def test_experiment_evaluates_and_exports_heads_with_centers():
    experiment = trained({"head": {"name": "arcface", "centers": 3}}, pictures(classes=("a", "b", "c")))
    features, labels = experiment.embed()
    scores = experiment.head.scores(features)
    assert scores.shape == (10, 3)
    vectors = heads.class_vectors(experiment.head, features, labels)
    assert vectors.shape == (3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGULARIZERS)
def test_experiment_trains_with_every_regularizer(name):
    options = {"projection": {"name": "random", "dim": 3}} if name == "comhe" else {}
    if name == "t_net":
        experiment = trained({"regularizers": "t_net", "model": "pointnet_transforms"}, clouds())
    else:
        experiment = trained({"regularizers": [{"name": name, **options}]})
    objective, (x, y) = experiment.objective, experiment.prepare(*next(iter(experiment.loader)))
    types = [REGULARIZERS[name]] if name not in ("none", "t_net") else []
    assert [type(regularizer) for regularizer in objective.regularizers] == types
    with torch.no_grad():
        added = float(objective(x, y)) - float(objective(x, y, regularize=False))
    assert added == 0 if name == "none" else added > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTATIONS)
def test_experiment_trains_every_rotation(name):
    options = {"every": 2} if name in ("stochastic", "equivalence") else {}
    settings = {"rotation": {"name": name, **options}, "model": HIDDEN}
    experiment = trained(settings, steps=3)
    assert bool(rotation_parameters(experiment.objective)) == (name != "none")
    if name in ("descent", "stochastic", "equivalence") or (name in METHODS and METHODS[name].always_orthogonal):
        initial = build(Config.of(settings), split=pictures())
        for new, old in zip(layers_of(experiment.network.body), layers_of(initial.network.body), strict=True):
            assert not torch.equal(new.rows(), old.rows())
            torch.testing.assert_close(torch.linalg.svdvals(new.rows()), torch.linalg.svdvals(old.rows()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_experiment_trains_with_every_optimizer(name):
    options = {"lr": 1e-3, "weight_decay": 2e-3, "decay_everything": True}
    experiment = trained({"optimizer": {"name": name, **options}, "clip": 1.0, "schedule": "constant"})
    (optimizer,) = experiment.optimizer.optimizers
    assert type(optimizer) is getattr(OPTIMIZERS[name], "func", OPTIMIZERS[name])
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 2e-3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_experiment_trains_with_every_schedule(name):
    experiment = trained({"schedule": name, "optimizer": {"name": "sgd", "lr": 0.2}})
    assert type(experiment.scheduler.schedule) is SCHEDULES[name]
    # The learning rate after the last step. The schedule "steps" has multiplied it by 0.1 twice.
    last = {"constant": 0.2, "cosine": 0.0, "one_cycle": 0.0, "steps": 0.002, "plateau": 0.2}[name]
    assert [group["lr"] for group in experiment.optimizer.param_groups] == pytest.approx([last, last])


@pytest.mark.parametrize("name", INITIALIZATIONS)
def test_experiment_uses_every_initialization(name):
    mean, options = (0.0, {}) if name == "default" else (0.1, {"mean": 0.1})
    settings = {"init": {"name": name, **options}, "optimizer": {"name": "sgd", "lr": 1e-3}}
    trained(settings)
    experiment = build(Config.of({**settings, "model": {"name": "mlp", "widths": [128]}}), split=pictures(16))
    inputs, outputs = 256, 128
    deviations = {"default": (3 * inputs) ** -0.5, "normal": 1, "xavier": (2 / (inputs + outputs)) ** 0.5}
    (layer,) = layers_of(experiment.network.body)
    assert layer.rows().mean().item() == pytest.approx(mean, abs=0.02)
    assert layer.rows().std().item() == pytest.approx({**deviations, "he": (2 / inputs) ** 0.5}[name], rel=0.03)


@pytest.mark.parametrize("name", ADVERSARIES)
def test_experiment_trains_with_every_attack(name):
    objective = trained({"adversarial": name}).objective
    assert type(objective.attack) is (type(None) if name == "none" else ADVERSARIES[name])
    x, y = images().images.float() / 255, images().labels
    clean, attacked = objective.eval()(x, y).item(), objective.train()(x, y).item()
    assert attacked == clean if name == "none" else attacked > clean


@pytest.mark.parametrize(
    "settings",
    [
        {"operator": {"name": "tanh", "angular": "sigmoid", "learn_k": "layer", "learn_radius": "filter"}},
        {"operator": {"name": "tanh", "learn_radius": "filter", "radius_norm": "batch", "storage": "half"}},
        {"operator": {"name": "sphere", "angular": {"name": "sigmoid", "k": 0.3}, "project_every": 1, "layers": "all"}},
        {"operator": {"name": "linear", "weighted_gradients": True}},
        {"operator": {"name": "sphere", "scale": "keep"}},
        {"rotation": {"name": "cayley", "output": True, "hidden": False}},
        {
            "rotation": {"name": "cayley", "blocks": 2, "whole_first": True},
            "optimizer": {"name": "sgd", "rotation_lr": 0.5},
        },
        {"rotation": "descent", "optimizer": {"name": "adam", "rotation_lr": 0.01}},
        {"rotation": {"name": "descent", "momentum": 0.5, "blocks": 2, "whole_first": True}},
        {"rotation": {"name": "descent", "adam": True}, "optimizer": {"name": "adam", "rotation_lr": 0.01}},
        {"rotation": {"name": "cayley", "refine": "mhe", "refine_steps": 3, "refine_rate": 0.01, "spread": 0.1}},
        {"rotation": {"name": "stochastic", "normalize": True, "refine": "mhe", "refine_steps": 2}, "model": HIDDEN},
        {"rotation": {"name": "stochastic", "fraction": 0}, "model": HIDDEN},
        {
            "rotation": {"name": "cayley", "block_size": 4, "factors": 2, "side": "input", "whole_first": True},
            "model": HIDDEN,
        },
        {"rotation": {"name": "cayley", "block_size": 4, "dropout": 0.5, "quantize": "int8", "whole_first": True}},
        {"head": {"name": "a_softmax", "annealing": {"start": 10.0, "end": 0.0}, "label_smoothing": 0.1}},
        {"head": {"name": "am_softmax", "class_weights": [1.0, 2.0], "reduction": "sum"}},
        {"head": {"name": "arcface", "ramp": {"steps": 3}}},
        {"augment": [{"name": "shift", "pixels": 1}, "mirror"], "precision": "bfloat16"},
        {"head": {"name": "arcface", "sharded": True}},
        {"head": {"name": "arcface", "sharded": True, "sample": 0.5}, "optimizer": {"name": "adam", "lr": 0.01}},
        {"embedding": {"dim": 3, "neck": "linear_batch_norm", "dropout": 0.1}},
        {"optimizer": {"name": "adamw", "layer_decay": 0.5, "weight_decay": 0.1}},
        {"normalize": "centered", "sampler": {"name": "m_per_class", "m": 2}, "batch_size": 4},
        {"regularizers": ["mhe", "orthonormal"], "accumulate": 2},
        {"adversarial": {"name": "fgsm", "epsilon": 0.1, "weight": 0.3}, "precision": "bfloat16"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_experiment_combines_components(settings):
    state, again = (trained(settings).objective.state_dict() for _ in range(2))
    torch.testing.assert_close(state, again, rtol=0, atol=0)


# --- foreign code


class UserNet(nn.Module):
    """A model without an attribute for the dimension of its features."""

    def __init__(self, in_channels, width=6):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3)

    def forward(self, x):
        return self.conv(x)


def test_experiment_trains_a_foreign_model_with_an_embedder():
    experiment = trained({"model": {"name": f"{__name__}:UserNet", "width": 5}, "embedding": {"pool": "gem"}})
    assert isinstance(experiment.network.body, models.Embedder)
    assert experiment.network.feature_dim == 5
    with pytest.raises(ValueError, match=r"the config names code .*which is imported only with trust_code=True"):
        build(Config.of({"model": f"{__name__}:UserNet"}), split=pictures(), trust_code=False)


def test_foreign_code_is_not_imported_without_trust(tmp_path, monkeypatch):
    (tmp_path / "surprise.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for setting in ("model", "head", "optimizer", "augment", "data", "operator", "rotation"):
        with pytest.raises(ValueError, match="imported only with trust_code=True"):
            build(
                Config.of({setting: "surprise:Net"}), split=None if setting == "data" else pictures(), trust_code=False
            )
    assert "surprise" not in sys.modules


# --- defaults that fit the data


@pytest.mark.parametrize(
    ("given", "name", "dim"),
    [
        (pictures(8), "embedding_cnn", 64),
        (pictures(4), "embedding_cnn", 64),
        (pictures(32, channels=3), "embedding_cnn", 64),
        (pictures(64, channels=3, count=4), "embedding_cnn", 64),
        (pictures(96, channels=3, count=4), "resnet18", 512),
        (clouds(), "pointnet", 256),
        (nodes(), "gcn", 16),
    ],
    ids=["8", "4", "32", "64", "96", "points", "graph"],
)
def test_auto_model_fits_the_data(given, name, dim):
    experiment = build(Config.of({"batch_size": 2, "epochs": 1}), split=given)
    assert experiment.config.model.name == name
    assert experiment.network.feature_dim == dim
    x, y = next(iter(experiment.loader))
    assert math.isfinite(experiment.objective(*experiment.prepare(x, y)).item())


def test_dimension_of_features_grows_with_the_number_of_classes():
    many = tuple(f"class {number}" for number in range(1200))
    split = pictures(8, count=1200, classes=many)
    assert build(Config.of({}), split=split).network.feature_dim == 256


def test_complete_settings_show_the_rescale_of_sphere_norm():
    assert complete_settings(Config.of({"operator": "sphere_norm"}))["operator"]["rescale"] == "learned"


def test_orthonormality_leaves_out_the_classifier_by_default():
    experiment = build(Config.of({"model": SMALL, "regularizers": "orthonormal"}), split=pictures())
    (regularizer,) = experiment.objective.regularizers
    assert isinstance(regularizer, Orthonormal)
    assert all(not layer.name.startswith("head") for layer in regularizer.selection)


# --- invalid settings


MENU_OF = {"regularizers": "regularizer"}


@pytest.mark.parametrize(
    "part",
    ["data", "model", "operator", "head", "regularizers", "rotation", "optimizer", "schedule", "sampler", "normalize"],
)
def test_experiment_suggests_the_closest_name(part):
    menu = MENU_OF.get(part, part)
    setting = "regularizers.0" if part == "regularizers" else part
    name = next(name for name in list(MENUS[menu])[1:] if name not in ("gcn",))
    wrong = name[:-1] + "_" + name[-1]
    with pytest.raises(ValueError, match=f"{setting}.name must be one of .*not '{wrong}'; did you mean {name}\\?"):
        build(Config.of({part: wrong}), split=None if part == "data" else pictures())
    fitting = {"data": "digits", "model": "toy_cnn", "operator": "ball"}.get(part, next(iter(MENUS[menu])))
    with pytest.raises(ValueError, match=rf"{setting}\.nonsense_option is not an option"):
        build(Config.of({part: {"name": fitting, "nonsense_option": 1}}), split=None if part == "data" else pictures())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"head": {"name": "softmax", "reduction": "none"}}, "head.reduction must be 'mean' or 'sum'"),
        ({"head": {"name": "softmax", "sharded": 1}}, "head.sharded must be true or false"),
        ({"head": {"name": "softmax", "sample": 0.5}}, "head.sample must be null without head.sharded"),
        ({"operator": {"name": "ball", "project_every": 0}}, "operator.project_every must be null or an integer"),
        ({"operator": {"name": "ball", "aplha": 2}}, "operator.aplha is not an option of ball; did you mean alpha?"),
        ({"model": "gcn"}, "model.name must be 'gcn' on a graph, and another model otherwise"),
        ({"model": "pointnet"}, "model.name must be a pointnet on points, and another model otherwise"),
        ({"model": {"name": "toy_cnn", "conv": 1}}, "model.conv is not an option of toy_cnn"),
        ({"model": {"name": "mlp", "norm": "layer"}}, "model.norm must be one of batch, group, none"),
        ({"model": {"name": "auto", "widths": [3]}}, "model 'auto' has no options, but got widths; name a model"),
        (
            {"optimizer": {"name": "sgd", "decay_everything": "false"}},
            "decay_everything must be true or false, not 'false'",
        ),
        (
            {"optimizer": {"name": "adamw", "layer_decay": 0}},
            "optimizer.layer_decay must be null or a number in (0, 1]",
        ),
        ({"optimizer": {"name": "sgd", "lr": "fast"}}, "optimizer.lr must be a number >= 0, not 'fast'"),
        (
            {"optimizer": {"name": "sgd", "hyperball": "layer"}},
            "optimizer.hyperball must be null, 'matrix' or 'row', not 'layer'",
        ),
        (
            {"model": {"name": "normalized_vit", "dim": 8, "depth": 1, "heads": 2}, "ema": 0.9},
            "ema must be unset with normalized_vit, because an average of unit vectors is not a unit vector, not 0.9",
        ),
        ({"validation": {"protocols": ["accuracy", "accuracy"]}}, "validation.protocols must be different"),
        ({"regularizers": "t_net"}, "without t_net unless the model is pointnet_transforms"),
        (
            {
                "head": {"name": "arcface", "sharded": True, "sample": 0.5},
                "regularizers": [{"name": "mhe", "output": 1.0}],
            },
            "regularizers.0.output must be unset with head.sharded, because no process has the class vectors of all",
        ),
    ],
)
def test_experiment_rejects_settings_that_cannot_be_built(settings, match):
    with pytest.raises(ValueError) as caught:
        build(Config.of({"model": SMALL, **settings}), split=pictures())
    assert match in str(caught.value)


class Two:
    """A stand-in for a group of two processes."""

    size, rank = 2, 0


def ring(count=6):
    """Return a small graph, as the data of an experiment."""
    nodes = torch.arange(count)
    masks = [nodes % 3 == part for part in range(3)]
    graph = Graph(torch.rand(count, 3), nodes % 2, torch.stack([nodes, nodes.roll(1)]), *masks, ("a", "b"))
    train, test = (TensorSource(nodes[mask], graph.labels[mask], graph.classes) for mask in masks[:2])
    return DataSplit(train, test, graph=graph)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 1.0, "head": {"name": "softmax", "sharded": True}}, "clip must be unset with head.sharded"),
        ({"clip": 1.0, "parallel": "fsdp"}, "clip must be null with parallel fsdp"),
        ({"precision": "float16", "parallel": "fsdp"}, "precision must be float32 or bfloat16 with parallel fsdp"),
        ({"data": "cora"}, "data cora is a single graph, which cannot be divided among processes"),
    ],
)
def test_experiment_rejects_settings_that_processes_cannot_share(settings, message, monkeypatch):
    monkeypatch.setattr(build_module, "Processes", Two)
    monkeypatch.setattr(build_module, "shard_network_", lambda network: None)
    split = ring() if settings.get("data") == "cora" else pictures()
    with pytest.raises(ValueError, match=message):
        build(Config.of({"model": "auto", **settings}), split=split)


def test_experiment_names_missing_options():
    with pytest.raises(ValueError, match=r"data\.path is required for image_folder"):
        build(Config.of({"data": "image_folder"}))
    with pytest.raises(ValueError, match=r"nesterov, .*decay_everything, layer_decay, rotation_lr, rotation_decay"):
        build(Config.of({"optimizer": {"name": "sgd", "x": 1}}), split=pictures())
    with pytest.raises(ValueError, match=r"did you mean sharded\?"):
        build(Config.of({"head": {"name": "softmax", "shard": True}}), split=pictures())


# --- parameter groups


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
    config = Config.of({"model": HIDDEN, "rotation": "descent", "optimizer": optimizer, "schedule": "constant"})
    *_, last = build(config, split=pictures()).optimizer.optimizers
    assert last.param_groups[0]["lr"] == rate
    assert last.param_groups[0]["momentum"] == 0.9


def test_weight_decay_on_rotations():
    settings = {"model": HIDDEN, "rotation": "free", "schedule": "constant"}
    optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 0.3, "rotation_decay": 0.2}
    experiment = build(Config.of({**settings, "optimizer": optimizer}), split=pictures())
    last = experiment.optimizer.param_groups[-1]
    assert last["weight_decay"] == 0.2
    assert last["lr"] == 0.1
    assert {tuple(p.shape) for p in last["params"]} == {(64, 64), (8, 8)}


def test_layer_decay_lowers_the_rate_of_early_layers():
    optimizer = {"name": "sgd", "lr": 1.0, "layer_decay": 0.5, "weight_decay": 0.1}
    experiment = build(Config.of({"model": HIDDEN, "optimizer": optimizer, "schedule": "constant"}), split=pictures())
    rates = {id(p): group["lr"] for group in experiment.optimizer.param_groups for p in group["params"]}
    first, second = (layer for layer in experiment.network.body.modules() if isinstance(layer, nn.Linear))
    assert rates[id(experiment.head.weight)] == 1.0
    assert (rates[id(second.weight)], rates[id(second.bias)]) == (0.5, 0.5)
    assert (rates[id(first.weight)], rates[id(first.bias)]) == (0.25, 0.25)
    decays = {id(p): group["weight_decay"] for group in experiment.optimizer.param_groups for p in group["params"]}
    assert decays[id(first.weight)] == 0.1
    assert decays[id(first.bias)] == 0.0


def test_hyperball_keeps_the_norms_of_weights():
    optimizer = {"name": "adamw", "lr": 0.01, "hyperball": "matrix"}
    experiment = build(Config.of({"model": HIDDEN, "optimizer": optimizer, "epochs": 1}), split=pictures())
    weights = [p for p in experiment.network.parameters() if p.ndim > 1]
    before, norms = [p.detach().clone() for p in weights], [p.detach().norm() for p in weights]
    Trainer(experiment).train()
    for p, old, norm in zip(weights, before, norms, strict=True):
        assert not p.equal(old)
        torch.testing.assert_close(p.detach().norm(), norm)


def test_normalized_transformer_keeps_unit_weights_in_training():
    model = {"name": "normalized_vit", "dim": 8, "depth": 1, "heads": 2}
    settings = {"model": model, "optimizer": {"name": "adam", "lr": 0.1}, "epochs": 2, "init": {"name": "xavier"}}
    experiment = build(Config.of(settings), split=pictures(16, channels=3))
    layers = [layer for layer in layers_of(experiment.network.body) if layer.name.endswith((".q", ".k", ".up"))]
    before = [layer.rows().detach().clone() for layer in layers]
    Trainer(experiment).train()
    assert len(layers) == 3
    for layer, old in zip(layers, before, strict=True):
        assert not layer.rows().equal(old)
        for rows in (old, layer.rows()):
            torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_sampled_classes_that_are_not_drawn_do_not_move(name):
    """Neither momentum nor weight decay may change class vectors outside the sample."""
    many = tuple(f"class {number}" for number in range(200))
    split = pictures(8, count=4, classes=many)  # labels 0 to 3
    settings = {"model": HIDDEN, "head": {"name": "arcface", "sharded": True, "sample": 0.1}, "epochs": 1}
    optimizer = {"name": name, "lr": 0.01, "weight_decay": 0.1}
    experiment = build(Config.of({**settings, "batch_size": 4, "optimizer": optimizer}), split=split)
    before = experiment.head.weight.detach().clone()
    Trainer(experiment).train()
    moved = (experiment.head.weight != before).any(1)
    assert moved[:4].all()
    assert 4 < int(moved.sum()) < 60


# --- data, seeds and initial weights


def test_network_standardizes_constant_points_to_finite_values():
    one = PointClouds(torch.ones(4, 64, 3), torch.arange(4) % 2, ("a", "b"))
    split = DataSplit(TensorSource.of(one), TensorSource.of(one))
    experiment = build(Config.of({"model": "pointnet", "normalize": "standardize"}), split=split)
    assert experiment.network.deviation.item() == 1
    assert bool(torch.isfinite(experiment.network.eval()(one.points)).all())


def test_network_accepts_uint8_and_float_inputs():
    experiment = build(Config.of({"model": SMALL}), split=pictures())
    pixels = experiment.data.train.inputs
    torch.testing.assert_close(experiment.network(pixels), experiment.network(pixels.float() / 255))


def test_experiment_depends_only_on_the_seed():
    one, other, third = (trained({"seed": seed, "rotation": "stochastic", "model": HIDDEN}) for seed in (3, 3, 4))
    state, same, different = (experiment.objective.state_dict() for experiment in (one, other, third))
    assert all(torch.equal(state[key], same[key]) for key in state)
    assert any(not torch.equal(state[key], different[key]) for key in state)


def test_the_default_experiment_learns_digits():
    experiment = build(Config.of({"epochs": 3, "data": {"name": "digits", "limit": 600}}))
    trainer = Trainer(experiment)
    assert trainer.train()
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"] / 2
    assert trainer.metrics["accuracy"] > 0.8


def test_objective_can_be_trained_with_another_loop():
    experiment = build(Config.of({"model": SMALL, "batch_size": 5, "epochs": 2}), split=pictures())
    batches = [experiment.prepare(x, y) for x, y in experiment.loader]
    optimizer, scheduler = experiment.optimizer, experiment.scheduler
    history = minimize(experiment.objective.train(), batches, epochs=2, optimizer=optimizer, scheduler=scheduler)
    assert len(history) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": "left"}, "side must be 'auto', 'weight' or 'input', not 'left'"),
        ({"quantize": "int4"}, "quantize must be None or 'int8', not 'int4'"),
        ({"dropout": 1}, r"dropout must be a number in \[0, 1\), not 1"),
        (
            {"block_size": 2, "blocks": 2},
            "block_size must be None with blocks=2, because the two exclude each other, not 2",
        ),
        ({"block_size": "many"}, "rotation.block_size must be an integer or null, not 'many'"),
        ({"embeddings": 1}, "rotation.embeddings must be true or false, not 1"),
    ],
)
def test_experiment_checks_the_options_of_a_rotation(options, message):
    with pytest.raises(ValueError, match=message):
        build(Config.of({"model": HIDDEN, "rotation": {"name": "cayley", **options}}), split=pictures())


@pytest.mark.parametrize("rotation", ["none", "cayley", "descent"])
def test_experiment_applies_rotations_to_initial_weights(rotation):
    source = build(Config.of({"model": HIDDEN, "seed": 1}), split=pictures())
    config = Config.of({"model": HIDDEN, "seed": 2, "rotation": rotation})
    experiment = build(config, split=pictures(), weights=source.objective.state_dict())
    ours, theirs = (one.head.scores(one.embed()[0]) for one in (experiment, source))
    torch.testing.assert_close(ours, theirs)
    assert experiment.loaded.initialized == ()
    assert build(config, split=pictures()).loaded is None


def test_experiment_can_be_built_from_an_outline():
    outline = pictures().outline()
    experiment = build(Config.of({"normalize": "mean_image"}), outline=outline)
    assert experiment.data.classes == ("a", "b")
    assert experiment.network.mean.shape == (1, 8, 8)


def test_data_menu_has_every_entry():
    assert set(data.DATA) == set(MENUS["data"])


def test_experiment_stores_the_absolute_path_of_a_model_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_encoder", lambda name, options, **sizes: nn.Flatten())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "encoder").mkdir()
    for name, stored in (("hf:encoder", f"hf:{tmp_path / 'encoder'}"), ("hf:vit", "hf:vit"), ("timm:a", "timm:a")):
        config = Config.of({"data": {"name": "digits", "limit": 20}, "model": name})
        assert build(config).config.model.name == stored


def test_experiment_stores_the_absolute_path_of_a_file_of_pairs(tmp_path, monkeypatch):
    names = [f"{index:05d}" for index in range(4)]
    source = data.TensorSource(torch.zeros(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]), ("a", "b"), names)
    split = data.DataSplit(source, source, open_set=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.txt").write_text(f"{names[0]} {names[1]} 1\n{names[0]} {names[2]} 0\n")
    protocols = [{"name": "verification", "pairs": "pairs.txt"}, "retrieval"]
    config = Config.of({"model": "mlp", "validation": {"protocols": protocols}})
    for root in (None, tmp_path / "elsewhere"):  # pairs are not relative to the data root
        stored = build(config, split=split, data_root=root).config.validation.protocols
        assert [one.options for one in stored] == [{"pairs": str(tmp_path / "pairs.txt")}, {}]


def test_build_experiment_refuses_a_mapping():
    with pytest.raises(ValueError) as error:
        build({"head": "arcface"})
    assert str(error.value) == "config must be a Config, such as Config.of({...}), not {'head': 'arcface'}"
