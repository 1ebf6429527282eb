"""Verdicts and pages about neurons."""

from __future__ import annotations

import re

import torch

from hypersphere import energy
from hypersphere.report import inspection_page, layer_table, page_html
from hypersphere.report.neurons import verdict


def verdict_of(weight: torch.Tensor) -> str:
    return verdict(energy.inspect({"layer": weight}, probes=64).layers[0])


def test_verdict_compares_neurons_with_random_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    assert verdict_of(torch.randn(64, 32, generator=draw)) == "like random"
    assert verdict_of(torch.linalg.qr(torch.randn(32, 32, generator=draw)).Q) == "diverse"
    assert verdict_of(torch.randn(64, 32, generator=draw) + 3) == "redundant"
    twice = torch.randn(8, 32, generator=draw)
    assert verdict_of(torch.cat([twice, 2 * twice])) == "duplicated"
    assert verdict_of(torch.cat([twice, -twice])) == "duplicated"
    assert verdict_of(torch.randn(6, 2, generator=draw)) in ("no reference", "duplicated")


def test_layer_table_names_layers_with_zero_neurons() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    weight[::2] = 0
    inspection = energy.inspect({"pruned": weight, "whole": torch.eye(4)}, probes=64)
    assert layer_table(inspection).caption.endswith("lower the energy: pruned (32 of 64).")


def test_layer_table_and_page_state_the_verdict() -> None:
    inspection = energy.inspect({"a": torch.randn(16, 9) + 4, "b": torch.randn(16, 9)}, probes=64)
    table = layer_table(inspection)
    assert [column.name for column in table.columns][:3] == ["layer", "neurons", "verdict"]
    assert table.rows[0][2] == "redundant"
    assert "The verdict compares half-space energies" in table.caption
    html = page_html(inspection_page(inspection, "<w>.pt"))
    assert "Neurons of &lt;w&gt;.pt" in html
    assert len(re.findall(r"data-column='verdict'>redundant", html)) == 1
    assert "Histograms of 2 distributions of angle in degrees" in html
