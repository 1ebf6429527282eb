import io

import pytest
import torch

from hypersphere.data import DamagedData, image_names, lfw, lfw_pairs, lfw_people

Image = pytest.importorskip("PIL.Image")

PAIRS = b"2\t1\nAda_L\t1\t2\nAda_L\t2\tBob\t1\nCy\t1\t3\nDee\t1\tCy\t2\n"
PEOPLE = b"2\n2\nAda_L\t2\nBob\t1\n2\nCy\t3\nDee\t1\n"


@pytest.fixture
def faces(write, tmp_path):
    for person, (name, count) in enumerate((("Ada_L", 2), ("Bob", 1), ("Cy", 3), ("Dee", 1))):
        for number in range(1, count + 1):
            buffer = io.BytesIO()
            Image.new("L", (4, 5), 10 * person + number).save(buffer, "JPEG")
            write(f"lfw/lfw/{name}/{name}_{number:04d}.jpg", buffer.getvalue())
    write("lfw/pairs.txt", PAIRS)
    write("lfw/people.txt", PEOPLE)
    return tmp_path


def test_lfw_pairs_are_positions_of_the_images(faces):
    images = lfw(faces)
    assert images.classes == ("Ada_L", "Bob", "Cy", "Dee")
    assert images.images.shape == (7, 1, 5, 4)
    pairs = lfw_pairs(faces, verify=False)
    assert pairs.first.tolist() == [0, 1, 3, 6]
    assert pairs.second.tolist() == [1, 2, 5, 4]
    assert pairs.same.tolist() == [True, False, True, False]
    assert pairs.fold.tolist() == [0, 0, 1, 1]
    assert torch.equal(images.labels[pairs.first] == images.labels[pairs.second], pairs.same)


def test_lfw_pairs_accept_other_names(faces):
    images = lfw(faces)
    reversed_images = images.subset(list(range(6, -1, -1)))
    assert lfw_pairs(faces, names=reversed_images.names, verify=False).first.tolist() == [6, 5, 3, 0]
    with pytest.raises(DamagedData, match="line 2 must name one of the 6 images, not 'Ada_L/Ada_L_0001'"):
        lfw_pairs(faces, names=images.names[1:], verify=False)


def test_lfw_reads_the_people_of_a_fold(faces):
    folds = lfw_people(faces, verify=False)
    assert folds == (("Ada_L", "Bob"), ("Cy", "Dee"))
    train = lfw(faces, people=folds[0], size=8, grey=False)
    assert train.classes == folds[0]
    assert train.images.shape == (3, 3, 8, 8)


def test_lfw_verifies_the_checksums_of_its_lists(faces):
    with pytest.raises(DamagedData, match=r"pairs\.txt must have SHA-256"):
        lfw_pairs(faces)
    with pytest.raises(DamagedData, match=r"people\.txt must have SHA-256"):
        lfw_people(faces)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "must begin with"),
        (b"ten\n", "must begin with"),
        (b"2\t1\nAda_L\t1\t2\n", "must contain 4 pairs, not 1"),
        (PAIRS.replace(b"Ada_L\t1\t2", b"Ada_L\t1"), "line 2 must be name, number, number"),
        (PAIRS.replace(b"Dee\t1\tCy\t2", b"Dee\t1\t1"), "line 5 must be name, number, name, number"),
        (PAIRS.replace(b"Cy\t1\t3", b"Cy\tone\t3"), "line 4 must be"),
        (PAIRS.replace(b"Cy\t1\t3", b"Cy\t1\t" + b"3" * 5000), "line 4 must be"),
        (b"9" * 5000 + b"\t1\n", "must begin with"),
        (b"\n" + PAIRS.replace(b"Cy\t1\t3", b"\nCy\tone\t3"), "line 6 must be"),  # empty lines count
    ],
)
def test_lfw_pairs_rejects_a_damaged_list(faces, write, text, message):
    write("lfw/pairs.txt", text)
    with pytest.raises(DamagedData, match=message):
        lfw_pairs(faces, verify=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "ends before"),
        (b"2\n2\nAda_L\t2\n", "line 3 must be a new name"),
        (b"2\n1\nAda_L\t2\n", "ends before"),
        (b"2\n1\nAda_L\t2\n1\nAda_L\t2\n", "line 5 must be a new name"),
        (b"1\n1\nAda_L\t2\nBob\t1\n", "that its counts state, not more"),
        (b"x\n", "line 1 must be a count"),
        (b"9" * 5000 + b"\n", "line 1 must be a count"),
        (b"\n2\n\n1\nAda_L\t2\n\nx\n", "line 7 must be a count"),  # empty lines count
    ],
)
def test_lfw_people_rejects_a_damaged_list(faces, write, text, message):
    write("lfw/people.txt", text)
    with pytest.raises(DamagedData, match=message):
        lfw_people(faces, verify=False)


def test_lfw_reads_the_real_files(real):
    root = real("lfw")
    pairs = lfw_pairs(root)
    assert torch.bincount(pairs.fold[pairs.same]).tolist() == [300] * 10
    assert torch.bincount(pairs.fold[~pairs.same]).tolist() == [300] * 10
    assert int(torch.maximum(pairs.first, pairs.second).max()) < 13233
    folds = lfw_people(root)
    assert sum(map(len, folds)) == len(set().union(*folds)) == 5749
    some = lfw(root, people=folds[9][:40])
    assert some.classes == folds[9][:40]
    assert some.images[0].float().std() > 10


def test_lfw_pairs_stay_within_the_folds_of_people(real):
    root = real("lfw")
    source = root / "lfw" / "lfw-a-96x112.tar.gz"
    names = image_names(source if source.exists() else root / "lfw" / "lfw")
    pairs = lfw_pairs(root, names=names)
    for number, people in enumerate(lfw_people(root)):
        _, part = pairs.split(number)
        assert {names[i].split("/")[0] for i in (*part.first.tolist(), *part.second.tolist())} <= set(people)
