"""One checkpoint: a folder with weights, state, and a manifest that tells whether they are what was written.

`weights.safetensors` holds the tensors of all modules, `state.pt` everything else (optimiser, schedule, random numbers,
place in the data) in a form that opens with `weights_only=True`, `manifest.json` the size and SHA-256 of both and of
itself. The manifest is written last.
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
    """A checkpoint that is not, or not any more, what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: where it lies, after how many steps, and with which versions it was made."""

    path: Path
    step: int
    made_with: dict[str, Any]

    def weights(self) -> dict[str, dict[str, Any]]:
        """Read the state dict of every module, by the module's name."""
        modules: dict[str, dict[str, Any]] = _load_state(self.path / STATE, mmap=True)["modules"]
        for full_name, tensor in load_file(self.path / WEIGHTS).items():
            name, key = full_name.split(".", 1)
            modules[name][key] = tensor
        return modules

    def state(self) -> dict[str, Any]:
        """Read all that was saved besides the modules, anew at each call."""
        return _load_state(self.path / STATE)["state"]

    def restore_(self, modules: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None) -> None:
        """Give modules, and what else has a `load_state_dict`, the state that was saved under their names, in place.

        Args:
            modules: some or all of those that were saved.
            state: some or all of the objects that were saved; values without the method are passed over, `state()`
                returns them.
        """
        weights, saved = self.weights(), self.state() if state else {}
        if state and not saved:
            advice = "begin a new run with them: hypersphere train --from, or restore the modules alone"
            raise ValueError(f"{self.path} holds weights only, so that training cannot go on from it; {advice}")
        for given, known in ((modules, weights), (state or {}, saved)):
            missing = sorted(set(given) - set(known))
            require(not missing, "names", f"among those that were saved, {', '.join(sorted(known))}", missing)
        for name, module in modules.items():
            _load_module_(name, module, weights[name])
        for name, part in (state or {}).items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(saved[name])


def write_checkpoint(folder: Path, step: int, modules: Mapping[str, nn.Module], state: Mapping[str, Any]) -> None:
    """Write the three files into an empty folder and see to it that they are on the disk.

    Raises:
        ValueError: something cannot be saved; it is named.
        OSError: the files cannot be written.
    """
    tensors, others = _split(modules)
    now = {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}
    content = {"modules": others, "state": plain(now, "state")}
    try:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        with (folder / STATE).open("wb") as file:
            torch.save(content, file)
    except (RuntimeError, SafetensorError) as error:  # what the two libraries make of a full disk
        known = error.__context__
        if isinstance(known, OSError):
            raise OSError(known.errno, known.strerror) from error
        raise OSError(str(error).splitlines()[0]) from error
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": _size(folder / name), "sha256": _digest(folder / name)} for name in (WEIGHTS, STATE)},
        "made_with": {
            "hypersphere": importlib.import_module("hypersphere").__version__,  # its lazy rooms lie above this one
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        },
    }
    (folder / MANIFEST).write_text(_sealed(manifest), encoding="utf-8")
    for name in (WEIGHTS, STATE, MANIFEST, "."):
        flush(folder / name)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint of a folder if every bit of it is as it was written.

    Raises:
        DamagedCheckpoint: it is not; the message says what is wrong.
        ValueError: it is of another format.
        OSError: it may be, but the disk or the system does not let it be read.
    """
    with _judging(folder):
        manifest = _unsealed((folder / MANIFEST).read_text(encoding="utf-8"))
        found, made_with = manifest["format"], manifest.get("made_with")
    if found != FORMAT:
        writer = f" that wrote it, {made_with['hypersphere']}" if isinstance(made_with, dict) else ""
        raise ValueError(f"{folder} is of format {found!r}, not {FORMAT}: read it with the version{writer}")
    with _judging(folder):
        _agree("step", manifest["step"], step)
        for name in (WEIGHTS, STATE):
            told = manifest["files"][name]
            _agree(f"size of {name}", _size(folder / name), told["bytes"])
            _agree(f"SHA-256 of {name}", _digest(folder / name), told["sha256"])
        with safe_open(folder / WEIGHTS, framework="pt"):
            _load_state(folder / STATE, mmap=True)
        return Checkpoint(folder, step, manifest["made_with"])


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a checkpoint of another format."""
    try:
        return bool(_unsealed((folder / MANIFEST).read_text(encoding="utf-8"))["format"] != FORMAT)
    except (OSError, ValueError, KeyError, RecursionError):
        return False


