import os
import stat
import threading

import pytest

from hypersphere import _files as files


def is_folder(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


@pytest.mark.parametrize("way", [files.replacing, files.creating])
def test_files_are_flushed_before_and_after_renaming(way, tmp_path, monkeypatch):
    events = []
    for name in ("replace", "link"):
        done = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *paths, done=done: (events.append("named"), done(*paths)))
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (events.append("folder" if is_folder(file) else "content"), fsync(file))
    )
    with way(tmp_path / "file") as draft:
        draft.write_text("whole")
    assert events == ["content", "named", "folder"]
    assert (tmp_path / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("way", [files.replacing, files.creating])
def test_failure_leaves_no_files(way, tmp_path):
    def write():
        with way(tmp_path / "file") as draft:
            draft.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_creating_keeps_a_file_created_by_another_process(links, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no hard links here")

    def create_late():
        with files.creating(tmp_path / "two") as draft:
            draft.write_text("mine")
            (tmp_path / "two").write_text("theirs")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with files.creating(tmp_path / "one") as draft:
        draft.write_text("mine")
    assert (tmp_path / "one").read_text() == "mine"
    with pytest.raises(FileExistsError):
        create_late()
    assert (tmp_path / "two").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_creating_succeeds_for_exactly_one_thread(tmp_path):
    made, barrier = [], threading.Barrier(8)

    def create(number):
        barrier.wait()
        try:
            with files.creating(tmp_path / "file") as draft:
                draft.write_text(str(number))
        except FileExistsError:
            return
        made.append(number)

    threads = [threading.Thread(target=create, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() == str(*made)


def test_make_folder_flushes_new_folders(tmp_path, monkeypatch):
    flushed, flush = [], files.flush
    monkeypatch.setattr(files, "flush", lambda path: (flushed.append(path), flush(path)))
    files.make_folder(tmp_path / "a" / "b")
    assert flushed == [tmp_path, tmp_path / "a"]
    files.make_folder(tmp_path / "a" / "b")
    assert len(flushed) == 2
