import math

import pytest
import torch
from torch.optim import lr_scheduler

from hypersphere.optim.schedules import SCHEDULES, Constant, Cosine, OneCycle, Plateau, Scheduler, Steps, is_better

TOTAL = 40


def rates_of(make):
    """Return the learning rates of a torch scheduler for each of TOTAL steps, with base rate 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Constant(), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (Cosine(), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL)),
        (Cosine(end=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.1)),
        (Steps(at=(0.75, 0.5), factor=0.2), lambda o: lr_scheduler.MultiStepLR(o, [20, 30], 0.2)),
        (
            Cosine(warmup=0.25),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 1e-9, 1.0, 10), lr_scheduler.CosineAnnealingLR(o, 30)], [10]
            ),
        ),
        (
            Steps(warmup=0.1, at=(0.5,), factor=0.1),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 1e-9, 1.0, 4), lr_scheduler.MultiStepLR(o, [16])], [4]
            ),
        ),
    ],
    ids=["constant", "cosine", "cosine to a tenth", "steps", "warmed cosine", "warmed steps"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedules_agree_with_torch(ours, theirs):
    assert [ours(step / TOTAL) for step in range(TOTAL)] == pytest.approx(rates_of(theirs), abs=1e-7)


def test_one_cycle_rises_linearly_and_decays_as_a_cosine():
    for part in torch.linspace(0, 1, 41).tolist():
        rising, falling = part / 0.25, (1 + math.cos(math.pi * (part - 0.25) / 0.75)) / 2
        assert OneCycle()(part) == pytest.approx(rising if part < 0.25 else falling)
    assert OneCycle(warmup=0.5)(0.5) == 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduler_rates_are_positive_and_keep_their_ratio(name):
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    first = torch.optim.SGD([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.3}], lr=0.1)
    second = torch.optim.Adam([parameters[2]], lr=0.01)
    scheduler = Scheduler([first, second], SCHEDULES[name](), 10)
    for step in range(10):
        rates = [first.param_groups[0]["lr"], first.param_groups[1]["lr"], second.param_groups[0]["lr"]]
        factor = SCHEDULES[name]()((step + 0.5) / 10)
        assert rates == pytest.approx([0.1 * factor, 0.3 * factor, 0.01 * factor])
        assert min(rates) > 0
        scheduler.step()
    scheduler.step()  # constant beyond the end
    assert first.param_groups[0]["lr"] == pytest.approx(0.1 * SCHEDULES[name]()(1.0))


def test_scheduler_state_restores_the_rates():
    made = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2)]
    one, other = (Scheduler([optimizer], Cosine(), 7) for optimizer in made)
    for _ in range(3):
        one.step()
    other.load_state_dict(one.state_dict())
    assert made[0].param_groups[0]["lr"] == made[1].param_groups[0]["lr"]
    assert other.done == 3


@pytest.mark.parametrize("wrong", [-0.1, 1.0])
def test_schedules_reject_invalid_warmup_and_total(wrong):
    with pytest.raises(ValueError, match="warmup must be a fraction of training in"):
        Cosine(warmup=wrong)
    with pytest.raises(ValueError, match="total must be a number >= 1"):
        Scheduler([], Cosine(), 0)


@pytest.mark.parametrize(("at", "unit"), [((20, 30), "steps"), ((2, 3), "epochs"), ((0.5, 0.75), "fraction")])
def test_steps_in_iterations_epochs_and_fractions_agree_with_torch(at, unit):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = Scheduler([optimizer], Steps(at=at, factor=0.2, unit=unit), TOTAL, steps_per_epoch=10)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == pytest.approx(rates_of(lambda o: lr_scheduler.MultiStepLR(o, [20, 30], 0.2)))


def test_warmup_in_epochs_rises_linearly():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = Scheduler([optimizer], Constant(warmup=2, unit="epochs"), TOTAL, steps_per_epoch=5)
    rates = []
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == pytest.approx([(step + 0.5) / 10 for step in range(10)] + [1.0] * 5)


@pytest.mark.parametrize("metric", ["accuracy", "loss", "verification.eer"])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_agrees_with_torch(metric, patience):
    generator = torch.Generator().manual_seed(patience)
    values = torch.rand(60, generator=generator).tolist()
    small = metric != "accuracy"
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = lr_scheduler.ReduceLROnPlateau(
        theirs, "min" if small else "max", factor=0.5, patience=patience, threshold=0.01, min_lr=0.01
    )
    ours = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = Plateau(metric=metric, factor=0.5, patience=patience, threshold=0.01, least=0.01)
    scheduler = Scheduler([ours], schedule, 1000)
    for value in values:
        reference.step(value)
        scheduler.observe({metric: value, "energy": {}})
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    restored = Scheduler([other], schedule, 1000)
    restored.load_state_dict(scheduler.state_dict())
    assert other.param_groups[0]["lr"] == ours.param_groups[0]["lr"]


def test_plateau_names_the_metrics_that_exist():
    scheduler = Scheduler([], Plateau(metric="acc"), 10)
    with pytest.raises(ValueError, match=r"schedule\.metric must be one of loss, accuracy, not 'acc'"):
        scheduler.observe({"loss": 1.0, "accuracy": 0.5, "energy": {}})


def test_is_better_treats_nan_as_worst():
    assert not is_better("accuracy", math.nan, None)
    assert is_better("accuracy", 0.1, math.nan)


def test_schedules_reject_invalid_options():
    with pytest.raises(ValueError, match=r"schedule\.unit must be one of fraction, steps, epochs"):
        Steps(unit="minutes")
    with pytest.raises(ValueError, match="at must be numbers >= 0"):
        Steps(at=(-1,))
    with pytest.raises(ValueError, match=r"factor must be a number in \(0, 1\)"):
        Plateau(factor=1.0)


def test_steps_multiply_by_one_factor_per_time():
    schedule = Steps(at=(0.25, 0.5, 0.75), factor=(0.1, 10.0, 0.5))
    assert [schedule(part) for part in (0.0, 0.25, 0.5, 0.8)] == pytest.approx([1.0, 0.1, 1.0, 0.5])
    for at, factor in (((0.5,), (0.1, 0.2)), ((0.5, 0.25), (0.1, 0.2))):
        with pytest.raises(ValueError, match="factor must be a number, or one per time, and times in ascending order"):
            Steps(at=at, factor=factor)
