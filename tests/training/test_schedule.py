import math

import pytest
import torch
from torch.optim import lr_scheduler

from hypersphere.training.job_schedule import SCHEDULES, Constant, Cosine, OneCycle, Scheduler, Steps

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
