"""The checks of shapes that run during the tests must themselves reject what is wrong."""

import pytest
import torch
from jaxtyping import Float, Int, Integer
from shape_checks import ShapeError, check_shapes
from torch import Tensor

import hypersphere as hs


def scores(x: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"] | None = None) -> Float[Tensor, " batch"]:
    return x.sum(-1)


def test_check_shapes_accepts_annotated_shapes():
    checked = check_shapes(scores)
    assert checked(torch.ones(3, 2)).tolist() == [2, 2, 2]
    assert checked(torch.ones(3, 2), labels=torch.arange(3)).shape == (3,)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((torch.ones(3, 2, 1),), "x"),
        ((torch.ones(3, 2, dtype=torch.int64),), "x"),
        ((torch.ones(3, 2), torch.arange(4)), "labels"),
        ((torch.ones(3, 2), torch.ones(3)), "labels"),
    ],
)
def test_check_shapes_names_the_wrong_argument(arguments, name):
    with pytest.raises(ShapeError, match=f"scores: {name} is"):
        check_shapes(scores)(*arguments)


def test_check_shapes_rejects_a_wrong_result():
    @check_shapes
    def transpose(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return x.mT

    with pytest.raises(ShapeError, match="return"):
        transpose(torch.ones(3, 2))


def test_check_shapes_lets_the_error_of_the_function_through():
    @check_shapes
    def strict(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        raise ValueError("x must be a matrix")

    with pytest.raises(ValueError, match="x must be a matrix"):
        strict(torch.ones(3))


def test_public_functions_are_checked():
    with pytest.raises(ShapeError, match=r"x is torch\.int64"):
        hs.sphere.norm(torch.arange(3))


def test_checked_functions_compile_in_one_graph():
    x = torch.randn(4, 3)
    compiled = torch.compile(hs.sphere.normalize, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), hs.sphere.normalize(x))


def test_a_wrong_shape_of_integers_of_any_size_is_an_error():
    def first(labels: "Integer[Tensor, ' batch']"):
        return labels

    with pytest.raises(ShapeError, match="labels is"):
        check_shapes(first)(torch.zeros(2, 2, dtype=torch.int32))
