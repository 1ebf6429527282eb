import dataclasses
import json
import math

import pytest

from hypersphere.training.components import MENUS
from hypersphere.training.config import (
    Component,
    Config,
    Embedding,
    Validation,
    menus_of,
    merge,
    parse_value,
    set_path,
)

KINDS = [Config, Embedding, Validation]


def message(call, *arguments):
    with pytest.raises(ValueError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_config_settings_are_plain_data_and_of_is_the_inverse():
    config = Config.of(
        {
            "head": {"name": "a_softmax", "annealing": {"start": 10}},
            "augment": ["flip", {"name": "crop", "size": 3}],
            "validation": {"every": 2, "protocols": "verification"},
            "freeze": "body.*",
            "clip": 1,
        }
    )
    settings = json.loads(json.dumps(config.settings()))
    assert Config.of(settings) == config
    assert config.clip == 1.0
    assert config.freeze == ("body.*",)
    assert config.augment == (Component("flip"), Component("crop", {"size": 3}))
    assert config.validation.protocols == (Component("verification"),)


def test_config_repr_has_only_the_settings_that_differ_from_the_defaults():
    assert repr(Config()) == "Config.of({})"
    settings = {
        "augment": [{"name": "flip"}],
        "optimizer": {"name": "adamw", "lr": 0.01},  # without the default weight decay, so it is another component
        "validation": {"every": 2},
        "embedding": {"dim": 8},
    }
    config = Config.of({**settings, "seed": 0, "head": "softmax"})
    assert config.changes() == settings
    assert Config.of(config.changes()) == config
    assert eval(repr(config)) == config


def test_config_of_changes_the_options_of_a_default_component_without_a_name():
    config = Config.of({"optimizer": {"lr": 0.5}, "head": {"label_smoothing": 0.1}, "data": {}})
    assert config == Config().patched({"optimizer": {"lr": 0.5}, "head": {"label_smoothing": 0.1}})
    assert config.optimizer == Component("adamw", {"lr": 0.5, "weight_decay": 1e-4})
    assert config.head == Component("softmax", {"label_smoothing": 0.1})


def test_config_read_names_the_file_of_an_invalid_setting(tmp_path):
    (tmp_path / "job.yaml").write_text("epoch: 3")
    expected = f"{tmp_path / 'job.yaml'}: epoch is not a setting; did you mean epochs?"
    assert message(Config.read, tmp_path / "job.yaml") == expected


def test_config_declares_help_for_every_setting_and_a_menu_for_every_component():
    for kind in KINDS:
        for one in dataclasses.fields(kind):
            assert one.metadata["help"].endswith("."), one.name
            assert ("Component" in str(one.type)) == (one.metadata["menu"] is not None), one.name
            assert one.metadata["menu"] is None or one.metadata["menu"] in MENUS
    assert menus_of(Validation) == {"protocols": "validation"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epoch": 2}, "epoch is not a setting; did you mean epochs?"),
        ({"wandb": 2}, "wandb is not a setting"),
        ({"validation": {"evry": 2}}, "validation.evry is not a setting; did you mean every?"),
        ({"validation": 3}, "validation must be a mapping of settings, not 3"),
        ({"epochs": 0}, "epochs must be an integer >= 1, or null, not 0"),
        ({"epochs": 1.0}, "epochs must be an integer >= 1, or null, not 1.0"),
        ({"epochs": True}, "epochs must be an integer >= 1, or null, not True"),
        ({"epochs": 2, "steps": 3}, "steps must be unset if epochs is set, not 3"),
        ({"batch_size": "8"}, "batch_size must be an integer >= 1, not '8'"),
        ({"seed": 2**70}, f"seed must be an integer >= 0, not {2**70}"),
        ({"seed": -1}, "seed must be an integer >= 0, not -1"),
        ({"clip": 0}, "clip must be a number > 0, or null, not 0.0"),
        ({"ema": 1}, "ema must be a number >= 0 and < 1, or null, not 1.0"),
        ({"embedding": {"dropout": 1.5}}, "embedding.dropout must be a number >= 0 and < 1, not 1.5"),
        ({"clip": math.nan}, "clip must be a number > 0, or null, not nan"),
        ({"clip": math.inf}, "clip must be a number > 0, or null, not inf"),
        ({"clip": 10**400}, "clip must be a number > 0, or null, not 1000"),
        ({"precision": "float8"}, "precision must be one of float32, bfloat16, float16, not 'float8'"),
        ({"compile": "yes"}, "compile must be true or false, not 'yes'"),
        ({"head": {"name": 4}}, "head must be a name, or a mapping with a name and options, not {'name': 4}"),
        ({"augment": {"p": 1}}, "augment.0 must be a name, or a mapping with a name and options, not {'p': 1}"),
        ({"head": 3}, "head must be a name, or a mapping with a name and options, not 3"),
        ({"head": ""}, "head must be a name, or a mapping with a name and options, not ''"),
        ({"head": {"name": "softmax", "x": {1, 2}}}, "head must consist of numbers, text, lists and mappings: set"),
        ({"augment": ["flip", 3]}, "augment.1 must be a name, or a mapping with a name and options, not 3"),
        ({"freeze": [3]}, "freeze.0 must be text, not 3"),
        (["head"], "settings must be a mapping of settings, not ['head']"),
    ],
)
def test_config_names_the_invalid_setting(settings, text):
    assert message(Config.of, settings).startswith(text)


