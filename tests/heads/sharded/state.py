"""Checks: checkpoints, class sampling, and changes of the set of classes."""

from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from hypersphere.heads import PRESETS, AngularHead
from hypersphere.heads.sharded import ShardedHead

from .problem import CLASSES, DIM, HEADS, ROWS, batch, build_head, close, local_rows, raises


def meta(make):
    """Return a head on the meta device."""
    with torch.device("meta"):
        return make()


def check_checkpoint(folder, groups):
    """The largest group writes a checkpoint, and each smaller group loads it and has the same state."""
    saved = folder / "head.pt"
    for group in groups:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        torch.manual_seed(rank)  # only the seed of the first process is used
        head = ShardedHead(meta(partial(HEADS["annealed"], bias=True)), group=group)
        drawn = ShardedHead(meta(partial(PRESETS["sphereface2"], 2, 2500)), group=group, sizes=None)
        initial_state = drawn.full_state_dict()
        if size == len(ROWS):
            x, y, parts = batch(size, torch.float32)
            for _ in range(3):
                head(x[parts[rank]], y[parts[rank]])
            state = head.full_state_dict()
            if rank == 0:
                torch.save(state, saved)
                torch.save(initial_state, folder / "drawn.pt")
            else:
                assert state == {}
                words = ("every process", "full_state_dict gives it to the first alone", "load the file everywhere")
                raises(lambda head=head: head.load_full_state_dict({}), *words)
            dist.barrier(group)
        else:
            head.load_full_state_dict(torch.load(saved, mmap=True))
            state = head.full_state_dict()
        if rank == 0:
            for tensors, name in ((state, "head.pt"), (initial_state, "drawn.pt")):
                expected = torch.load(folder / name)
                assert tensors.keys() == expected.keys()
                assert all(torch.equal(tensors[key], expected[key]) for key in expected)
        assert head.head.steps.item() == 3
        raises(lambda head=head: head.load_full_state_dict({"weight": torch.ones(1)}), "state", "steps")
        wrong = {**torch.load(saved), "weight": torch.ones(CLASSES + 1, DIM)}
        raises(lambda head=head, wrong=wrong: head.load_full_state_dict(wrong), "'weight'", str(CLASSES))


class SamplingProblem:
    """A head with 40 classes of which a sharded head samples 30 %, and a batch that is held by the first process."""

    num_classes, dim = 40, 4
    options = {"radius": 8.0, "margin": "additive_angle", "bias": True, "energy_weight": 0.3}

    def __init__(self, group):
        self.reference = build_head(partial(AngularHead, self.dim, self.num_classes, **self.options))
        self.head = ShardedHead(self.reference, group=group, sample=0.3, backbone="summed")
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(6, self.dim, generator=generator, dtype=torch.float64)
        self.y = torch.randint(self.num_classes, (6,), generator=generator)
        self.local = slice(0, 6 if dist.get_rank(group) == 0 else 0)

    def sampled_classes(self):
        """Compute gradients for the local batch, and return the sorted classes that were sampled in all processes."""
        self.head.zero_grad()
        self.head(self.x[self.local], self.y[self.local]).backward()
        return all_gradient_classes(self.head)

    def head_of(self, classes):
        """Return a plain head with the given classes only."""
        head = AngularHead(self.dim, len(classes), **self.options).double()
        weight, bias = (torch.cat(self.head.processes.all_gather_objects(p.detach())) for p in self.head.parameters())
        with torch.no_grad():
            head.weight.copy_(weight[classes])
            head.bias.copy_(bias[classes])
        return head


def gradient_classes(head):
    """Return the classes of this process that have a row in the sparse gradient."""
    assert head.weight.grad.is_sparse
    return head.weight.grad.coalesce().indices()[0] + head.first


def all_gradient_classes(head):
    """Return the sorted classes of all processes that have a row in the sparse gradient."""
    return sorted(chain(*head.processes.all_gather_objects(gradient_classes(head).tolist())))


def check_sampled_loss(folder, groups):
    """Loss and gradients are those of a head that has the sampled classes only."""
    for group in groups:
        problem = SamplingProblem(group)
        head, x, y, local = problem.head, problem.x, problem.y, problem.local
        optimizer = torch.optim.SparseAdam(head.parameters())
        for _ in range(3):
            features, local_features = x.clone().requires_grad_(), x[local].clone().requires_grad_()
            head.zero_grad()
            loss = head(local_features, y[local])
            loss.backward()
            classes = torch.tensor(all_gradient_classes(head))
            fewer = problem.head_of(classes)
            expected = fewer(features, torch.searchsorted(classes, y))
            expected.backward()
            close(loss, expected)
            close(local_features.grad, features.grad[local])
            rows = gradient_classes(head) - head.first
            is_local = (classes >= head.first) & (classes < head.first + len(head.weight))
            close(head.weight.grad.to_dense()[rows], fewer.weight.grad[is_local])
            close(head.head.bias.grad.to_dense()[rows], fewer.bias.grad[is_local])
            optimizer.step()


