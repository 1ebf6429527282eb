import pytest
import torch

from hypersphere import data
from hypersphere.data.splits import split_by_class
from hypersphere.training import Config, Trainer, build_experiment, check_experiment

SMALL = {"data": {"name": "digits", "limit": 20}, "model": {"name": "mlp", "widths": [8]}}


def test_check_experiment_names_the_shape_that_does_not_fit():
    model = {"name": "toy_cnn", "in_channels": 3}
    with pytest.raises(ValueError, match=r"the model toy_cnn does not fit inputs of shape \(1, 8, 8\): "):
        check_experiment(build_experiment(Config.of({**SMALL, "model": model})))


def test_check_experiment_uses_the_size_of_the_windows():
    """A network with a fixed input size is built for the windows that training cuts from the images."""
    settings = {**SMALL, "model": {"name": "mlp", "widths": [8]}, "augment": [{"name": "window", "margin": 2}]}
    labels = torch.arange(10) % 2
    train, held_out = (data.TensorSource(torch.rand(10, 1, side, side), labels, ("a", "b")) for side in (8, 6))
    experiment = build_experiment(Config.of({**settings, "epochs": 1}), split=data.DataSplit(train, held_out))
    assert experiment.input_shape == (1, 6, 6)
    check_experiment(experiment)
    Trainer(experiment).train()


class Regression(torch.nn.Linear):
    """A head outside the library without scores."""

    def forward(self, features, labels):
        return (super().forward(features) - labels[:, None]).square().mean()


def test_check_experiment_names_a_head_without_scores():
    settings = {**SMALL, "head": f"{__name__}:Regression"}
    with pytest.raises(ValueError, match=r"head must be a head with a method scores\(features\), which accuracy needs"):
        check_experiment(build_experiment(Config.of(settings)))
    settings |= {"validation": {"protocols": ["retrieval"]}}
    check_experiment(build_experiment(Config.of(settings)))


def test_check_experiment_rejects_a_batch_of_one_with_batch_norm():
    settings = {**SMALL, "model": {"name": "mlp", "widths": [8], "norm": "batch"}, "batch_size": 1}
    with pytest.raises(ValueError, match="this model needs batches of at least two examples, not one"):
        check_experiment(build_experiment(Config.of(settings)))


def test_check_experiment_warns_about_slow_settings(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.warns(UserWarning, match="no bfloat16 instructions"):
        check_experiment(build_experiment(Config.of({**SMALL, "precision": "bfloat16"})))


def of_classes(count, held_out):
    """Return random data of `count` classes, of which `held_out` are not trained."""
    labels = torch.arange(count).repeat_interleave(4)
    source = data.TensorSource(torch.rand(len(labels), 1, 8, 8), labels, [str(label) for label in range(count)])
    return split_by_class(source, held_out)


def check_open_set(count=3, held_out=1, **settings):
    config = Config.of({"model": {"name": "mlp", "widths": [8]}, **settings})
    check_experiment(build_experiment(config, split=of_classes(count, held_out)))


def test_check_experiment_requires_two_held_out_classes_for_verification():
    with pytest.raises(ValueError, match=r"^verification needs 2 held-out classes; set data.held_out to 2 or more$"):
        check_open_set()
    with pytest.raises(ValueError, match=r"^verification needs 2 held-out classes; raise selection$"):
        check_open_set(selection=0.2)
    check_open_set(count=4, held_out=2)
    check_open_set(validation={"protocols": ["retrieval"]})


def test_check_experiment_requires_two_pairs_of_each_kind_for_verification():
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3])  # the last two classes are held out and have one same pair
    source = data.TensorSource(torch.rand(7, 1, 8, 8), labels, list("abcd"))
    split = data.DataSplit(data.subset(source, labels < 2), data.subset(source, labels >= 2), open_set=True)
    experiment = build_experiment(Config.of({"model": {"name": "mlp", "widths": [8]}}), split=split)
    with pytest.raises(ValueError, match="verification pairs must be at least two of the same class"):
        check_experiment(experiment)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"validation": {"best": "accuracy"}},
            "validation.best must be one of loss, verification.accuracy, verification.eer, verification.auc, "
            "not 'accuracy'",
        ),
        (
            {"validation": {"best": "loss", "every_unit": "steps", "protocols": [{"name": "identification"}]}},
            r"validation.best must be one of identification.rank1, identification.rank5 "
            r"\(and loss, if validation.every_unit is epochs\), not 'loss'",
        ),
        (
            {"schedule": {"name": "plateau", "metric": "recall1"}, "validation": {"protocols": ["retrieval"]}},
            "schedule.metric must be one of loss, retrieval.recall1, retrieval.map_at_r, not 'recall1'",
        ),
    ],
)
def test_check_experiment_rejects_a_metric_that_no_protocol_computes(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_open_set(count=4, held_out=2, **settings)


class Spread:
    """A protocol outside the library."""

    def __call__(self, features, labels, split):
        return {"mean": 1.0}


def test_check_experiment_accepts_the_metrics_that_are_measured():
    spread = {"protocols": [f"{__name__}:Spread"], "best": "Spread.mean"}
    for validation in ({"best": "loss"}, {"best": "accuracy"}, {"best": "top5"}, spread):
        experiment = build_experiment(Config.of({**SMALL, "validation": validation, "epochs": 1}))
        check_experiment(experiment, on_message=pytest.fail)
        trainer = Trainer(experiment)
        trainer.train()
        assert trainer.best["value"] == trainer.metrics[validation["best"]]


@pytest.mark.parametrize("held_out", [1, 2])
def test_experiment_names_the_settings_that_leave_one_class(held_out):
    words = "training needs at least 2 classes, not 1; lower data.held_out or selection, which hold out classes"
    with pytest.raises(ValueError, match=f"^{words}$"):
        check_open_set(count=held_out + 1, held_out=held_out)
