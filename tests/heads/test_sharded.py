"""ShardedHead in one process and in groups of processes, whose checks are in `sharded/`."""

import contextlib
import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from hypersphere import angular, margin
from hypersphere.energy import data_dependent_energy
from hypersphere.functions._pairwise import PairSum, pair_energy
from hypersphere.functions.kernel import PairPotential, Riesz
from hypersphere.heads import PRESETS, AngularHead, Annealing, Ramp, arcface
from hypersphere.heads.sharded import ShardedHead, differences, fingerprint

from .sharded import worker

WORKER = ["-m", "heads.sharded.worker"]
ANNEALING = Annealing(10, 1, 1, 0)
TESTS = str(Path(__file__).parents[1])
SEARCHED = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), TESTS]))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCHED}
# The other checks need a launcher, end a process, or write a checkpoint for other tests.
CHECKS = [name for name in worker.CHECKS if name not in ("ddp", "silence", "checkpoint")]


def start(folder, size, *checks):
    """Start the processes of a group. They write errors and the names of passed checks to one stream."""
    commands = [[sys.executable, *WORKER, str(folder), str(rank), str(size), *checks] for rank in range(size)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [subprocess.Popen(command, text=True, env=ENVIRONMENT, **streams) for command in commands]


def kill(workers):
    for process in workers:
        process.kill()


class Group:
    """Four processes that run one check after the other. If one fails, they end, and the next check starts others."""

    def __init__(self, folder):
        self.folder, self.workers = folder, []

    def run(self, check):
        """Run a check in all processes, and fail with the output of those in which it fails."""
        if not self.workers:
            (self.folder / "store").unlink(missing_ok=True)
            self.workers = start(self.folder, 4)
        for process in self.workers:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its output says why
                process.stdin.write(f"{check}\n")
                process.stdin.flush()
        failures = [output for process in self.workers if (output := self._failure(process, check))]
        if failures:
            kill(self.workers)
            self.workers = []
            pytest.fail("\n".join(failures), pytrace=False)

    @staticmethod
    def _failure(process, check):
        """Return None when a process has passed a check, and its output if it has ended."""
        output = []
        for line in process.stdout:
            if line == f"{check}\n":
                return None
            output.append(line)
        return "".join(output) or f"a process ended in the check {check}"

    def end(self):
        """End the processes, and return their exit codes."""
        try:
            for process in self.workers:
                process.stdin.close()
            return [process.wait(timeout=150) for process in self.workers]
        finally:
            kill(self.workers)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Start the processes with the first check, and keep them for the others."""
    group = Group(tmp_path_factory.mktemp("group"))
    yield group
    assert not any(group.end())


@pytest.fixture(scope="module")
def checkpoint_folder(group):
    """Write a checkpoint and initial class vectors of four processes."""
    group.run("checkpoint")
    return group.folder


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_sharded_head_in_several_processes(group, check):
    """Run a check in groups of four, three and two processes."""
    group.run(check)


def test_sharded_head_checkpoint_loads_in_one_process(checkpoint_folder):
    state = torch.load(checkpoint_folder / "head.pt")
    plain = AngularHead(6, 7, margin="multiplicative", annealing=ANNEALING, bias=True)
    plain.load_state_dict(state)
    alone = ShardedHead(AngularHead(6, 7, margin="multiplicative", annealing=ANNEALING, bias=True))
    alone.load_full_state_dict(state)
    x, y = torch.randn(5, 6), torch.arange(5)
    assert torch.equal(alone(x, y), plain(x, y))
    assert plain.steps.item() == 4
    assert alone.full_state_dict().keys() == state.keys()


def test_sharded_head_initial_rows_equal_those_of_one_process(checkpoint_folder):
    torch.manual_seed(0)
    with torch.device("meta"):
        annealed = AngularHead(6, 7, margin="multiplicative", annealing=ANNEALING, bias=True)
        binary = PRESETS["sphereface2"](2, 2500)
    ShardedHead(annealed)
    alone = ShardedHead(binary).full_state_dict()
    drawn = torch.load(checkpoint_folder / "drawn.pt")
    assert all(torch.equal(alone[name], drawn[name]) for name in drawn)
    assert torch.equal(drawn["bias"], PRESETS["sphereface2"](2, 2500).bias)
    rows = drawn["weight"]
    assert len(rows.unique(dim=0)) == 2500
    assert rows.std().item() == pytest.approx(2**-0.5, rel=0.05)


@pytest.mark.slow
def test_sharded_head_trains_with_a_data_parallel_backbone(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *WORKER, str(tmp_path), "ddp"], capture_output=True, text=True, env=ENVIRONMENT, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ddp") == 2


@pytest.mark.slow
def test_sharded_head_raises_if_another_process_is_killed_or_silent(tmp_path):
    workers = start(tmp_path, 2, "silence")
    try:
        outputs = [process.communicate(timeout=150)[0] for process in workers]
    finally:
        kill(workers)
    assert [process.returncode for process in workers] == [0, -9], outputs
    assert (tmp_path / "survived").exists()


@pytest.mark.parametrize("preset", PRESETS)
def test_sharded_head_without_a_group_equals_the_plain_head(preset):
    plain = PRESETS[preset](5, 4)
    head = ShardedHead(plain)
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])
    features, plain_features = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(0)  # for margins that are drawn
    loss = head(features, y)
    torch.manual_seed(0)
    expected = plain(plain_features, y)
    loss.backward()
    expected.backward()
    actual = loss, features.grad, head.weight.grad
    torch.testing.assert_close(actual, (expected, plain_features.grad, plain.weight.grad), rtol=1e-6, atol=1e-6)
    assert torch.equal(head.scores(x), plain.scores(x))


@pytest.mark.parametrize("preset", ["arcface", "adaface", "sphereface_plus"])
def test_sharded_head_ignores_nan_in_ignored_samples(preset):
    head = ShardedHead(PRESETS[preset](5, 4)).eval()
    x, y = torch.randn(6, 5), torch.tensor([0, 1, -100, 3, 0, 1])
    broken = x.clone()
    broken[2] = float("nan")
    features = broken.clone().requires_grad_()
    actual = torch.autograd.grad(head(features, y), (features, head.weight))
    plain = head.head(x, y)  # the finite features
    torch.testing.assert_close(actual[1], torch.autograd.grad(plain, head.weight)[0])
    assert not actual[0][2].any()
    with pytest.raises(ValueError, match="row 2"):
        head(broken, y.clamp_min(0))


def test_sharded_head_scores_reject_nan_if_the_first_class_is_ignored():
    head = ShardedHead(AngularHead(5, 4, ignore_index=0))
    with pytest.raises(ValueError, match="x must be finite, but row 1"):
        head.scores(torch.randn(3, 5).index_fill(0, torch.tensor([1]), float("nan")))


def test_sharded_head_does_not_change_the_given_head():
    plain = arcface(5, 4)
    head = ShardedHead(plain, sample=0.5)
    twin = copy.deepcopy(head)
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])
    assert torch.equal(head(x, y), twin(x, y))
    with torch.no_grad():
        head.weight.zero_()
    assert plain.weight.any()
    assert twin.weight.any()
    assert twin.head.class_storage is not head.head.class_storage


@pytest.mark.parametrize(
    "make_optimizer",
    [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SparseAdam, lr=0.1)],
    ids=["SGD", "SparseAdam"],
)
def test_sharded_head_sampling_updates_only_sampled_classes(make_optimizer):
    torch.manual_seed(0)
    head = ShardedHead(arcface(4, 60, s=4.0), sample=0.2)
    sampled, dense = set(), head.weight.detach().clone().requires_grad_()
    optimizer, dense_optimizer = make_optimizer(head.parameters()), torch.optim.SGD([dense], lr=0.1)
    x, y = torch.randn(5, 4), torch.arange(5)
    first = head(x, y).item()
    for _ in range(20):
        before = head.weight.detach().clone()
        optimizer.zero_grad()
        head(x, y).backward()
        drawn = set(head.weight.grad.coalesce().indices()[0].tolist())
        dense.grad = head.weight.grad.to_dense()
        optimizer.step()
        dense_optimizer.step()
        moved = set((head.weight != before).any(1).nonzero().flatten().tolist())
        assert moved == drawn
        sampled |= drawn
    if isinstance(optimizer, torch.optim.SGD):
        torch.testing.assert_close(head.weight, dense)
    assert len(sampled) > 40
    assert head.eval()(x, y).item() < first


def test_sharded_head_repeats_checkpointed_calls_with_the_classes_they_sampled():
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        head = ShardedHead(arcface(4, 60, s=4.0, ramp=Ramp(3)), sample=0.2)
        total = 0
        for seed in range(2):
            x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(5)
            total = total + (checkpoint(head, x, y, use_reentrant=False) if checkpointed else head(x, y))
        total.backward()
        gradients.append((head.weight.grad.to_dense(), head.sampling, head.head.steps))
    torch.testing.assert_close(*gradients)


def test_sharded_head_has_the_sizes_of_the_full_head():
    head = ShardedHead(arcface(5, 4))
    assert (head.in_features, head.num_classes) == (5, 4)


def test_fingerprint_depends_on_all_numbers_but_no_addresses():
    def of(k, g):
        return fingerprint(AngularHead(5, 4, angular=g, margin=margin.AdditiveAngle(k)), ["weight"])

    assert of(0.1, lambda c: c) == of(0.1, lambda c: c)
    assert differences([of(0.1, torch.tanh), of(0.5, torch.tanh)])["margin"] == [
        "AdditiveAngle(m=0.1)",
        "AdditiveAngle(m=0.5)",
    ]
    near = [angular.Sigmoid(k=torch.tensor(0.5 + shift)) for shift in (0.0, 1e-6)]
    assert "angular" in differences([of(0.1, g) for g in near])
    assert of(0.1, partial(torch.clamp, min=-1)) != of(0.1, partial(torch.clamp, min=-0.5))
    assert "object at" not in str(of(0.1, Callable()))


class Callable:
    def __call__(self, c):
        return c


def test_sharded_head_samples_the_given_fraction():
    head = ShardedHead(arcface(2, 200_000), sample=0.1)
    head(torch.randn(3, 2), torch.tensor([0, 5, 199_999])).backward()
    rows = head.weight.grad.coalesce().indices()[0]
    assert len(rows) == pytest.approx(20_000, rel=0.05)
    assert {0, 5, 199_999} <= set(rows.tolist())
    assert len(rows[rows >= 2**16]) == pytest.approx(0.1 * (200_000 - 2**16), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample": 0.0}, r"^sample must be a number in \(0, 1\] or None, not 0\.0$"),
        ({"sample": 1.5}, r"^sample must be a number in \(0, 1\] or None, not 1\.5$"),
        ({"backbone": "mean"}, "^backbone must be 'averaged' or 'summed', not 'mean'$"),
        ({"sizes": [2, 2]}, r"^sizes must be 1 positive numbers, the classes of each process .*, not \(2, 2\)$"),
        ({"sizes": [3]}, r"^sizes must be integers that add up to the 4 classes, not \(3,\)$"),
    ],
)
def test_sharded_head_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShardedHead(arcface(5, 4), **arguments)


def test_sharded_head_rejects_a_learned_activation():
    message = r"^head must be without learned parameters other than weight and bias, not \['_angular\.weight'\]$"
    with pytest.raises(ValueError, match=message):
        ShardedHead(AngularHead(5, 4, angular=torch.nn.PReLU()))


@pytest.mark.parametrize("counted", [None, torch.tensor([True, False, True, True])], ids=["all", "some"])
def test_pair_energies_of_parts_sums_to_the_data_dependent_energy(counted):
    w = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 3, 8])
    expected = data_dependent_energy(w, labels, counted=counted)
    halves = ((w[:5], torch.tensor([0, 3, 3, -1])), (w[5:], torch.tensor([-1, -1, -1, 3])))
    parts = [pair_energy(PairSum(v, PairPotential(), labels=y, rows=w[labels], counted=counted)) for v, y in halves]
    total = sum(parts) / ((4 if counted is None else 3) * 8)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, w), torch.autograd.grad(expected, w))
    rows = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    none = torch.full((4,), -1)

    def energy(r, v):
        return pair_energy(PairSum(v, PairPotential(Riesz(1), "angular"), labels=none, rows=r, counted=counted))

    assert gradcheck(energy, (rows, w))
    assert gradgradcheck(energy, (rows, w))
    assert gradcheck(lambda r: energy(r, w.detach()), (rows,))
    with torch.no_grad():
        torch.testing.assert_close(energy(rows, w), torch.func.vmap(energy, (None, 0))(rows, w[None])[0])


def test_sharded_head_advances_with_an_optimizer():
    head = ShardedHead(arcface(4, 3, ramp=Ramp(10)))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.advance_with(optimizer)
    for _ in range(3):
        head(torch.randn(2, 4), torch.tensor([0, 2])).backward()
    optimizer.step()
    assert head.head.steps == 1
