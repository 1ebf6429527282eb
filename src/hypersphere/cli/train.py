"""`hypersphere train`: one job, alone or under torchrun, from the beginning or from its last checkpoint."""

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
from hypersphere.training.run import CONFIG, Run, refuse_existing
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
    """Train a job in a folder; return the exit code, 0 or 130.

    Args:
        out: the folder of the run.
        config: a file of settings.
        options: settings that have options of their own, None where not given.
        words: what is left of the command line, such as `--head.m=4`.
        names: the command's options, for the message about a wrong one.
        start: a run or a file whose weights to begin with.
        resume: "never", or "auto": from the last checkpoint if there is one.
        data_root, device, threads, save_every, keep, log_every, tensorboard: as the command's help says.
        dry_run: build everything, print what would be done, and write nothing.
    """
    require(resume in RESUME, "--resume", f"one of {', '.join(RESUME)}", resume)
    require(log_every >= 1, "--log-every", "a number >= 1", log_every)
    require(save_every >= 0, "--save-every", "a number >= 0", save_every)
    require(keep >= 1, "--keep", "a number >= 1", keep)
    if tensorboard:
        require_package("tensorboard", "tensorboard", "track")
    goes_on = resume == "auto" or restarts() > 0
    there = Run.open(out) if goes_on and (out / CONFIG).exists() else None
    job = _job(there, config, options or {}, dotted_words(words, names), data_root)
    source = str(start.expanduser().resolve()) if start else there.start if there else None
    if there is not None:
        _refuse_other(there, job, source)
    if not goes_on:
        refuse_existing(out)  # before the data are read
    if threads is not None:
        torch.set_num_threads(threads)
    first = int(os.environ.get("RANK", 0)) == 0
    say = _say if first else lambda words: None
    session: Session | None = None
    with ExitStack() as stack:
        try:
            signals = stack.enter_context(interrupts())
            where = stack.enter_context(process_group(device))
            saved = there.checkpoints().steps() if there is not None else []
            weights = read_start(Path(source), say) if source is not None and not saved else None
            assembly = _built(job, data_root, where, weights)
            if assembly.taken is not None and first:
                print(f"{'# ' * dry_run}from {source}: {assembly.taken}", flush=True)
            if dry_run:
                if first:
                    print(plan(assembly, out, where, saved[-1] if saved else None), flush=True)
                return 0
            session = Session(
                _run(out, assembly, source, goes_on, stack),
                assembly,
                device=where,
                save_every=save_every,
                keep=keep,
                log_every=log_every,
                stop=lambda: signals.came,
                on_damage=say,
            )
            if goes_on:
                _go_on(session, first)
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


def _job(there: Run | None, config: Path | None, options: Mapping[str, Any], words: Any, data_root: Path | None) -> Job:
    """The job that is asked for: changes to a file's, or to that of the run that goes on, or to the default one."""
    file = {} if config is None else read_config(config)
    base = Job() if there is None or config is not None else there.job
    return _placed(Job.of(resolve(base.settings(), file, options, words)), data_root)


def _placed(job: Job, data_root: Path | None) -> Job:
    """The job with its folder of images, unless that is below a data root, where it will be found from anywhere."""
    path = job.data.get("path")
    if data_root is not None or not isinstance(path, str):
        return job
    return replace(job, data={**job.data, "path": str(Path(path).expanduser().resolve())})


def _refuse_other(there: Run, job: Job, start: str | None) -> None:
    """Raise a `ValueError` unless a run has these settings and began with these weights."""
    before = {**_placed(there.job, None).settings(), "--from": there.start}
    now = {**_placed(job, None).settings(), "--from": start}
    changed = [f"{key} was {before[key]!r} and is {now[key]!r}" for key in now if before[key] != now[key]]
    if changed:
        raise ValueError(f"{there.folder} has a run with other settings: {'; '.join(changed)}; choose another folder")


def _built(job: Job, data_root: Path | None, where: torch.device, start: Mapping[str, Any] | None = None) -> Assembly:
    """The parts of the job, tried on two examples."""
    try:
        assembly = job.build(data_root, start)
    except (TypeError, RuntimeError) as error:  # what torch and Python make of options that do not fit
        raise ValueError(f"the job cannot be built: {_line(error)}") from None
    if Processes().size > 1:
        if assembly.task.graph is not None:
            raise ValueError(f"data {job.data['name']} is one graph, which processes cannot divide; start one process")
        clip = job.optimizer.get("clip")
        require(not (clip and job.head.get("sharded")), "optimizer.clip", "None with head.sharded", clip)
    objective, inputs = assembly.objective.to(where), assembly.task.inputs
    try:
        with torch.no_grad(), evaluation_mode(objective):
            x, _ = next(assembly.test_batches(2))
            objective.head.scores(objective.features(x.to(where)))  # type: ignore[operator]
    except (TypeError, RuntimeError, IndexError) as error:
        shape = tuple(inputs.shape[1:])
        words = f"the model {job.model['name']} does not fit inputs of shape {shape}: {_line(error)}"
        raise ValueError(words) from None
    if assembly.task.graph is None and min(len(inputs), job.batch_size) == 1:
        _try_one(assembly, x[:1].to(where))
    return assembly


def _try_one(assembly: Assembly, x: Tensor) -> None:
    """Refuse batches of one example where a norm of batches needs several."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(assembly.network).train()(x)
    except ValueError as error:
        raise ValueError(
            f"batches must be of two examples or more with this model, not of one: {_line(error)}"
        ) from None


def _run(out: Path, assembly: Assembly, start: str | None, goes_on: bool, stack: ExitStack) -> Run:
    """The run of the folder, made by the first process if it is not there; no other command trains in it meanwhile."""
    processes, job = Processes(), assembly.job

    def make() -> None:
        if processes.rank == 0:
            known = goes_on and (out / CONFIG).exists()
            run = (
                Run.open(out)
                if known
                else Run.create(out, job, start, assembly.task.outline(), resolved(job.settings()))
            )
            stack.enter_context(run.alone())
            _refuse_other(run, job, start)  # it may have been made since we looked

    processes.raise_any(problem_of(make))
    return Run.open(out)


def _go_on(session: Session, first: bool) -> None:
    checkpoint = session.resume()
    if checkpoint is not None and first:
        print(f"going on from step {checkpoint.step} of {session.steps}", flush=True)
        threads = checkpoint.made_with.get("threads")
        if threads != torch.get_num_threads():
            _say(f"saved with {threads} threads, now {torch.get_num_threads()}: the last bits may differ")


def _interrupted(saved: int | None, out: Path, first: bool) -> int:
    if first and saved is None:
        _say(f"interrupted; nothing new is saved in {out}")
    elif first:
        _say(f"interrupted; step {saved} is saved in {out}; the same command with --resume auto goes on")
    return 130


def _say(words: str) -> None:
    print(f"hypersphere: {words}", file=sys.stderr, flush=True)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _tensorboard(session: Session) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A log that writes events too, from the session's step on."""
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
