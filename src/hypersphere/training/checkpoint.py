"""Checkpoints: folders that a kill at any moment leaves intact, verified by checksums, for any number of processes.

A checkpoint of step 123 is a folder `step-00000123` with these files:

- `weights.safetensors` holds the tensors of all modules, with the names of their state dicts.
- `state.safetensors` and `state.json` hold everything else: optimiser, schedule, random numbers, position in the data.
- `weights-1.safetensors`, `state-1.safetensors`, … hold the rows of process 1, … of tensors that are divided by rows.
- `manifest.json` holds the size and SHA-256 of each file and a SHA-256 of itself. It is written last.

No process ever holds the rows of another one. Another number of processes can read the checkpoint; each reads the rows
that it needs. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import stat
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hypersphere._files import flush, make_folder
from hypersphere._validation import require
from hypersphere.heads import ShardedHead
from hypersphere.heads._collectives import Processes
from hypersphere.training._state_files import Rows, RowShard, TensorFiles, flatten, unflatten, write_tensors

__all__ = ["Checkpoint", "Checkpoints", "DamagedCheckpoint"]

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
DAMAGED = "damaged-"


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint whose content is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: its folder, the number of steps, and the versions it was made with."""

    path: Path
    step: int
    made_with: dict[str, Any]

    def weights(self) -> dict[str, dict[str, Any]]:
        """Read the state dicts of all modules, by name. Tensors that are divided among processes are complete."""
        files = self._files("weights")
        modules: dict[str, dict[str, Any]] = self._state()["modules"]
        for full_name in files.names():
            name, key = full_name.split(".", 1)
            modules[name][key] = files.read(full_name)
        return modules

    def state(self) -> dict[str, Any]:
        """Read everything that was saved except the modules; each call reads the files again."""
        return self._state()["state"]

    def restore_(self, modules: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None) -> None:
        """Load the saved state into modules, and into other objects with a `load_state_dict`, in place.

        Args:
            modules: some or all of the saved modules, by name. Modules whose parameters are divided among processes
                (with a `ShardedHead`, or by `fully_shard`) load their rows.
            state: some or all of the other saved objects, by name. Values without `load_state_dict` are skipped; read
                them with `state()`. Optimisers of divided parameters load their rows.
        """
        layout = _Layout(modules)
        files = self._files("weights")
        skeleton = self._skeleton()
        available = {"modules": skeleton["modules"], "state": skeleton["state"] if state else {}}
        if state and not available["state"]:
            advice = "start a new run from them with hypersphere train --from, or restore the modules only"
            raise ValueError(f"{self.path} holds weights only, so training cannot resume from it; {advice}")
        for given, kind in ((modules, "modules"), (state or {}, "state")):
            missing = sorted(set(given) - set(available[kind]))
            require(not missing, "names", f"among the saved names {', '.join(sorted(available[kind]))}", missing)
        others = self._files("state")
        for name, module in modules.items():
            extra = unflatten(skeleton["modules"][name], others.read)
            layout.load_(name, module, files, extra)
        for name, part in (state or {}).items():
            if hasattr(part, "load_state_dict"):
                rows = layout.rows_of_states(part, ("state", name))
                saved = unflatten(skeleton["state"][name], partial(_read_rows, others, rows))
                part.load_state_dict(layout.with_distributed_tensors(part, saved))

    def _files(self, kind: str) -> TensorFiles:
        with _judging(self.path):
            return TensorFiles(sorted(self.path.glob(f"{kind}*.safetensors")))

    def _skeleton(self) -> dict[str, Any]:
        with _judging(self.path):
            return _read_skeleton(self.path)

    def _state(self) -> dict[str, Any]:
        return unflatten(self._skeleton(), self._files("state").read)


