"""`hypersphere train`: train an experiment, in one process or under torchrun, from the start or a checkpoint."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypersphere._validation import require
from hypersphere.cli.options import DataRoot, Device, Threads, TrustCode
from hypersphere.cli.output import print_line, printable, warn
from hypersphere.cli.settings import changed_settings, read_settings, with_settings
from hypersphere.training.config import Config, set_path

if TYPE_CHECKING:
    from hypersphere.training import Experiment, Run, Trainer

__all__ = ["train"]

RESUME = ("never", "auto")


@with_settings
def train(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Read settings from this .yaml or .json file.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: KEY=VALUE, for example head.m=4.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write the run to.")] = Path("runs/train"),
    weights: Annotated[
        Path | None, typer.Option("--from", help="Start from the weights of this run or .safetensors file.")
    ] = None,
    resume: Annotated[str, typer.Option(help="never, or auto: continue from the last checkpoint, if any.")] = "never",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print settings and sizes without training.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="The same as --trackers tensorboard.")] = False,
    data_root: DataRoot = None,
    device: Device = None,
    threads: Threads = None,
    trust_code: TrustCode = False,
    **settings: Any,
) -> None:
    """Train a model. Options of a component take dots: --head.m=4, --optimizer.lr=0.1, --data.limit=500.

    A component is an entry of `hypersphere list`, or an import path such as my_module:Net. With N processes:
    `torchrun --nproc-per-node N -m hypersphere train …`; --head.sharded then divides the classes among them.
    """
    from hypersphere.cli.processes import restarts
    from hypersphere.training.run import CONFIG, Run, refuse_existing

    require(resume in RESUME, "--resume", f"one of {', '.join(RESUME)}", resume)
    if tensorboard:
        settings["trackers"] = settings["trackers"] or "tensorboard"
    resuming = resume == "auto" or restarts() > 0
    existing = Run.open(out) if resuming and (out / CONFIG).exists() else None
    if not resuming:
        refuse_existing(out)  # fail before the data are read
    known = [name for parameter in ctx.command.params for name in parameter.opts]

    def requested(base: Config, file: Path | None) -> Config:
        changed = changed_settings(base.settings(), file, settings, ctx.args, assignments or [], known)
        return Config.of(_absolute_paths(changed, data_root))

    chosen = requested(existing.config if existing is not None and config is None else Config(), config)
    if not trust_code:
        # What the user wrote is trusted; what comes from the folder of a run is not.
        from_run = config is not None and "format" in read_settings(config, whole=True)
        _require_trusted(chosen, requested(Config(), None if from_run else config))
    source = str(weights.expanduser().resolve()) if weights else existing.weights if existing else None
    if existing is not None:
        _require_same_weights(existing, source)
    code = _train(chosen, out, existing, source, resuming, dry_run, data_root, device)
    if code:
        raise typer.Exit(code)


def _absolute_paths(settings: dict[str, Any], data_root: Path | None) -> dict[str, Any]:
    """Return settings with absolute paths of the data; paths relative to a data root are kept."""
    for option in ("path", "pairs"):
        value = settings["data"].get(option) if isinstance(settings["data"], dict) else None
        if data_root is None and isinstance(value, str):
            settings = set_path(settings, f"data.{option}", str(Path(value).expanduser().resolve()))
    return settings


def _require_trusted(config: Config, requested: Config) -> None:
    from hypersphere.training.components import foreign_code

    others = [name for name in foreign_code(config) if name not in foreign_code(requested)]
    if others:
        raise ValueError(f"the settings name code outside hypersphere ({', '.join(others)}), which needs --trust-code")


def _train(
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
    from rich.console import Console

    from hypersphere.cli.initial_weights import read_weights
    from hypersphere.cli.plan import checked_experiment, plan, start_line
    from hypersphere.cli.processes import is_broken, process_group
    from hypersphere.cli.progress import View
    from hypersphere.cli.signals import interrupts
    from hypersphere.heads._collectives import Processes
    from hypersphere.training import Trainer

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
        print_line(f"Run: {out}", f"Next: hypersphere evaluate {out}, or hypersphere report {out}")
    return 0


def _run(out: Path, experiment: Experiment, source: str | None, resuming: bool, stack: ExitStack) -> Run:
    """Return the run of the folder. The first process creates it if needed and locks it against other commands."""
    from hypersphere.heads._collectives import Processes, problem_of
    from hypersphere.training.run import CONFIG, Run

    processes = Processes()

    def make() -> None:
        if processes.rank == 0:
            exists = resuming and (out / CONFIG).exists()
            run = Run.open(out) if exists else Run.of(out, experiment, weights=source)
            stack.enter_context(run.alone())
            _require_same_weights(run, source)  # another command may have created it in the meantime
            run.with_config(experiment.config)  # settings that may change are updated

    processes.raise_any(problem_of(make))
    return Run.open(out)


def _require_same_weights(run: Run, source: str | None) -> None:
    if run.weights != source:
        reason = f"holds a run with different settings: --from was {run.weights} and is {source}"
        raise ValueError(f"{run.folder} {reason}; choose another folder")


def _resume(trainer: Trainer, first: bool) -> None:
    import torch

    checkpoint = trainer.resume()
    if checkpoint is not None and first:
        print_line(f"resuming from step {checkpoint.step} of {trainer.steps}")
        threads = checkpoint.made_with.get("threads")
        if threads != torch.get_num_threads():
            warn(f"saved with {threads} threads, now {torch.get_num_threads()}: results may differ in rounding")


def _interrupted(saved: int | None, out: Path, say: Any) -> int:
    if saved is None:
        say(f"interrupted; nothing new was saved in {out}")
    else:
        say(f"interrupted; step {saved} is saved in {out}; run the same command with --resume auto to continue")
    return 130
