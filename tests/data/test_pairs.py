import pytest
import torch

from hypersphere.data import DamagedData, MissingData, Pairs, draw_pairs, read_pairs
from hypersphere.data.pairs import pairs_from_rows, sample_pairs

NAMES = ("a/1.png", "a/2.png", "b/1.png", "my b/2.png")


@pytest.mark.parametrize(
    "text",
    [
        "# first second same\na/1.png a/2.png 1\n\na/2.png b/1.png 0\n",
        "a/1.png,a/2.png,1\na/2.png, b/1.png, 0\n",
        "a/1.png\ta/2.png\t1\r\na/2.png\tb/1.png\t0",
        "a/1.png a/2.png 1 0\na/2.png b/1.png 0 0",
        "\ufeffa/1.png a/2.png 1\na/2.png b/1.png 0",
    ],
)
def test_read_pairs_accepts_spaces_commas_and_tabs(write, text):
    pairs = read_pairs(write("pairs.txt", text.encode()), NAMES)
    assert pairs.first.tolist() == [0, 1]
    assert pairs.second.tolist() == [1, 2]
    assert pairs.same.tolist() == [True, False]
    assert pairs.folds == 1


def test_read_pairs_allows_spaces_in_names_with_commas(write):
    pairs = read_pairs(write("pairs.csv", b"my b/2.png,b/1.png,1,0\nmy b/2.png,a/1.png,0,2\n"), NAMES)
    assert pairs.first.tolist() == [3, 3]
    assert pairs.fold.tolist() == [0, 2]
    assert pairs.folds == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a/1.png a/2.png\n", "line 1 must be"),
        ("# x\na/1.png a/2.png yes\n", "line 2 must be"),
        ("a/1.png a/2.png 1 -3\n", "line 1 must be"),
        (f"a/1.png a/2.png 1 0\na/1.png a/2.png 1 {10**30}\n", "line 2 must be"),
        (f"a/1.png a/2.png 1 {10**9}\n", "line 1 must be"),
        ("a/1.png c/9.png 1\n", "line 1 must name two of the 4 images, not 'c/9.png'"),
    ],
)
def test_read_pairs_names_invalid_lines(write, text, message):
    with pytest.raises(DamagedData, match=message):
        read_pairs(write("pairs.txt", text.encode()), NAMES)


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_read_pairs_names_lines_in_another_encoding(write, start):
    content = start + b"a/1.png a/2.png 1\na/1.png caf\xe9.png 0\n"
    with pytest.raises(DamagedData, match=r"line 2 must be UTF-8 text, not b'\\xe9'"):
        read_pairs(write("pairs.txt", content), NAMES)


def test_read_pairs_names_a_missing_file(tmp_path):
    with pytest.raises(MissingData, match=r"name name 0\|1"):
        read_pairs(tmp_path / "gone.txt", NAMES)


def test_pairs_split_holds_out_one_fold():
    pairs = pairs_from_rows([(0, 1, True, 0), (1, 2, False, 1), (2, 3, True, 1)])
    rest, held_out = pairs.split(1)
    assert len(rest) == 1
    assert held_out.first.tolist() == [1, 2]
    assert repr(pairs) == "Pairs(3 pairs, 2 of them same, 2 folds)"
    with pytest.raises(ValueError, match=r"fold must be in 0\.\.1, not 2"):
        pairs.split(2)


def test_pairs_reject_invalid_fields():
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="same must be"):
        Pairs(one, one, one, one)
    with pytest.raises(ValueError, match="second must be"):
        Pairs(one, one.repeat(2), one.bool(), one)
    with pytest.raises(ValueError, match="first, second and fold must be >= 0, not -1"):
        Pairs(one - 1, one, one.bool(), one)


@pytest.mark.parametrize(("classes", "each"), [(40, 6), (50, 900)])  # few items: enumeration; many: rejection
def test_draw_pairs_are_correct_distinct_and_disjoint_between_folds(classes, each):
    labels = torch.arange(classes).repeat(each)
    pairs = draw_pairs(labels, folds=10, per_fold=20, seed=3)
    assert len(pairs) == 400
    assert torch.equal(labels[pairs.first] == labels[pairs.second], pairs.same)
    assert torch.bincount(pairs.fold[pairs.same]).tolist() == [20] * 10
    ends = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    assert len({frozenset(pair) for pair in ends}) == 400
    fold_classes = [
        set(torch.cat((labels[part.first], labels[part.second])).tolist()) for _, part in map(pairs.split, range(10))
    ]
    assert sum(map(len, fold_classes)) == len(set.union(*fold_classes))
    again = draw_pairs(labels, folds=10, per_fold=20, seed=3)
    assert torch.equal(pairs.first, again.first)
    assert not torch.equal(pairs.first, draw_pairs(labels, folds=10, per_fold=20, seed=4).first)