class Checkpoints:
    """The last checkpoints of a run, each in a folder `step-00000123` (with `.1`, `.2`… if the step is saved again).

    A checkpoint is written under a temporary name and renamed when it is complete. With several processes, all call the
    same methods in the same order and see the same folder; only one such group at a time may save. A damaged checkpoint
    is renamed to `damaged-step-00000123` at the next save.

    Args:
        folder: folder of the checkpoints, created at the first save.
        keep: number of checkpoints to keep, and number of damaged ones to keep.
        on_damage: called with a message for each damaged checkpoint that `latest` skips.
        protected: a step whose checkpoint is kept although it is old, for example the best one; None for none.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> layer, folder = nn.Linear(2, 2), TemporaryDirectory()
        >>> checkpoints = Checkpoints(folder.name)
        >>> _ = checkpoints.save(10, {"layer": layer}, {"epoch": 1})
        >>> again = nn.Linear(2, 2)
        >>> checkpoint = checkpoints.latest()
        >>> checkpoint.restore_({"layer": again})
        >>> checkpoint.step, checkpoint.state(), bool((again.weight == layer.weight).all())
        (10, {'epoch': 1}, True)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        *,
        on_damage: Callable[[str], None] = warnings.warn,
        protected: int | None = None,
    ) -> None:
        require(keep >= 1, "keep", "a number >= 1", keep)
        self.folder, self.keep, self.on_damage, self.protected = Path(folder), keep, on_damage, protected
        self.processes = Processes()
        self._damaged: set[Path] = set()  # skipped checkpoints; the next save renames them

    def save(self, step: int, modules: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint, remove all but the last `keep`, and return the folder of the new one.

        Args:
            step: number of steps so far.
            modules: everything with weights and buffers, by name: model, head, regularisers.
            state: everything else by name: objects with a `state_dict` (optimiser, schedule, gradient scaler, loader,
                `RandomState`), or plain values. The first process saves its values; of tensors that are divided among
                processes, each process saves its rows.

        Raises:
            ValueError: if a value cannot be saved, or the folder has an intact checkpoint of a later step.
            OSError: if the disk is full or not writable; existing checkpoints are not changed.
        """
        require(step >= 0, "step", "a number >= 0", step)
        first = self.processes.rank == 0
        draft = self._together(lambda: self._begin(step) if first else None, step)[0]
        assert draft is not None
        try:
            content = self._together(lambda: _write_part(draft, self.processes.rank, modules, state or {}), step)
            # The manifest is written last: a folder without one is not a checkpoint.
            path = self._together(lambda: self._finish(draft, step, content) if first else None, step)[0]
        finally:
            if first:
                shutil.rmtree(draft, ignore_errors=True)
        assert path is not None
        return path

    def _begin(self, step: int) -> Path:
        make_folder(self.folder)
        for leftover in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._refuse_later(step)
        self._set_damaged_aside()
        draft = self._aside(f"step-{step:08d}")
        draft.mkdir()
        return draft

    def _finish(self, draft: Path, step: int, parts: list[dict[str, Any]]) -> Path:
        files = {name: entry for part in parts for name, entry in part.items()}
        manifest = {"format": FORMAT, "step": step, "files": files, "made_with": _made_with(len(parts))}
        (draft / MANIFEST).write_text(_sealed(manifest), encoding="utf-8")
        for name in (MANIFEST, "."):
            flush(draft / name)
        before = self._all()
        again = [attempt + 1 for at, attempt, _ in before if at == step]
        path = draft.rename(self.folder / (f"step-{step:08d}" + (f".{max(again)}" if again else "")))
        flush(self.folder)
        older = [old for at, _, old in before if at < step]
        remaining = older[max(len(older) - self.keep + 1, 0) :]
        for at, _, old in before:
            if old not in remaining and (at != self.protected or at == step) and not is_foreign(old):
                self._remove(old)
        return path

    def _together(self, work: Callable[[], Any], step: int) -> list[Any]:
        """Run a part of saving in every process and return all results; raise the first error in every process."""
        result, failure = None, None
        try:
            result = work()
        except (ValueError, OSError) as error:
            failure = error
        results = self.processes.objects((result, failure))
        for _, reported in results:
            if isinstance(reported, OSError):
                context = f"the checkpoint of step {step} cannot be saved in {self.folder}"
                raise with_context(reported, context) from failure
            if reported is not None:
                raise reported
        return [value for value, _ in results]

    def latest(self) -> Checkpoint | None:
        """Return the last intact checkpoint, or None if there are no checkpoints.

        Raises:
            DamagedCheckpoint: if all checkpoints are damaged.
            ValueError: if the last one has another format.
            OSError: if the disk or the system does not allow reading the last one.
        """
        damages = []
        for step, _, path in reversed(self.processes.objects(self._all())[0]):
            try:
                checkpoint = read_checkpoint(path, step, self.processes)
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                damages.append(f"{path.name} is damaged: {error}")
            else:
                for damage in damages:
                    self.on_damage(f"{damage}; using {path.name} instead")
                return checkpoint
        if damages:
            raise DamagedCheckpoint(f"no intact checkpoint in {self.folder}: {'; '.join(damages)}")
        return None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; if the step was saved several times, the last intact one."""
        paths = [path for at, _, path in self._all() if at == step]
        require(bool(paths), "step", f"one of {', '.join(map(str, dict.fromkeys(self.steps())))}", step)
        damage: DamagedCheckpoint | None = None
        for path in reversed(paths):
            try:
                return read_checkpoint(path, step, self.processes)
            except DamagedCheckpoint as error:
                damage = damage or DamagedCheckpoint(f"{path} is damaged: {error}")
        assert damage is not None
        raise damage

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in increasing order, without verifying them."""
        return [step for step, _, _ in self._all()]

    def _all(self, prefix: str = "") -> list[tuple[int, int, Path]]:
        """Return step, attempt and folder of each checkpoint in increasing order."""
        entries = []
        for path in self.folder.glob(f"{prefix}step-*"):
            if match := re.fullmatch(rf"{prefix}step-(\d{{8,}})(?:\.(\d+))?", path.name):
                entries.append((int(match[1]), int(match[2] or 0), path))
        return sorted(entries)

    def _refuse_later(self, step: int) -> None:
        for later, _, path in self._all():
            if later > step and path not in self._damaged:
                try:
                    read_checkpoint(path, later)
                except DamagedCheckpoint:
                    self._damaged.add(path)
                    continue
                raise ValueError(f"step must be at least {later}, because {path} exists, not {step}")

    def _set_damaged_aside(self) -> None:
        """Rename the damaged checkpoints, so that they are neither counted nor used, and keep the last of them."""
        for path in sorted(self._damaged):
            name, again = f"{DAMAGED}{path.name.partition('.')[0]}", 0
            while (place := self.folder / (f"{name}.{again}" if again else name)).exists():
                again += 1
            if path.exists():
                path.rename(place)
        self._damaged.clear()
        for _, _, path in self._all(DAMAGED)[: -self.keep]:
            self._remove(path)

    def _aside(self, name: str) -> Path:
        return self.folder / f".{name}.{uuid.uuid4().hex}.tmp"

    def _remove(self, path: Path) -> None:
        """Rename the folder before deleting it, so that a kill leaves nothing that looks like a checkpoint."""
        shutil.rmtree(path.rename(self._aside(path.name)), ignore_errors=True)


