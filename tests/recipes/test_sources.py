import pytest

from hypersphere.recipes import PARTS, RECIPES, find_recipe, printed_number, source_entries


def test_source_entries_have_known_parts_and_kinds():
    entries = source_entries()
    assert len(entries) == 156
    assert {entry.part for entry in entries.values()} == set(PARTS)
    kinds = {"table", "figure", "function plot", "claim", "text claim", "theory"}
    assert {entry.kind for entry in entries.values()} == kinds
    for name, entry in entries.items():
        if len(entry.columns) > 1:
            assert all(len(cells) == len(entry.columns) for cells in entry.rows.values()), name


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("T5.1", "Half-space MHE", "CIFAR-100 s=2"), 25.61),
        (("T2.2", "L-Softmax (m=4)"), 0.31),
        (("T5.3", "Baseline", "CNN-15"), None),
    ],
)
def test_printed_number_reads_the_cell_of_a_table(place, expected):
    assert printed_number(*place) == expected


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("T5.11", "MHE"), "source must be one of .*, not 'T5.11'; did you mean"),
        (("T5.1", "MHEs", "CIFAR-10 s=2"), "row of T5.1 must be one of .*, not 'MHEs'; did you mean MHE"),
        (("T5.1", "MHE"), "column of T5.1 must be one of CIFAR-10 s=2, "),
    ],
)
def test_printed_number_names_what_is_missing(place, message):
    with pytest.raises(ValueError, match=message):
        printed_number(*place)


def test_recipes_cover_entries_of_the_sources_and_are_found_by_them():
    covered = {name for recipe in RECIPES.values() for name in recipe.covers}
    assert covered <= set(source_entries())
    for name in covered:
        assert name in find_recipe(name).covers
