"""Save and restore checkpoints, safe against a kill at any moment, with checksums, in any number of processes.

A checkpoint of step 123 is a folder `step-00000123` with these files:

- `weights.safetensors` holds the tensors of all modules, with the names of their state dicts.
- `state.safetensors` holds all other tensors: optimiser, schedule, random numbers, position in the data.
- `weights-1.safetensors`, `state-1.safetensors`, … hold the rows of process 1, … of tensors that are divided by rows.
- `state.json` holds everything that is not a tensor, and the structure of both states.
- `manifest.json` holds the size and SHA-256 of each file and a SHA-256 of itself. It is written last.

No process ever holds the rows of another one. Any number of processes can read the checkpoint; each reads the rows that
it needs. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hypersphere._collectives import Processes
from hypersphere._files import file_summary, flush, make_folder
from hypersphere._provenance import versions
from hypersphere._state_files import Rows, StoredTensor, TensorFiles, flatten, unflatten, write_tensors
from hypersphere._validation import require
from hypersphere.heads import ShardedHead

__all__ = ["Checkpoint", "Checkpoints", "DamagedCheckpoint"]

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
TENSOR_FILES = {"modules": "weights", "state": "state"}  # names of the tensor files of the two parts of a checkpoint
DAMAGED = "damaged-"


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint whose content is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: its folder, the number of steps, and the versions it was made with."""

    path: Path
    step: int
    made_with: dict[str, Any] = field(repr=False)

    def weights(self) -> dict[str, dict[str, Any]]:
        """Read the state dicts of all modules, by name. Tensors that are divided among processes are complete."""
        return unflatten(self._skeleton()["modules"], self._tensors("modules").read)

    def state(self, *names: str) -> dict[str, Any]:
        """Read everything that was saved except the modules; each call reads the files again.

        Args:
            names: read only these objects, and skip those that were not saved. Without names, all are read.
        """
        skeleton = self._skeleton()["state"]
        chosen = {name: part for name, part in skeleton.items() if not names or name in names}
        return unflatten(chosen, self._tensors("state").read)

    def restore_(self, modules: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None) -> None:
        """Load the saved state into modules, and into other objects with a `load_state_dict`, in place.

        Args:
            modules: some or all of the saved modules, by name. Modules whose parameters are divided among processes
                (with a `ShardedHead`, or by `fully_shard`) load their rows.
            state: some or all of the other saved objects, by name. Values without `load_state_dict` are skipped; read
                them with `state()`. Optimisers of divided parameters load their rows.
        """
        state = state or {}
        skeleton = self._skeleton()
        if state and not skeleton["state"]:
            advice = "pass its weights to build_experiment(weights=…), or restore the modules only"
            raise ValueError(f"{self.path} holds weights only, so training cannot resume from it; {advice}")
        for given, kind in ((modules, "modules"), (state, "state")):
            missing = sorted(set(given) - set(skeleton[kind]))
            require(not missing, "names", f"among the saved names {', '.join(sorted(skeleton[kind]))}", missing)
        read = partial(_divided_weights(modules).read, self._tensors("modules"))
        for name, module in modules.items():
            _load_module_(name, module, unflatten(skeleton["modules"][name], read))
        read = partial(_divided_states(modules, state).read, self._tensors("state"))
        for name, part in state.items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(unflatten(skeleton["state"][name], read))

    def _tensors(self, kind: str) -> TensorFiles:
        with _reading(self.path):
            return TensorFiles(sorted(self.path.glob(f"{TENSOR_FILES[kind]}*.safetensors")))

    def _skeleton(self) -> dict[str, Any]:
        """Read the structure of both states without their tensors, see `flatten`."""
        with _reading(self.path):
            content = json.loads((self.path / STATE).read_text(encoding="utf-8"))
            if not all(isinstance(content[kind], dict) for kind in TENSOR_FILES):
                raise DamagedCheckpoint(f"{STATE} does not hold the states of modules and other objects")
            return content


