"""Deprecated names of all modules."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import hypersphere
from hypersphere import sphere
from hypersphere._deprecation import deprecated_names


def renamed_objects():
    """Return (module, old name) for every entry of every `deprecated_names` mapping of the package."""
    pairs = []
    for info in pkgutil.walk_packages(hypersphere.__path__, "hypersphere."):
        if info.name.endswith("__main__"):
            continue
        lookup = vars(importlib.import_module(info.name)).get("__getattr__")
        if getattr(lookup, "__qualname__", "").startswith(deprecated_names.__qualname__):
            pairs += [(info.name, old) for old in inspect.getclosurevars(lookup).nonlocals["renamed"]]
    return pairs


def test_deprecated_names_are_found_in_all_modules_that_have_some():
    modules = {module for module, _ in renamed_objects()}
    assert {"hypersphere.report", "hypersphere.rotation", "hypersphere.sphere"} <= modules


def test_every_deprecated_name_resolves_with_a_warning():
    for module, old in renamed_objects():
        with pytest.warns(DeprecationWarning, match=f"^{module}.{old} is deprecated, use "):
            assert getattr(importlib.import_module(module), old) is not None


def test_modules_with_deprecated_names_suggest_the_nearest_name():
    with pytest.raises(AttributeError, match=r"has no attribute 'SphereConv2d'; did you mean sphere_conv2d\?"):
        hypersphere.layers.SphereConv2d  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'hat'$"):
        hypersphere.layers.hat  # noqa: B018


def test_deprecated_elevation_overwrites_its_argument():
    c = torch.tensor([1.0000001, 0.0, -2.0])
    with pytest.warns(DeprecationWarning, match="arcsin_"):
        elevations = sphere.elevation_(c)
    assert elevations is c
    torch.testing.assert_close(c, torch.tensor([1.0, 0.0, -1.0]) * torch.pi / 2)
