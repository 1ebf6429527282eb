"""Checks of arguments and their messages."""

import math

import numpy as np
import pytest
import torch

from hypersphere._validation import choose, is_integer, is_number, printable, require, require_package
from hypersphere.functions.angular import ANGULARS, Cosine


def test_require_names_argument_value_and_accepted_values():
    require(True, "m", "a number >= 1", 0.5)
    with pytest.raises(ValueError, match=r"^m must be a number >= 1, not 0.5$"):
        require(False, "m", "a number >= 1", 0.5)


def test_require_shortens_long_values():
    with pytest.raises(ValueError, match=r"^names must be short, not \['n0', 'n1', .*….*, 'n9999'\]$") as error:
        require(False, "names", "short", [f"n{number}" for number in range(10000)])
    assert len(str(error.value)) < 250
    with pytest.raises(ValueError, match=r"short, not 'x{198}'$"):
        require(False, "names", "short", "x" * 198)


def test_printable_escapes_line_breaks_and_keeps_other_text():
    assert printable("naïve – 1\t2") == "naïve – 1\t2"
    assert printable("a\nb\x1b[2J\u202e\udcff") == r"a\nb\x1b[2J\u202e\udcff"


@pytest.mark.parametrize("value", [3, 2.5, np.float32(2), np.int64(2)])
def test_is_number_accepts_real_numbers(value):
    assert is_number(value, 1, 5)


@pytest.mark.parametrize("value", [True, "3", None, math.nan, math.inf, 0, 6, 1j, [3]])
def test_is_number_rejects_other_values(value):
    assert not is_number(value, 1, 5)


@pytest.mark.parametrize("value", [2, np.int32(2), np.uint8(2), np.array(2), torch.tensor(2)])
def test_is_integer_accepts_integers_of_python_numpy_and_torch(value):
    assert is_integer(value, 1, 5)


@pytest.mark.parametrize(
    "value",
    [True, np.True_, 2.0, np.float64(2), torch.tensor(2.0), torch.tensor([2]), np.array([2]), [2], "2", None, 0, 6],
)
def test_is_integer_rejects_other_values(value):
    assert not is_integer(value, 1, 5)


def test_choose_accepts_names_instances_and_callables():
    assert choose(ANGULARS, "cosine", "angular") == Cosine()
    assert choose(ANGULARS, Cosine(), "angular") == Cosine()
    assert choose(ANGULARS, torch.sin, "angular") is torch.sin


@pytest.mark.parametrize("choice", ["cosin", Cosine, 3])
def test_choose_lists_the_menu_when_it_fails(choice):
    with pytest.raises(ValueError, match=r"angular must be one of 'cosine', .* or a callable, not"):
        choose(ANGULARS, choice, "angular")


def test_require_package_returns_the_module():
    assert require_package("math", "nothing", "eval") is math


def test_require_package_names_the_extra_that_installs_it():
    with pytest.raises(ImportError, match=r"needs nothing-real: pip install 'torch-hypersphere\[eval\]'"):
        require_package("no_such_module_at_all", "nothing-real", "eval")