class Checkpoints:
    """The last checkpoints of a run, each in a folder `step-00000123` (with `.1`, `.2`… if the step is saved again).

    A checkpoint is written under a temporary name and renamed when it is complete. With several processes, all call the
    same methods in the same order and see the same folder; only one such group at a time may save. A damaged checkpoint
    is renamed to `damaged-step-00000123` at the next save.

    Args:
        folder: folder of the checkpoints, created at the first save.
        keep: number of checkpoints to keep, and number of damaged ones to keep.
        on_damage: called with a message for each damaged checkpoint that is skipped.

    Attributes:
        protected: a step whose checkpoint is kept even if it is old, for example the best one, or None.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> layer, folder = nn.Linear(2, 2), TemporaryDirectory()
        >>> checkpoints = Checkpoints(folder.name)
        >>> _ = checkpoints.save(10, {"layer": layer}, {"epoch": 1})
        >>> restored = nn.Linear(2, 2)
        >>> checkpoint = checkpoints.latest()
        >>> checkpoint.restore_({"layer": restored})
        >>> checkpoint.step, checkpoint.state(), bool((restored.weight == layer.weight).all())
        (10, {'epoch': 1}, True)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        *,
        on_damage: Callable[[str], None] = warnings.warn,
    ) -> None:
        require(keep >= 1, "keep", "a number >= 1", keep)
        self.folder, self.keep, self.on_damage = Path(folder), keep, on_damage
        self.protected: int | None = None
        self.processes = Processes()
        self._damaged: set[Path] = set()  # skipped checkpoints, which the next save renames

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, steps {self.steps()})"

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
        rank = self.processes.rank
        try:
            draft = self._on_all_ranks(lambda: self._begin(step) if rank == 0 else None)[0]
            try:
                files = self._on_all_ranks(lambda: _write_part(draft, rank, modules, state or {}))
                return self._on_all_ranks(lambda: self._finish(draft, step, files) if rank == 0 else None)[0]
            finally:
                if rank == 0:
                    shutil.rmtree(draft, ignore_errors=True)
        except OSError as error:
            raise with_context(error, f"the checkpoint of step {step} cannot be saved in {self.folder}") from error

    def latest(self) -> Checkpoint | None:
        """Return the last intact checkpoint, or None if there are no checkpoints.

        Raises:
            DamagedCheckpoint: if all checkpoints are damaged.
            ValueError: if the last one has another format.
            OSError: if the last one cannot be read because of the disk or of missing permissions.
        """
        entries = self._entries_of_rank0()
        return self._last_intact(entries) if entries else None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; if the step was saved several times, the last intact one."""
        entries = [entry for entry in self._entries_of_rank0() if entry[0] == step]
        require(bool(entries), "step", f"one of {', '.join(map(str, dict.fromkeys(self.steps())))}", step)
        return self._last_intact(entries)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in increasing order, without verifying them."""
        return [step for step, _, _ in self._listed()]

    # --- the stages of `save`: all processes write their tensors, the first process does the rest

    def _begin(self, step: int) -> Path:
        make_folder(self.folder)
        # A process that was killed while saving or removing leaves temporary folders behind.
        for leftover in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._refuse_later(step)
        self._rename_damaged()
        draft = self._temporary_path(f"step-{step:08d}")
        draft.mkdir()
        return draft

    def _finish(self, draft: Path, step: int, parts: list[dict[str, Any]]) -> Path:
        # The manifest is written last: a folder without one is not a checkpoint. The folder gets its name after all
        # files are on the disk, and older checkpoints are removed after that.
        files = {name: entry for part in parts for name, entry in part.items()}
        made_with = {**versions(), "processes": len(parts)}
        manifest = {"format": FORMAT, "step": step, "files": files, "made_with": made_with}
        (draft / MANIFEST).write_text(_manifest_text(manifest), encoding="utf-8")
        flush(draft / MANIFEST)
        flush(draft)
        existing = self._listed()
        attempts = [attempt + 1 for old_step, attempt, _ in existing if old_step == step]
        path = draft.rename(self.folder / (f"step-{step:08d}" + (f".{max(attempts)}" if attempts else "")))
        flush(self.folder)
        older = [old for old_step, _, old in existing if old_step < step]
        remaining = older[max(len(older) - self.keep + 1, 0) :]
        for old_step, _, old in existing:
            # The new checkpoint replaces an earlier one of the same step, even if that step is protected.
            is_protected = old_step == self.protected and old_step != step
            if old not in remaining and not is_protected and not _has_other_format(old):
                self._remove(old)
        return path

    def _refuse_later(self, step: int) -> None:
        """Raise a `ValueError` if there is an intact checkpoint of a later step, which `latest` would prefer."""
        for later, _, path in self._listed():
            if later > step and path not in self._damaged:
                try:
                    read_checkpoint(path, later)
                except DamagedCheckpoint:
                    self._damaged.add(path)
                    continue
                raise ValueError(f"step must be at least {later}, because {path} exists, not {step}")

    def _rename_damaged(self) -> None:
        """Rename damaged checkpoints, so that they are neither counted nor used, and remove all but the last ones."""
        for path in sorted(self._damaged):
            name, attempt = f"{DAMAGED}{path.name.partition('.')[0]}", 0
            while (target := self.folder / (f"{name}.{attempt}" if attempt else name)).exists():
                attempt += 1
            if path.exists():
                path.rename(target)
        self._damaged.clear()
        for _, _, path in self._listed(DAMAGED)[: -self.keep]:
            self._remove(path)

    def _temporary_path(self, name: str) -> Path:
        return self.folder / f".{name}.{uuid.uuid4().hex}.tmp"

    def _remove(self, path: Path) -> None:
        """Rename the folder before deleting it, so that a kill leaves nothing that looks like a checkpoint."""
        shutil.rmtree(path.rename(self._temporary_path(path.name)), ignore_errors=True)

    # --- which checkpoints exist

    def _listed(self, prefix: str = "") -> list[tuple[int, int, Path]]:
        """Return step, attempt and folder of each checkpoint, sorted by step and then by attempt."""
        entries = []
        for path in self.folder.glob(f"{prefix}step-*"):
            if match := re.fullmatch(rf"{prefix}step-(\d{{8,}})(?:\.(\d+))?", path.name):
                entries.append((int(match[1]), int(match[2] or 0), path))
        return sorted(entries)

    def _entries_of_rank0(self) -> list[tuple[int, int, Path]]:
        """Return the checkpoints that the first process sees, so that all processes choose the same one."""
        return self.processes.all_gather_objects(self._listed())[0]

    def _last_intact(self, entries: list[tuple[int, int, Path]]) -> Checkpoint:
        """Return the last of these checkpoints that is intact, and report the damaged ones after it."""
        rank, size = self.processes.rank, self.processes.size
        damages = []
        for step, _, path in reversed(entries):
            try:
                # Hashing takes longest, so each process verifies some of the files.
                checkpoint = self._on_all_ranks(partial(read_checkpoint, path, step, rank, size))[rank]
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                damages.append(f"{path.name} is damaged: {error}")
            else:
                for damage in damages:
                    self.on_damage(f"{damage}; using {path.name} instead")
                return checkpoint
        raise DamagedCheckpoint(f"no intact checkpoint in {self.folder}: {'; '.join(damages)}")

    def _on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        """Call a function in every process and return all results.

        If it fails in one process, all raise the same error. Otherwise the others would wait for that process forever.
        """
        result: Any = None
        failure: Exception | None = None
        rank = self.processes.rank
        try:
            result = work()
        except Exception as error:
            failure = error
        # Errors are pickled for the other processes, which may fail for classes other than these.
        can_pickle = failure is None or isinstance(failure, (ValueError, OSError))
        shared = failure if can_pickle else RuntimeError(f"process {rank}: {failure}")
        results = self.processes.all_gather_objects((result, shared))  # also waits for all processes
        for origin, (_, shared) in enumerate(results):
            if shared is not None:
                raise failure if origin == rank and failure is not None else shared
        return [value for value, _ in results]


# Which rows of which tensors this process holds -----------------------------------------------------------------------


class _RowDivision:
    """Which rows this process stores and loads, of tensors that are divided by rows among processes.

    Args:
        rows: maps the path of a parameter, or the path of its state in an optimiser, to the parameter and the rows of
            it that this process has.
    """

    def __init__(self, rows: Mapping[str, tuple[Tensor, Rows]]) -> None:
        self._rows = rows

    def local_part(self, path: str, tensor: Tensor) -> StoredTensor:
        """Return the part of a tensor that this process stores."""
        if isinstance(tensor, DTensor):
            return StoredTensor(tensor.to_local(), _rows_of_distributed_tensor(tensor))
        parameter, rows = self._find(path)
        # States of an optimiser that have another shape, such as its number of steps, are equal in all processes.
        is_divided = parameter is not None and tensor.shape == parameter.shape
        return StoredTensor(tensor, rows if is_divided else None)

    def read(self, files: TensorFiles, path: str) -> Tensor:
        """Read the part of a tensor that this process holds."""
        parameter, rows = self._find(path)
        if parameter is None or rows is None:
            return files.read(path)
        shape = (rows.total, *parameter.shape[1:])
        if files.shape(path) != shape:
            # States of an optimiser may have another shape than their parameter; the parameter itself may not.
            require(path not in self._rows, path, f"of shape {files.shape(path)}", shape)
            return files.read(path)
        tensor = files.read(path, rows)
        if not isinstance(parameter, DTensor):
            return tensor
        # By default, `from_local` assumes that all processes have equally many rows.
        layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(tensor, parameter.device_mesh, parameter.placements, **layout)

    def _find(self, path: str) -> tuple[Tensor | None, Rows | None]:
        """Return the parameter and its rows; `optimizer.state.3.exp_avg` is found as `optimizer.state.3`."""
        return self._rows.get(path) or self._rows.get(path.rpartition(".")[0]) or (None, None)


def _divided_weights(modules: Mapping[str, Any]) -> _RowDivision:
    """Return the divided parameters of modules by their paths."""
    rows, division = _rows_of_parameters(modules), {}
    for name, part in modules.items():
        module = _module_of(part)
        saved_names = _saved_names(module)
        for key, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in rows:
                division[f"{name}.{saved_names.get(key, key)}"] = parameter, rows[id(parameter)]
    return _RowDivision(division)


def _divided_states(modules: Mapping[str, Any], state: Mapping[str, Any]) -> _RowDivision:
    """Return the divided parameters of modules by the paths of their states in optimisers."""
    rows, division = _rows_of_parameters(modules), {}
    for name, part in state.items():
        for prefix, optimizer in _optimizers(name, part).items():
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for index, parameter in enumerate(parameters):
                if id(parameter) in rows:
                    division[f"{prefix}.state.{index}"] = parameter, rows[id(parameter)]
    return _RowDivision(division)


def _rows_of_parameters(modules: Mapping[str, Any]) -> dict[int, Rows]:
    """Return the rows that this process holds of divided parameters, by the identity of the parameter."""
    rows: dict[int, Rows] = {}
    for module in map(_module_of, modules.values()):
        for head in module.modules():
            if isinstance(head, ShardedHead) and head.processes.size > 1:
                classes = Rows(head.classes.start, head.classes.stop, head.num_classes)
                centers = Rows(head.rows.start, head.rows.stop, head.num_classes * head.head.num_centers)
                parameters = head.head.named_parameters()
                rows |= {
                    id(parameter): centers if key == "weight" else classes
                    for key, parameter in parameters
                    if key in head.sharded_parameters
                }
        distributed = (parameter for parameter in module.parameters() if isinstance(parameter, DTensor))
        rows |= {id(parameter): _rows_of_distributed_tensor(parameter) for parameter in distributed}
    return rows


def _rows_of_distributed_tensor(tensor: DTensor) -> Rows:
    """Return the rows of a tensor that `fully_shard` divided."""
    fits = tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),)
    require(fits, "modules", "divided by rows over one group of processes", tensor.placements)
    # `fully_shard` divides n rows among R processes like `torch.chunk`: ⌈n / R⌉ each, and fewer in the last ones.
    total, mesh = tensor.shape[0], tensor.device_mesh
    rows_per_process = -(-total // mesh.size())
    start = min(mesh.get_local_rank() * rows_per_process, total)
    return Rows(start, start + tensor.to_local().shape[0], total)


def _module_of(part: Any) -> nn.Module:
    """Return a module, or the module whose weights an object such as `MovingAverage` averages."""
    return part if isinstance(part, nn.Module) else part.module


def _saved_names(module: nn.Module) -> dict[str, str]:
    """Return the names in a checkpoint that differ from those in the state dict.

    The class vectors of a `ShardedHead` have the names that they have in a plain head, so that a checkpoint loads with
    and without sharding.
    """
    names: dict[str, str] = {}
    for path, head in module.named_modules():
        if isinstance(head, ShardedHead):
            prefix = f"{path}." if path else ""
            names |= {f"{prefix}head.{key}": f"{prefix}{key}" for key in head.head.state_dict()}
    return names


def _optimizers(name: str, part: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimisers of an object by the path of their state dicts; empty if it has none."""
    if hasattr(part, "optimizers"):  # several that step together, see `hypersphere.optim.Optimizers`
        return {f"{name}.{index}": optimizer for index, optimizer in enumerate(part.optimizers)}
    return {name: part} if hasattr(part, "param_groups") else {}


