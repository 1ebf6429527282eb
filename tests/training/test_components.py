import inspect
import json
import sys

import pytest
import torch

from hypersphere._signatures import accept_options_of
from hypersphere.training.components import (
    MENUS,
    NESTED,
    Menu,
    _converted_value,
    _parameters,
    check_components,
    complete_settings,
    create,
    foreign_code,
    require_trust,
)
from hypersphere.training.config import Component, Config, parse_value


def create_head(name, options=None, **more):
    return create(Component(name, options or {}), "head", 4, 3, **more)


def message(call, *arguments, **named):
    with pytest.raises(ValueError) as error:
        call(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's in the current folder."""
    (tmp_path / "my_module.py").write_text(
        "MARK = []\n"
        "def build(width: int, *, in_channels=1, note: str = ''):\n    return width, in_channels, note\n"
        "def anything(**options):\n    return options\n"
        "def fails():\n    raise TypeError('inside')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    yield
    sys.modules.pop("my_module", None)


def test_create_passes_mappings_to_foreign_options_with_names_of_nested_menus(module):
    options = {"method": {"depth": 2}, "annealing": {"start": 1.0}, "projection": {"name": "mine"}}
    assert create(Component("my_module:anything", options), "head") == options
    (angular,) = create(Component("my_module:anything", {"angular": {"name": "sigmoid"}}), "head").values()
    assert repr(angular) == "Sigmoid(k=0.5)"  # it names an entry of the library


def test_menu_imports_its_source_when_it_is_read():
    menu = Menu("no_such_module:ENTRIES")
    with pytest.raises(ImportError):
        list(menu)


def test_create_calls_the_entry_with_arguments_and_options():
    head = create_head("arcface", {"m": 0.3})
    assert (head.in_features, head.num_classes) == (4, 3)
    assert "0.3" in repr(head)


def test_create_fills_parameters_from_the_context_only_if_the_user_did_not_set_them():
    context = {"in_channels": 3, "image_size": 16, "unused": 1}
    model = create(Component("toy_cnn", {"widths": [4, 4]}), "model", context=context)
    assert next(model.parameters()).shape[1] == 3
    model = create(Component("toy_cnn", {"widths": [4, 4], "in_channels": 2}), "model", context=context)
    assert next(model.parameters()).shape[1] == 2


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CosFace", "am_softmax"),
        ("aam_sotfmax", "arcface"),
        ("SphereFace", "a_softmax"),
        ("arcfce", "arcface"),
        ("sphereface_2", "sphereface2"),
    ],
)
def test_create_suggests_the_nearest_head(name, meant):
    assert message(create_head, name).endswith(f"not {name!r}; did you mean {meant}?")


@pytest.mark.parametrize(
    ("name", "preset"), [("cosface", "am_softmax"), ("sphereface", "a_softmax"), ("aam_softmax", "arcface")]
)
def test_create_accepts_the_names_of_the_literature_for_heads(name, preset):
    assert repr(create_head(name, {"m": 2})) == repr(create_head(preset, {"m": 2}))
    assert name not in list(MENUS["head"])
    config = Config.of({"head": name})
    check_components(config)
    assert complete_settings(config)["head"]["m"] == MENUS["head"].options(preset)["m"]


@pytest.mark.parametrize("name", ["triplet", "wandb", "x" * 1000])
def test_create_suggests_nothing_if_nothing_is_similar(name):
    assert message(create_head, name).endswith(f"not {name!r}")


def test_create_names_an_unknown_option_and_lists_the_known_ones():
    text = message(create_head, "arcface", {"M": 4})
    assert text.startswith("head.M is not an option of arcface; did you mean m? Options: s, m")
    assert "sharded" in text
    assert "in_features" not in text
    text = message(create, Component("none", {"k": 1}), "regularizer", None, setting="regularizers.0")
    assert text == "regularizers.0.k is not an option of none, which takes no options"


def test_create_refuses_arguments_that_the_library_passes():
    assert message(create_head, "arcface", {"num_classes": 4}).startswith("head.num_classes is not an option")


def test_create_names_a_missing_option():
    assert message(create, Component("image_folder"), "data", None) == "data.path is required for image_folder"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"m": "large"}, "head.m must be a number, not 'large'"),
        ({"m": True}, "head.m must be a number, not True"),
        ({"class_weights": "heavy"}, "head.class_weights must be a list of numbers, not 'heavy'"),
        ({"class_weights": ["a", "b", "c"]}, "head.class_weights must be a list of numbers, not ['a', 'b', 'c']"),
        ({"ignore_index": 2**70}, f"head.ignore_index must be an integer of at most 64 bits, not {2**70}"),
        ({"label_smoothing": None}, "head.label_smoothing must be a number, not None"),
        ({"ramp": {"steps": [1]}}, "head.ramp"),
    ],
)
def test_create_names_the_option_with_an_invalid_value(options, text):
    assert message(create_head, "arcface", options).startswith(text)


def test_create_makes_nested_objects():
    head = create_head("a_softmax", {"annealing": {}, "class_weights": [1, 2, 3.5]})
    assert type(head.annealing).__name__ == "Annealing"
    assert torch.equal(head.class_weights, torch.tensor([1, 2, 3.5]))
    text = message(create_head, "ga_softmax", {"angular": {"name": "sigmod"}})
    assert text.endswith("not 'sigmod'; did you mean sigmoid?")
    assert message(create_head, "ga_softmax", {"angular": {"k": 1}}).startswith("head.angular must be a mapping")


