"""Checks: checkpoints and class sampling."""

from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from hypersphere.heads import PRESETS, AngularHead
from hypersphere.heads.sharded import ShardedHead

from .problem import CLASSES, DIM, HEADS, ROWS, batch, build_head, close, raises


def meta(make):
    with torch.device("meta"):
        return make()


def check_checkpoint(folder, groups):
    """Written by the largest group; each smaller one loads it and goes on as the writers do."""
    saved = folder / "head.pt"
    for group in groups:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        torch.manual_seed(rank)  # only the first process's counts
        head = ShardedHead(meta(partial(HEADS["annealed"], bias=True)), group=group)
        drawn = ShardedHead(meta(partial(PRESETS["sphereface2"], 2, 2500)), group=group, sizes=None)
        everything = drawn.full_state_dict()
        if size == len(ROWS):
            x, y, parts = batch(size, torch.float32)
            for _ in range(3):
                head(x[parts[rank]], y[parts[rank]])
            state = head.full_state_dict()
            if rank == 0:
                torch.save(state, saved)
                torch.save(everything, folder / "drawn.pt")
            else:
                assert state == {}
                words = ("every process", "full_state_dict gives it to the first alone", "load the file everywhere")
                raises(lambda head=head: head.load_full_state_dict({}), *words)
            dist.barrier(group)
        else:
            head.load_full_state_dict(torch.load(saved, mmap=True))
            state = head.full_state_dict()
        if rank == 0:
            for ours, name in ((state, "head.pt"), (everything, "drawn.pt")):
                theirs = torch.load(folder / name)
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert head.head.steps.item() == 3
        raises(lambda head=head: head.load_full_state_dict({"weight": torch.ones(1)}), "state", "steps")
        wrong = {**torch.load(saved), "weight": torch.ones(CLASSES + 1, DIM)}
        raises(lambda head=head, wrong=wrong: head.load_full_state_dict(wrong), "'weight'", str(CLASSES))


def check_sampling(folder, groups):
    """The same classes are drawn however many processes there are; the loss is that of a head with those classes."""
    many, dim, steps = 40, 4, 3
    for group in groups:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        make = partial(AngularHead, dim, many, radius=8.0, margin="additive_angle", bias=True, energy_weight=0.3)
        torch.manual_seed(5)
        reference = build_head(make)
        head = ShardedHead(reference, group=group, sample=0.3, backbone="summed")
        start = head.full_state_dict()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, dim, generator=generator, dtype=torch.float64)
        y = torch.randint(many, (6,), generator=generator)
        mine = slice(0, 6) if rank == 0 else slice(0, 0)
        losses, drawn = [], []
        optimizer = torch.optim.SparseAdam(head.parameters())
        for _ in range(steps):
            before = [p.detach().clone() for p in head.parameters()]
            head.zero_grad()
            ours = x[mine].clone().requires_grad_()
            loss = head(ours, y[mine])
            loss.backward()
            assert head.weight.grad.is_sparse
            rows = head.weight.grad.coalesce().indices()[0] + head.first
            lists = head.processes.objects(rows.tolist())
            chosen = torch.tensor(sorted(chain(*lists)))
            assert set(y.tolist()) <= set(chosen.tolist())
            assert len(chosen) < many
            fewer = AngularHead(dim, len(chosen), radius=8.0, margin="additive_angle", bias=True, energy_weight=0.3)
            fewer = fewer.double()
            weights, biases = (torch.cat(head.processes.objects(p)) for p in before)
            with torch.no_grad():
                fewer.weight.copy_(weights[chosen])
                fewer.bias.copy_(biases[chosen])
            theirs = x.clone().requires_grad_()
            expected = fewer(theirs, torch.searchsorted(chosen, y))
            expected.backward()
            close(loss, expected)
            close(ours.grad, theirs.grad[mine])
            here = (chosen >= head.first) & (chosen < head.first + len(head.weight))
            close(head.weight.grad.to_dense()[rows - head.first], fewer.weight.grad[here])
            close(head.head.bias.grad.to_dense()[rows - head.first], fewer.bias.grad[here])
            optimizer.step()
            still = torch.ones(len(head.weight), dtype=torch.bool)
            still[rows - head.first] = False
            assert torch.equal(head.weight[still], before[0][still])
            assert not optimizer.state[head.weight]["exp_avg"][still].any() or drawn
            losses.append(loss.item())
            drawn.append(chosen.tolist())
        assert drawn[0] != drawn[1]
        (folder / f"drawn-{size}-{rank}").write_text(repr(drawn))
        if size < len(ROWS):
            assert repr(drawn) == (folder / f"drawn-{len(ROWS)}-0").read_text()
        state = head.full_state_dict()
        assert set(state) == ({"weight", "bias", "sampling"} if rank == 0 else set())
        again = ShardedHead(reference, group=group, sample=0.3)
        for step in range(steps):  # from the first process's state, the same classes again
            again.load_full_state_dict(head.processes.objects(start)[0]) if step == 0 else None
            again.zero_grad()
            again(x[mine], y[mine]).backward()
            rows = again.weight.grad.coalesce().indices()[0] + again.first
            assert sorted(chain(*again.processes.objects(rows.tolist()))) == drawn[step]
        again.eval()
        with torch.no_grad():
            close(again(x[mine], y[mine]), reference(x, y))  # all classes outside training


def check_sampling_alone(folder, groups):
    """No negative is drawn at all: a loss of zero, not NaN."""
    head = ShardedHead(build_head(HEADS["arcface"]), sample=1e-9, sizes=(4, 1, 1, 1)[: dist.get_world_size()])
    x, _, _ = batch(1)
    loss = head(x.requires_grad_(), torch.zeros(len(x), dtype=torch.int64))
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
