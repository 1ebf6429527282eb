"""One checkpoint: a folder with weights, state, and a manifest with checksums.

`weights.safetensors` holds the tensors of all modules; `state.pt` holds everything else (optimiser, schedule, random
state, position in the data) in a form that loads with `weights_only=True`; `manifest.json` holds the size and SHA-256
of both files and a SHA-256 of itself. The manifest is written last.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hypersphere._files import flush
from hypersphere._validation import require
from hypersphere.training.plain import plain

__all__ = ["Checkpoint", "DamagedCheckpoint"]

FORMAT = 1
WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.pt", "manifest.json"


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint whose content is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: its folder, the number of steps, and the versions it was made with."""

    path: Path
    step: int
    made_with: dict[str, Any]

    def weights(self) -> dict[str, dict[str, Any]]:
        """Read the state dicts of all modules, by name."""
        modules: dict[str, dict[str, Any]] = _load_state(self.path / STATE, mmap=True)["modules"]
        for full_name, tensor in load_file(self.path / WEIGHTS).items():
            name, key = full_name.split(".", 1)
            modules[name][key] = tensor
        return modules

    def state(self) -> dict[str, Any]:
        """Read everything that was saved except the modules; each call reads the file again."""
        return _load_state(self.path / STATE)["state"]

    def restore_(self, modules: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None) -> None:
        """Load the saved state into modules, and into other objects with a `load_state_dict`, in place.

        Args:
            modules: some or all of the saved modules, by name.
            state: some or all of the other saved objects, by name. Values without `load_state_dict` are skipped; read
                them with `state()`.
        """
        weights, saved = self.weights(), self.state() if state else {}
        if state and not saved:
            advice = "start a new run from them with hypersphere train --from, or restore the modules only"
            raise ValueError(f"{self.path} holds weights only, so training cannot resume from it; {advice}")
        for given, available in ((modules, weights), (state or {}, saved)):
            missing = sorted(set(given) - set(available))
            require(not missing, "names", f"among the saved names {', '.join(sorted(available))}", missing)
        for name, module in modules.items():
            _load_module_(name, module, weights[name])
        for name, part in (state or {}).items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(saved[name])


def write_checkpoint(folder: Path, step: int, modules: Mapping[str, nn.Module], state: Mapping[str, Any]) -> None:
    """Write the three files into an empty folder and flush them to the disk.

    Raises:
        ValueError: if a value cannot be saved; the message names it.
        OSError: if the files cannot be written.
    """
    tensors, others = _split(modules)
    now = {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}
    content = {"modules": others, "state": plain(now, "state")}
    try:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        with (folder / STATE).open("wb") as file:
            torch.save(content, file)
    except (RuntimeError, SafetensorError) as error:  # raised by the two libraries if the disk is full
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror) from error
        raise OSError(str(error).splitlines()[0]) from error
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": _size(folder / name), "sha256": _digest(folder / name)} for name in (WEIGHTS, STATE)},
        "made_with": {
            "hypersphere": importlib.import_module(
                "hypersphere"
            ).__version__,  # the package itself is in a higher layer
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        },
    }
    (folder / MANIFEST).write_text(_sealed(manifest), encoding="utf-8")
    for name in (WEIGHTS, STATE, MANIFEST, "."):
        flush(folder / name)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint of a folder after comparing its files with the manifest.

    Raises:
        DamagedCheckpoint: if the files differ from the manifest; the message says how.
        ValueError: if the checkpoint has another format.
        OSError: if the disk or the system does not allow reading it.
    """
    with _judging(folder):
        manifest = _unsealed((folder / MANIFEST).read_text(encoding="utf-8"))
        version, made_with = manifest["format"], manifest.get("made_with")
    if version != FORMAT:
        writer = f" that wrote it, {made_with['hypersphere']}" if isinstance(made_with, dict) else ""
        raise ValueError(f"{folder} has format {version!r}, not {FORMAT}; read it with the version{writer}")
    with _judging(folder):
        _agree("step", manifest["step"], step)
        for name in (WEIGHTS, STATE):
            recorded = manifest["files"][name]
            _agree(f"size of {name}", _size(folder / name), recorded["bytes"])
            _agree(f"SHA-256 of {name}", _digest(folder / name), recorded["sha256"])
        with safe_open(folder / WEIGHTS, framework="pt"):
            _load_state(folder / STATE, mmap=True)
        return Checkpoint(folder, step, manifest["made_with"])


def is_foreign(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of another format."""
    try:
        return bool(_unsealed((folder / MANIFEST).read_text(encoding="utf-8"))["format"] != FORMAT)
    except (OSError, ValueError, KeyError, RecursionError):
        return False


@contextmanager
def _judging(folder: Path) -> Iterator[None]:
    """Report missing or unreadable content as damage; errors of the system remain an `OSError`."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not a checkpoint: {error}") from None
    except (OSError, RuntimeError) as error:
        for name in (WEIGHTS, STATE, MANIFEST):  # safetensors reports a file without read permission as missing
            if _is_missing(folder / name):
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
    """Return the error of the system, also if torch wrapped it in a message: "…: Too many open files (24)"."""
    if isinstance(error, OSError):
        return error
    text = str(error).partition("\n")[0]
    match = re.search(r": ([^:]+) \((\d+)\)$", text)
    return OSError(int(match[2]), match[1]) if match and os.strerror(int(match[2])) == match[1] else OSError(text)


def _split(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the tensors of all modules without shared memory, and by module what safetensors cannot store.

    The latter is extra state, and sparse, quantised or complex128 tensors.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    written: set[int] = set()
    for name, module in modules.items():
        require(bool(name) and "." not in name, "modules", "names without dots", name)
        others[name] = {}
        for key, value in module.state_dict().items():
            full_name = f"{name}.{key}"
            content = plain(value, full_name)
            if isinstance(content, Tensor) and _is_common(content):
                content = content.cpu().contiguous()
                memory = content.untyped_storage().data_ptr()
                # A tied tensor is stored under each of its names.
                tensors[full_name] = content.clone() if memory in written else content
                written.add(memory)
            else:
                others[name][key] = content
    return tensors, others


def _is_common(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype != torch.complex128 and not tensor.is_quantized


def _load_module_(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    for key, value in module.state_dict().items():
        if isinstance(value, Tensor) and isinstance(saved.get(key), Tensor):
            require(value.dtype == saved[key].dtype, f"{name}.{key}", f"{saved[key].dtype} as saved", value.dtype)
    try:
        module.load_state_dict(saved)
    except RuntimeError as error:
        raise ValueError(f"{name} does not match the saved module: {' '.join(str(error).split())}") from None


def _load_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Open a file of tensors; with `mmap` only its structure is read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a broken pickle can raise any error
        if isinstance(error, RuntimeError) and _system_error(error).errno:
            raise _system_error(error) from error
        reason = str(error).strip().partition("\n")[0]
        raise DamagedCheckpoint(f"{path.name} cannot be loaded as a file of tensors: {reason}") from None
    if not (isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in ("modules", "state"))):
        raise DamagedCheckpoint(f"{path.name} does not hold the states of modules and other objects")
    return content


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


def _size(path: Path) -> int:
    return path.stat().st_size


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()
