"""The runs of a recipe as plain data: the settings that all rows share, and those that each row adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypersphere import data
from hypersphere.recipes.recipe import Recipe
from hypersphere.training.build import build_network_on_meta

__all__ = ["plan"]


def plan(
    recipe: Recipe,
    *,
    scale: str = "cpu",
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what `execute` would run with these arguments, and the number of parameters of the network of each row.

    The networks are built for the published shape of the data, which need not be on this machine.

    The settings of a row are those under "shared" with those of the row merged into them
    (`hypersphere.training.config.merge`). If there is only one row, it has all settings.

    Example:
        >>> from hypersphere.recipes import Recipe, Row
        >>> rows = (Row("a", {"head": {"m": 0.5}}), Row("b", {"head": {"m": 0.4}}))
        >>> recipe = Recipe("toy", "Toy", "nowhere", {"head": "arcface"}, {"cpu": {}}, rows)
        >>> result = plan(recipe)
        >>> result["shared"]["head"], result["rows"]
        ({'name': 'arcface'}, {'a': {'head': {'m': 0.5}}, 'b': {'head': {'m': 0.4}}})
    """
    selected_rows, selected_seeds = recipe.selected(scale, rows, seeds)
    seed = selected_seeds[0] if selected_seeds else None
    settings = {row.name: recipe.checked_settings(row, scale, overrides, seed) for row in selected_rows}
    shared = _shared(list(settings.values())) if len(settings) > 1 else {}
    return {
        "recipe": recipe.name,
        "scale": scale,
        "seeds": selected_seeds,
        "core_hours_of_all_rows": recipe.cost.get(scale),
        "shared": shared,
        "rows": {row: _without(shared, row_settings) for row, row_settings in settings.items()},
        "parameters": {} if recipe.compute else _parameters(recipe, scale, list(settings), overrides),
    }


def _parameters(
    recipe: Recipe, scale: str, names: Sequence[str], overrides: Mapping[str, Any] | None
) -> dict[str, int | None]:
    """Return the number of parameters of the network of each row; None if the shape of the data is not known."""
    counts: dict[str, int | None] = {}
    by_network: dict[str, int | None] = {}  # rows often have the same network
    for row in names:
        config = recipe.config(row, scale, overrides)
        key = repr((config.data, config.model, config.operator, config.embedding))
        if key not in by_network:
            split = data.published_outline(config.data.name, config.data.options)
            network = None if split is None else build_network_on_meta(config, split)
            by_network[key] = None if network is None else sum(parameter.numel() for parameter in network.parameters())
        counts[row] = by_network[key]
    return counts


def _shared(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all parts have in common; components with different names have nothing in common."""
    shared = {}
    for key, value in parts[0].items():
        values: list[Any] = [part.get(key) for part in parts]
        if all(key in part and part[key] == value for part in parts):
            shared[key] = value
        elif all(isinstance(item, dict) for item in values) and len({item.get("name") for item in values}) == 1:
            shared[key] = _shared(values)
    return shared


def _without(shared: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not shared; merged into the shared ones, they give all settings."""
    rest = {key: value for key, value in settings.items() if key not in shared or shared[key] != value}
    return {key: _without(shared[key], value) if key in shared else value for key, value in rest.items()}