@pytest.mark.parametrize("each", [6, 900])
@pytest.mark.parametrize(("factor", "offset"), [(10**12, 0), (1, -7), (-3, 2)])
def test_draw_pairs_accepts_any_integer_labels(each, factor, offset):
    plain = torch.arange(20).repeat(each)
    labels = plain * factor + offset
    pairs = draw_pairs(labels, folds=4, per_fold=10)
    assert torch.equal(labels[pairs.first] == labels[pairs.second], pairs.same)
    if factor > 0:  # the draw depends only on the order of the classes
        assert torch.equal(pairs.first, draw_pairs(plain, folds=4, per_fold=10).first)


def test_draw_pairs_draws_large_classes_as_often_as_they_have_pairs():
    labels = torch.tensor([0] * 1000 + [1] * 100).repeat(2)  # 2,200 items; class 0 has 99 % of the same pairs
    pairs = draw_pairs(labels, folds=1, per_fold=3000)
    share = (labels[pairs.first[pairs.same]] == 0).double().mean()
    assert float(share) == pytest.approx(1999 * 2000 / (1999 * 2000 + 199 * 200), abs=0.006)


def test_draw_pairs_of_many_items_in_classes_of_one_size_are_the_pairs_of_0_1():
    pairs = draw_pairs(torch.arange(30).repeat(100), folds=1, per_fold=3, seed=0)
    assert pairs.first.tolist() == [480, 481, 12, 2085, 1288, 1778]
    assert pairs.second.tolist() == [1890, 1801, 2862, 2711, 1822, 2999]


def test_draw_pairs_rejects_more_pairs_than_there_are():
    with pytest.raises(ValueError, match="not 5: fold 0 has"):
        draw_pairs(torch.tensor([0, 0, 1, 1]), folds=1, per_fold=5)
    with pytest.raises(ValueError, match="fold 0 has 36 same and 0 different"):
        draw_pairs(torch.arange(2).repeat(9), folds=3, per_fold=1)
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        draw_pairs(torch.arange(2), folds=0)


LFW_LIST = "2\t1\nA_A\t1\t2\nA_A\t2\tB_B\t1\nB_B\t1\t3\nB_B\t3\tA_A\t1\n"
LFW_NAMES = ["A_A/A_A_0001.jpg", "A_A/A_A_0002.jpg", "B_B/B_B_0001.png", "B_B/B_B_0003.png"]


def test_read_pairs_accepts_the_list_of_lfw(write):
    pairs = read_pairs(write("pairs.txt", LFW_LIST.encode()), LFW_NAMES)
    assert pairs.first.tolist() == [0, 1, 2, 3]
    assert pairs.second.tolist() == [1, 2, 3, 0]
    assert pairs.same.tolist() == [True, False, True, False]
    assert pairs.fold.tolist() == [0, 0, 1, 1]


def test_read_pairs_accepts_the_lists_of_lfw_with_one_number(write):
    pairs = read_pairs(write("pairsDevTest.txt", b"1\nA_A\t1\t2\nA_A\t2\tB_B\t1\n"), LFW_NAMES)
    assert pairs.same.tolist() == [True, False]
    assert pairs.folds == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LFW_LIST + "A_A\t1\t2\n", "must contain 4 pairs, not 5"),
        (LFW_LIST.replace("B_B\t1\t3", "B_B\t1\t4"), r"line 4 must name one of the 4 images, not 'B_B/B_B_0004'"),
        (LFW_LIST.replace("A_A\t1\t2\n", "A_A\t1\n", 1), "line 2 must be name, number, number"),
    ],
)
def test_read_pairs_names_damaged_lines_of_an_lfw_list(write, text, message):
    with pytest.raises(DamagedData, match=message):
        read_pairs(write("pairs.txt", text.encode()), LFW_NAMES)


def test_sample_pairs_of_one_class_are_all_the_same():
    first, second = sample_pairs(torch.zeros(50, dtype=torch.int64), 20, torch.Generator().manual_seed(0))
    assert len(first) == len(second) == 20
    assert (first != second).all()
