import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import oracle
from hypersphere.energy import (
    MHE,
    SRIP,
    CoMHE,
    Orthogonal,
    Orthonormal,
    data_dependent_energy,
    factors,
    hyperspherical_energy,
    low_rank_,
)
from hypersphere.functions.projection import PROJECTIONS, Adversarial, AnglePreserving, Bilateral, Group, Random
from hypersphere.heads import AngularHead

from . import reference

SMALL = [
    Random(dim=4, views=2),
    Random(dim=4, views=3, aggregate="max", construction="hadamard"),
    Random(dim=4, construction="count_sketch", every=2),
    AnglePreserving(dim=4),
    AnglePreserving(dim=4, form="angle", updates=2),
    AnglePreserving(dim=4, method="alternating", every=2),
    Adversarial(dim=4),
    Group(channels=3),
    Group(channels=3, random=True),
    Bilateral(dim=4),
]
every_projection = pytest.mark.parametrize("projection", SMALL, ids=repr)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 12), nn.Linear(12, 12), nn.Linear(12, 5)
    )


def test_mhe_is_the_sum_of_the_layers():
    net = network()
    weights = [net[k].weight.detach().flatten(1).numpy() for k in (0, 3, 4, 5)]
    for half_space, distance, power in ((True, "euclidean", 2), (False, "angular", 1), (True, "angular", 0)):
        ours = MHE(net, hidden=0.5, output=3.0, half_space=half_space, power=power, distance=distance)()
        hidden = sum(oracle.energy(w, power, distance, half_space) for w in weights[:-1])
        expected = 0.5 * hidden + 3 * oracle.energy(weights[-1], power, distance)
        assert ours.item() == pytest.approx(expected, rel=1e-5)
    named = MHE(net, hidden=1, half_space=["3"], output_layer="4")()
    full = [oracle.energy(w, 2) for w in weights]
    assert named.item() == pytest.approx(
        full[0] + oracle.energy(weights[1], 2, half_space=True) + full[2] + full[3], rel=1e-5
    )
    assert MHE(net, output=0)().item() == pytest.approx(
        sum(oracle.energy(w, 2, half_space=True) for w in weights[:-1]), rel=1e-5
    )


def test_gradients_reach_every_layer_as_by_hand():
    net = network()
    MHE(net)().backward()
    ours = [p.grad for p in net.parameters() if p.ndim > 1]
    net.zero_grad()
    by_hand = [hyperspherical_energy(net[k].weight, half_space=True) for k in (0, 3, 4)]
    (sum(by_hand) + hyperspherical_energy(net[5].weight)).backward()
    for mine, expected in zip(ours, (p.grad for p in net.parameters() if p.ndim > 1), strict=True):
        torch.testing.assert_close(mine, expected)


def test_groups_transposed_and_single_neurons():
    net = nn.ModuleDict(
        {
            "grouped": nn.Conv1d(6, 8, 3, groups=2),
            "up": nn.ConvTranspose2d(4, 6, 2, groups=2),
            "depthwise": nn.Conv2d(5, 5, 3, groups=5),
            "score": nn.Linear(9, 1),
        }
    )
    with pytest.warns(UserWarning, match="left out, with one neuron to a set: depthwise, score"):
        ours = MHE(net, hidden=1, half_space=False, output_layer=None)
    assert ours.skipped == ("depthwise", "score")
    grouped = [oracle.energy(part.flatten(1).detach().numpy(), 2) for part in net["grouped"].weight.chunk(2)]
    up = [oracle.energy(np.array(s), 2) for s in reference.neurons_of_transposed(net["up"].weight.detach().numpy(), 2)]
    assert ours().item() == pytest.approx(np.mean(grouped) + np.mean(up), rel=1e-5)


def test_heads_parametrised_and_tied_weights_are_understood():
    model = nn.ModuleDict({"head": AngularHead(6, 4), "first": nn.Linear(8, 6)})
    regulariser = MHE(model)
    assert regulariser.population.output.name == "head"
    parametrizations.weight_norm(model["first"])
    seen = MHE(model)
    assert seen().item() == pytest.approx(regulariser().item())
    seen().backward()
    assert model["first"].parametrizations.weight.original1.grad.abs().sum() > 0
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    assert len(MHE(tied, output_layer=None).population.hidden) == 1


