"""Energies of projected neurons: values, bases, and their state."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import oracle
from hypersphere.energy import MHE, CoMHE, Step
from hypersphere.functions.projection import (
    PROJECTIONS,
    Adversarial,
    AnglePreserving,
    Bilateral,
    Cooperative,
    Group,
    Random,
)

from .networks import network

SMALL = [
    Random(dim=4, views=2),
    Random(dim=4, views=3, aggregate="max", construction="hadamard"),
    Random(dim=4, construction="count_sketch", every=2),
    AnglePreserving(dim=4),
    AnglePreserving(dim=4, form="angle", updates=2),
    AnglePreserving(dim=4, method="alternating", every=2),
    Adversarial(dim=4),
    Cooperative(dim=4),
    Group(channels=3),
    Group(channels=3, random=True),
    Bilateral(dim=4),
]
every_projection = pytest.mark.parametrize("projection", SMALL, ids=repr)


def test_every_projection_is_tested():
    assert {type(p) for p in SMALL} == set(PROJECTIONS.values())


@every_projection
def test_comhe_is_the_energy_of_projected_rows(projection):
    """One layer, one step: the energies of what the projection makes of its rows."""
    w = torch.randn(9, 12, dtype=torch.float64)
    regularizer = CoMHE({"w": w}, projection=projection, seed=3).eval()
    basis = regularizer.bases()["w"]
    rows, views = w.numpy(), basis.double().numpy()
    if isinstance(projection, Group):
        sets = [rows[:, [k for k in group if k < 12]] for group in basis.tolist()]
    elif isinstance(projection, Bilateral):
        sets = [rows @ views[:, :12].T, views[:, 12:] @ rows]
    else:
        sets = [rows @ p.T for p in views]
    energies = [oracle.energy(s, 2, half_space=True) for s in sets]
    total = sum(energies) if isinstance(projection, Bilateral) else np.mean(energies)
    total = max(energies) if projection.aggregate == "max" else total
    assert regularizer().item() == pytest.approx(total, rel=1e-5)


@every_projection
def test_comhe_trains_and_resumes_and_does_not_use_the_global_seed(projection):
    net, twin = network(), network()
    first = CoMHE(net, projection=projection)
    torch.manual_seed(1234)
    second = CoMHE(twin, projection=projection)
    for _ in range(3):
        losses = [first(), second()]
        assert losses[0].item() == losses[1].item()
        for model, loss in zip((net, twin), losses, strict=True):
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        assert torch.isfinite(p.grad).all()
                        p -= 0.1 * p.grad
    resumed = CoMHE(net, projection=projection, seed=77)
    resumed.load_state_dict(first.state_dict())
    value = first()
    torch.testing.assert_close(resumed(), value)
    resumed.load_state_dict(second.state_dict())


def test_comhe_unrolled_differentiates_through_the_step():
    w = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    projection = AnglePreserving(dim=3, rate=2.0)
    start = CoMHE({"w": w}, projection=projection).basis_7.double()

    def value(w):
        regularizer = CoMHE({"w": w}, projection=projection)
        regularizer.basis_7 = start
        return regularizer()

    assert torch.autograd.gradcheck(value, (w,))
    regularizer = CoMHE({"w": w}, projection=projection)
    regularizer()
    assert not torch.equal(regularizer.basis_7, start)


def test_comhe_bases_are_shared_by_length_and_redrawn():
    net = network()
    shared, separate = (CoMHE(net, projection=AnglePreserving(dim=4), shared=s) for s in (True, False))
    assert [k for k in shared.state_dict() if k.startswith("basis")] == ["basis_36", "basis_24", "basis_12"]
    assert "basis_4" in separate.state_dict()
    rare = CoMHE(net, projection=Random(dim=4, every=2))
    values = [rare().item() for _ in range(4)]
    assert values[0] == values[1] != values[2] == values[3]
    rare.eval()
    assert rare().item() == rare().item()


def test_comhe_does_not_project_short_neurons():
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="not projected, because the layers are smaller .*: 0$") as caught:
        regularizer = CoMHE(net, projection=Random(dim=5), output=0)
    assert caught[0].filename == __file__  # the caller, through all constructors
    with_short = regularizer().item()
    alone = CoMHE({"1": net[1].weight}, projection=Random(dim=5))().item()
    first = oracle.energy(net[0].weight.detach().numpy(), 2, half_space=True)
    assert with_short == pytest.approx(alone + first, rel=1e-5)


def test_comhe_groups_of_one_number_are_merged():
    w = torch.randn(6, 9, dtype=torch.float64)
    value = CoMHE({"w": w}, projection=Group(channels=4), half_space=False)().item()
    expected = [oracle.energy(part.numpy(), 2) for part in (w[:, :4], w[:, 4:])]
    assert value == pytest.approx(np.mean(expected))
    with pytest.raises(ValueError, match="channels must be at least 2 where a channel has one number"):
        CoMHE({"w": w}, projection=Group(channels=1))
    both = CoMHE({"thin": torch.randn(6, 1), "w": w}, projection=Group(channels=4), half_space=False)
    assert [(skip.name, skip.reason) for skip in both.skipped] == [("thin", "neurons of 1 number")]
    assert both().item() == pytest.approx(value)


def test_comhe_buffers_are_unique_for_similar_names():
    generator = torch.Generator().manual_seed(0)
    pairs = [(name, torch.randn(6, 8, generator=generator)) for name in ("a.b", "a_b", "a.~1b")]
    regularizer = CoMHE(pairs, projection=AnglePreserving(dim=3), shared=False)
    assert sum(name.startswith("basis") for name in regularizer.state_dict()) == 3
    with pytest.raises(ValueError, match="model must be pairs with different names, not \"pairs with 'a' twice\""):
        MHE([("a", pairs[0][1]), ("a", pairs[1][1])])


def test_comhe_wider_than_every_layer_is_the_plain_energy():
    net = network()
    with pytest.warns(UserWarning, match="not projected, because the layers are smaller than the projection: 0, 3, 4"):
        regularizer = CoMHE(net, projection=Random(dim=50))
    assert regularizer().item() == pytest.approx(MHE(net)().item(), rel=1e-6)


def test_comhe_default_projection_accepts_short_neurons():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))  # neurons of 27 numbers, dim is 30
    with pytest.warns(UserWarning, match="not projected"):
        assert torch.isfinite(CoMHE(net)())


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_comhe_adversarial_stays_bounded_in_few_dimensions(dim, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 5))
    regularizer = CoMHE(net, projection=Adversarial(dim=dim), output=0, seed=seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = regularizer()
        loss.backward()
        optimizer.step()
        assert loss.item() < 400  # the capped energy of two coinciding neurons is 300
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_comhe_angle_preserving_basis_is_drawn_again():
    w = torch.randn(6, 9, requires_grad=True)
    regularizer = CoMHE({"w": w}, projection=AnglePreserving(dim=3, rate=1e-3, redraw_every=3))
    bases = []
    for _ in range(7):
        regularizer()
        bases.append(regularizer.basis_9.clone())
    changes = [(after - before).norm().item() for before, after in itertools.pairwise(bases)]
    assert [change > 1 for change in changes] == [False, False, True, False, False, True]
    with pytest.raises(ValueError, match="redraw_every must be an integer >= 1"):
        AnglePreserving(redraw_every=0)


ONE_BASIS = Random(dim=4, views=1, every=1000)
BETAS = torch.linspace(0.5, 2, 7, dtype=torch.float64)


def test_comhe_bases_are_those_of_the_last_step():
    regularizer = CoMHE(network(), projection=Random(dim=4))
    seen = []
    for _ in range(2):
        value = regularizer().item()
        seen.append(regularizer.bases())
        with torch.no_grad():
            assert regularizer().item() == value
    assert list(seen[0]) == ["0", "3", "4"]
    assert not torch.equal(seen[0]["3"], seen[1]["3"])


def test_comhe_bases_of_layers_that_share_one_are_the_same_tensor():
    pairs = [("a", torch.randn(6, 9)), ("b", torch.randn(5, 9))]
    for projection in (Random(dim=3), AnglePreserving(dim=3)):
        shared, separate = (CoMHE(pairs, projection=projection, shared=s).bases() for s in (True, False))
        assert shared["a"] is shared["b"]
        assert not torch.equal(separate["a"], separate["b"])


def test_comhe_layer_weights_and_average_scale_the_energies():
    w, v = torch.randn(7, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    plain = [CoMHE({"w": x}, projection=ONE_BASIS, seed=2)().item() for x in (w, v)]
    both = CoMHE([("w", w), ("v", v)], projection=ONE_BASIS, seed=2, layer_weights={"v": 3.0}, average=True)
    assert both().item() == pytest.approx((plain[0] + 3 * plain[1]) / 2)


def test_comhe_neuron_weights_scale_projected_directions():
    w = torch.randn(7, 12, dtype=torch.float64)
    weighted = CoMHE({"w": w}, projection=ONE_BASIS, neuron_weights={"w": BETAS})
    value, basis = weighted().item(), weighted.bases()["w"][0].double().numpy()
    assert value == pytest.approx(oracle.energy(w.numpy() @ basis.T, 2, half_space=True, weights=BETAS.numpy()))


def test_comhe_neuron_weights_of_the_output_exclude_labels():
    net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 7)).double()
    weights = {"2": BETAS, "0": torch.ones(12)}
    weighted = CoMHE(net, hidden=0, output=1, projection=ONE_BASIS, neuron_weights=weights)
    expected = oracle.energy(net[2].weight.detach().numpy(), 2, weights=BETAS.numpy())
    assert weighted().item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="labels cannot be combined with neuron_weights of the output layer '2'"):
        weighted(labels=torch.tensor([0, 1]))


def test_comhe_neuron_weights_are_refused_where_neurons_are_mixed():
    with pytest.raises(ValueError, match="neuron_weights must be None with a bilateral projection"):
        CoMHE({"w": torch.randn(7, 12)}, projection=Bilateral(dim=4), neuron_weights={"w": BETAS})


@pytest.mark.parametrize("half_space", [True, False])
def test_comhe_random_batches_are_unbiased(half_space):
    """Layers of different size have samples of equal size, which stand for different numbers of pairs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 20), nn.Linear(20, 9), nn.Linear(9, 40))
    options = {"projection": Random(dim=5, views=1, every=10**6), "half_space": half_space, "seed": 1}
    with pytest.warns(UserWarning, match="not projected"):
        everything = CoMHE(net, **options)().item()
    with pytest.warns(UserWarning, match="not projected"):
        drawn = CoMHE(net, **options, batch=6)
    values = [drawn().item() for _ in range(150)]
    assert len(set(values)) == 150
    assert np.mean(values) == pytest.approx(everything, abs=4 * np.std(values) / 150**0.5)


