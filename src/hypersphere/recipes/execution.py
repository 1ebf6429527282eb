"""Run a recipe: tune each row, train it with each seed, measure, and write one record per row and seed."""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hypersphere._collectives import Processes
from hypersphere._provenance import made_with
from hypersphere.energy import mean_energy
from hypersphere.recipes.recipe import Outcome, Recipe, Row, config_of
from hypersphere.recipes.record import Record, finite_or_none, record_path, write_tensors
from hypersphere.training import DamagedCheckpoint, Experiment, Run, Trainer, build_experiment
from hypersphere.training.validation import PROTOCOLS

__all__ = ["execute", "outcome_of_lines"]

Device = torch.device | str | None


def execute(
    recipe: Recipe,
    out: Path,
    *,
    scale: str = "cpu",
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: Device = None,
    data_root: Path | None = None,
    on_progress: Callable[[Row, int, float], None] = lambda row, seed, fraction: None,
    stop: Callable[[], bool] = lambda: False,
    on_message: Callable[[str], None] = warnings.warn,
) -> list[Record]:
    """Run every row with every seed for which there is no record yet; return the records of all rows and seeds.

    Rows of a recipe with `Tuning` first run their trials, whose records are stored in the folder `trials` of the row.

    A run that is interrupted continues from its last checkpoint, in the folder next to the place of its record. In a
    process group, all processes call this function and share the work; the first one writes the files.

    Args:
        recipe: the table.
        out: folder of the records, `out/NAME/ROW/seed-K.json`, with tensors next to them as safetensors.
        scale: "paper", "cpu" or "smoke". Records of scales other than "cpu" are stored in `out/NAME@SCALE/`.
        rows: names of the rows to run; if None, those of the scale.
        seeds: seeds to run; by default those of the recipe.
        overrides: settings that are changed in all rows, by dotted path, see `Recipe.settings`. They become part of the
            record, and the records are stored separately, in `out/NAME@HASH/`.
        device: device for training.
        data_root: folder of the data sets; None uses the environment variable HYPERSPHERE_DATA.
        on_progress: called with the row, the seed and the fraction done; 1 if it is finished or was recorded before.
        stop: called after each step; if it returns True, the state is saved and the finished records are returned.
        on_message: called with messages for the user: rows that diverge, damaged checkpoints that are skipped, settings
            that were chosen for a row.
    """
    selected_rows, selected_seeds = recipe.selected(scale, rows, seeds)
    changes = json.loads(json.dumps(dict(overrides or {})))
    # Check all settings before the first run, which may take hours.
    for row in selected_rows:
        for trial in recipe.trials(row, scale) or [{}]:
            recipe.checked_settings(row, scale, {**trial, **changes}, selected_seeds[0] if selected_seeds else None)
    session = _Session(recipe, out, scale, changes, device, data_root, stop, on_message, made_with())
    records: list[Record] = []
    for row in selected_rows:
        selection = _stored_selection(session, row, selected_seeds) or _tune(session, row)
        if selection is None:
            break
        for seed in selected_seeds:
            report = partial(on_progress, row, seed)
            job = _Job(session, row, seed, selection)
            record = job.finished_record()
            if record is None:
                report(0.0)
                record = job.run(report)
            if record is None:
                return records
            records.append(record)
            report(1.0)
    return records


@dataclass(frozen=True)
class _Session:
    """The arguments that all jobs of a call of `execute` share, and `environment`, the result of `made_with`."""

    recipe: Recipe
    out: Path
    scale: str
    overrides: dict[str, Any]
    device: Device
    data_root: Path | None
    stop: Callable[[], bool]
    on_message: Callable[[str], None]
    environment: Mapping[str, Any]

    def record_path(self, row: Row, seed: int) -> Path:
        """Return the path of the record of a row and seed."""
        return record_path(self.out, self.recipe.name, row.name, seed, self.overrides, self.scale)


@dataclass(frozen=True)
class Selection:
    """The settings that were chosen for a row, and the trials they were chosen from."""

    chosen: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Mapping[str, Any]] = ()


def _stored_selection(session: _Session, row: Row, seeds: Sequence[int]) -> Selection | None:
    """Return the selection of a current record of the row, or None. Records of trials are not needed."""
    recipe, overrides = session.recipe, session.overrides
    for seed in seeds:
        path = session.record_path(row, seed)
        record = Record.read(path) if path.exists() else None
        if record is not None and record.trials and record.overrides == overrides and record.is_current(recipe):
            return Selection(record.chosen, record.trials)
    return None