def test_labels_make_the_output_data_dependent():
    net, labels = network(), torch.tensor([0, 0, 4])
    regulariser = MHE(net, hidden=0)
    torch.testing.assert_close(regulariser(labels), data_dependent_energy(net[5].weight, labels))


def test_random_batches_average_to_the_whole_and_resume():
    net = network()
    whole, drawn = MHE(net, output=0), MHE(net, output=0, batch=4)
    values = [drawn().item() for _ in range(300)]
    assert np.mean(values) == pytest.approx(whole().item(), abs=4 * np.std(values) / 300**0.5)
    torch.manual_seed(99)  # the global seed has no say
    again = MHE(net, output=0, batch=4)
    assert [again().item() for _ in range(3)] == values[:3]
    again.load_state_dict(drawn.state_dict())
    assert again().item() == drawn().item()


@every_projection
def test_comhe_by_hand(projection):
    """One layer, one step: the energies of what the projection makes of its rows."""
    w = torch.randn(9, 12, dtype=torch.float64)
    regulariser = CoMHE({"w": w}, projection=projection, seed=3).eval()
    bases = dict(regulariser.named_buffers())
    basis = next((b for name, b in bases.items() if name.startswith("basis")), None)
    if basis is None:
        basis = regulariser._draw(0)[regulariser._key(regulariser.projected[0])]
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
    assert regulariser().item() == pytest.approx(total, rel=1e-5)


@every_projection
def test_comhe_trains_resumes_compiles_and_is_the_same_on_every_rank(projection):
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


def test_unrolled_differentiates_through_the_step():
    w = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    projection = AnglePreserving(dim=3, rate=2.0)
    start = CoMHE({"w": w}, projection=projection).basis_7.double()

    def value(w):
        regulariser = CoMHE({"w": w}, projection=projection)
        regulariser.basis_7 = start
        return regulariser()

    assert torch.autograd.gradcheck(value, (w,))
    regulariser = CoMHE({"w": w}, projection=projection)
    regulariser()
    assert not torch.equal(regulariser.basis_7, start)


def test_bases_are_shared_by_length_and_redrawn():
    net = network()
    shared, own = (CoMHE(net, projection=AnglePreserving(dim=4), shared=s) for s in (True, False))
    assert [k for k in shared.state_dict() if k.startswith("basis")] == ["basis_36", "basis_24", "basis_12"]
    assert "basis_4" in own.state_dict()
    rare = CoMHE(net, projection=Random(dim=4, every=2))
    values = [rare().item() for _ in range(4)]
    assert values[0] == values[1] != values[2] == values[3]
    rare.eval()
    assert rare().item() == rare().item()


def test_short_neurons_stand_for_themselves():
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="not projected, with neurons shorter than the projection: 0"):
        regulariser = CoMHE(net, projection=Random(dim=5), output=0)
    with_short = regulariser().item()
    alone = CoMHE({"1": net[1].weight}, projection=Random(dim=5))().item()
    first = oracle.energy(net[0].weight.detach().numpy(), 2, half_space=True)
    assert with_short == pytest.approx(alone + first, rel=1e-5)


def test_orthogonality_by_hand():
    net = network()
    gram = [w @ w.T for w in (net[k].weight.detach().flatten(1).double().numpy() for k in (0, 3, 4, 5))]
    orthonormal = sum(((g - np.eye(len(g))) ** 2).sum() for g in gram)
    orthogonal = sum(((g - np.diag(np.diag(g))) ** 2).sum() for g in gram)
    spectral = sum(np.linalg.norm(g - np.eye(len(g)), 2) for g in gram)
    assert Orthonormal(net, 0.5)().item() == pytest.approx(0.5 * orthonormal, rel=1e-4)
    assert Orthogonal(net, 0.5)().item() == pytest.approx(0.5 * orthogonal, rel=1e-4)
    srip = SRIP(net, 0.5)
    for _ in range(200):
        value = srip()
    assert value.item() == pytest.approx(0.5 * spectral, rel=1e-3)
    resumed = SRIP(net, 0.5, seed=5)
    resumed.load_state_dict(srip.state_dict())
    assert resumed().item() == pytest.approx(value.item(), rel=1e-5)
    value.backward()
    exact = torch.linalg.matrix_norm(net[3].weight @ net[3].weight.T - torch.eye(12), 2)
    (expected,) = torch.autograd.grad(0.5 * exact, net[3].weight)
    torch.testing.assert_close(net[3].weight.grad, expected, atol=2e-3, rtol=0)


