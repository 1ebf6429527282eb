import pytest
import torch
import torch.distributed as dist
from torch import nn

import hypersphere as hs
from hypersphere import robustness
from hypersphere.data import Batches
from hypersphere.heads import ShardedHead, softmax
from hypersphere.training import Objective, embed, fit, minimize, predict
from hypersphere.training.distributed import Parallel
from hypersphere.training.loop import Progress


def blobs(n=60, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return 2 * torch.eye(classes)[y] + 0.3 * torch.randn(n, classes, generator=generator), y


def parts(rate=0.05, head=hs.heads.modified_softmax):
    model, head = nn.Linear(3, 2), head(2, 3)
    return model, head, torch.optim.SGD([*model.parameters(), *head.parameters()], lr=rate)


def trained(seed=0, epochs=20, **more):
    torch.manual_seed(seed)
    x, y = blobs()
    model, head = nn.Linear(3, 2), hs.heads.modified_softmax(2, 3)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.05)
    data = Batches(x, y, 16, torch.Generator().manual_seed(seed))
    history = fit(model, head, data, epochs=epochs, optimizer=optimizer, **more)
    return model, head, history


def test_fit_learns_separable_data_and_is_reproducible():
    model, head, history = trained()
    x, y = blobs(seed=1)
    features, labels = embed(model, Batches(x, y, 7))
    assert torch.equal(labels, y)
    assert (predict(head, features) == y).float().mean() > 0.9
    assert history[-1].loss < history[0].loss
    assert [e.number for e in history] == list(range(1, 21))
    assert torch.equal(trained()[1].weight, head.weight)
    assert not torch.equal(trained(seed=1)[1].weight, head.weight)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.randn(2, 3), "a Tensor"),  # two rows, which could be unpacked
        (torch.randn(5, 3), "a Tensor"),
        ((torch.randn(2, 3),), "a tuple of length 1 (Tensor)"),
        ([torch.randn(2, 3)] * 3, "a list of length 3 (Tensor, Tensor, Tensor)"),
        ((torch.randn(2, 3), [0, 1]), "a tuple of length 2 (Tensor, list)"),
        ({"x": torch.randn(2, 3), "y": torch.tensor([0, 1])}, "a dict"),
    ],
)
def test_fit_and_embed_refuse_batches_that_are_not_pairs(batch, found):
    model, head, optimizer = parts()
    message = f"data must yield (inputs, labels) with labels as a tensor, not {found}"
    for call in (
        lambda: embed(model, [batch]),
        lambda: fit(model, head, [batch], epochs=1, optimizer=optimizer),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message


def test_embed_refuses_batches_with_fewer_labels_than_inputs():
    with pytest.raises(ValueError, match="labels must be as many as the 4 features of their batch, not 3"):
        embed(nn.Linear(3, 2), [(torch.randn(4, 3), torch.arange(3))])


def test_fit_accepts_a_data_loader():
    x, y = blobs()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, head, optimizer = parts(head=hs.heads.softmax)
    assert len(fit(model, head, loader, epochs=2, optimizer=optimizer)) == 2


def test_fit_adds_regularizers():
    seen = []
    head_energy = lambda: (seen.append(1), torch.zeros(()))[1]  # noqa: E731
    _, _, plain = trained(epochs=1)
    _, _, lifted = trained(epochs=1, regularizers=[head_energy, lambda: torch.tensor(10.0)])
    assert lifted[0].loss == pytest.approx(plain[0].loss + 10, abs=1e-4)
    assert len(seen) == 4


def test_fit_steps_the_scheduler_once_per_batch():
    model, head, optimizer = parts(rate=1.0)
    halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fit(model, head, Batches(*blobs(), 20), epochs=2, optimizer=optimizer, scheduler=halving)
    assert optimizer.param_groups[0]["lr"] == 0.5**6


def test_fit_counts_steps_over_all_epochs():
    model, head, optimizer = parts()
    steps, before = [], model.weight.detach().clone()

    def on_step(step):
        assert not torch.equal(model.weight, before)
        before.copy_(model.weight.detach())
        steps.append(step)

    fit(model, head, Batches(*blobs(), 20), epochs=2, optimizer=optimizer, on_step=on_step)
    assert steps == [1, 2, 3, 4, 5, 6]


def test_fit_and_embed_reject_empty_data():
    model, head, optimizer = parts()
    with pytest.raises(ValueError, match="data must yield batches again every epoch, but epoch 2 had none"):
        fit(model, head, iter(Batches(*blobs(), 20)), epochs=2, optimizer=optimizer)
    with pytest.raises(ValueError, match="data must be an iterable with at least one batch"):
        embed(model, [])


def test_fit_stops_before_the_step_if_the_loss_is_not_finite():
    model, head, optimizer = parts()
    before = model.weight.detach().clone()
    broken = [lambda: torch.tensor(float("nan"))]
    reason = r"^the loss became nan in epoch 1; no step was taken yet, so check the inputs and the options of head and"
    with pytest.raises(FloatingPointError, match=reason):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer, regularizers=broken)
    assert torch.equal(before, model.weight)


