import pytest

from hypersphere.recipes import RECIPES, plan


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_plan_builds_the_network_of_every_row_without_data(name):
    recipe = RECIPES[name]
    parameters = plan(recipe, scale="paper")["parameters"]
    if recipe.compute is None:
        assert list(parameters) == [row.name for row in recipe.rows_at("paper")]
        assert all(isinstance(count, int) and count > 0 for count in parameters.values())


def test_plan_accepts_an_empty_list_of_seeds():
    recipe = RECIPES["lsoftmax-function"]
    assert plan(recipe, scale="smoke", seeds=[])["seeds"] == []