def test_copies_moves_and_types():
    net = network()
    regulariser = MHE(net)
    before = regulariser().item()
    model, of_copy = copy.deepcopy((net, regulariser))
    with torch.no_grad():
        net[3].weight.add_(torch.randn_like(net[3].weight))
    assert of_copy().item() == before != regulariser().item()
    model.double()
    assert of_copy().dtype == torch.float64
    model.bfloat16()
    assert of_copy().dtype == torch.float32
    assert not regulariser.state_dict()
    assert not list(regulariser.parameters())
    net.regulariser = regulariser  # a part of the model it looks at
    assert copy.deepcopy(net).regulariser().item() == regulariser().item()
    with torch.autocast("cpu", torch.bfloat16):
        value = regulariser()
    assert value.item() == pytest.approx(regulariser().item(), rel=1e-6)


def test_data_parallel_and_compiled():
    net = network()
    made = torch.compile(MHE(net), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(made(), MHE(net)())
    projected = CoMHE(net, projection=Random(dim=4))
    expected = [projected().item() for _ in range(2)]
    compiled = torch.compile(CoMHE(net, projection=Random(dim=4)), backend="aot_eager")
    assert [compiled().item() for _ in range(2)] == pytest.approx(expected, rel=1e-4)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        regulariser = CoMHE(parallel, projection=AnglePreserving(dim=4))
        (parallel(torch.randn(2, 4, 4, 4)).square().mean() + regulariser()).backward()
        assert net[0].weight.grad.abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()


def test_low_rank_neurons():
    net = low_rank_(network(), rank=4)
    assert torch.linalg.matrix_rank(net[3].weight).item() == 4
    found = factors(net)
    assert {name: tuple(y.shape) for name, y in found.items()}["3.first"] == (12, 4)
    p1, (y1, y2) = net[3].parametrizations.weight[0].left, (found["3.first"], found["3.second"])
    expected = (y2.T @ torch.linalg.inv(p1 @ y2.T) @ y1.T).T  # (E.23), columns are neurons
    torch.testing.assert_close(net[3].weight, expected, atol=1e-4, rtol=1e-3)
    MHE(found)().backward()
    assert all(y.grad.abs().sum() > 0 for y in found.values())
    with pytest.raises(ValueError, match=r"rank must be an integer from 1 to 6, .* in 0"):
        low_rank_(network(), rank=7)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MHE(nn.ReLU()), "model must be a module with linear, convolution or head layers"),
        (lambda: MHE({}), "model must be a module with"),
        (
            lambda: MHE(nn.Linear(3, 4), half_space=True),
            "half_space must be False here: the only layer",
        ),
        (lambda: MHE(network(), half_space=["5"]), "half_space must not name the output layer '5'"),
        (
            lambda: MHE(network(), half_space=["conv"]),
            "half_space must be None, a bool or a list of some",
        ),
        (lambda: MHE(network(), output_layer="conv"), "output_layer must be None, 'last' or one of '0'"),
        (lambda: MHE(network(), hidden=-1), "hidden must be None or a number >= 0"),
        (lambda: MHE({"w": torch.ones(3)}), "w must be a floating-point tensor"),
        (lambda: MHE(nn.Sequential(nn.LazyLinear(3))), "weight of 0 must be initialised"),
        (lambda: CoMHE(network(), projection=Random(dim=50)), "projection must be at most as wide as .* 36"),
        (lambda: CoMHE(network(), projection="fourier"), "projection must be one of 'random'"),
        (lambda: CoMHE(nn.Linear(40, 4)), "model must be one with a hidden layer"),
        (lambda: Orthonormal(network(), -1), "weight must be a number >= 0"),
    ],
)
def test_bad_input_names_itself(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [MHE, Orthonormal, SRIP, lambda net: CoMHE(net, projection=Random(dim=4))])
def test_weights_that_are_not_finite_are_named(make):
    net = network()
    regulariser = make(net)
    with torch.no_grad():
        net[3].weight[2, 1] = float("nan")
    with pytest.raises(ValueError, match="weight of 3 must be finite, but row 2 is not"):
        regulariser()


def test_every_projection_is_tried():
    assert {type(p) for p in SMALL} == set(PROJECTIONS.values())