# Which rows of which tensors this process holds -----------------------------------------------------------------------


class _Layout:
    """The tensors of modules by their name in a checkpoint, and the rows of them that this process holds.

    The class vectors of a `ShardedHead` have the names that they have in a plain head, so that a checkpoint loads with
    and without sharding.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.rows: dict[int, Rows] = {}  # by the identity of the parameter
        self._saved_names: dict[str, dict[str, str]] = {}  # by module: name here → name in the checkpoint
        for name, module in modules.items():
            require(bool(name) and "." not in name, "modules", "names without dots", name)
            inner = _module_of(module)
            for path, submodule in inner.named_modules():
                if isinstance(submodule, ShardedHead):
                    self._add_sharded_head(name, path, submodule)
            for parameter in inner.parameters():
                if isinstance(parameter, DTensor):
                    self.rows[id(parameter)] = _rows_of_distributed_tensor(parameter)

    def _add_sharded_head(self, name: str, path: str, head: ShardedHead) -> None:
        prefix = f"{path}." if path else ""
        renamed = self._saved_names.setdefault(name, {})
        renamed |= {f"{prefix}head.{key}": f"{prefix}{key}" for key in head.head.state_dict()}
        if head.processes.size > 1:
            for key, parameter in head.head.named_parameters():
                if key in head.sharded_parameters:
                    self.rows[id(parameter)] = Rows(head.classes.start, head.classes.stop, head.num_classes)

    def tensors(self, name: str, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of a module with its names in a checkpoint; divided tensors are shards."""
        parameters = _named_parameters(module)
        return {
            self._saved_name(name, key): self.shard(value, parameters.get(key))
            for key, value in module.state_dict().items()
        }

    def shard(self, value: Any, parameter: Tensor | None) -> Any:
        """Return a tensor, or the shard of it that this process holds, as the rows of `parameter` are divided."""
        if isinstance(value, DTensor):
            return RowShard(value.to_local().detach(), _rows_of_distributed_tensor(value))
        rows = None if parameter is None else self.rows.get(id(parameter))
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and parameter is not None
        if rows is None or not has_rows or value.shape != parameter.shape:  # type: ignore[union-attr]
            return value
        return RowShard(value.detach(), rows)

    def load_(self, name: str, module: nn.Module, files: TensorFiles, extra: Mapping[str, Any]) -> None:
        """Load the saved tensors and the extra state of a module."""
        parameters = _named_parameters(module)
        current = module.state_dict()
        loaded: dict[str, Any] = {}
        for key, value in current.items():
            saved_name = self._saved_name(name, key)
            full_name = f"{name}.{saved_name}"
            if saved_name in extra:
                loaded[key] = extra[saved_name]
            elif full_name in files:
                rows = self.rows.get(id(parameters[key])) if key in parameters else None
                if rows is not None:
                    shape = (rows.total, *value.shape[1:])
                    require(files.shape(full_name) == shape, full_name, f"of shape {files.shape(full_name)}", shape)
                tensor = files.read(full_name, rows)
                fits = not isinstance(value, Tensor) or value.dtype == tensor.dtype
                require(fits, full_name, f"{tensor.dtype} as saved", getattr(value, "dtype", None))
                loaded[key] = _distributed_like(parameters.get(key), tensor)
        known = {self._saved_name(name, key) for key in current}
        prefix = f"{name}."
        saved = {full.removeprefix(prefix) for full in files.names() if full.startswith(prefix)} | set(extra)
        # The counter of sampled classes exists only in a head that samples them.
        unknown = {key: None for key in saved - known if not key.endswith("sampling")}
        kept = {key: value for key, value in current.items() if key not in loaded and key.endswith("sampling")}
        try:
            module.load_state_dict({**loaded, **kept, **unknown})
        except RuntimeError as error:
            raise ValueError(f"{name} does not match the saved module: {' '.join(str(error).split())}") from None

    def _saved_name(self, module: str, key: str) -> str:
        return self._saved_names.get(module, {}).get(key, key)

    def state(self, part: Any) -> Any:
        """Return the state of an object; that of an optimiser contains shards."""
        if not hasattr(part, "state_dict"):
            return part
        state = part.state_dict()
        for optimizer, place in _optimizers(part):
            inner = state if place is None else state[place]
            parameters = _parameters(optimizer)
            inner["state"] = {
                index: {key: self.shard(value, parameters[index]) for key, value in entry.items()}
                for index, entry in inner["state"].items()
            }
        return state

    def rows_of_states(self, part: Any, prefix: tuple[str, ...]) -> dict[str, Rows]:
        """Return the rows of this process by the path of the state of a parameter in the state of an optimiser."""
        rows: dict[str, Rows] = {}
        for optimizer, place in _optimizers(part):
            above = (*prefix, place, "state") if place is not None else (*prefix, "state")
            for index, parameter in enumerate(_parameters(optimizer)):
                if id(parameter) in self.rows:
                    rows[".".join((*above, str(index)))] = self.rows[id(parameter)]
        return rows

    def with_distributed_tensors(self, part: Any, state: Any) -> Any:
        """Return the state of an optimiser with the rows of distributed parameters as distributed tensors."""
        for optimizer, place in _optimizers(part):
            inner = state if place is None else state[place]
            parameters = _parameters(optimizer)
            for index, entry in inner["state"].items():
                for key, value in entry.items():
                    if isinstance(value, Tensor) and value.ndim > 0:
                        entry[key] = _distributed_like(parameters[index], value)
        return state


