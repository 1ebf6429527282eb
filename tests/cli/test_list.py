"""`hypersphere list`: all menus are complete, and commands accept the options that it shows."""

import inspect
import json
import re

import pytest

from hypersphere.cli.list import LISTS, TITLES, entry_options
from hypersphere.cli.settings import changed_settings
from hypersphere.heads import BASELINES, PRESETS
from hypersphere.training import Config, build_experiment
from hypersphere.training.components import MENUS

ENTRIES = [(title, name) for title, (menu, _) in TITLES.items() for name in menu if name != "none"]


def test_list_shows_all_components_of_an_experiment(succeeds):
    out = succeeds("list")
    assert {id(menu) for menu, setting in TITLES.values() if setting} == {id(menu) for menu in MENUS.values()}
    for title in ("optimisers", "schedules", "augmentations", "initialisations", "heads", "networks", "recipes"):
        assert f"\n{title}\n" in f"\n{out}"
    for name in ("generator", "discriminator", "autoencoder"):  # not available for --model
        assert f"\n  {name} " not in out
    for name in ("adamw", "one_cycle", "shift", "mirror", "xavier", "a_softmax", "verification", "wandb", "shards"):
        assert f"\n  {name} " in out


def test_list_shows_one_line_per_entry(succeeds):
    out = succeeds("list")
    for title, (menu, _) in TITLES.items():
        assert f"{title}\n" in out
        for name in menu:
            assert name == "none" or re.search(rf"^  {re.escape(name)} +\S", out, re.M), (title, name)
    heads = succeeds("list", "heads")
    assert heads in out
    assert len(heads.splitlines()) == len(MENUS["head"]) + 1


@pytest.mark.parametrize("word", ["data sets", "data-sets", "data_sets", "data"])
def test_list_accepts_spellings_of_a_menu(word, succeeds):
    out = succeeds("list", word)
    assert out.startswith("data sets\n  digits ")
    assert "heads" not in out


def test_list_accepts_british_and_american_spelling(succeeds):
    assert succeeds("list", "optimizers") == succeeds("list", "optimisers") == succeeds("list", "optimizer")


def test_list_rejects_unknown_menus_and_entries(fails):
    assert "menu must be one of data-sets, samplers," in fails(2, "list", "hats")
    assert "menu must be given before the entry (`list heads arcface`), not 'arcface'" in fails(2, "list", "arcface")
    assert "entry must be one of softmax," in fails(2, "list", "heads", "hat")
    assert fails(2, "list", "heads", "CosFace").endswith("not 'CosFace'; did you mean am_softmax?\n")
    assert fails(2, "list", "networks", "opt").endswith("not 'opt'; did you mean opt_cnn6 or opt_cnn9?\n")
    assert "--json needs the name of a menu" in fails(2, "list", "--json")


def test_list_recipes_shows_tables_and_finds_recipes_by_them(succeeds, fails):
    lines = {line.split()[0]: line.split()[1:] for line in succeeds("list", "recipes").splitlines()[1:]}
    assert lines["lsoftmax-mnist"][0] == "T2.2"
    assert lines["energy-cnn"][:3] == ["T6.1,", "F6.2,", "…"]
    shown = succeeds("list", "recipes", "T2.2")
    assert shown == succeeds("list", "recipes", "lsoftmax-mnist")
    assert "Tables and figures: T2.2." in shown
    (described,) = json.loads(succeeds("list", "recipes", "t2.2", "--json"))
    assert described["name"] == "lsoftmax-mnist"
    line = fails(2, "list", "recipes", "digts")
    assert line.endswith("not 'digts'; did you mean digits?\n")
    assert len(line) < 160


@pytest.mark.parametrize("words", [["models", "hf:vit"], ["hf:vit"], ["networks", "timm:resnet18"], ["my_module:Net"]])
def test_list_says_how_to_use_models_from_elsewhere(words, fails):
    line = fails(2, "list", *words)
    assert "must be a name of this library, for example `list networks resnet18`, not" in line
    assert f"`train --model {words[-1]}`, with its arguments as --model.NAME=VALUE" in line


def test_list_prints_json(succeeds):
    heads = json.loads(succeeds("list", "heads", "--json"))
    assert [one["name"] for one in heads] == [*PRESETS, *BASELINES, "fixed"]
    (arcface,) = json.loads(succeeds("list", "heads", "arcface", "--json"))
    assert arcface["options"]["m"] == 0.5
    assert arcface["summary"]


@pytest.mark.parametrize(("title", "name"), ENTRIES, ids=lambda words: words.replace(" ", "-"))
def test_list_describes_every_entry_with_its_options(title, name, succeeds):
    out = succeeds("list", title, name)
    heading, first, *_ = out.splitlines()
    assert heading.startswith(f"{name} ({title})")
    assert len(first.strip()) > 10
    assert ">>>" not in out
    assert "<" not in out.replace("<=", "").replace("0 < ", "")  # no repr of an object as a default
    for option in entry_options(title, name):
        assert option in out


@pytest.mark.parametrize("name", ["image_folder", "image_list", "shards", "recordio", "hf_dataset"])
def test_list_says_how_much_is_held_out_by_default(name, succeeds):
    assert "by default" in succeeds("list", "data", name)
    assert "a fifth" in " ".join(succeeds("list", "data", name).split())


def test_list_shows_options_in_command_line_form(succeeds):
    lines = succeeds("list", "heads", "a_softmax").splitlines()
    assert lines[0] == "a_softmax (heads): --head a_softmax"
    for option, value in (("m", "4"), ("annealing", "null"), ("label_smoothing", "0.0"), ("sharded", "false")):
        assert any(line.split() == [f"--head.{option}", value] for line in lines), option
    assert "--regularizers.mhe.power" in succeeds("list", "regularisers", "mhe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "name"),
    [(title, name) for title, name in ENTRIES if title in ("heads", "schedules", "regularisers", "normalisations")]
    + [("operators", name) for name in MENUS["operator"] if name not in ("none", "sphere_norm")]
    + [("optimisers", name) for name in ("sgd", "adam", "adamw")]
    + [("rotations", "cayley"), ("networks", "toy_cnn"), ("networks", "opt_cnn6"), ("data sets", "digits")],
)
def test_printed_defaults_are_accepted_by_train(title, name, succeeds):
    """What `list` prints is accepted on the command line, apart from values that need another option."""
    setting = TITLES[title][1]
    words = []
    for line in succeeds("list", title, name).splitlines():
        option, _, value = line.strip().partition(" ")
        if option.startswith(f"--{setting}.") and value.strip() not in ("required", "null", "from the data"):
            words += [option, value.strip()]
    if title == "networks":
        words = ["--model.widths", "[4, 4]" if name == "toy_cnn" else "[4, 4, 4]"]
    shown = {key: value for key, value in entry_options(title, name).items() if value is not inspect.Parameter.empty}
    assert not shown or words or all(value is None or callable(value) for value in shown.values())
    if name == "t_net":
        pytest.skip("needs a PointNet")
    settings = changed_settings(Config.of({"data": {"name": "digits", "limit": 40}}).settings(), None, {}, [])
    path = f"{setting}.{name}" if setting in LISTS else setting
    options = {} if setting in LISTS else {setting: name}
    arguments = [f"--{path}"] if setting in LISTS else []
    settings = changed_settings(settings, None, options, [*arguments, *words])
    assert build_experiment(Config.of(settings)).objective is not None
