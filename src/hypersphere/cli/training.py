"""Train an experiment in the folder of a run, with signals, processes, progress and messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from hypersphere._collectives import Processes, error_message
from hypersphere._validation import require
from hypersphere.cli.output import is_out_of_memory, print_line, warn
from hypersphere.cli.progress import TrainingProgress
from hypersphere.cli.settings import settings_json
from hypersphere.training import (
    Config,
    Experiment,
    Run,
    Trainer,
    build_experiment,
    check_experiment,
    interrupts,
    process_group,
    read_weights,
)
from hypersphere.training.components import foreign_code
from hypersphere.training.config import CONFIG
from hypersphere.training.processes import other_process_ended

__all__ = ["train_in_folder"]


def train_in_folder(
    config: Config,
    out: Path,
    *,
    existing: Run | None,
    failed: Run | None,
    source: str | None,
    resuming: bool,
    dry_run: bool,
    data_root: Path | None,
    device: str | None,
) -> int:
    """Train, and return the exit code: 0, or 130 after an interrupt.

    Args:
        config: the settings.
        out: folder of the run.
        existing: the run in the folder if it is resumed.
        failed: a run in the folder without a checkpoint, which the new run replaces.
        source: the run or file with the initial weights.
        resuming: continue from the last checkpoint if there is one.
        dry_run: print settings and sizes without training.
        data_root, device: see `hypersphere train`.
    """
    is_first = int(os.environ.get("RANK", 0)) == 0
    warn_on_rank0: Callable[[str], None] = warn if is_first else lambda message: None
    print_on_rank0: Callable[..., None] = print_line if is_first else lambda *lines: None
    trainer: Trainer | None = None
    with ExitStack() as stack:
        try:
            signals = stack.enter_context(interrupts())
            torch_device = stack.enter_context(process_group(device))
            if existing is not None:
                _require_same_weights(existing, source)
            steps = existing.checkpoints(on_damage=warn_on_rank0).steps() if existing is not None else []
            weights = read_weights(source, on_damage=warn_on_rank0) if source is not None and not steps else None
            try:
                experiment = build_experiment(config, data_root=data_root, weights=weights, device=torch_device)
            except (TypeError, RuntimeError) as error:  # raised by torch and Python for invalid options
                if is_out_of_memory(error):
                    raise
                raise ValueError(f"the experiment cannot be built: {_first_line(error)}") from error
            check_experiment(experiment, on_message=warn_on_rank0)
            if experiment.loaded is not None:
                print_on_rank0(f"{'# ' * dry_run}from {source}: {experiment.loaded}")
            if dry_run:
                print_on_rank0(_plan(experiment, out, steps))
                return 0
            run = _open_locked(out, experiment, source, resuming, failed, stack)
            trainer = Trainer(experiment, run, stop=lambda: signals.received, on_message=warn_on_rank0)
            print_on_rank0(experiment)
            if resuming:
                _resume(trainer, print_on_rank0, warn_on_rank0)
            if is_first:
                trainer.on_step = stack.enter_context(TrainingProgress(Console(highlight=False)))
            signals.deferred = True
            trainer.train()
        except KeyboardInterrupt:
            pass  # an interrupt before the first step, or the second one
        except RuntimeError as error:
            if Processes().size > 1 and other_process_ended(error):
                raise ConnectionError(f"another process of this run has ended: {_first_line(error)}") from None
            raise
    if trainer is not None and trainer.finished:
        _print_end(trainer, out, print_on_rank0, warn_on_rank0)
        return 0
    if trainer is None or trainer.saved is None:
        warn_on_rank0(f"interrupted; nothing new was saved in {out}")
    else:
        warn_on_rank0(
            f"interrupted; step {trainer.saved} is saved in {out}; run the same command with --resume auto to continue"
        )
    return 130


def _open_locked(
    out: Path, experiment: Experiment, source: str | None, resuming: bool, failed: Run | None, stack: ExitStack
) -> Run:
    """Return the run of the folder. The first process creates it if needed, and locks it until `stack` is closed."""
    processes = Processes()

    def prepare() -> None:
        if processes.rank == 0:
            if failed is not None:
                stack.enter_context(failed.locked())  # raises if another process is training it
                failed.discard()
            exists = resuming and (out / CONFIG).exists()
            run = Run.open(out) if exists else Run.of(out, experiment, weights=source)
            if failed is None:
                stack.enter_context(run.locked())
            _require_same_weights(run, source)  # another command may have created it in the meantime
            done = max(run.checkpoints().steps(), default=0)
            accepted = f"at least the {done} step{'s' * (done != 1)} that the run has done"
            require(experiment.steps >= done, "epochs or steps", accepted, experiment.steps)
            run.with_config(experiment.config)  # settings that may change are updated

    # With several processes, an `OSError` is also raised in all, because the others would wait for the first one.
    processes.raise_everywhere(error_message(prepare, (ValueError, OSError) if processes.size > 1 else ValueError))
    return Run.open(out)


def _require_same_weights(run: Run, source: str | None) -> None:
    if run.weights != source:
        reason = f"holds a run with different settings: --from was {run.weights} and is {source}"
        raise ValueError(f"{run.folder} {reason}; choose another folder")


def _plan(experiment: Experiment, out: Path, steps: list[int]) -> str:
    """Return the resolved settings as JSON, followed by sizes as comments, so that the text is valid YAML."""
    split = experiment.data
    shape = "×".join(map(str, (experiment.outline or {"shape": ()})["shape"]))
    of_shape = f" of shape {shape}" if shape else ""  # the nodes of a graph have none
    held_out = 0 if split.validation is None else len(split.validation)
    purpose = "selection" if experiment.config.selection else "test"
    held_out_examples = f"{held_out:,} {purpose} examples{' of other classes' * split.open_set}"
    per_epoch = experiment.steps_per_epoch
    lines = [
        f"{len(split.train):,} training examples{of_shape}, {held_out_examples}, {len(split.classes):,} classes",
        f"{per_epoch:,} step{'s' * (per_epoch != 1)} per epoch, {experiment.steps:,} in total",
        f"network: {_sizes(experiment.network)}, {experiment.network.feature_dim:,} features",
        f"head: {_sizes(experiment.head)}",
        f"{experiment.device}, processes: {Processes().size}, threads: {torch.get_num_threads()}",
        f"{out}: {f'would continue from step {steps[-1]:,}' if steps else 'a new run'}",
    ]
    return "\n".join([settings_json(experiment.config.settings()), *(f"# {line}" for line in lines)])


def _sizes(module: nn.Module) -> str:
    """Return the number of parameters and how many of them are trained.

    >>> _sizes(nn.Linear(3, 2).requires_grad_(False))
    '8 parameters, 0 trained'
    """
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{sum(parameter.numel() for parameter in parameters):,} parameters, {trained:,} trained"


def _resume(trainer: Trainer, print_on_rank0: Callable[..., None], warn_on_rank0: Callable[[str], None]) -> None:
    """Restore the last checkpoint, if there is one, and print what follows from it."""
    checkpoint = trainer.resume()
    if checkpoint is not None:
        is_finished = checkpoint.step == trainer.steps and trainer.progress.batches == 0
        advice = "; the run is finished, and more --epochs or --steps extend it" * is_finished
        print_on_rank0(f"resuming from step {checkpoint.step} of {trainer.steps}{advice}")
        threads = checkpoint.made_with.get("threads")
        if threads != torch.get_num_threads():
            warn_on_rank0(
                f"saved with {threads} threads, now {torch.get_num_threads()}: results may differ in rounding"
            )


def _print_end(
    trainer: Trainer, out: Path, print_on_rank0: Callable[..., None], warn_on_rank0: Callable[[str], None]
) -> None:
    """Print how training ended and which commands may follow."""
    validation, best = trainer.config.validation, trainer.best
    if trainer.progress.step < trainer.steps:
        print_on_rank0(f"stopped early: {validation.best} did not improve for {validation.patience} validations")
    if best["step"] is not None:
        print_on_rank0(f"best {validation.best} {best['value']:.4f} at step {best['step']}")
    skipped = list(trainer.experiment.loader.skipped)
    if skipped:
        names = ", ".join(skipped[:3]) + ", …" * (len(skipped) > 3)
        warn_on_rank0(f"{len(skipped)} files could not be decoded and were skipped: {names}")
    trust_option = " --trust-code" * bool(foreign_code(trainer.config))
    step_option = " --step best" * (best["step"] is not None)
    arguments = f"{out}{step_option}{trust_option}"
    print_on_rank0(f"Run: {out}", f"Next: hypersphere evaluate {arguments}, or hypersphere report {arguments}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