def _tune(session: _Session, row: Row) -> Selection | None:
    """Run the trials of a row for which there are no records yet and choose the best one; None if stopped."""
    recipe = session.recipe
    combinations, tuning = recipe.trials(row, session.scale), recipe.tuning
    if not combinations:
        return Selection()
    assert tuning is not None
    trials: list[dict[str, Any]] = []
    for index, combination in enumerate(combinations):
        values: list[float | None] = []
        for seed in tuning.seeds:
            job = _Job(session, row, seed, Selection(combination), trial=index)
            record = job.finished_record() or job.run(lambda fraction: None)
            if record is None:
                return None
            values.append(record.metrics.get(tuning.metric))
        trials.append({"settings": combination, "values": values})
    metric = next(metric for metric in recipe.metrics if metric.key == tuning.metric)
    sign = 1 if metric.higher_is_better else -1

    def score(trial: Mapping[str, Any]) -> float:
        return -inf if None in trial["values"] else sign * fmean(trial["values"])

    best = max(trials, key=score)  # the first in the order of the grid, if several are equally good
    shown = ", ".join(f"{path} = {value}" for path, value in best["settings"].items())
    session.on_message(f"{row.name}: {shown}, the best of {len(trials)} trials on held-out training data")
    return Selection(best["settings"], trials)


class _Job:
    """One row with one seed, or one trial of it: its settings and the paths of its files."""

    def __init__(
        self, session: _Session, row: Row, seed: int, selection: Selection, *, trial: int | None = None
    ) -> None:
        self.session, self.recipe, self.row, self.seed, self.selection = session, session.recipe, row, seed, selection
        changes = {**selection.chosen, **session.overrides}
        self.settings = self.recipe.settings(row, session.scale, changes, seed)
        self.path = session.record_path(row, seed)
        if trial is not None:
            assert self.recipe.tuning is not None
            self.settings["selection"] = self.recipe.tuning.held_out
            self.path = self.path.parent / "trials" / f"{trial}-{self.path.name}"
        self.measure_options = self.settings.get("measure", {})
        self.folder = self.path.with_suffix("")  # folder of the run, until its record is written
        self.processes = Processes()

    def finished_record(self) -> Record | None:
        """Return the record, or None if there is none or it belongs to other settings."""
        if not self.path.exists():
            return None
        record = Record.read(self.path)
        is_same = (record.recipe, record.row, record.seed) == (self.recipe.name, self.row.name, self.seed)
        return record if is_same and record.scale == self.session.scale and record.has_settings(self.settings) else None

    def run(self, report: Callable[[float], None]) -> Record | None:
        """Train and measure; return the record, which the first process also writes, or None if stopped.

        Args:
            report: called with the fraction done.
        """
        self._wait()  # until all processes have looked for the record
        if self.processes.rank == 0:
            _require_writable(self.path.parent)  # before training, not after it
            # Files of other settings are removed, the record first: a record without its tensors must not exist.
            for old in (self.path, self.path.with_suffix(".safetensors")):
                old.unlink(missing_ok=True)
        start = time.perf_counter()
        torch.manual_seed(self.seed)
        try:
            outcome = self._train(report) if self.recipe.compute is None else self._compute(self.recipe.compute)
        except Exception:
            _remove_empty_folders(self.path.parent, self.session.out)
            raise
        if outcome is None:
            return None
        seconds, environment = time.perf_counter() - start, self.session.environment
        record = Record(
            recipe=self.recipe.name,
            row=self.row.name,
            seed=self.seed,
            scale=self.session.scale,
            config=self.settings,
            metrics={key: finite_or_none(value) for key, value in outcome.metrics.items()},
            seconds=round(seconds, 3),
            # Six digits are enough for figures and keep records small.
            curves={key: [finite_or_none(f"{v:.6g}") for v in values] for key, values in outcome.curves.items()},
            commit=environment["commit"],
            versions={name: environment[name] for name in ("hypersphere", "python", "torch", "numpy")},
            machine=_machine(environment["machine"], self.session.device, self.processes.size),
            threads=environment["threads"],
            overrides=self.session.overrides,
            chosen=dict(self.selection.chosen),
            trials=[dict(trial) for trial in self.selection.trials],
        )
        self._wait()
        if self.processes.rank == 0:
            if outcome.tensors:
                write_tensors(outcome.tensors, self.path.with_suffix(".safetensors"))
            record.write(self.path)  # after the tensors, so that a record implies that they exist
            shutil.rmtree(self.folder, ignore_errors=True)
        self._wait()
        return record if self.processes.rank == 0 else Record.read(self.path)  # the same in all processes

    def _compute(self, compute: Callable[..., Outcome]) -> Outcome:
        """Return the outcome of a recipe without training."""
        root = _data_root(compute, self.session.data_root)
        return compute(self.settings["seed"], **self.measure_options, **root)

    def _train(self, report: Callable[[float], None]) -> Outcome | None:
        """Train from the last checkpoint to the end and measure; return None if stopped."""
        session = self.session
        config = config_of(self.settings)
        experiment = build_experiment(config, data_root=session.data_root, device=session.device)
        run = self._open(experiment)

        def on_step(trainer: Trainer) -> None:
            report(min(trainer.progress.step / trainer.steps, 0.999))

        trainer = Trainer(experiment, run, stop=session.stop, on_step=on_step, on_message=session.on_message)
        trainer.resume()
        measured, diverged, seconds = Outcome(), False, nan
        try:
            if trainer.progress.step == 0:
                self._log_start(experiment, run)
            if not trainer.train():
                return None
            seconds = trainer.seconds  # without the measurement that follows
            if self.recipe.measure is not None:
                experiment.objective.eval()
                root = _data_root(self.recipe.measure, session.data_root)
                measured = self.recipe.measure(experiment, run, **self.measure_options, **root)
        except FloatingPointError as error:
            session.on_message(f"{self.row.name}, seed {self.seed}: {error}")
            diverged, seconds = True, trainer.seconds
        trained = outcome_of_lines(run.metrics())
        metrics = {"seconds": seconds, "diverged": float(diverged)}
        if not diverged:
            metrics |= {**trained.metrics, **measured.metrics}
        return Outcome(metrics, {**trained.curves, **measured.curves}, measured.tensors)

    def _open(self, experiment: Experiment) -> Run:
        """Return the run of an earlier, interrupted attempt, or a new one."""
        if self.processes.rank == 0 and not self._is_resumable(experiment):
            shutil.rmtree(self.folder, ignore_errors=True)
            Run.of(self.folder, experiment)
        self._wait()
        return Run.open(self.folder)

    def _is_resumable(self, experiment: Experiment) -> bool:
        """Return True if the folder holds a run with the same settings and data."""
        try:
            run = Run.open(self.folder)
            run.require_same_data(experiment.data)
        except (ValueError, DamagedCheckpoint):
            return False
        return run.config == experiment.config

    def _log_start(self, experiment: Experiment, run: Run) -> None:
        """Log the metrics before training, the first point of every curve."""
        line = {"kind": "validation", "epoch": 0, "step": 0, **experiment.validation(experiment.objective)}
        if self.processes.rank == 0 and not any(old.get("step") == 0 for old in run.metrics()):
            run.log(line)

    def _wait(self) -> None:
        """Wait for all processes."""
        if self.processes.size > 1:
            torch.distributed.barrier()


