"""The unpickler of data files runs no code and accepts only the names that those files need."""

import builtins
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hypersphere.data import DamagedData, ForbiddenGlobal
from hypersphere.data._pickles import ALLOWED, ArrayStandIn, CsrStandIn, dense_array, load_pickle

HERE = Path("evil")
pytest.importorskip("scipy.sparse")  # before the tests replace `exec`, which an import needs


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def stack_global(module: str, name: str, argument: bytes = b"\x8c\x04true") -> bytes:
    parts = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + parts + b"\x93" + argument + b"\x85R."


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Fail the test if one of the usual targets is called."""

    def called(*arguments):
        pytest.fail(f"the pickle ran code: {arguments}")

    for module, name in ((os, "system"), (os, "popen"), (builtins, "eval"), (builtins, "exec")):
        monkeypatch.setattr(module, name, called)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"cposix\nsystem\n(S'true'\ntR.", "posix.system"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"(S'true'\nios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\nS'true'\no.", "os.system"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
        (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
        (b"ccopy_reg\n_reconstructor\n.", "copy_reg._reconstructor"),
        (b"c_codecs\ndecode\n.", "_codecs.decode"),
        (b"cnumpy\nload\n.", "numpy.load"),
        (b"cnumpy\nfromfile\n.", "numpy.fromfile"),
        (b"cnumpy.core.multiarray\nscalar\n.", "numpy.core.multiarray.scalar"),
        (b"cnumpy.testing._private.utils\nrunstring\n.", "runstring"),
        (b"cscipy.sparse\nload_npz\n.", "scipy.sparse.load_npz"),
        (b"ccollections\nOrderedDict\n.", "collections.OrderedDict"),
        (stack_global("os", "system"), "os.system"),
        (stack_global("builtins", "eval"), "builtins.eval"),
        (stack_global("numpy", "ndarray.__class__"), r"numpy\.ndarray\.__class__"),
        (stack_global("numpy", "f.__globals__"), r"numpy\.f\.__globals__"),
        (stack_global("collections", "defaultdict.__init__.__globals__"), "__globals__"),
        (stack_global("builtins", "list.__subclasses__"), "__subclasses__"),
        (stack_global("hypersphere.data._pickles", "load_pickle"), "load_pickle"),
        (stack_global("", "numpy.ndarray"), "numpy.ndarray"),
    ],
)
def test_load_pickle_rejects_and_names_forbidden_names(content, name):
    with pytest.raises(ForbiddenGlobal, match=f"evil: the pickle names .*{name}"):
        load_pickle(content, HERE)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_load_pickle_rejects_calls_in_every_protocol(protocol):
    for function in (print, open, np.load, os.getcwd):
        with pytest.raises(ForbiddenGlobal):
            load_pickle(pickle.dumps(Call(function, "true"), protocol=protocol), HERE)


def test_load_pickle_rejects_a_forbidden_name_inside_allowed_ones():
    nested = b"ccollections\ndefaultdict\n(cos\nsystem\ntR."
    with pytest.raises(ForbiddenGlobal, match=r"os\.system"):
        load_pickle(nested, HERE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        b"\x80\x02]q",
        pickle.dumps(list(range(100)))[:-20],
        b"Pid\n.",  # a persistent id
        b"\x82\x01.",  # an extension code
        b"c__builtin__\nlist\n(dS'append'\nI1\nsb.",  # sets the state of a mentioned type
        b"cscipy.sparse.csr\ncsr_matrix\n(N}S'dense'\nI1\nstb.",  # sets attributes of a stand-in class
        b"ccollections\ndefaultdict\n(}S'x'\nI1\nstb.",
        b"cnumpy\ndtype\n(S'O8'\ntR.",
        b"cnumpy\ndtype\n(S'f4, (1000000000,)f4'\ntR.",
        b"cnumpy\ndtype\n(S'f4'\ntR(I3\nS'?'\ntb.",
        b"cnumpy.core.multiarray\n_reconstruct\n(tR(I1\n(I1000000000000\ntcnumpy\ndtype\n(S'f4'\ntRI00\nS'abcd'\ntb.",
        b"cnumpy.core.multiarray\n_reconstruct\n(tR(I1\n(I-1\ntcnumpy\ndtype\n(S'f4'\ntRI00\nS'abcd'\ntb.",
        b"cnumpy.core.multiarray\n_reconstruct\n(tR(I1\n(I1\ntNI00\nS'abcd'\ntb.",
    ],
)
def test_load_pickle_rejects_damaged_pickles(content):
    before = {name: dict(vars(stand_in)) for name, stand_in in ALLOWED.items()}
    with pytest.raises(DamagedData, match="evil"):
        load_pickle(content, HERE)
    assert before == {name: dict(vars(stand_in)) for name, stand_in in ALLOWED.items()}


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i4", "|u1", ">i2", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_load_pickle_restores_arrays(dtype, order):
    array = np.asarray(np.arange(6).reshape(2, 3) % 2, dtype=dtype, order=order)
    loaded = dense_array(load_pickle(pickle.dumps(array, protocol=3), HERE))
    assert np.array_equal(loaded, array)
    assert loaded.dtype.isnative


def test_load_pickle_restores_arrays_of_python_2():
    content = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x02\xe9\x01tb."
    )
    assert dense_array(load_pickle(content, HERE)).tolist() == [0xE9, 1]


def test_sparse_matrix_with_inconsistent_parts_is_rejected():
    sparse = pytest.importorskip("scipy.sparse")
    for part, value in (("indptr", [0, 5]), ("indices", [9, 9]), ("indices", [0.0, 1.0]), ("data", [1.0])):
        matrix = sparse.csr_matrix(np.ones((1, 2)))
        setattr(matrix, part, np.array(value))
        with pytest.raises(DamagedData, match="of a sparse matrix must"):
            dense_array(load_pickle(pickle.dumps(matrix, protocol=3), HERE))
    for part, value in (
        ("indptr", np.array([0.0, 2.0])),
        ("indptr", np.array([0.0, np.nan])),
        ("data", np.array(1.0)),
        ("data", np.ones((1, 2))),
    ):
        matrix = sparse.csr_matrix(np.ones((1, 2)))
        setattr(matrix, part, value)
        with pytest.raises(DamagedData, match="data, indices and indptr of a sparse matrix must"):
            dense_array(load_pickle(pickle.dumps(matrix, protocol=3), HERE))
    huge = sparse.csr_matrix((1, 2**40), dtype=np.float32)
    with pytest.raises(DamagedData, match="at most 268435456 entries, not 1x1099511627776"):
        dense_array(load_pickle(pickle.dumps(huge, protocol=3), HERE))


@pytest.mark.parametrize(("middle", "dtype"), [(5, np.uint8), (5, np.uint32), (2**63 + 5, np.uint64)])
def test_sparse_matrix_with_decreasing_unsigned_row_starts_is_rejected(middle, dtype):
    matrix = pytest.importorskip("scipy.sparse").csr_matrix(np.ones((2, 1)))
    matrix.indptr = np.array([0, middle, 2], dtype=dtype)
    with pytest.raises(DamagedData, match="row starts of a sparse matrix must increase"):
        dense_array(load_pickle(pickle.dumps(matrix, protocol=3), HERE))


def test_sparse_matrix_may_have_unsigned_parts():
    matrix = pytest.importorskip("scipy.sparse").csr_matrix(np.eye(3)[[2, 0]])
    matrix.indptr, matrix.indices = matrix.indptr.astype(np.uint64), matrix.indices.astype(np.uint8)
    assert np.array_equal(dense_array(load_pickle(pickle.dumps(matrix, protocol=3), HERE)), np.eye(3)[[2, 0]])


def test_sparse_matrix_that_contains_itself_is_rejected():
    itself = CsrStandIn()
    itself.__setstate__({"data": itself, "indices": itself, "indptr": itself, "shape": (1, 1)})
    with pytest.raises(DamagedData, match="must be an array, not CsrStandIn"):
        dense_array(itself)


def test_sparse_matrix_without_rows_and_huge_columns_is_rejected():
    empty = ArrayStandIn()
    empty.values = np.zeros(0, dtype=np.int64)
    start = ArrayStandIn()
    start.values = np.zeros(1, dtype=np.int64)
    flat = CsrStandIn()
    flat.__setstate__({"data": empty, "indices": empty, "indptr": start, "shape": (0, 2**70)})
    with pytest.raises(DamagedData, match="at most 268435456 entries"):
        dense_array(flat)


def test_array_without_state_is_rejected():
    with pytest.raises(DamagedData, match="must be an array"):
        dense_array(ArrayStandIn())


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_load_pickle_reads_bytes_of_old_protocols(protocol):
    content = bytes(range(256))
    assert load_pickle(pickle.dumps([content], protocol), Path("a.bin")) == [content]


@pytest.mark.parametrize(
    "content",
    [
        b"c_codecs\nencode\n(V636174\nVhex\ntR.",  # another codec, which could decompress or run a rule
        b"c_codecs\nencode\n(I1\nVlatin1\ntR.",
        b"c_codecs\nencode\n}X\x01\x00\x00\x00xX\x01\x00\x00\x00ysb.",  # a state for the stand-in itself
    ],
)
def test_load_pickle_encodes_latin1_only(content):
    with pytest.raises(DamagedData):
        load_pickle(content, Path("a.bin"))


def test_a_large_memo_index_needs_no_memory():
    content = b"\x80\x02Nr" + (2**31 - 1).to_bytes(4, "little") + b"."
    tracemalloc.start()
    assert load_pickle(content, Path("bomb")) is None
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