@contextmanager
def _judging(folder: Path) -> Iterator[None]:
    """Call missing files and what cannot be understood damage; leave what the system refuses an `OSError`."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpoint(f"not a checkpoint: {error}") from None
    except (OSError, RuntimeError) as error:
        for name in (WEIGHTS, STATE, MANIFEST):  # safetensors call a file missing that they may not open
            if _is_missing(folder / name):
                raise DamagedCheckpoint(f"{name}: No such file") from None
        raise retold(_system_error(error), f"{folder} cannot be read") from error


def retold(error: OSError, words: str) -> OSError:
    """The same error with words before what the system said.

    >>> retold(OSError(28, "No space left on device"), "nothing is saved")
    OSError(28, 'nothing is saved: No space left on device')
    """
    reason = f"{words}: {error.strerror or error}"
    return OSError(error.errno, reason) if error.errno else OSError(reason)


def _is_missing(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _system_error(error: OSError | RuntimeError) -> OSError:
    """What the system said, also where torch has put it into words: "…: Too many open files (24)"."""
    if isinstance(error, OSError):
        return error
    text = str(error).partition("\n")[0]
    said = re.search(r": ([^:]+) \((\d+)\)$", text)
    return OSError(int(said[2]), said[1]) if said and os.strerror(int(said[2])) == said[1] else OSError(text)


def _split(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors of all modules, each with memory of its own, and by module what safetensors do not know.

    These are extra state, and tensors that are sparse, quantised or of complex128.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    taken: set[int] = set()
    for name, module in modules.items():
        require(bool(name) and "." not in name, "modules", "named without dots", name)
        others[name] = {}
        for key, value in module.state_dict().items():
            full_name = f"{name}.{key}"
            own = plain(value, full_name)
            if isinstance(own, Tensor) and _is_common(own):
                own = own.cpu().contiguous()
                memory = own.untyped_storage().data_ptr()
                tensors[full_name] = own.clone() if memory in taken else own  # tied: the file has it under every name
                taken.add(memory)
            else:
                others[name][key] = own
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
        raise ValueError(f"{name} is not built as it was when saved: {' '.join(str(error).split())}") from None


def _load_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Open a file of tensors; mapped to memory, only its structure is read."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a broken or foreign pickle can fail in any way
        if isinstance(error, RuntimeError) and _system_error(error).errno:
            raise _system_error(error) from error
        reason = str(error).strip().partition("\n")[0]
        raise DamagedCheckpoint(f"{path.name} is not a file of tensors that can be opened safely: {reason}") from None
    if not (isinstance(found, dict) and all(isinstance(found.get(key), dict) for key in ("modules", "state"))):
        raise DamagedCheckpoint(f"{path.name} does not hold the states of modules and other parts")
    return found


def _sealed(manifest: Mapping[str, Any]) -> str:
    """The manifest as text with the sum of itself."""
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": own}, indent=1) + "\n"


def _unsealed(text: str) -> dict[str, Any]:
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or not manifest.pop("sha256", None) or _sealed(manifest) != text:
        raise DamagedCheckpoint(f"{MANIFEST} is not what was written")
    return manifest


def _agree(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise DamagedCheckpoint(f"the {what} is {found}, not {expected}")


def _size(path: Path) -> int:
    return path.stat().st_size


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()