def _load_module_(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a saved state into a module; raise a `ValueError` that says how the two differ."""
    saved_names = _saved_names(_module_of(module))
    remaining, loaded = dict(saved), {}
    for key, value in module.state_dict().items():
        saved_name = saved_names.get(key, key)
        if saved_name in remaining:
            loaded[key] = remaining.pop(saved_name)
            if isinstance(value, Tensor) and isinstance(loaded[key], Tensor):
                dtype = loaded[key].dtype
                require(value.dtype == dtype, f"{name}.{saved_name}", f"{dtype} as saved", value.dtype)
        elif key.endswith("sampling"):  # the counter of sampled classes exists only in a head that samples them
            loaded[key] = value
    # `load_state_dict` reports what remains as unexpected.
    loaded |= {key: value for key, value in remaining.items() if not key.endswith("sampling")}
    try:
        module.load_state_dict(loaded)
    except RuntimeError as error:
        raise ValueError(f"{name} does not match the saved module: {' '.join(str(error).split())}") from None


# Files of a checkpoint ------------------------------------------------------------------------------------------------


def _write_part(folder: Path, rank: int, modules: Mapping[str, nn.Module], state: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files of one process, flush them to the disk, and return the size and SHA-256 of each."""
    weights: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        require(bool(name) and "." not in name, "modules", "names without dots", name)
        saved_names = _saved_names(_module_of(module))
        weights[name] = {saved_names.get(key, key): value for key, value in module.state_dict().items()}
    states = {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}
    contents = {"modules": (weights, _divided_weights(modules)), "state": (states, _divided_states(modules, state))}
    skeletons, names = {}, []
    try:
        for kind, (content, division) in contents.items():
            # Other programs read the file of weights, so its tensors keep their shapes.
            keep_strides = kind == "state"
            title = f"checkpoint[{kind!r}]"
            skeletons[kind], tensors = flatten(content, title, division.local_part, keep_strides=keep_strides)
            names.append(TENSOR_FILES[kind] + (f"-{rank}" if rank else "") + ".safetensors")
            # Tensors that are equal in all processes are written by the first one.
            written = {key: stored for key, stored in tensors.items() if rank == 0 or stored.rows is not None}
            write_tensors(folder / names[-1], written)
        if rank == 0:
            names.append(STATE)
            (folder / STATE).write_text(json.dumps(skeletons), encoding="utf-8")
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(str(error).splitlines()[0]) from error
    for name in names:
        flush(folder / name)  # before the manifest says that the files are complete
    return {name: file_summary(folder / name) for name in names}


def read_checkpoint(folder: Path, step: int, rank: int = 0, size: int = 1) -> Checkpoint:
    """Return the checkpoint of a folder after verifying its files.

    Several processes share the work: the process `rank` of `size` compares every `size`-th file with the manifest.

    Raises:
        DamagedCheckpoint: if the files differ from the manifest; the message says how.
        ValueError: if the checkpoint has another format.
        OSError: if it cannot be read because of the disk or of missing permissions.
    """
    with _reading(folder):
        manifest = _parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        version, made_with = manifest["format"], manifest.get("made_with")
    if version != FORMAT:
        writer = f" that wrote it, {made_with.get('hypersphere')}" if isinstance(made_with, dict) else ""
        raise ValueError(f"{folder} has format {version!r}, not {FORMAT}; read it with the version{writer}")
    with _reading(folder, manifest.get("files", ())):
        _require_equal("step", manifest["step"], step)
        files = manifest["files"]
        for name in (STATE, "state.safetensors", "weights.safetensors"):
            _require_equal(f"entry of {name}", name in files, True)
        for name in sorted(files)[rank::size]:
            _require_equal("name of a file", Path(name).name, name)
            _require_equal(f"size of {name}", (folder / name).stat().st_size, files[name]["bytes"])
            _require_equal(f"SHA-256 of {name}", file_summary(folder / name)["sha256"], files[name]["sha256"])
        checkpoint = Checkpoint(folder, step, dict(manifest["made_with"]))
        # Also check the skeletons and the headers of the tensor files, without reading the tensors.
        for kind, skeleton in checkpoint._skeleton().items():
            unflatten(skeleton, checkpoint._tensors(kind).blank)
        return checkpoint


def _has_other_format(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of another format."""
    try:
        return bool(_parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))["format"] != FORMAT)
    except (OSError, ValueError, KeyError, RecursionError):
        return False


@contextmanager
def _reading(folder: Path, files: Any = ()) -> Iterator[None]:
    """Raise `DamagedCheckpoint` for missing or invalid content; errors of the system remain an `OSError`."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not a checkpoint: {error}") from None
    except (OSError, RuntimeError) as error:
        for name in [MANIFEST, *(files if isinstance(files, dict) else ())]:
            if _is_missing(folder / name):  # not by the error: safetensors calls an unreadable file missing
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
    """Return True if there is no regular file at a path. A file without read permission is not missing."""
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


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON, with a checksum of itself."""
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": checksum}, indent=1) + "\n"


def _parse_manifest(text: str) -> dict[str, Any]:
    """Return a manifest without its checksum, after verifying it."""
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or not manifest.pop("sha256", None) or _manifest_text(manifest) != text:
        raise DamagedCheckpoint(f"{MANIFEST} does not match its checksum")
    return manifest


def _require_equal(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise DamagedCheckpoint(f"the {what} is {actual}, not {expected}")
