"""Helpers of the page tests: readers of pages, and a recipe that runs instantly."""

import re

import torch

from hypersphere.recipes import Metric, Outcome, Recipe, Record, Row
from hypersphere.training import Run


def logged(runs, name):
    """Return the last logged test accuracy in per cent."""
    return 100 * [line for line in Run.open(runs / name).metrics() if line["kind"] == "epoch"][-1]["accuracy"]


def cells(html, section=1):
    """Return the table of a section as rows of text."""
    body = re.search(rf"<section id='section-{section}'>.*?</section>", html, re.S)[0]
    rows = re.findall("<tr>(.*?)</tr>", body, re.S)[1:]
    words = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
    return [[re.sub("<span class='unseen'>.*?</span>|<.*?>", "", cell) for cell in row] for row in words]


def toy(rows=("a", "b"), **options):
    def compute(seed, shift, epochs):
        error = [90.0, 50.0 + seed, 20.0 - 2 * seed]
        grid = torch.linspace(1, 3, 9).view(3, 3) + shift
        tensors = {"k": torch.rand(20), "landscape_loss": grid, "coordinates": torch.linspace(-1, 1, 3)}
        curves = {"loss": [2.0, 1.0], "error": error, "energy": [0.6, 0.55, 0.5]}
        return Outcome({"error": error[-1]}, curves, tensors)

    metrics = (Metric("error", "test error %", ".1f", False),)
    made = tuple(Row(name, {"measure": {"shift": float(place)}}) for place, name in enumerate(rows))
    base = {"measure": {"shift": 0.0, "epochs": 2}}
    return Recipe("toy", "A toy", "nowhere", base, {"cpu": {}}, made, (0, 1), metrics, compute=compute, **options)


def made(row, seed, *, diverged=False, **curves):
    metrics = {"error": None if diverged else 10.0 + seed, "diverged": float(diverged)}
    return Record("toy", row, seed, "cpu", {"shift": 0.0, "epochs": 4}, metrics, 1.0, curves=curves)