def _read_rows(files: TensorFiles, rows: Mapping[str, Rows], key: str) -> Tensor:
    """Read the state of a parameter, or its rows; the number of steps, a scalar, has none."""
    return files.read(key, rows.get(key.rpartition(".")[0]) if files.shape(key) else None)


def _module_of(part: Any) -> nn.Module:
    """Return a module, or the module whose weights an object such as `MovingAverage` averages."""
    return part if isinstance(part, nn.Module) else part.module


def _named_parameters(part: Any) -> dict[str, Tensor]:
    # Tied parameters appear under each of their names.
    return dict(_module_of(part).named_parameters(remove_duplicate=False))


def _optimizers(part: Any) -> list[tuple[torch.optim.Optimizer, str | None]]:
    """Return the optimisers of an object with the key of each in its state dict, None for an optimiser itself."""
    if hasattr(part, "optimizers"):
        return [(optimizer, str(place)) for place, optimizer in enumerate(part.optimizers)]
    return [(part, None)] if hasattr(part, "param_groups") else []


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _rows_of_distributed_tensor(tensor: DTensor) -> Rows:
    """Return the rows of a tensor that `fully_shard` divided."""
    fits = tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),)
    require(fits, "modules", "divided by rows over one group of processes", tensor.placements)
    # Like `torch.chunk`: all processes but the last ones have ⌈n / R⌉ rows.
    total, mesh = tensor.shape[0], tensor.device_mesh
    each = -(-total // mesh.size())
    start = min(mesh.get_local_rank() * each, total)
    return Rows(start, start + tensor.to_local().shape[0], total)


def _distributed_like(parameter: Tensor | None, rows: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return rows
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


# Files of a checkpoint ------------------------------------------------------------------------------------------------


def _write_part(folder: Path, rank: int, modules: Mapping[str, nn.Module], state: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files of one process, flush them to the disk, and return the size and SHA-256 of each."""
    layout = _Layout(modules)
    weights: dict[str, Tensor | RowShard] = {}
    extra: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        extra[name] = {}
        for key, value in layout.tensors(name, module).items():
            if _is_storable(value):
                weights[f"{name}.{key}"] = value
            else:
                extra[name][key] = value
    now = {name: layout.state(part) for name, part in state.items()}
    skeleton, others = flatten({"modules": extra, "state": now}, "checkpoint")
    suffix = "" if rank == 0 else f"-{rank}"
    names = [f"weights{suffix}.safetensors", f"state{suffix}.safetensors"]
    try:
        for name, tensors in zip(names, (weights, others), strict=True):
            # Tensors that all processes have in common are written by the first one.
            mine = {key: value for key, value in tensors.items() if rank == 0 or isinstance(value, RowShard)}
            write_tensors(folder / name, mine)
        if rank == 0:
            names.append(STATE)
            (folder / STATE).write_text(json.dumps(skeleton), encoding="utf-8")
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(str(error).splitlines()[0]) from error
    for name in names:
        flush(folder / name)
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)} for name in names}


def _is_storable(value: Any) -> bool:
    """Return True for tensors that the file of weights can hold; others go to the state, which keeps their type."""
    if isinstance(value, RowShard):
        return True
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_complex() and not value.is_meta


def read_checkpoint(folder: Path, step: int, processes: Processes | None = None) -> Checkpoint:
    """Return the checkpoint of a folder after comparing its files with the manifest.

    Several processes share the work and get the same result.

    Raises:
        DamagedCheckpoint: if the files differ from the manifest; the message says how.
        ValueError: if the checkpoint has another format.
        OSError: if the disk or the system does not allow reading it.
    """
    result: Checkpoint | None = None
    failure: Exception | None = None
    rank, size = (0, 1) if processes is None else (processes.rank, processes.size)
    try:
        result = _read_part(folder, step, rank, size)
    except (ValueError, OSError) as error:
        failure = error
    for reported in [failure] if processes is None else processes.objects(failure):
        if reported is not None:
            raise reported
    assert result is not None
    return result


def _read_part(folder: Path, step: int, rank: int, size: int) -> Checkpoint:
    """Verify every `size`-th file from the file number `rank` on."""
    with _judging(folder):
        manifest = _unsealed((folder / MANIFEST).read_text(encoding="utf-8"))
        version, made_with = manifest["format"], manifest.get("made_with")
    if version != FORMAT:
        writer = f" that wrote it, {made_with.get('hypersphere')}" if isinstance(made_with, dict) else ""
        raise ValueError(f"{folder} has format {version!r}, not {FORMAT}; read it with the version{writer}")
    with _judging(folder, manifest.get("files", ())):
        _agree("step", manifest["step"], step)
        files = manifest["files"]
        for name in (STATE, "state.safetensors", "weights.safetensors"):
            _agree(f"entry of {name}", name in files, True)
        for name in sorted(files)[rank::size]:
            _agree("name of a file", Path(name).name, name)
            _agree(f"size of {name}", (folder / name).stat().st_size, files[name]["bytes"])
            _agree(f"SHA-256 of {name}", _digest(folder / name), files[name]["sha256"])
        checkpoint = Checkpoint(folder, step, dict(manifest["made_with"]))
        # Headers and skeleton are checked as well, without reading the tensors.
        checkpoint._files("weights")
        state = checkpoint._files("state")
        unflatten(checkpoint._skeleton(), lambda key: torch.empty(state.shape(key), device="meta"))
        return checkpoint


def _read_skeleton(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if not (isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in ("modules", "state"))):
        raise DamagedCheckpoint(f"{STATE} does not hold the states of modules and other objects")
    return content


def is_foreign(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of another format."""
    try:
        return bool(_unsealed((folder / MANIFEST).read_text(encoding="utf-8"))["format"] != FORMAT)
    except (OSError, ValueError, KeyError, RecursionError):
        return False


@contextmanager
def _judging(folder: Path, files: Any = ()) -> Iterator[None]:
    """Report missing or unreadable content as damage; errors of the system remain an `OSError`."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not a checkpoint: {error}") from None
    except (OSError, RuntimeError) as error:
        for name in [MANIFEST, *(files if isinstance(files, dict) else ())]:
            if _is_missing(folder / name):  # safetensors reports a file without read permission as missing
                raise DamagedCheckpoint(f"{name}: No such file") from None
        raise with_context(_system_error(error), f"{folder} cannot be read") from error


def with_context(error: OSError, context: str) -> OSError:
    """Return the same error with text before the message of the system.

    >>> with_context(OSError(28, "No space left on device"), "nothing is saved")
    OSError(28, 'nothing is saved: No space left on device')
    """
    reason = f"{context}: {error.strerror or error}"
    return OSError(error.errno, reason) if error.errno else OSError(reason)


def _is_missing(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _system_error(error: OSError | RuntimeError) -> OSError:
    """Return the error of the system, also if a library wrapped it in a message: "…: Too many open files (24)"."""
    if isinstance(error, OSError):
        return error
    text = str(error).partition("\n")[0]
    match = re.search(r": ([^:]+) \((\d+)\)$", text)
    return OSError(int(match[2]), match[1]) if match and os.strerror(int(match[2])) == match[1] else OSError(text)


def _made_with(processes: int) -> dict[str, Any]:
    return {
        "hypersphere": importlib.import_module("hypersphere").__version__,  # the package itself is in a higher layer
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


def _sealed(manifest: Mapping[str, Any]) -> str:
    """Return the manifest as text with its own checksum."""
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": checksum}, indent=1) + "\n"


def _unsealed(text: str) -> dict[str, Any]:
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or not manifest.pop("sha256", None) or _sealed(manifest) != text:
        raise DamagedCheckpoint(f"{MANIFEST} does not match its checksum")
    return manifest


def _agree(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise DamagedCheckpoint(f"the {what} is {actual}, not {expected}")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()