def outcome_of_lines(lines: Iterable[Mapping[str, Any]]) -> Outcome:
    """Return metrics and curves of the logged lines of a run.

    Curves have one value per validation, and one before training except for the loss: `loss`, `error` (100 minus the
    accuracy), `energy` (mean over the hidden layers) and the metrics of other protocols, such as
    `verification.accuracy`. Fractions are in per cent; metrics of protocols outside this library are not changed. The
    metrics are the last values of the curves, and `accuracy`.

    >>> line = {"kind": "epoch", "epoch": 1, "loss": 0.5, "accuracy": 0.75}
    >>> outcome_of_lines([line]).metrics
    {'error': 25.0, 'accuracy': 75.0}
    """
    validated = [line for line in lines if line.get("kind") in ("epoch", "validation") and _metrics_of(line)]
    curves: dict[str, list[float]] = {"loss": [_number(line["loss"]) for line in validated if "loss" in line]}
    for key in _metrics_of(validated[-1]) if validated else ():
        values = [line.get(key) for line in validated]
        if key == "accuracy":
            curves["error"] = [100 * (1 - _number(value)) for value in values]
        elif key == "energy":
            curves["energy"] = [mean_energy(value) if value and None not in value.values() else nan for value in values]
        else:
            # Only the metrics of protocols of this library are known to be fractions.
            factor = 100 if key.partition(".")[0] in PROTOCOLS else 1
            curves[key] = [factor * _number(value) for value in values]
    metrics = {key: values[-1] for key, values in curves.items() if key != "loss"}
    if "error" in metrics:
        metrics["accuracy"] = 100 - metrics["error"]
    return Outcome(metrics, curves)


def _metrics_of(line: Mapping[str, Any]) -> list[str]:
    """Return the names of validation metrics in a line; there are none after an epoch without validation."""
    return [key for key, value in line.items() if key == "accuracy" or "." in key or (key == "energy" and value)]


def _number(value: float | None) -> float:
    return nan if value is None else float(value)


def _data_root(function: Callable[..., Any], data_root: Path | None) -> dict[str, Path | None]:
    """Return the argument `data_root` for a function that has this parameter."""
    return {"data_root": data_root} if "data_root" in inspect.signature(function).parameters else {}


def _require_writable(folder: Path) -> None:
    """Create a folder; raise a `ValueError` if files cannot be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"out must be a writable folder, not {folder}: {error.strerror}") from None


def _remove_empty_folders(folder: Path, end: Path) -> None:
    """Remove a folder and its parents as long as they are empty, up to `end`, which stays."""
    with suppress(OSError):  # raised unless the folder is empty
        while folder != end:
            folder.rmdir()
            folder = folder.parent


def _machine(name: str, device: Device, processes: int) -> str:
    device = torch.device("cpu" if device is None else device)
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = [
        name,
        *([] if device.type == "cpu" else [accelerator]),
        *([f"{processes} processes"] if processes > 1 else []),
    ]
    return ", ".join(parts)
