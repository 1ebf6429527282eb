"""`hypersphere train`: train one job, in one process or under torchrun, from the start or from its last checkpoint."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hypersphere._modes import evaluation_mode
from hypersphere._validation import require, require_package
from hypersphere.cli.catalogue import resolved
from hypersphere.cli.config import dotted_words, read_config, resolve
from hypersphere.cli.dry_run import plan
from hypersphere.cli.interrupts import interrupts
from hypersphere.cli.processes import is_broken, process_group, restarts
from hypersphere.cli.progress import View
from hypersphere.cli.start import read_start
from hypersphere.heads._collectives import Processes, problem_of
from hypersphere.training import Assembly, Job
from hypersphere.training.job_run import CONFIG, Run, refuse_existing
from hypersphere.training.session import Session

__all__ = ["train"]

RESUME = ("never", "auto")


def train(
    out: Path,
    *,
    config: Path | None = None,
    options: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    names: Sequence[str] = (),
    start: Path | None = None,
    resume: str = "never",
    data_root: Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    save_every: float = 60.0,
    keep: int = 3,
    log_every: int = 10,
    tensorboard: bool = False,
    dry_run: bool = False,
) -> int:
    """Train a job and write the run to a folder; return the exit code, 0 or 130.

    Args:
        out: the folder of the run.
        config: a file with settings.
        options: settings that have a command-line option, None where it was not given.
        words: the remaining arguments of the command line, such as `--head.m=4`.
        names: the options of the command, used to suggest a correction for a misspelt one.
        start: a run or a file with the initial weights.
        resume: "never", or "auto" to continue from the last checkpoint if there is one.
        data_root, device, threads, save_every, keep, log_every, tensorboard: see `hypersphere train --help`.
        dry_run: build everything, print the plan, and write nothing.
    """
    require(resume in RESUME, "--resume", f"one of {', '.join(RESUME)}", resume)
    require(log_every >= 1, "--log-every", "a number >= 1", log_every)
    require(save_every >= 0, "--save-every", "a number >= 0", save_every)
    require(keep >= 1, "--keep", "a number >= 1", keep)
    if tensorboard:
        require_package("tensorboard", "tensorboard", "track")
    resuming = resume == "auto" or restarts() > 0
    existing = Run.open(out) if resuming and (out / CONFIG).exists() else None
    job = _job(existing, config, options or {}, dotted_words(words, names), data_root)
    source = str(start.expanduser().resolve()) if start else existing.start if existing else None
    if existing is not None:
        _refuse_other(existing, job, source)
    if not resuming:
        refuse_existing(out)  # fail before the data are read
    if threads is not None:
        torch.set_num_threads(threads)
    first = int(os.environ.get("RANK", 0)) == 0
    say = _say if first else lambda message: None
    session: Session | None = None
    with ExitStack() as stack:
        try:
            signals = stack.enter_context(interrupts())
            where = stack.enter_context(process_group(device))
            saved = existing.checkpoints().steps() if existing is not None else []
            weights = read_start(Path(source), say) if source is not None and not saved else None
            assembly = _built(job, data_root, where, weights)
            if assembly.taken is not None and first:
                print(f"{'# ' * dry_run}from {source}: {assembly.taken}", flush=True)
            if dry_run:
                if first:
                    print(plan(assembly, out, where, saved[-1] if saved else None), flush=True)
                return 0
            session = Session(
                _run(out, assembly, source, resuming, stack),
                assembly,
                device=where,
                save_every=save_every,
                keep=keep,
                log_every=log_every,
                stop=lambda: signals.came,
                on_damage=say,
            )
            if resuming:
                _resume(session, first)
            if first:
                session.on_step = stack.enter_context(View(Console(highlight=False)))
                if tensorboard:
                    session.log = stack.enter_context(_tensorboard(session))
            signals.deferred = True
            session.train()
        except KeyboardInterrupt:
            return _interrupted(None if session is None else session.saved, out, first)
        except RuntimeError as error:
            if Processes().size > 1 and is_broken(error):
                raise ConnectionError(f"another process of this run has ended: {_line(error)}") from None
            raise
    if not session.finished:
        return _interrupted(session.saved, out, first)
    if first:
        print(f"Run: {out}", flush=True)
    return 0


def _job(
    existing: Run | None, config: Path | None, options: Mapping[str, Any], words: Any, data_root: Path | None
) -> Job:
    """Return the requested job: changes applied to the settings file, to the resumed run, or to the defaults."""
    file = {} if config is None else read_config(config)
    base = Job() if existing is None or config is not None else existing.job
    return _placed(Job.of(resolve(base.settings(), file, options, words)), data_root)


def _placed(job: Job, data_root: Path | None) -> Job:
    """Return the job with an absolute path to its images; a path relative to a data root is kept."""
    path = job.data.get("path")
    if data_root is not None or not isinstance(path, str):
        return job
    return replace(job, data={**job.data, "path": str(Path(path).expanduser().resolve())})


def _refuse_other(existing: Run, job: Job, start: str | None) -> None:
    """Raise a `ValueError` unless a run has these settings and these initial weights."""
    before = {**_placed(existing.job, None).settings(), "--from": existing.start}
    now = {**_placed(job, None).settings(), "--from": start}
    changed = [f"{key} was {before[key]!r} and is {now[key]!r}" for key in now if before[key] != now[key]]
    if changed:
        raise ValueError(
            f"{existing.folder} holds a run with different settings: {'; '.join(changed)}; choose another folder"
        )


def _built(job: Job, data_root: Path | None, where: torch.device, start: Mapping[str, Any] | None = None) -> Assembly:
    """Build the components of the job and check them with a forward pass on two examples."""
    try:
        assembly = job.build(data_root, start)
    except (TypeError, RuntimeError) as error:  # raised by torch and Python for options that do not fit
        raise ValueError(f"the job cannot be built: {_line(error)}") from None
    if Processes().size > 1:
        if assembly.task.graph is not None:
            raise ValueError(
                f"data {job.data['name']} is a single graph, which cannot be divided among processes; start one process"
            )
        clip = job.optimizer.get("clip")
        require(not (clip and job.head.get("sharded")), "optimizer.clip", "None with head.sharded", clip)
    objective, inputs = assembly.objective.to(where), assembly.task.inputs
    try:
        with torch.no_grad(), evaluation_mode(objective):
            x, _ = next(assembly.test_batches(2))
            objective.head.scores(objective.features(x.to(where)))  # type: ignore[operator]
    except (TypeError, RuntimeError, IndexError) as error:
        shape = tuple(inputs.shape[1:])
        message = f"the model {job.model['name']} does not fit inputs of shape {shape}: {_line(error)}"
        raise ValueError(message) from None
    if assembly.task.graph is None and min(len(inputs), job.batch_size) == 1:
        _try_one(assembly, x[:1].to(where))
    return assembly


def _try_one(assembly: Assembly, x: Tensor) -> None:
    """Raise a `ValueError` if the model, for example through BatchNorm, cannot train on batches of one example."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(assembly.network).train()(x)
    except ValueError as error:
        raise ValueError(f"this model needs batches of at least two examples, not one: {_line(error)}") from None


