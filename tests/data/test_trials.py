import pytest
import torch

from hypersphere.data import DamagedData, MissingData, ijb, read_template_pairs, read_template_set, read_trials

TRIALS = "1 id1/a.wav id1/b.wav\n0 id1/a.wav id2/c.wav\n\n1 id2/c.wav id2/d.wav\n"


def test_read_trials_reads_the_list_of_voxceleb(write):
    trials = read_trials(write("veri_test.txt", TRIALS.encode()))
    assert trials.names == ("id1/a.wav", "id1/b.wav", "id2/c.wav", "id2/d.wav")
    assert trials.pairs.first.tolist() == [0, 0, 2]
    assert trials.pairs.second.tolist() == [1, 2, 3]
    assert trials.pairs.same.tolist() == [True, False, True]
    known = read_trials(write("veri_test.txt", TRIALS.encode()), trials.names[::-1])
    assert known.pairs.first.tolist() == [3, 3, 1]
    assert known.names == trials.names[::-1]


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("1 a.wav\n", None, "line 1 must be `0|1 enrolment test`"),
        ("1 a.wav b.wav\na.wav b.wav 1\n", None, "line 2 must be `0|1 enrolment test`"),
        ("1 a.wav b.wav\n", ["a.wav"], "line 1 must name two of the 1 items, not 'b.wav'"),
    ],
)
def test_read_trials_names_invalid_lines(write, text, names, message):
    with pytest.raises(DamagedData, match=message):
        read_trials(write("trials.txt", text.encode()), names)


def test_read_trials_names_a_missing_file(tmp_path):
    with pytest.raises(MissingData, match=r"0\|1 enrolment test"):
        read_trials(tmp_path / "gone.txt")


def write_ijb(root, version="c", galleries=("G1", "G2")):
    folder = root / f"IJB{version.upper()}" / "meta"
    folder.mkdir(parents=True)
    heading = "TEMPLATE_ID,SUBJECT_ID,FILENAME,SIGHTING_ID\n"
    (folder / f"ijb{version}_face_tid_mid.txt").write_text(
        "1.jpg 20 7\n2.jpg 20 7\n3.jpg 20 9\n4.jpg 5 1\n5.jpg 31 2\n6.jpg 8 3\n"
    )
    (folder / f"ijb{version}_template_pair_label.txt").write_text("20 5 1\n20 8 0\n5 31 0\n")
    (folder / f"ijb{version}_1N_gallery_{galleries[0]}.csv").write_text(
        heading + "20,100,img/1.jpg,1\n20,100,img/2.jpg,1\n"
    )
    (folder / f"ijb{version}_1N_gallery_{galleries[1]}.csv").write_text(heading + "8,300,img/6.jpg,1\n")
    (folder / f"ijb{version}_1N_probe_mixed.csv").write_text(heading + "5,100,img/4.jpg,1\n31,300,frames/5.png,2\n")
    return folder


@pytest.mark.parametrize(("version", "galleries"), [("c", ("G1", "G2")), ("b", ("S1", "S2"))])
def test_ijb_reads_templates_pairs_galleries_and_probes(tmp_path, version, galleries):
    write_ijb(tmp_path, version, galleries)
    benchmark = ijb(tmp_path, version)
    assert benchmark.names == ("1.jpg", "2.jpg", "3.jpg", "4.jpg", "5.jpg", "6.jpg")
    assert benchmark.template_ids.tolist() == [20, 20, 20, 5, 31, 8]
    assert benchmark.media_ids.tolist() == [7, 7, 9, 1, 2, 3]
    # Rows are positions among the ids 5, 8, 20, 31.
    assert benchmark.pairs.first.tolist() == [2, 2, 0]
    assert benchmark.pairs.second.tolist() == [0, 1, 3]
    assert benchmark.pairs.same.tolist() == [True, False, False]
    assert [gallery.rows.tolist() for gallery in benchmark.galleries] == [[2], [1]]
    assert [gallery.subjects.tolist() for gallery in benchmark.galleries] == [[100], [300]]
    assert benchmark.probes.rows.tolist() == [0, 3]
    assert benchmark.probes.subjects.tolist() == [100, 300]


def test_ijb_rows_are_those_of_templates(tmp_path):
    from hypersphere.evaluation import pair_scores, templates

    write_ijb(tmp_path)
    benchmark = ijb(tmp_path)
    # Images of subject 100 point along one axis, those of 300 along another; template 8 shows subject 300.
    features = torch.eye(2)[[0, 0, 0, 0, 1, 1]]
    pooled = templates(features, benchmark.template_ids, benchmark.media_ids)
    pairs = benchmark.pairs
    assert pair_scores(pooled, pairs.first, pairs.second).tolist() == pairs.same.double().tolist()
    assert pooled[benchmark.probes.rows].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ijbc_face_tid_mid.txt", "1.jpg 20\n", "line 1 must be `image template medium`"),
        ("ijbc_face_tid_mid.txt", "\n", "must list at least one image"),
        ("ijbc_template_pair_label.txt", "20 5 1\n20 5\n", "must have lines of `template template 0|1`"),
        ("ijbc_template_pair_label.txt", "20 5 7\n", "must have lines of `template template 0|1`"),
        ("ijbc_template_pair_label.txt", "", "must have lines of `template template 0|1`"),
        ("ijbc_template_pair_label.txt", "20 6 1\n", "must name templates that have images, not 6"),
        ("ijbc_1N_gallery_G1.csv", "TEMPLATE_ID,SUBJECT_ID\n20,100\n20,101\n", "line 3 gives template 20 a second"),
        ("ijbc_1N_gallery_G1.csv", "TEMPLATE_ID,SUBJECT_ID\n20,x\n", "line 2 must begin with a template and a subject"),
        ("ijbc_1N_gallery_G2.csv", "TEMPLATE_ID,SUBJECT_ID\n", "must list at least one template"),
        ("ijbc_1N_probe_mixed.csv", "TEMPLATE_ID,SUBJECT_ID\n99,1\n", "must name templates that have images, not 99"),
    ],
)
def test_ijb_names_what_is_wrong(tmp_path, name, text, message):
    folder = write_ijb(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(DamagedData, match=message):
        ijb(tmp_path)
    (folder / name).unlink()
    with pytest.raises(MissingData, match=f"{name} not found"):
        ijb(tmp_path)
    with pytest.raises(ValueError, match="version must be 'b' or 'c', not 'a'"):
        ijb(tmp_path, "a")


def test_template_lists_are_read_alone(write):
    ids = torch.tensor([4, 4, 9])
    assert read_template_pairs(write("pairs.txt", b"4 9 0\n"), ids).second.tolist() == [1]
    assert read_template_set(write("gallery.csv", b"9,70\n4,71\n"), ids).rows.tolist() == [1, 0]
