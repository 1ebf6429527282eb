"""The language model of bytes."""

import math

import pytest
import torch

from hypersphere.recipes import execute
from hypersphere.recipes.rotation.language import LANGUAGE, read_text, train_language_model

OPTIONS = LANGUAGE.settings("AdamW", "smoke")["measure"]


def test_texts_are_read_as_bytes(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "verse.txt").write_text("In the é", encoding="utf-8")
    assert bytes(read_text("verse", tmp_path).tolist()) == "In the é".encode()
    assert bytes(read_text("source").tolist()).startswith(b'"""')
    with pytest.raises(ValueError, match="text must be 'source' or the name of a file"):
        read_text("missing", tmp_path)


def test_bits_of_a_predictable_text_fall(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "periodic.txt").write_bytes(b"abcd" * 2000)
    options = {**OPTIONS, "text": "periodic", "steps": 60, "rates": [1e-2], "data_root": tmp_path}
    outcome = train_language_model(0, **options)
    assert outcome.metrics["bits"] < 0.5  # a uniform prediction of 256 bytes has 8 bits, of four letters 2
    assert len(outcome.curves["bits"]) == 20
    assert outcome.curves["bits"][0] > 4


def test_trials_choose_the_rates_and_survive_divergence():
    with torch.random.fork_rng():
        outcome = train_language_model(0, **{**OPTIONS, "rates": [1e-6, math.inf, 1e-2]}, data_root=None)
    assert outcome.metrics["rate"] == 1e-2
    assert outcome.metrics["bits"] < 8


def test_measurement_at_equal_time_comes_before_the_end():
    options = {**OPTIONS, "rates": [1e-2], "data_root": None}
    early = train_language_model(0, **{**options, "seconds": 0.0}).metrics
    assert early["bits_at_equal_time"] > early["bits"]  # measured after the first step
    late = train_language_model(0, **{**options, "seconds": 1e9}).metrics
    assert late["bits_at_equal_time"] == late["bits"] == early["bits"]


@pytest.mark.slow
@pytest.mark.parametrize("row", [row.name for row in LANGUAGE.rows])
def test_language_rows_run_at_the_smoke_scale(row, smoke_folder):
    (record,) = execute(LANGUAGE, smoke_folder, scale="smoke", rows=[row], seeds=[0])
    assert 0 < record.metrics["bits"] < 9
    assert record.metrics["parameters"] > 0
