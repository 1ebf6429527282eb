"""Save galleries in processes that are killed, and check after each kill that the folder holds one of them."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from hypersphere.gallery import Gallery

COUNT, DIM = 1000, 32


def embeddings(generation):
    return torch.randn(COUNT, DIM, generator=torch.Generator().manual_seed(generation))


def gallery_of(generation):
    gallery = Gallery(DIM, "int8", fingerprint=str(generation), keep_full=True)
    gallery.enroll([f"{generation}/{entry}" for entry in range(COUNT)], embeddings(generation))
    return gallery


def generation_in(folder):
    """Return the generation of the gallery in the folder, after comparing all of its content; None without one."""
    if not (folder / "gallery.json").exists():
        return None
    gallery = Gallery.load(folder)
    generation = int(gallery.fingerprint)
    assert gallery.names == gallery_of(generation).names
    chosen = list(range(0, COUNT, 97))
    matches = gallery.search(embeddings(generation)[chosen], k=1)
    assert matches.entries.flatten().tolist() == chosen
    return generation


def kill_at_event(number, folder):
    """Kill this process just before its `number`-th file system operation in the folder."""
    left = number

    def watch(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(folder) in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def child(work):
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return process


def is_killed(process):
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    kills, drafts = 0, 0
    last = None
    # A kill before each operation, first without and then with a previous gallery in the folder.
    for _ in range(2):
        for number in range(1, 100):
            new = gallery_of((last or 0) + 1)

            def save(new=new, number=number):
                kill_at_event(number, folder)
                new.save(folder)

            killed = is_killed(child(save))
            found = generation_in(folder)
            assert found in (last, int(new.fingerprint)), (found, last)
            last = found
            if not killed:
                assert found == int(new.fingerprint)
                assert len([path for path in folder.iterdir() if path.name != ".lock"]) == 3
                break
            kills += 1
    # Kills at random moments.
    began = time.perf_counter()
    gallery_of(last).save(folder)
    duration = time.perf_counter() - began
    moments = random.Random(7)
    for _ in range(12):
        new = gallery_of(last + 1)
        process = child(lambda new=new: new.save(folder))
        time.sleep(duration * moments.uniform(0, 1.2))
        os.kill(process, signal.SIGKILL)
        is_killed(process)
        drafts += len(list(folder.glob(".*.tmp")))
        found = generation_in(folder)
        assert found in (last, last + 1)
        last = found
    print(kills, drafts)


if __name__ == "__main__":
    main()