def check_sampled_updates(folder, groups):
    """An optimizer for sparse gradients does not change classes that are not sampled."""
    for group in groups:
        problem = SamplingProblem(group)
        head, sampled_before = problem.head, torch.zeros(len(problem.head.weight), dtype=torch.bool)
        optimizer = torch.optim.SparseAdam(head.parameters())
        for _ in range(3):
            weight = head.weight.detach().clone()
            problem.sampled_classes()
            optimizer.step()
            is_sampled = torch.zeros_like(sampled_before)
            is_sampled[gradient_classes(head) - head.first] = True
            assert torch.equal(head.weight[~is_sampled], weight[~is_sampled])
            sampled_before |= is_sampled
            assert not optimizer.state[head.weight]["exp_avg"][~sampled_before].any()


def check_sampled_classes(folder, groups):
    """The labels and some other classes are sampled in each step, the same in any number of processes."""
    for group in groups:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        problem = SamplingProblem(group)
        steps = [problem.sampled_classes() for _ in range(3)]
        assert all(set(problem.y.tolist()) <= set(classes) for classes in steps)
        assert all(len(classes) < problem.num_classes for classes in steps)
        assert steps[0] != steps[1]
        (folder / f"sampled-{size}-{rank}").write_text(repr(steps))
        if size < len(ROWS):
            assert repr(steps) == (folder / f"sampled-{len(ROWS)}-0").read_text()


def check_sampling_state(folder, groups):
    """The full state includes the state of the sampling, from which the same classes are sampled again."""
    for group in groups:
        problem, resumed = SamplingProblem(group), SamplingProblem(group)
        state = problem.head.full_state_dict()
        assert set(state) == ({"weight", "bias", "sampling"} if dist.get_rank(group) == 0 else set())
        steps = [problem.sampled_classes() for _ in range(3)]
        resumed.sampled_classes()  # one step further than the state
        resumed.head.load_full_state_dict(problem.head.processes.all_gather_objects(state)[0])
        assert [resumed.sampled_classes() for _ in range(3)] == steps


def check_sampling_evaluation(folder, groups):
    """All classes are used outside training."""
    for group in groups:
        problem = SamplingProblem(group)
        problem.head.eval()
        with torch.no_grad():
            loss = problem.head(problem.x[problem.local], problem.y[problem.local])
            close(loss, problem.reference(problem.x, problem.y))


def check_sampling_alone(folder, groups):
    """The loss is finite if no class other than the labels is sampled."""
    head = ShardedHead(build_head(HEADS["arcface"]), sample=1e-9, sizes=(4, 1, 1, 1)[: dist.get_world_size()])
    x, _, _ = batch(1)
    loss = head(x.requires_grad_(), torch.zeros(len(x), dtype=torch.int64))
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


def check_noise(folder, groups):
    """All processes draw the same margins, and the loss is the same everywhere."""
    size, rank = dist.get_world_size(), dist.get_rank()
    head = ShardedHead(build_head(partial(PRESETS["elasticface"], DIM, CLASSES)))
    x, y, parts = batch(size)
    torch.manual_seed(rank)
    losses = [head(x[parts[rank]], y[parts[rank]]).detach() for _ in range(2)]
    assert losses[0] != losses[1]
    gathered = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(gathered, torch.stack(losses))
    assert all(torch.equal(one, gathered[0]) for one in gathered)


def check_class_changes(folder, groups):
    """Class vectors, biases, optimiser state and losses after each change are those of one process."""
    changes = {
        "grow": lambda head, **options: head.grow(4, init=torch.arange(4.0 * DIM).view(4, DIM).sin(), **options),
        "drop": lambda head, **options: head.drop([0, 3], **options),
        "merge": lambda head, **options: head.merge(6, 1, **options),
    }
    for name in ("biased centers", "curricular centers", "biased", "sphereface_plus", "class sizes"):
        for group in groups:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            reference = build_head(HEADS[name])
            head = ShardedHead(reference, group=group, backbone="summed")
            pair = [(reference, torch.optim.Adam(reference.parameters())), (head, torch.optim.Adam(head.parameters()))]
            for change, apply in changes.items():
                x, y, parts = batch(size, seed=len(change))
                y = y.clamp_max(reference.num_classes - 1)
                for (one, optimizer), part in zip(pair, (slice(None), parts[rank]), strict=True):
                    optimizer.zero_grad()
                    one(x[part], y[part]).backward()
                    optimizer.step()
                mappings = [apply(one, optimizer=optimizer) for one, optimizer in pair]
                assert torch.equal(*mappings), change
                if change == "grow" and reference.num_centers > 1:  # other centres of new classes are random
                    full = head.full_state_dict()
                    shared = [full.get("weight", torch.empty_like(reference.weight))]
                    dist.broadcast(shared[0], group=group, group_src=0)
                    torch.testing.assert_close(shared[0][: 2 * CLASSES + 1], reference.weight[: 2 * CLASSES + 1])
                    with torch.no_grad():
                        reference.weight.copy_(shared[0])
                close(head.weight, reference.weight[local_rows(head)])
                ours, theirs = (optimizer.state[one.weight] for one, optimizer in pair)
                for key in ("exp_avg", "exp_avg_sq"):
                    close(theirs[key], ours[key][local_rows(head)])
                assert head.num_classes == reference.num_classes == sum(head.sizes)
                x, y, parts = batch(size, seed=1)
                y = y.clamp_max(reference.num_classes - 1)
                close(head(x[parts[rank]], y[parts[rank]]), reference(x, y))
                close(head.scores(x[parts[rank]]), reference.scores(x)[parts[rank]].detach())
    raises(lambda: ShardedHead(build_head(HEADS["biased"])).drop(list(range(CLASSES - 3))), "one per process")