def test_comhe_batch_draws_from_the_output_layer_too():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 40))
    regularizer = CoMHE(net, hidden=0, projection=Random(dim=4), batch=10)
    values = [regularizer().item() for _ in range(200)]
    exact = oracle.energy(net[1].weight.detach().numpy(), 2)
    assert np.mean(values) == pytest.approx(exact, abs=4 * np.std(values) / 200**0.5)
    assert len(set(values)) > 100


def test_comhe_batch_uses_the_weights_of_the_drawn_neurons():
    w, betas = torch.randn(9, 8, dtype=torch.float64), torch.linspace(0.5, 2, 9, dtype=torch.float64)
    projection = Random(dim=4, views=1)
    drawn = CoMHE({"w": w}, projection=projection, batch=4, neuron_weights={"w": betas}, half_space=False)
    index = drawn.draw_neurons(Step(buffers=dict(drawn.named_buffers())))["w"]
    value, basis = drawn().item(), drawn.bases()["w"][0].double()
    expected = oracle.energy((w[index] @ basis.T).numpy(), 2, weights=betas[index].numpy())
    assert value == pytest.approx(expected)


@pytest.mark.parametrize("projection", [p for p in SMALL if not isinstance(p, Bilateral)], ids=repr)
def test_comhe_batch_works_with_every_projection_of_neurons(projection):
    net, twin = network(), network()
    drawn, resumed = (CoMHE(model, projection=projection, batch=5) for model in (net, twin))
    for _ in range(3):
        drawn().backward()
    assert all(torch.isfinite(net[k].weight.grad).all() for k in (0, 3, 4, 5))
    resumed.load_state_dict(drawn.state_dict())
    assert resumed().item() == drawn().item()


