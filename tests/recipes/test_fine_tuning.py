"""Fine-tuning by rotation, LoRA and PEFT's OFT."""

import pytest
import torch
from torch import nn

from hypersphere.recipes.rotation import fine_tuning
from hypersphere.recipes.rotation.fine_tuning import FINE_TUNING, fine_tune


def outcome(row, **changes):
    options = FINE_TUNING.settings(row, "smoke")["measure"]
    return fine_tune(0, **{**options, "rates": [3e-3], **changes}, data_root=None).metrics


def test_fine_tuning_a_head_forgets_nothing():
    metrics = outcome("new head only")
    assert metrics["forgotten"] == 0
    assert metrics["parameters"] == 0


def test_fine_tuning_all_weights_learns_the_second_task():
    metrics = outcome("full", second={"name": "digits"}, epochs=6)
    assert metrics["accuracy"] > 60  # chance is 10
    assert metrics["first_before"] == outcome("new head only")["first_before"]  # the same encoder


def test_fine_tuning_ends_with_the_last_step_of_the_schedule(monkeypatch):
    """Nine images in batches of four are two steps, because the last batch of one is merged."""
    made, schedule = [], torch.optim.lr_scheduler.CosineAnnealingLR

    def recorded(*arguments):
        made.append(schedule(*arguments))
        return made[-1]

    monkeypatch.setattr(torch.optim.lr_scheduler, "CosineAnnealingLR", recorded)
    model = fine_tuning._Classifier(nn.Flatten(), nn.Linear(4, 2))
    fine_tuning._train(model, torch.rand(9, 1, 2, 2), torch.arange(9) % 2, 0.1, epochs=3, batch_size=4, seed=0)
    (one,) = made
    assert one.last_epoch == one.T_max == 6


def test_rotations_agree_with_the_oft_of_peft():
    pytest.importorskip("peft")
    ours, theirs = outcome("rotation"), outcome("OFT (PEFT)")
    assert ours["parameters"] == theirs["parameters"]
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=7)  # two of 32 test images
    assert ours["first_after"] == pytest.approx(theirs["first_after"], abs=1)


@pytest.mark.parametrize("row", ["LoRA (PEFT)", "butterfly rotation"])
def test_fine_tuning_rows_train_few_numbers(row):
    pytest.importorskip("peft")
    assert 0 < outcome(row)["parameters"] < outcome("full")["parameters"] / 2
