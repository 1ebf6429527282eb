import numpy as np
import pytest
import torch

from hypersphere.evaluation._arrays import as_features, as_labels, blocks

CPU = torch.device("cpu")


def test_as_features_shares_memory():
    array = np.ones((3, 2), dtype=np.float32)
    assert as_features("x", array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert as_features("x", array).data_ptr() == array.ctypes.data
    tensor = torch.ones(3, 2, dtype=torch.float16)
    assert as_features("x", tensor).data_ptr() == tensor.data_ptr()


def test_as_features_accepts_views_lists_and_huge_values():
    array = np.arange(6.0).reshape(3, 2)
    assert as_features("x", array[::-1]).tolist() == array[::-1].tolist()
    assert as_features("x", np.asfortranarray(array)).tolist() == array.tolist()
    assert as_features("x", [[1, 2]]).dtype == torch.get_default_dtype()
    assert as_features("x", torch.ones(2, 2, requires_grad=True)).requires_grad is False
    assert as_features("x", torch.full((2, 2), 6e4, dtype=torch.float16)).shape == (2, 2)  # the sum overflows
    assert as_features("x", np.full((2, 2), 1e308)).shape == (2, 2)
    for kind in (np.uint8, np.int32, np.uint16, bool):
        assert as_labels("y", np.ones(3, dtype=kind), 3, CPU).dtype == torch.int64


@pytest.mark.parametrize(
    "invalid", [None, "text", object(), [["a"]], [[1.0], [1.0, 2.0]], np.ones((2, 2), dtype=complex)]
)
def test_as_features_rejects_what_is_not_an_array_of_numbers(invalid):
    with pytest.raises(ValueError, match="x must be a"):
        as_features("x", invalid)


@pytest.mark.parametrize(
    "names", [["ann", "bob"], ("ann", "bob"), np.array(["ann", "bob"]), np.array(["ann", 3], object)]
)
def test_as_labels_explains_how_to_number_names(names):
    with pytest.raises(
        ValueError, match=r"y must be integers, not 'ann': number the names with np.unique\(names, return_inv"
    ):
        as_labels("y", names, 2, CPU)
    numbers = np.unique(["ann", "bob", "ann"], return_inverse=True)[1]
    assert as_labels("y", numbers, 3, CPU).tolist() == [0, 1, 0]


def test_as_features_names_a_row_beyond_the_first_block():
    x = np.zeros((70_000, 1), dtype=np.float32)
    x[69_999] = np.inf
    with pytest.raises(ValueError, match="x must be finite, but row 69999 is not"):
        as_features("x", x)
    assert [start for start, _ in blocks(torch.zeros(5), 2)] == [0, 2, 4]