def test_comhe_batch_is_refused_where_neurons_are_mixed():
    with pytest.raises(ValueError, match="batch must be None with a bilateral projection, which mixes neurons, not 4"):
        CoMHE(network(), projection=Bilateral(dim=4), batch=4)
    with pytest.raises(ValueError, match="batch must be None or an integer >= 2, not 1"):
        CoMHE(network(), projection=Random(dim=4), batch=1)


def changed_steps(regularizer, count, *, by_more_than):
    """Return the steps of `count` calls at which the learned basis changes by more than a bound."""
    steps, before = [], regularizer.basis_9
    for number in range(count):
        regularizer()
        if (regularizer.basis_9 - before).norm().item() > by_more_than:
            steps.append(number)
        before = regularizer.basis_9
    return steps


@pytest.mark.parametrize(
    "skipping", [{"every": 2}, {"schedule": lambda step: float(step % 2 == 0)}], ids=["every", "schedule"]
)
def test_comhe_redraws_a_basis_once_per_period_although_steps_are_skipped(skipping):
    projection = AnglePreserving(dim=3, rate=1e-3, redraw_every=3)
    regularizer = CoMHE({"w": torch.randn(6, 9)}, projection=projection, **skipping)
    assert changed_steps(regularizer, 13, by_more_than=1) == [4, 6, 10, 12]  # periods start at 3, 6, 9 and 12


