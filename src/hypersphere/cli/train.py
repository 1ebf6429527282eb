"""`hypersphere train`: one job, alone or under torchrun, from the beginning or from its last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from hypersphere.cli.config import dotted_words, read_config, resolve
from hypersphere.cli.progress import View
from hypersphere.data.errors import require_package
from hypersphere.functions.menu import require
from hypersphere.heads.collectives import Processes, problem_of
from hypersphere.training import Assembly, Job
from hypersphere.training.run import CONFIG, Run
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
    resume: str = "never",
    data_root: Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    save_every: float = 60.0,
    log_every: int = 10,
    tensorboard: bool = False,
) -> int:
    """Train a job in a folder; return the exit code, 0 or 130.

    Args:
        out: the folder of the run.
        config: a file of settings.
        options: settings that have options of their own, None where not given.
        words: what is left of the command line, such as `--head.m=4`.
        names: the command's options, for the message about a wrong one.
        resume: "never", or "auto": from the last checkpoint if there is one.
        data_root, device, threads, save_every, log_every, tensorboard: as the command's help says.
    """
    require(resume in RESUME, "--resume", f"one of {', '.join(RESUME)}", resume)
    require(log_every >= 1, "--log-every", "a number >= 1", log_every)
    require(save_every >= 0, "--save-every", "a number >= 0", save_every)
    if tensorboard:
        require_package("tensorboard", "tensorboard", "track")
    goes_on = resume == "auto" or _restarts() > 0
    job = _job(out, config, options or {}, dotted_words(words, names), goes_on)
    if threads is not None:
        torch.set_num_threads(threads)
    first = int(os.environ.get("RANK", 0)) == 0
    with ExitStack() as stack:
        try:
            signals = stack.enter_context(_signals())
            where = stack.enter_context(_processes(device))
            assembly = _built(job, data_root, where)
            session = Session(
                _run(out, job, goes_on),
                assembly,
                device=where,
                save_every=save_every,
                log_every=log_every,
                stop=lambda: signals.came,
                on_damage=_say if first else lambda words: None,
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
            return _interrupted(f"nothing new is saved in {out}", first)
        except RuntimeError as error:
            if Processes().size > 1 and _is_broken(error):
                raise ConnectionError(f"another process of this run has ended: {_line(error)}") from None
            raise
    if not session.finished:
        again = "the same command with --resume auto goes on"
        return _interrupted(f"step {session.progress.step} is saved in {out}; {again}", first)
    if first:
        print(f"Run: {out}", flush=True)
    return 0


def _job(out: Path, config: Path | None, options: Mapping[str, Any], words: Any, goes_on: bool) -> Job:
    """The job that is asked for; that of the run itself, where it goes on, must be the same."""
    file = {} if config is None else read_config(config)
    there = Run.open(out).job if goes_on and (out / CONFIG).exists() else None
    base = Job() if there is None or config is not None else there
    job = Job.of(resolve(base.settings(), file, options, words))
    if there is not None and job != there:
        before, now = there.settings(), job.settings()
        changed = [f"{key} was {before[key]!r} and is {now[key]!r}" for key in now if before[key] != now[key]]
        raise ValueError(f"{out} has a run with other settings: {'; '.join(changed)}; choose another folder")
    return job


def _built(job: Job, data_root: Path | None, where: torch.device) -> Assembly:
    """The parts of the job, tried on two examples."""
    try:
        assembly = job.build(data_root)
    except (TypeError, RuntimeError) as error:  # what torch and Python make of options that do not fit
        raise ValueError(f"the job cannot be built: {_line(error)}") from None
    if Processes().size > 1:
        if assembly.task.graph is not None:
            raise ValueError(f"data {job.data['name']} is one graph, which processes cannot divide; start one process")
        clip = job.optimizer.get("clip")
        require(not (clip and job.head.get("sharded")), "optimizer.clip", "None with head.sharded", clip)
    objective, inputs = assembly.objective.to(where), assembly.task.inputs
    objective.eval()
    try:
        with torch.no_grad():
            x, _ = next(assembly.test_batches(2))
            objective.head.scores(objective.features(x.to(where)))  # type: ignore[operator]
    except (TypeError, RuntimeError, IndexError) as error:
        shape = tuple(inputs.shape[1:])
        words = f"the model {job.model['name']} does not fit inputs of shape {shape}: {_line(error)}"
        raise ValueError(words) from None
    return assembly


def _run(out: Path, job: Job, goes_on: bool) -> Run:
    """The run of the folder, made by the first process if it is not there."""
    processes = Processes()

    def make() -> None:
        if processes.rank == 0 and not (goes_on and (out / CONFIG).exists()):
            Run.create(out, job)

    processes.raise_any(problem_of(make))
    return Run.open(out)


def _go_on(session: Session, first: bool) -> None:
    checkpoint = session.resume()
    if checkpoint is not None and first:
        print(f"going on from step {checkpoint.step} of {session.steps}", flush=True)
        threads = checkpoint.made_with.get("threads")
        if threads != torch.get_num_threads():
            _say(f"saved with {threads} threads, now {torch.get_num_threads()}: the last bits may differ")


def _interrupted(words: str, first: bool) -> int:
    if first:
        _say(f"interrupted; {words}")
    return 130


def _say(words: str) -> None:
    print(f"hypersphere: {words}", file=sys.stderr, flush=True)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class _Signals:
    """Whether an interrupt came; one that comes while not deferred, or a second one, ends the program at once."""

    def __init__(self) -> None:
        self.came = self.deferred = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came or not self.deferred:
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signals) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _restarts() -> int:
    """How many times torchrun has started the processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def _processes(device: str | None) -> Iterator[torch.device]:
    """The device to compute on, and the process group that torchrun asks for meanwhile."""
    number = int(os.environ.get("WORLD_SIZE", 1))
    try:
        chosen = torch.device(device) if device is not None else _default_device(number)
        torch.empty((), device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used: {_line(error)}") from None
    if number == 1:
        yield chosen
        return
    from torch.distributed.rendezvous import rendezvous

    # torchrun keeps its store when it starts workers again: they must not find the addresses of those before them
    store, rank, _ = next(rendezvous("env://"))
    own = dist.PrefixStore(f"start-{_restarts()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(dist.get_default_backend_for_device(chosen), store=own, rank=rank, world_size=number)
    try:
        yield chosen
    finally:
        dist.destroy_process_group()


def _default_device(number: int) -> torch.device:
    if not torch.accelerator.is_available():
        return torch.get_default_device()
    if number > 1:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _is_broken(error: RuntimeError) -> bool:
    """Whether a collective failed because a process has ended."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in ("gloo", "nccl", "has ended", "peer"))


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
