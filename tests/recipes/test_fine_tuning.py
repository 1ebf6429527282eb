"""Fine-tuning by rotation, LoRA and PEFT's OFT."""

import pytest

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
