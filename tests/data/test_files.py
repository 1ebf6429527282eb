import gzip
import importlib
import subprocess
import sys
import warnings

import pytest

from hypersphere import data
from hypersphere.data import DamagedData, MissingData, data_root
from hypersphere.data._files import accept_root_first, read_content

WITH_SPLITS = ["mnist", "fashion_mnist", "cifar10", "cifar100", "cifar100_fifth", "omniglot", "modelnet10"]


def test_data_root_is_the_argument_or_else_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERSPHERE_DATA", str(tmp_path))
    assert data_root() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_root(tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize("value", [None, ""])
def test_data_root_says_how_to_set_it(monkeypatch, value):
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("HYPERSPHERE_DATA", value)
    with pytest.raises(MissingData, match="pass root= or set the environment variable HYPERSPHERE_DATA"):
        data_root()


def test_data_root_names_a_folder_that_does_not_exist(tmp_path, monkeypatch):
    with pytest.raises(MissingData, match=r"root must be an existing folder, not .*nowhere"):
        data_root(tmp_path / "nowhere")
    monkeypatch.setenv("HYPERSPHERE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="HYPERSPHERE_DATA must be"):
        data_root()


@pytest.mark.parametrize("name", [name for name in data.DATASETS if name not in ("digits", "image_folder")])
def test_loaders_say_what_is_missing_and_how_to_get_it(tmp_path, name, monkeypatch):
    mnist_module = importlib.import_module("hypersphere.data.mnist")
    monkeypatch.setattr(mnist_module, "DEBIAN_FASHION", tmp_path / "debian")
    with pytest.raises(MissingData) as caught:
        data.DATASETS[name](root=tmp_path)
    message = str(caught.value)
    assert f"not found in {tmp_path}" in message
    assert "in the folder" in message
    assert "http" not in message


def test_loaders_have_a_summary_and_are_public():
    for name, loader in data.DATASETS.items():
        assert (loader.__doc__ or "").splitlines()[0].endswith(".")
        assert getattr(data, name) is loader
    assert all(hasattr(data, name) for name in data.__all__)


@pytest.mark.parametrize("name", WITH_SPLITS)
def test_loaders_list_the_splits_for_an_unknown_one(tmp_path, name):
    with pytest.raises(ValueError, match=r"split must be one of .*, not 'weekend'"):
        data.DATASETS[name]("weekend", tmp_path)


@pytest.mark.parametrize("name", WITH_SPLITS)
def test_loaders_take_the_split_first_and_then_the_root(tmp_path, name, monkeypatch):
    mnist_module = importlib.import_module("hypersphere.data.mnist")
    monkeypatch.setattr(mnist_module, "DEBIAN_FASHION", tmp_path / "debian")
    loader = data.DATASETS[name]
    split = "evaluation" if name == "omniglot" else "test"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MissingData, match=f"not found in {tmp_path}"):
            loader(split, tmp_path)
        with pytest.raises(MissingData, match=f"not found in {tmp_path}"):
            loader(split, root=str(tmp_path))
    with pytest.warns(DeprecationWarning, match="is deprecated"), pytest.raises(MissingData, match="not found in"):
        loader(tmp_path, split)


def test_digits_accepts_a_root_like_the_other_loaders(tmp_path):
    pytest.importorskip("sklearn")
    assert len(data.digits("test", tmp_path)) == len(data.digits("test")) == 500


@accept_root_first("train", "test")
def show(split="train", root=None, *, verify=True):
    return split, root, verify


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, ("train", None, True)),
        (("test",), {}, ("test", None, True)),
        (("test", "data"), {}, ("test", "data", True)),
        (("test", None), {"verify": False}, ("test", None, False)),
        (("test",), {"root": "train"}, ("test", "train", True)),
        (("weekend",), {}, ("weekend", None, True)),  # the loader rejects the split
        (("weekend", "nowhere"), {}, ("weekend", "nowhere", True)),
        ((), {"root": "data", "split": "test"}, ("test", "data", True)),
    ],
)
def test_accept_root_first_leaves_the_new_order_alone(args, kwargs, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert show(*args, **kwargs) == expected


def test_accept_root_first_accepts_the_old_order_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    old_calls = [
        ((tmp_path, "test"), {}, ("test", tmp_path, True)),
        ((tmp_path,), {"verify": False}, ("train", tmp_path, False)),
        ((tmp_path,), {"split": "test"}, ("test", tmp_path, True)),
        ((None, "test"), {}, ("test", None, True)),
        ((None,), {}, ("train", None, True)),
        (("nowhere", "test"), {}, ("test", "nowhere", True)),
        (("folder",), {}, ("train", "folder", True)),
        (("nowhere",), {"split": "test"}, ("test", "nowhere", True)),
        ((tmp_path, "weekend"), {}, ("weekend", tmp_path, True)),
    ]
    for args, kwargs, expected in old_calls:
        with pytest.warns(
            DeprecationWarning, match=r"show\(root, split\) is deprecated, use show\(split, root\)"
        ) as caught:
            assert show(*args, **kwargs) == expected
        assert caught[0].filename == __file__  # the warning names the line of the caller


def test_accept_root_first_rejects_two_roots(tmp_path):
    with pytest.raises(TypeError, match="multiple values"), pytest.warns(DeprecationWarning, match="is deprecated"):
        show(tmp_path, root=tmp_path)


def test_read_content_decompresses_no_more_than_the_limit(write, monkeypatch):
    path = write("file.gz", b"abcdef" * 1000)
    assert read_content(path, 4) == b"abcd"
    assert len(read_content(path)) == 6000
    monkeypatch.setattr("hypersphere.data._files.MAX_FILE_BYTES", 5999)
    with pytest.raises(DamagedData, match=r"at most 5999 bytes \(decompressed\), not more"):
        read_content(path)
    monkeypatch.setattr("hypersphere.data._files.MAX_FILE_BYTES", 6000)
    assert read_content(path) == gzip.decompress(path.read_bytes())


@pytest.mark.slow
def test_importing_data_imports_no_optional_package():
    code = "import sys, hypersphere.data; print([m for m in ('sklearn', 'scipy', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