def test_comhe_redraws_the_basis_of_its_period_although_steps_are_skipped():
    projection = AnglePreserving(dim=3, rate=1e-6, redraw_every=3)
    w = torch.randn(6, 9)
    whole, skipping = (CoMHE({"w": w}, projection=projection, every=every) for every in (1, 2))
    for _ in range(5):
        whole()
        skipping()
    torch.testing.assert_close(skipping.basis_9, whole.basis_9, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "skipping", [{"every": 2}, {"schedule": lambda step: float(step % 2 == 0)}], ids=["every", "schedule"]
)
def test_comhe_updates_a_basis_once_per_period_although_steps_are_skipped(skipping):
    projection = Adversarial(dim=3, every=3)
    regularizer = CoMHE({"w": torch.randn(6, 9)}, projection=projection, **skipping)
    assert changed_steps(regularizer, 13, by_more_than=0) == [0, 4, 6, 10, 12]


def test_comhe_layers_of_weight_zero_do_not_change_a_shared_basis():
    torch.manual_seed(0)
    w, v = torch.randn(6, 9), torch.randn(5, 9)
    projection = AnglePreserving(dim=3)
    alone = CoMHE({"w": w}, projection=projection)
    both = CoMHE({"w": w, "v": v}, projection=projection, layer_weights={"v": 0.0})
    for _ in range(3):
        assert both().item() == alone().item()
    assert torch.equal(both.basis_9, alone.basis_9)


def test_comhe_without_weighted_hidden_layers_does_not_change_its_basis():
    regularizer = CoMHE(network(), hidden=0, projection=AnglePreserving(dim=4, redraw_every=1))
    before = {name: value.clone() for name, value in regularizer.named_buffers() if name.startswith("basis")}
    for _ in range(2):
        regularizer()
    assert before
    for name, value in before.items():
        assert torch.equal(regularizer.get_buffer(name), value)
