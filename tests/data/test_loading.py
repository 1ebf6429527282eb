import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from hypersphere.data import SAMPLERS, Batches, BrokenSample, DamagedData, ImageFolderSource, Loader, TensorSource
from hypersphere.data.loading import batch_sizes, rows_of_rank
from picture_files import write_tree

BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pets")
    write_tree(root, {"ant": 15, "bee": 12, "cat": 14})  # 41 images: the last batch of one is merged
    return root


@pytest.fixture(scope="module")
def files(folder):
    return ImageFolderSource(folder)


def tensors(count=41, classes=3):
    inputs = torch.randint(256, (count, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorSource(inputs, torch.arange(count) % classes, [str(number) for number in range(classes)])


def loader_of(source, sampler="shuffled", seed=3, batch_size=BATCH, options=None, **others):
    made = SAMPLERS[sampler](source.labels, seed, **(options or {}))
    return Loader(source, batch_size=batch_size, sampler=made, **others)


def assert_equal_batches(actual, expected):
    assert len(actual) == len(expected)
    for (x, y), (a, b) in zip(actual, expected, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


def test_loader_yields_the_samples_in_the_order_of_the_seeded_permutations():
    source, loader = tensors(), loader_of(tensors())
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        order = torch.randperm(41, generator=generator)
        expected = [(source.inputs[rows], source.labels[rows]) for rows in order.split([8, 8, 8, 8, 9])]
        assert_equal_batches(list(loader), expected)


def test_loader_keeps_uint8():
    assert next(iter(loader_of(tensors())))[0].dtype == torch.uint8


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_decodes_files_as_the_source_does(files, workers):
    memory = TensorSource(torch.stack([files[index] for index in range(len(files))]), files.labels, files.classes)
    lazy, eager = loader_of(files, workers=workers), loader_of(memory)
    for _ in range(2):
        assert_equal_batches(list(lazy), list(eager))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_loader_resumes_in_the_middle_of_an_epoch(sampler, done):
    source = tensors()
    options = {"m": 4} if sampler == "m_per_class" else {}
    reference = loader_of(source, sampler, options=options)
    expected = [batch for _ in range(3) for batch in reference]
    first = loader_of(source, sampler, options=options)
    batches = iter(first)
    seen = [next(batches) for _ in range(done)]
    second = loader_of(source, sampler, seed=99, options=options)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert_equal_batches(seen + [batch for _ in range(3) for batch in second], expected)


def saved_and_loaded(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2), (2, 0), (0, 2)])
def test_loader_resumes_with_any_number_of_workers(files, before, after):
    reference = loader_of(files)
    expected = [batch for _ in range(3) for batch in reference]
    first = loader_of(files, workers=before)
    seen = list(first)
    batches = iter(first)
    seen += [next(batches) for _ in range(2)]
    state = saved_and_loaded(first.state_dict())
    second = loader_of(files, seed=99, workers=after)
    second.load_state_dict(state)
    assert_equal_batches(seen + [batch for _ in range(2) for batch in second], expected)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_loader_resumes_after_the_process_was_killed(files, folder, tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal, torch
        from hypersphere.data import SAMPLERS, ImageFolderSource, Loader
        source = ImageFolderSource({str(folder)!r})
        loader = Loader(source, batch_size={BATCH}, sampler=SAMPLERS["shuffled"](source.labels, 3), workers=2)
        for number, (inputs, labels) in enumerate(loader):
            torch.save(loader.state_dict(), {str(tmp_path / "state.pt")!r})
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    reference = loader_of(files)
    expected = [batch for _ in range(2) for batch in reference][3:]
    resumed = loader_of(files, seed=0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal_batches([batch for _ in range(2) for batch in resumed], expected)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_loader_workers_end_with_their_parent_although_the_watchdog_of_torch_missed_it(folder):
    script = textwrap.dedent(
        f"""
        import os, signal
        import torch.utils.data._utils.worker as worker
        from hypersphere.data import SAMPLERS, ImageFolderSource, Loader
        worker.ManagerWatchdog.is_alive = lambda self: True
        source = ImageFolderSource({str(folder)!r})
        loader = Loader(source, batch_size={BATCH}, sampler=SAMPLERS["shuffled"](source.labels, 3), workers=2)
        next(iter(loader))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    # The pipes of the output stay open, and `run` waits, as long as a worker lives.
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_loader_starts_a_new_epoch_after_an_unfinished_one(files):
    loader, reference = loader_of(files, workers=2), loader_of(files)
    next(iter(loader))
    next(iter(reference))
    assert_equal_batches(list(loader), list(reference))


def test_loader_shares_its_random_state_with_augmentations():
    """A state that was saved between two draws of an augmentation continues with the next draw."""
    loader = loader_of(tensors())
    for _ in loader:
        torch.rand(3, generator=loader.generator)
        break
    other = loader_of(tensors(), seed=99)
    other.load_state_dict(loader.state_dict())
    assert torch.equal(torch.rand(3, generator=loader.generator), torch.rand(3, generator=other.generator))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_leaves_the_global_generator_alone(files, workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader_of(files, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_rejects_the_state_of_other_data():
    state = loader_of(tensors(40)).state_dict()
    with pytest.raises(ValueError, match="state must be a state of the same data"):
        loader_of(tensors(41)).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size"):
        loader_of(tensors(40), batch_size=4).load_state_dict(state)


@pytest.fixture
def damaged(tmp_path):
    write_tree(tmp_path, {"ant": 6, "bee": 6})
    (tmp_path / "ant" / "002.png").write_bytes(b"no image")
    (tmp_path / "bee" / "001.png").write_bytes(b"")
    return ImageFolderSource(tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_names_a_broken_file(damaged, workers):
    with pytest.raises(BrokenSample, match=r"ant/002\.png is not a readable image"):
        list(loader_of(damaged, "sequential", batch_size=4, workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_skips_broken_files_and_keeps_positions(damaged, workers):
    loader = loader_of(damaged, "sequential", batch_size=4, workers=workers, broken="skip")
    inputs, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    expected = damaged.labels.clone()
    expected[[2, 7]] = -100
    assert labels.tolist() == expected.tolist()
    for index in range(12):
        if index not in (2, 7):
            assert torch.equal(inputs[index], damaged[index])
    assert set(loader.skipped) == {"ant/002.png", "bee/001.png"}
    assert damaged.labels[2] == 0  # the source itself is not changed


def test_loader_needs_one_readable_sample_per_batch(damaged):
    for index in range(4):
        (damaged.folder / damaged.name(index)).write_bytes(b"")
    with pytest.raises(DamagedData, match="all of its 4 samples are broken"):
        list(loader_of(damaged, "sequential", batch_size=4, broken="skip"))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_does_not_skip_images_of_another_size(tmp_path, workers):
    write_tree(tmp_path, {"ant": 3})
    write_tree(tmp_path, {"bee": 3}, size=(9, 9))
    source = ImageFolderSource(tmp_path)
    with pytest.raises(ValueError, match="images must have the same size"):
        list(loader_of(source, "sequential", batch_size=3, workers=workers, broken="skip"))


@pytest.mark.parametrize("world", [2, 3])
def test_loader_divides_each_batch_among_processes(world):
    source = tensors()
    full = list(loader_of(source))
    parts = [list(loader_of(source, rank=rank, world=world)) for rank in range(world)]
    for number, (inputs, labels) in enumerate(full):
        for rank in range(world):
            assert torch.equal(parts[rank][number][0], inputs[rank::world])
            assert torch.equal(parts[rank][number][1], labels[rank::world])


def test_loader_state_moves_between_numbers_of_processes():
    source = tensors()
    expected = list(loader_of(source))
    first = loader_of(source, rank=1, world=2)
    batches = iter(first)
    next(batches)
    alone = loader_of(source, seed=99)
    alone.load_state_dict(first.state_dict())
    assert_equal_batches(list(alone), expected[1:])


def test_rows_of_rank_gives_every_process_two_rows():
    for count in range(2, 12):
        for world in range(1, 6):
            parts = [rows_of_rank(torch.arange(count), rank, world) for rank in range(world)]
            assert all(len(rows) >= 2 for rows, _ in parts)
            used = torch.cat([rows for rows, is_ignored in parts if not is_ignored])
            assert sorted(used.tolist()) == list(range(count))


def test_batch_sizes_cover_all_samples_without_a_last_batch_of_one():
    for count in range(1, 40):
        for size in range(1, 12):
            sizes = batch_sizes(count, size)
            assert sum(sizes) == count
            assert all(one in (size, size + 1) for one in sizes[:-1])
            assert len(sizes) == 1 or sizes[-1] > 1 or size == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"workers": -1}, "workers must be"),
        ({"broken": "ignore"}, "broken must be"),
        ({"rank": 2, "world": 2}, "rank must be"),
    ],
)
def test_loader_rejects_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        loader_of(tensors(), **options)


def test_loader_needs_the_sampler_of_its_source():
    with pytest.raises(ValueError, match="sampler must be a sampler of 41 labels, not 'one of 40'"):
        Loader(tensors(41), batch_size=4, sampler=SAMPLERS["shuffled"](tensors(40).labels, 0))


def test_loader_sends_small_sources_to_workers(files):
    assert len(pickle.dumps(files)) < 5000


def test_batches_are_reshuffled_in_every_epoch():
    x = torch.arange(50)
    data = Batches(x, -x, 8, torch.Generator().manual_seed(0))
    orders = [torch.cat([inputs for inputs, _ in data]) for _ in range(2)]
    assert not torch.equal(orders[0], orders[1])
    for order in orders:
        assert not torch.equal(order, x)
        assert torch.equal(order.sort().values, x)
    assert all(torch.equal(inputs, -labels) for inputs, labels in data)
    assert torch.equal(torch.cat([inputs for inputs, _ in Batches(x, x, 8)]), x)


def test_batches_reject_invalid_arguments():
    with pytest.raises(ValueError, match="labels must be one label for each of the 3 inputs"):
        Batches(torch.zeros(3, 1), torch.zeros(2), 1)
    with pytest.raises(ValueError, match="batch_size must be"):
        Batches(torch.zeros(3, 1), torch.zeros(3), 0)
    with pytest.raises(ValueError, match=r"generator must be a torch\.Generator or None, not 0"):
        Batches(torch.zeros(3, 1), torch.zeros(3), 1, 0)


@pytest.mark.parametrize("state", [{}, {"samples": 3, "batch_size": 1}, None])
def test_batches_refuse_an_incomplete_state(state):
    with pytest.raises(ValueError, match="state must be the result of `state_dict`, with samples, batch_size, done,"):
        Batches(torch.zeros(3, 1), torch.zeros(3), 1).load_state_dict(state)
    images = torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)
    assert next(iter(Batches(images, torch.zeros(2), 2)))[0].max() == 1.0


@pytest.mark.parametrize(("count", "size"), [(33, 16), (17, 16), (5, 4), (3, 2), (1, 4), (7, 7), (6, 1), (34, 16)])
def test_batches_have_at_least_two_rows(count, size):
    data = Batches(torch.arange(count), torch.arange(count), size)
    sizes = [len(y) for _, y in data]
    assert len(sizes) == len(data)
    assert torch.equal(torch.cat([y for _, y in data]), torch.arange(count))
    assert min(sizes) > 1 or 1 in (count, size)
    assert max(sizes) <= size + 1
    whole, rest = divmod(count, size)
    if rest != 1 or whole == 0:
        assert sizes == [size] * whole + [rest] * (rest > 0)


def test_batches_need_an_input():
    with pytest.raises(ValueError, match=r"^inputs must be at least one input, not 0$"):
        Batches(torch.zeros(0, 1), torch.zeros(0), 1)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("done", [0, 2, 3])
def test_batches_resume_in_the_middle_of_an_epoch(shuffled, done):
    def batches(seed):
        generator = torch.Generator().manual_seed(seed) if shuffled else None
        return Batches(torch.arange(11), torch.arange(11) / 2, 4, generator)

    reference = batches(3)
    expected = [batch for _ in range(2) for batch in reference]
    first = batches(3)
    epoch = iter(first)
    seen = [next(epoch) for _ in range(done)]
    second = batches(99)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert_equal_batches(seen + [batch for _ in range(2) for batch in second], expected)


def test_batches_have_no_random_state_if_the_order_is_kept():
    x = torch.arange(6)
    kept, shuffled = Batches(x, x, 2), Batches(x, x, 2, torch.Generator())
    next(iter(kept))
    assert kept.state_dict() == {"samples": 6, "batch_size": 2, "done": 1, "order": None, "generator": None}
    with pytest.raises(ValueError, match=r"state must be a state of batches with {'shuffled': True}"):
        shuffled.load_state_dict(kept.state_dict())
    with pytest.raises(ValueError, match=r"state must be a state of batches with {'shuffled': False}"):
        kept.load_state_dict(shuffled.state_dict())


def test_batches_state_is_that_of_the_last_of_several_iterations():
    x = torch.arange(6)
    data = Batches(x, x, 2, torch.Generator().manual_seed(0))
    first, second = iter(data), iter(data)
    next(first), next(second)
    next(first)
    resumed = Batches(x, x, 2, torch.Generator())
    resumed.load_state_dict(data.state_dict())
    assert_equal_batches(list(resumed), list(first))