def _run(out: Path, assembly: Assembly, start: str | None, resuming: bool, stack: ExitStack) -> Run:
    """Return the run of the folder. The first process creates it if needed and locks it against other commands."""
    processes, job = Processes(), assembly.job

    def make() -> None:
        if processes.rank == 0:
            exists = resuming and (out / CONFIG).exists()
            run = (
                Run.open(out)
                if exists
                else Run.create(out, job, start, assembly.task.outline(), resolved(job.settings()))
            )
            stack.enter_context(run.alone())
            _refuse_other(run, job, start)  # another command may have created it in the meantime

    processes.raise_any(problem_of(make))
    return Run.open(out)


def _resume(session: Session, first: bool) -> None:
    checkpoint = session.resume()
    if checkpoint is not None and first:
        print(f"resuming from step {checkpoint.step} of {session.steps}", flush=True)
        threads = checkpoint.made_with.get("threads")
        if threads != torch.get_num_threads():
            _say(f"saved with {threads} threads, now {torch.get_num_threads()}: results may differ in rounding")


def _interrupted(saved: int | None, out: Path, first: bool) -> int:
    if first and saved is None:
        _say(f"interrupted; nothing new was saved in {out}")
    elif first:
        _say(f"interrupted; step {saved} is saved in {out}; run the same command with --resume auto to continue")
    return 130


def _say(message: str) -> None:
    print(f"hypersphere: {message}", file=sys.stderr, flush=True)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _tensorboard(session: Session) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a log function that also writes TensorBoard events, starting at the step of the session."""
    from torch.utils.tensorboard import SummaryWriter

    step = session.progress.step
    with SummaryWriter(str(session.run.folder / "tensorboard"), purge_step=step + 1 if step else None) as writer:

        def log(line: Mapping[str, Any]) -> None:
            session.run.log(line)
            for key, value in line.items():
                for name, number in (value if isinstance(value, Mapping) else {"": value}).items():
                    if isinstance(number, int | float) and key not in ("step", "epoch"):
                        writer.add_scalar("/".join(filter(None, (line["kind"], key, name))), number, line["step"])

        yield log
