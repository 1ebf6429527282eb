"""Train an experiment in the folder of a run: signals, processes, progress, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from hypersphere._validation import require
from hypersphere.cli.initial_weights import read_weights
from hypersphere.cli.output import print_line, printable, warn
from hypersphere.cli.plan import checked_experiment, plan, start_line
from hypersphere.cli.processes import is_broken, process_group
from hypersphere.cli.progress import View
from hypersphere.cli.signals import interrupts
from hypersphere.heads._collectives import Processes, problem_of
from hypersphere.training import Config, Experiment, Run, Trainer
from hypersphere.training.components import foreign_code
from hypersphere.training.run import CONFIG

__all__ = ["require_same_weights", "train_in_folder"]


def train_in_folder(
    config: Config,
    out: Path,
    existing: Run | None,
    source: str | None,
    resuming: bool,
    dry_run: bool,
    data_root: Path | None,
    device: str | None,
) -> int:
    """Train, and return the exit code, 0 or 130."""
    first = int(os.environ.get("RANK", 0)) == 0
    say = warn if first else lambda message: None
    trainer: Trainer | None = None
    with ExitStack() as stack:
        try:
            signals = stack.enter_context(interrupts())
            where = stack.enter_context(process_group(device))
            saved = existing.checkpoints(on_damage=say).steps() if existing is not None else []
            weights = read_weights(Path(source), say) if source is not None and not saved else None
            experiment = checked_experiment(config, data_root, where, weights, say)
            if first and experiment.loaded is not None:
                print_line(f"{'# ' * dry_run}from {source}: {experiment.loaded}")
            if dry_run:
                if first:
                    print(printable(plan(experiment, out, saved[-1] if saved else None)), flush=True)
                return 0
            run = _run(out, experiment, source, resuming, stack)
            trainer = Trainer(experiment, run, stop=lambda: signals.came, say=say)
            if first:
                print_line(start_line(experiment))
            if resuming:
                _resume(trainer, first)
            if first:
                trainer.on_step = stack.enter_context(View(Console(highlight=False)))
            signals.deferred = True
            trainer.train()
        except KeyboardInterrupt:
            return _interrupted(None if trainer is None else trainer.saved, out, say)
        except RuntimeError as error:
            if Processes().size > 1 and is_broken(error):
                reason = str(error).strip().partition("\n")[0]
                raise ConnectionError(f"another process of this run has ended: {reason}") from None
            raise
    if not trainer.finished:
        return _interrupted(trainer.saved, out, say)
    if first:
        _print_end(trainer, out)
    return 0


def _print_end(trainer: Trainer, out: Path) -> None:
    """Print how training ended and which commands may follow."""
    chosen, best = trainer.config.validation, trainer.best
    if trainer.progress.step < trainer.steps:
        print_line(f"stopped early: {chosen.best} did not improve for {chosen.patience} validations")
    if best["step"] is not None:
        print_line(f"best {chosen.best} {best['value']:.4f} at step {best['step']}")
    skipped = trainer.experiment.loader.skipped
    if skipped:
        names = ", ".join(list(skipped)[:3]) + (", …" if len(skipped) > 3 else "")
        warn(f"{len(skipped)} files could not be decoded and were skipped: {names}")
    trust = " --trust-code" * bool(foreign_code(trainer.config))
    step = " --step best" * (best["step"] is not None)
    print_line(f"Run: {out}", f"Next: hypersphere evaluate {out}{step}{trust}, or hypersphere report {out}{trust}")


def _run(out: Path, experiment: Experiment, source: str | None, resuming: bool, stack: ExitStack) -> Run:
    """Return the run of the folder. The first process creates it if needed and locks it against other commands."""
    processes = Processes()

    def make() -> None:
        if processes.rank == 0:
            exists = resuming and (out / CONFIG).exists()
            run = Run.open(out) if exists else Run.of(out, experiment, weights=source)
            stack.enter_context(run.alone())
            require_same_weights(run, source)  # another command may have created it in the meantime
            done = max(run.checkpoints().steps(), default=0)
            accepted = f"at least the {done} steps that the run has done"
            require(experiment.steps >= done, "epochs or steps", accepted, experiment.steps)
            run.with_config(experiment.config)  # settings that may change are updated

    processes.raise_any(problem_of(make))
    return Run.open(out)


def require_same_weights(run: Run, source: str | None) -> None:
    """Raise a `ValueError` unless a run started from these weights."""
    if run.weights != source:
        reason = f"holds a run with different settings: --from was {run.weights} and is {source}"
        raise ValueError(f"{run.folder} {reason}; choose another folder")


def _resume(trainer: Trainer, first: bool) -> None:
    checkpoint = trainer.resume()
    if checkpoint is not None and first:
        is_finished = checkpoint.step == trainer.steps
        more = "; the run is finished, and more --epochs or --steps extend it" * is_finished
        print_line(f"resuming from step {checkpoint.step} of {trainer.steps}{more}")
        threads = checkpoint.made_with.get("threads")
        if threads != torch.get_num_threads():
            warn(f"saved with {threads} threads, now {torch.get_num_threads()}: results may differ in rounding")


def _interrupted(saved: int | None, out: Path, say: Callable[[str], None]) -> int:
    if saved is None:
        say(f"interrupted; nothing new was saved in {out}")
    else:
        say(f"interrupted; step {saved} is saved in {out}; run the same command with --resume auto to continue")
    return 130