def test_fit_distinguishes_divergence_from_invalid_data():
    model, head, optimizer = parts(rate=1e38)
    with pytest.raises(FloatingPointError, match=r"epoch 1.*a smaller learning rate may help"):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer)
    for broken in (0, 1):  # parameters of the network, of the head
        *both, optimizer = parts()
        nn.init.constant_(both[broken].weight, float("inf"))
        with pytest.raises(FloatingPointError, match=r"training diverged in epoch 1: \w+ must be finite"):
            fit(*both, Batches(*blobs(), 16), epochs=1, optimizer=optimizer)
    x, y = blobs()
    for wrong, match in ((Batches(x / 0, y, 16), "x must be finite"), (Batches(x, y + 1, 16), "y must be in")):
        model, head, optimizer = parts()
        with pytest.raises(ValueError, match=match):
            fit(model, head, wrong, epochs=1, optimizer=optimizer)


def test_embed_restores_the_mode_of_every_module():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[1].eval()
    features, _ = embed(model, Batches(*blobs(), 10))
    again, _ = embed(model, Batches(*blobs(), 60))
    torch.testing.assert_close(features, again)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_predict_accepts_any_object_with_scores():
    class Largest:
        def scores(self, x):
            return x

    assert predict(Largest(), torch.eye(3)).tolist() == [0, 1, 2]


# --- what users do wrong


def test_fit_refuses_an_optimizer_without_the_parameters_of_the_head():
    model, head = nn.Linear(3, 2), hs.heads.softmax(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer must have all parameters of the head .*, but lacks weight$"):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer)
    head.requires_grad_(False)
    fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer)


def test_fit_explains_a_model_that_does_not_return_a_tensor():
    class Output(nn.Linear):
        def forward(self, x):
            return {"last_hidden_state": super().forward(x)}

    model, head = Output(3, 2), hs.heads.softmax(2, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(TypeError, match="the model must return a tensor of features, not dict; wrap it in hypersphere"):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer)


def test_fit_rejects_losses_and_regularizers_that_are_not_scalars():
    model, _, _ = parts()
    head = hs.heads.softmax(2, 3, reduction="none")
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="head must be one that returns a scalar loss, with reduction 'mean' or 'sum'"):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer)
    model, head, optimizer = parts()
    with pytest.raises(ValueError, match="regularizers must be functions that return a number, not None"):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=optimizer, regularizers=[lambda: None])


