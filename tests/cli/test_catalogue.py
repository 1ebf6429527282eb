"""`hypersphere list`: all menus are complete, and the options shown for an entry are accepted."""

import inspect
import json
import re

import pytest

from hypersphere import training
from hypersphere.cli.catalogue import AUGMENTATIONS, INITIALS, MENUS, NEEDED, OF_DATA, options_of
from hypersphere.heads import PRESETS
from hypersphere.training.augment import moved
from hypersphere.training.job_network import INITIALIZATIONS

ENTRIES = [(title, name) for title, menu in MENUS.items() for name in menu.entries if name != "none"]


def test_list_shows_all_components_of_a_job(succeeds):
    out = succeeds("list")
    for title in ("optimisers", "schedules", "augmentations", "initialisations", "heads", "networks", "recipes"):
        assert f"\n{title}\n" in f"\n{out}"
    for name in ("generator", "discriminator", "autoencoder"):  # not available for --model
        assert f"\n  {name} " not in out
    for name in ("adamw", "one_cycle", "shift", "mirror", "xavier", "a_softmax"):
        assert f"\n  {name} " in out


def test_list_shows_one_line_per_entry(succeeds):
    out = succeeds("list")
    for title, menu in MENUS.items():
        assert f"{title}\n" in out
        for name in menu.entries:
            assert name == "none" or re.search(rf"^  {re.escape(name)} +\S", out, re.M), (title, name)
    assert succeeds("list", "heads").splitlines() == out.splitlines()[: len(PRESETS) + 1]


@pytest.mark.parametrize("word", ["data sets", "data-sets", "data_sets", "data"])
def test_list_accepts_spellings_of_a_menu(word, succeeds):
    out = succeeds("list", word)
    assert out.startswith("data sets\n  digits ")
    assert "heads" not in out


def test_list_accepts_british_and_american_spelling(succeeds):
    assert succeeds("list", "optimizers") == succeeds("list", "optimisers") == succeeds("list", "optimizer")


def test_list_rejects_unknown_menus_and_entries(fails):
    assert "menu must be one of heads, margins," in fails(2, "list", "hats")
    assert "menu must be given before the entry (`list heads arcface`), not 'arcface'" in fails(2, "list", "arcface")
    assert "data-sets" in fails(2, "list", "hats")
    assert "entry must be one of softmax," in fails(2, "list", "heads", "hat")


@pytest.mark.parametrize(("title", "name"), ENTRIES, ids=lambda words: words.replace(" ", "-"))
def test_list_describes_every_entry_with_its_options(title, name, succeeds):
    out = succeeds("list", title, name)
    heading, first, *_ = out.splitlines()
    assert heading.startswith(f"{name} ({title})")
    assert len(first.strip()) > 10
    assert ">>>" not in out
    assert "<" not in out.replace("<=", "")  # no repr of an object as a default
    for option in options_of(title, name):
        assert option in out


def test_list_shows_options_in_command_line_form(succeeds):
    lines = succeeds("list", "heads", "a_softmax").splitlines()
    assert lines[0] == "a_softmax (heads): --head a_softmax"
    for option, value in (("m", "4"), ("annealing", "null"), ("label_smoothing", "0.0"), ("sharded", "false")):
        assert any(line.split() == [f"--head.{option}", value] for line in lines), option
    out = succeeds("list", "recipes", "digits")
    assert "hypersphere reproduce digits" in out
    assert "A-Softmax + energy" in out
    assert "--set epochs=" in out


def job_with(title, name, options):
    """Return a job with one component whose options are all set explicitly."""
    return training.Job.of({MENUS[title].option: {"name": name, **options}})


@pytest.mark.parametrize(
    ("title", "name"),
    [(title, name) for title, name in ENTRIES if title in ("heads", "optimisers", "schedules", "regularisers")]
    + [("operators", name) for name in MENUS["operators"].entries if name not in ("none", "sphere_norm")]
    + [("rotations", "cayley"), ("networks", "toy_cnn"), ("networks", "opt_cnn6"), ("data sets", "digits")],
)
def test_options_of_an_entry_are_accepted_by_a_job(title, name):
    shown = {k: v for k, v in options_of(title, name).items() if v is not NEEDED and v != OF_DATA and not callable(v)}
    plain = json.loads(json.dumps({k: v for k, v in shown.items() if v is not None}, default=str))
    if title == "networks":
        plain |= {"widths": [4, 4] if name == "toy_cnn" else [4, 4, 4]}
    job = job_with(title, name, plain)
    assert job.build().objective is not None


def test_menus_of_names_agree_with_training():
    assert set(INITIALS) == set(INITIALIZATIONS)
    assert set(AUGMENTATIONS) == {k for k, v in inspect.signature(moved).parameters.items() if v.default is not v.empty}
