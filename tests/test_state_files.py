import pytest
import torch

from hypersphere._state_files import Rows, StoredTensor, TensorFiles, write_tensors


@pytest.mark.parametrize("total", [0, 3])
def test_tensor_files_read_no_rows(total, tmp_path):
    """A process has no rows if there are fewer rows than processes. The tensor may be empty as a whole."""
    tensor = torch.arange(4 * total, dtype=torch.float16).view(total, 4)
    write_tensors(tmp_path / "a.safetensors", {"weight": StoredTensor(tensor, Rows(0, total, total))})
    files = TensorFiles([tmp_path / "a.safetensors"])
    rows = files.read("weight", Rows(total, total, total))
    assert (rows.shape, rows.dtype) == ((0, 4), torch.float16)
    assert torch.equal(files.read("weight", Rows(0, total, total)), tensor)


def test_tensor_files_read_rows_across_files(tmp_path):
    tensor = torch.randn(5, 2)
    parts = {"a": Rows(0, 3, 5), "b": Rows(3, 3, 5), "c": Rows(3, 5, 5)}  # the second process has no rows
    for name, rows in parts.items():
        write_tensors(tmp_path / name, {"weight": StoredTensor(tensor[rows.start : rows.stop], rows)})
    files = TensorFiles(tmp_path / name for name in parts)
    assert files.shape("weight") == (5, 2)
    for start in range(6):
        for stop in range(start, 6):
            assert torch.equal(files.read("weight", Rows(start, stop, 5)), tensor[start:stop])