def test_fit_moves_batches_to_the_device_of_the_model():
    """On the meta device, where a batch on another device raises an error."""
    model, head = nn.Linear(3, 2, device="meta"), nn.Module()
    seen = []

    class Head(nn.Module):
        def forward(self, features, labels):
            seen.append((features.device.type, labels.device.type))
            raise KeyboardInterrupt

    head = Head()
    with pytest.raises(KeyboardInterrupt):
        fit(model, head, Batches(*blobs(), 16), epochs=1, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert seen == [("meta", "meta")]


# --- minimize


def test_minimize_ends_after_a_number_of_steps():
    model, head, optimizer = parts()
    ended = []
    history = minimize(
        Objective(model, head),
        Batches(*blobs(), 16),
        steps=6,
        optimizer=optimizer,
        on_epoch=lambda e: ended.append(e.number),
    )
    assert ended == [1, 2]  # four batches per epoch
    assert len(history) == 2


class FivePartPass:
    """Batches of a pass that continues where it was left, like a stateful loader."""

    def __init__(self):
        self.position, self.ended = 0, 0  # `ended` counts requests past the end

    def __len__(self):
        return 5

    def __iter__(self):
        while self.position < 5:
            self.position += 1
            yield blobs(12, seed=self.position)
        self.position, self.ended = 0, self.ended + 1


@pytest.mark.parametrize("first_steps", [1, 2, 3])
def test_minimize_requests_no_batch_past_the_end_before_the_step_is_counted(first_steps):
    # 5 batches in groups of two: the third group of each pass has one batch.
    model, head, optimizer = parts()
    data, progress, seen = FivePartPass(), Progress(), []

    def on_step(at):
        seen.append((at.position, data.ended))

    for steps in (first_steps, 6):  # training that ended within a pass is continued
        minimize(
            Objective(model, head),
            data,
            optimizer=optimizer,
            steps=steps,
            accumulate=2,
            batch_sizes=[12] * 5,
            on_step=on_step,
            progress=progress,
        )
    assert seen == [(2, 0), (4, 0), (5, 0), (2, 1), (4, 1), (5, 1)]


@pytest.fixture
def alone():
    """A process group with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def exploding(wrap):
    """Return an objective with finite parameters and non-finite features."""
    network = nn.Linear(2, 3)
    nn.init.constant_(network.weight, 3e38)
    return wrap(Objective(network, softmax(3, 2)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda objective: objective,
        Parallel,
        lambda objective: nn.parallel.DistributedDataParallel(objective),
        lambda objective: Parallel(Objective(objective.network, ShardedHead(objective.head))),
    ],
    ids=["plain", "parallel", "ddp", "sharded"],
)
def test_minimize_reports_non_finite_features_as_divergence(wrap, alone):
    objective = exploding(wrap)
    data = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))]
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    with pytest.raises(FloatingPointError, match="training diverged in epoch 1"):
        minimize(objective, data, epochs=1, optimizer=optimizer)
    wrong = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 9]))]  # invalid labels are still reported as such
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.fill_(0.5)
    with pytest.raises(ValueError, match="y must be in"):
        minimize(objective, wrong, epochs=1, optimizer=optimizer)


@pytest.mark.parametrize("wrap", [lambda one: one, nn.parallel.DistributedDataParallel], ids=["plain", "ddp"])
def test_minimize_accumulates_in_wrapped_objectives(wrap, alone):
    x, y = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    weights = []
    for batches, accumulate in (([(x, y)], 1), ([(x[:2], y[:2]), (x[2:], y[2:])], 2)):
        torch.manual_seed(0)
        objective = Objective(nn.Linear(2, 3), softmax(3, 2))
        optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
        minimize(wrap(objective), batches, optimizer=optimizer, steps=1, accumulate=accumulate)
        weights.append(objective.network.weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_objective_computes_adversarial_losses_in_float32(precision, monkeypatch):
    """With float16 the gradients of the images, about 1e-9, would become zero."""
    network, head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), softmax(4, 3)
    with torch.no_grad():
        for parameter in (network[0].weight, head.weight):
            parameter.mul_(1e-4)
    calls, forward, attacked = [], head.forward, []

    def record(features, labels):
        calls.append((features.dtype, torch.is_autocast_enabled("cpu")))
        return forward(features, labels)

    def attack(*arguments):
        attacked.append(robustness.FGSM(0.1)(*arguments))
        return attacked[-1]

    monkeypatch.setattr(head, "forward", record)
    images, labels = torch.full((3, 4), 0.5), torch.arange(3)
    objective = Objective(network, head, precision=precision, attack=attack)
    objective(images, labels).backward()
    assert set(calls) == {(torch.float32, False)}
    assert ((attacked[0] - images).abs() > 0.05).all()
    assert network.training
    assert network[1].num_batches_tracked == 1
