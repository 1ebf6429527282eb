import json

import pytest
import torch

from hypersphere.data import DATA, DamagedData, MissingData, megaface, youtube_faces
from picture_files import encoded, pixels, write_tree

PAIRS = "1, 1, A_A/0, A_A/2, 1\n1, 2, A_A/0, B_B/1, 0\n2, 1, B_B/1, B_B/3, 1\n2, 2, A_A/2, B_B/3, 0\n"


def write_videos(root, counts=None):
    frames = root / "ytf" / "aligned_images_DB"
    for person, video, count in counts or (("A_A", "0", 3), ("A_A", "2", 1), ("B_B", "1", 2), ("B_B", "3", 5)):
        write_tree(frames / person, {video: count})
    (root / "ytf" / "splits.txt").write_text("split, number, first, second, same\n" + PAIRS)


def test_youtube_faces_reads_pairs_of_videos_and_their_frames(tmp_path):
    write_videos(tmp_path)
    videos = youtube_faces(tmp_path, size=8, frames=2)
    assert videos.frames.classes == ("A_A/0", "A_A/2", "B_B/1", "B_B/3")
    assert videos.frames.labels.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert videos.frames.name(0).startswith("A_A/0/")
    assert videos.frames[0].shape == (3, 8, 8)
    assert videos.pairs.first.tolist() == [0, 0, 2, 1]
    assert videos.pairs.second.tolist() == [1, 2, 3, 3]
    assert videos.pairs.same.tolist() == [True, False, True, False]
    assert videos.pairs.fold.tolist() == [0, 0, 1, 1]


def test_youtube_faces_names_what_is_wrong(tmp_path):
    with pytest.raises(MissingData, match="ytf not found in"):
        youtube_faces(tmp_path)
    write_videos(tmp_path, [("A_A", "0", 1)])
    with pytest.raises(DamagedData, match="must contain the frames of a video"):
        youtube_faces(tmp_path)
    (tmp_path / "ytf" / "splits.txt").write_text("1, A_A/0, A_A/2, 1\n")
    with pytest.raises(DamagedData, match=r"line 1 must be `split, number, video, video, 0\|1`"):
        youtube_faces(tmp_path)
    (tmp_path / "ytf" / "splits.txt").unlink()
    with pytest.raises(MissingData, match=r"splits\.txt not found"):
        youtube_faces(tmp_path)


def write_megaface(root, distractors=4):
    base = root / "megaface"
    write_tree(base / "facescrub_images", {"Ann": 3, "Bob": 2})
    lists = base / "devkit" / "templatelists"
    lists.mkdir(parents=True)
    probes = ["Bob/000.png", "Bob/001.png", "Ann/000.png", "Ann/001.png", "Ann/002.png"]
    (lists / "facescrub_features_list.json").write_text(json.dumps({"id": probes, "path": probes}))
    others = [f"10/{number}.jpg" for number in range(distractors)]
    (base / "megaface_images" / "10").mkdir(parents=True)
    for number, name in enumerate(others):
        (base / "megaface_images" / name).write_bytes(encoded(pixels(number), "JPEG"))
    (lists / f"megaface_features_list.json_{distractors}_1").write_text(json.dumps({"path": others}))
    return base


def test_megaface_reads_probes_and_distractors_without_noises(tmp_path):
    base = write_megaface(tmp_path)
    benchmark = megaface(tmp_path, size=8, distractors=4)
    assert benchmark.probes.classes == ("Ann", "Bob")
    assert benchmark.probes.labels.tolist() == [1, 1, 0, 0, 0]
    assert len(benchmark.distractors) == 4
    assert benchmark.distractors[3].shape == (3, 8, 8)
    (base / "facescrub_noises.txt").write_text("# wrong people\nAnn/001.png\n")
    (base / "megaface_noises.txt").write_text("2.jpg\n")
    cleaned = megaface(tmp_path, size=8, distractors=4)
    assert cleaned.probes.labels.tolist() == [1, 1, 0, 0]
    assert [cleaned.distractors.name(at) for at in range(3)] == ["10/0.jpg", "10/1.jpg", "10/3.jpg"]


def test_megaface_names_what_is_missing(tmp_path):
    with pytest.raises(MissingData, match="megaface not found"):
        megaface(tmp_path)
    base = write_megaface(tmp_path)
    with pytest.raises(MissingData, match=r"megaface_features_list\.json_1000000_1 not found"):
        megaface(tmp_path)
    (base / "devkit" / "templatelists" / "facescrub_features_list.json").write_text("[]")
    with pytest.raises(DamagedData, match="must be a JSON object with a list of paths"):
        megaface(tmp_path, distractors=4)


@pytest.mark.parametrize(
    ("name", "folder"), [("casia_webface", "casia-webface"), ("ms_celeb", "MS-Celeb-1M"), ("imdb_face", "imdb-face")]
)
def test_training_sets_of_faces_leave_out_listed_people(tmp_path, name, folder):
    write_tree(tmp_path / folder, {f"{number:03d}": 2 for number in range(8)})
    (tmp_path / folder / "test-people.txt").write_text("001\n005\n")
    split = DATA[name](tmp_path, size=8, held_out=2, exclude="test-people.txt")
    people = set(split.train.classes) | set(split.validation.classes)
    assert people == {"000", "002", "003", "004", "006", "007"}
    assert split.open_set
    assert torch.equal(split.train.labels, torch.arange(4).repeat_interleave(2))