@pytest.mark.parametrize("menu", ["head", "optimizer", "schedule", "rotation", "regularizer", "data", "model"])
def test_printed_defaults_are_read_back_as_the_same_values(menu):
    """Also the text `true`, which is printed like a boolean."""
    for name in MENUS[menu]:
        for option, default in MENUS[menu].options(name).items():
            parameter = _parameters(MENUS[menu][name]).get(option)
            if parameter is None or default in (inspect.Parameter.empty, "from the data") or callable(default):
                continue
            if option == "levels":  # objects, which have no plain form
                continue
            printed = default if isinstance(default, str) else json.dumps(default)
            value = _converted_value(f"{menu}.{option}", parse_value(printed), parameter.annotation)
            assert value == (tuple(default) if isinstance(default, list) else default), (name, option)


def test_create_reads_true_as_text_for_options_that_take_text():
    assert create_head("arcface", {"gradient": True}).gradient == "true"


# --- foreign code


def test_create_imports_a_callable_from_the_current_folder(module):
    built = create(Component("my_module:build", {"width": 3}), "model", context={"in_channels": 2, "image_size": 9})
    assert built == (3, 2, "")


def test_create_checks_the_options_of_foreign_code_against_its_signature(module):
    text = message(create, Component("my_module:build", {"widht": 3}), "model")
    assert text == (
        "model.widht is not an option of my_module:build; did you mean width? Options: width, in_channels, note"
    )
    assert message(create, Component("my_module:build"), "model") == "model.width is required for my_module:build"
    assert message(create, Component("my_module:build", {"width": "a"}), "model").startswith("model.width must be an")
    assert create(Component("my_module:anything", {"a": 1}), "model") == {"a": 1}


def test_create_keeps_the_error_of_foreign_code(module):
    with pytest.raises(TypeError, match="inside"):
        create(Component("my_module:fails"), "model")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:Net", "model 'no_such_module:Net' cannot be imported: No module named 'no_such_module'; run"),
        ("my_module:Missing", "model 'my_module:Missing' cannot be imported: my_module has no 'Missing'"),
        ("my_module:bild", "model 'my_module:bild' cannot be imported: my_module has no 'bild'; did you mean build?"),
        ("my_module:build.no", "model 'my_module:build.no' cannot be imported: 'function' object has no attribute"),
        ("my_module:number", "model must be an import path of a callable, not 'my_module:number'"),
    ],
)
def test_create_names_foreign_code_that_cannot_be_imported(module, name, text):
    assert message(create, Component(name), "model").startswith(text)


def test_require_trust_refuses_foreign_code_without_importing_it(module):
    config = Config.of({"model": {"name": "my_module:build", "width": 1}, "trackers": "my_module:anything"})
    text = message(require_trust, config, False, "the config")
    names = "model my_module:build, trackers.0 my_module:anything"
    assert text == f"the config names code outside hypersphere ({names}), which is imported only with trust_code=True"
    assert "my_module" not in sys.modules
    require_trust(config, True, "the config")
    require_trust(Config(), False, "the config")


def test_foreign_code_lists_every_setting_with_an_import_path():
    config = Config.of(
        {
            "model": "timm:resnet18",
            "head": {"name": "a_softmax", "angular": {"name": "other.place:f"}},
            "augment": ["flip", "mine:augment"],
            "validation": {"protocols": ["mine:protocol"]},
        }
    )
    assert foreign_code(config) == [
        "augment.1 mine:augment",
        "head.angular other.place:f",
        "validation.protocols.0 mine:protocol",
    ]
    assert foreign_code(Config()) == []


def test_accept_options_of_extends_the_signature():
    @accept_options_of(NESTED["angular"]["sigmoid"])
    def factory(x, *, k: int = 3, **options): ...

    assert str(inspect.signature(factory)) == "(x, *, k: int = 3)"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"head": {"name": "arcface", "bias": True}}, "head.bias is not an option of arcface. Options: "),
        ({"head": {"name": "arcface", "margin": 0.3}}, "head.margin is not an option of arcface; did you mean m? "),
        ({"head": {"name": "arcface", "scale": 64}}, "head.scale is not an option of arcface; did you mean s? "),
        ({"head": {"name": "arcface", "m": "a"}}, "head.m must be a number, not 'a'"),
        ({"head": {"name": "arcface", "sample": 2}}, "head.sample must be null or a number in (0, 1], not 2"),
        ({"optimizer": {"name": "sgd", "params": 1}}, "optimizer.params is not an option of sgd"),
        ({"data": "image_folder"}, "data.path is required for image_folder"),
        ({"model": {"name": "mlp", "with": [8]}}, "model.with is not an option of mlp; did you mean widths?"),
        ({"augment": ["mirror", "miror"]}, "augment.1.name must be one of "),
        ({"validation": {"protocols": ["verify"]}}, "validation.protocols.0.name must be one of "),
    ],
)
def test_check_components_names_the_setting_without_building(settings, text):
    assert message(check_components, Config.of(settings)).startswith(text)


def test_check_components_accepts_defaults_and_imports_nothing(module):
    check_components(Config())  # imports the menus
    before = set(sys.modules)
    check_components(Config.of({"model": "my_module:anything", "head": "my_module:fails"}))
    check_components(Config.of({"model": "no_such_module:Net", "head": "no_such_module:Head"}))
    check_components(Config.of({"model": {"name": "timm:no_such_model", "any": 1}}))
    assert set(sys.modules) == before
