import math
import re

import pytest

from hypersphere.recipes import RECIPES, SCALES, Claim, Metric, Outcome, Recipe, Row, find_recipe, source_entries
from hypersphere.recipes.recipe import Method, table_rows


def recipe(*rows, base=None, scales=None, **options):
    base = {"head": {"name": "arcface", "m": 0.4}} if base is None else base
    return Recipe(
        "toy", "Toy", "nowhere", base, scales or {scale: {} for scale in SCALES}, rows or (Row("row"),), **options
    )


def test_patches_are_merged_deeply_in_order():
    row = Row("row", {"head": {"s": 1.0}, "model": {"norm": "none"}}, at={"paper": {"head": {"s": 64.0}}})
    scales = {"paper": {"model": "mhe_cnn9", "steps": 9}, "cpu": {"model": {"name": "mhe_cnn9", "widths": [4, 4, 4]}}}
    entry = recipe(row, scales=scales)
    small, large = (entry.config("row", scale) for scale in ("cpu", "paper"))
    assert small.head.options == {"m": 0.4, "s": 1.0}
    assert small.model.options == {"widths": [4, 4, 4], "norm": "none"}
    assert large.head.options == {"m": 0.4, "s": 64.0}
    assert large.model.options == {"norm": "none"}
    assert (small.steps, large.steps) == (None, 9)


def test_overrides_change_anything_by_path_or_nested():
    row = Row("row", {"regularizers": [{"name": "mhe"}]})
    overrides = {"head.m": 0.1, "regularizers.0.hidden": 2.0, "optimizer": {"lr": 0.5}, "head.ramp": {"steps": 400}}
    config = recipe(row).config("row", overrides=overrides)
    assert config.head.options == {"m": 0.1, "ramp": {"steps": 400}}
    assert config.regularizers[0].options == {"hidden": 2.0}
    assert config.optimizer.options["lr"] == 0.5


def test_overriding_epochs_replaces_steps_and_reverse():
    entry = recipe(base={"steps": 100})
    assert entry.config("row", overrides={"epochs": 2}).steps is None
    assert recipe(base={"epochs": 3}).config("row", overrides={"steps": 2}).epochs is None
    with pytest.raises(ValueError, match="steps must be unset if epochs is set"):
        entry.config("row", overrides={"epochs": 2, "steps": 3})


def test_seed_sets_every_seeded_setting_that_a_scale_has():
    scales = {"cpu": {"data": {"name": "lfw", "fold": 0}}, "smoke": {"data": "generated"}}
    entry = recipe(scales=scales, seeds=(4, 5), seeded=("seed", "data.fold"))
    config = entry.config("row", "cpu", seed=5)
    assert (config.seed, config.data.options["fold"]) == (5, 5)
    assert entry.config("row", "cpu").seed == 4
    assert entry.config("row", "smoke", seed=5).data.options == {}


def test_measure_options_are_settings_of_the_recipe_but_not_of_the_config():
    entry = recipe(base={"measure": {"points": 3}}, measure=lambda experiment, run, points: Outcome())
    assert entry.settings("row", overrides={"measure.points": 5})["measure"] == {"points": 5}
    assert entry.config("row").settings() == {k: v for k, v in entry.settings("row").items() if k != "measure"}
    with pytest.raises(ValueError, match=r"measure.point is not a setting of toy; did you mean points\?"):
        entry.config("row", overrides={"measure.point": 5})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row": "raw"}, "row must be one of row, not 'raw'"),
        ({"scale": "tiny"}, "scale must be one of paper, cpu, smoke, not 'tiny'"),
        ({"overrides": {"epoch": 2}}, "epoch is not a setting; did you mean epochs?"),
        ({"overrides": {"epochs": "two"}}, "epochs must be an integer >= 1, or null, not 'two'"),
        ({"overrides": {"seed": math.nan}}, "seed must be an integer >= 0, not nan"),
    ],
)
def test_invalid_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe().settings(**{"row": "row", **arguments})


def test_recipe_rejects_unknown_scales_and_repeated_rows():
    with pytest.raises(ValueError, match="scales must be among paper, cpu, smoke"):
        recipe(scales={"large": {}})
    with pytest.raises(ValueError, match="rows must be rows with different names"):
        recipe(Row("a"), Row("a"))
    for name in ("", ".", "..", " "):
        with pytest.raises(ValueError, match="name must be text other than dots and spaces"):
            Row(name)