def test_config_refuses_settings_that_contain_themselves():
    loop = {"name": "softmax"}
    loop["again"] = loop
    assert "head must consist of numbers, text, lists and mappings" in message(Config.of, {"head": loop})
    assert "settings must consist of numbers, text, lists and mappings" in message(merge, {}, {"head": loop})


def test_merge_is_deep_and_drops_the_options_of_another_component():
    base = Config.of({"head": {"name": "arcface", "m": 0.4}, "optimizer": {"name": "sgd", "lr": 0.1}}).settings()
    patched = merge(base, {"head": {"s": 16}, "validation": {"every": 3}}, {"optimizer": "adam"})
    assert patched["head"] == {"name": "arcface", "m": 0.4, "s": 16}
    assert patched["optimizer"] == {"name": "adam"}
    assert patched["validation"] == {**base["validation"], "every": 3}
    assert merge(base, {"head": "arcface"})["head"] == base["head"]
    assert base["head"] == {"name": "arcface", "m": 0.4}


def test_patched_checks_the_result():
    assert Config().patched({"epochs": 3}, {"head": {"label_smoothing": 0.1}}).head.options == {"label_smoothing": 0.1}
    assert message(Config().patched, {"epochs": -3}).startswith("epochs must be")


@pytest.mark.parametrize(
    ("path", "value", "key", "result"),
    [
        ("head.m", 4, "head", {"name": "softmax", "m": 4}),
        ("head", "arcface", "head", {"name": "arcface"}),
        ("head.angular.k", 1, "head", {"name": "softmax", "angular": {"k": 1}}),
        ("augment.0", "flip", "augment", ["flip"]),
        ("augment.0.name", "flip", "augment", [{"name": "flip"}]),
        ("epochs", 3, "epochs", 3),
    ],
)
def test_set_path_changes_one_setting(path, value, key, result):
    settings = Config().settings()
    changed = set_path(settings, path, value)
    assert changed.pop(key) == result
    settings.pop(key)
    assert changed == settings


@pytest.mark.parametrize("path", ["", ".", "head.", ".m", "a..b", "x" + ".y" * 2000])
def test_set_path_refuses_invalid_paths(path):
    text = message(set_path, {}, path, 1)
    assert text.startswith("path must be at most 8 names separated by dots")
    assert len(text) < 200


def test_set_path_refuses_positions_outside_a_list():
    assert "position of at most 0" in message(set_path, {"augment": []}, "augment.1.name", "flip")


def test_set_path_addresses_items_of_a_list_by_name():
    settings = {"augment": ["flip", {"name": "crop", "size": 3}]}
    assert set_path(settings, "augment.crop.size", 4)["augment"] == ["flip", {"name": "crop", "size": 4}]
    assert set_path(settings, "augment.flip.p", 1)["augment"][0] == {"name": "flip", "p": 1}
    assert set_path(settings, "augment.mirror", True)["augment"][2:] == [{"name": "mirror"}]


@pytest.mark.parametrize("text", ["NaN", "[" * 100_000, "1e", "{"])
def test_parse_value_returns_text_that_is_not_json(text):
    assert parse_value(text) == text