def test_rows_at_returns_the_rows_of_a_scale():
    entry = recipe(Row("all"), Row("large"), Row("full"), default_rows={"cpu": ["large", "all"], "smoke": ["all"]})
    names = {scale: [row.name for row in entry.rows_at(scale)] for scale in SCALES}
    assert names == {"paper": ["all", "large", "full"], "cpu": ["all", "large"], "smoke": ["all"]}
    with pytest.raises(ValueError, match="scale must be one of paper, cpu, smoke, not 'tiny'"):
        entry.rows_at("tiny")
    with pytest.raises(ValueError, match="default_rows must be among paper, cpu, smoke"):
        recipe(default_rows={"large": ["row"]})
    with pytest.raises(ValueError, match="row must be one of row, not 'raw'"):
        recipe(default_rows={"cpu": ["raw"]})


def test_claims_have_the_baseline_first_metric_and_first_source_as_defaults():
    rows, metrics = (Row("a"), Row("b"), Row("c", baseline="b")), (Metric("error", "error"), Metric("energy", "energy"))
    claims = (Claim("text", "b"), Claim("text", "c", metric="energy"), Claim("text", "b", "c", source="T6.2"))
    entry = recipe(*rows, metrics=metrics, covers=("T6.1",), baseline="a", claims=claims)
    assert entry.claims == (
        Claim("text", "b", "a", "error", "T6.1"),
        Claim("text", "c", "b", "energy", "T6.1"),
        Claim("text", "b", "c", "error", "T6.2"),
    )
    with pytest.raises(ValueError, match="row must be one of row, not ''"):
        recipe(metrics=metrics, claims=(Claim("text", "row"),))  # it has no baseline


def test_table_rows_have_names_places_and_settings_of_lines_and_columns():
    lines = {"Baseline": Method(grid={"epochs": [1, 2]}), "MHE": Method({"clip": 1.0}, paper={"epochs": 3})}
    rows = table_rows(
        "T5.1",
        lines,
        {"narrow": {"batch_size": 8}},
        baseline="Baseline",
        at={"narrow": {"paper": {"steps": 9}, "cpu": {"steps": 1}}},
        in_source={"narrow": "CIFAR-10 s=2"},
    )
    assert rows == (
        Row(
            "Baseline, narrow",
            {"batch_size": 8},
            {"error": ("T5.1", "Baseline", "CIFAR-10 s=2")},
            {"paper": {"steps": 9}, "cpu": {"steps": 1}},
            {"epochs": [1, 2]},
        ),
        Row(
            "MHE, narrow",
            {"batch_size": 8, "clip": 1.0},
            {"error": ("T5.1", "MHE", "CIFAR-10 s=2")},
            {"paper": {"steps": 9, "epochs": 3}, "cpu": {"steps": 1}},
            baseline="Baseline, narrow",
        ),
    )
    plain, other = table_rows("T6.1", {"Baseline": {}, "ours": {}}, in_source={"ours": ""})
    assert (plain.name, plain.printed, other.printed) == ("Baseline", {"error": ("T6.1", "Baseline")}, {})


def test_find_recipe_by_name_and_by_id():
    assert find_recipe("energy-cnn") is find_recipe("T6.1") is find_recipe("t6.1") is RECIPES["energy-cnn"]
    with pytest.raises(ValueError, match=r"not 'energy-widht'; did you mean energy-width\?"):
        find_recipe("energy-widht")
    with pytest.raises(ValueError, match="or a table or figure that one of them covers, not 'T99'"):
        find_recipe("T99")


@pytest.mark.parametrize(("of_thesis", "of_paper"), [("T7.6", "O-T2"), ("T7.10", "O-T8"), ("t7.11", "O-T9")])
def test_find_recipe_by_a_table_that_thesis_and_paper_print(of_thesis, of_paper):
    assert of_thesis.upper() in source_entries()[of_paper].same_as
    assert find_recipe(of_thesis) is find_recipe(of_paper)


def test_every_table_and_figure_of_the_sources_finds_a_recipe():
    for name, entry in source_entries().items():
        if entry.needs_recipe:
            assert name in find_recipe(name).covers


def test_description_is_plain_data():
    described = RECIPES["energy-cnn"].description()
    assert described["scales"] == list(SCALES)
    assert "T6.1" in described["covers"]
    assert set(described["cost"]) == set(SCALES)
