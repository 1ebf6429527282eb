"""Process groups under torchrun, and the device of each process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

__all__ = ["choose_device", "other_process_ended", "process_group", "restarts"]

# The threads of gloo need Python's global lock to free the tensors of finished collectives. `destroy_process_group`
# holds this lock while it waits for them, which would block forever. Waiting this number of seconds lets them finish.
RELEASE_TIME = 0.2


def choose_device(name: str | None = None, rank: int | None = None) -> torch.device:
    """Return a device after checking that it can be used.

    Args:
        name: name of the device; by default an accelerator if there is one.
        rank: local rank of this process, used as the index of an accelerator that is named without one.

    Raises:
        ValueError: if the device cannot be used.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
        >>> choose_device("toaster")
        Traceback (most recent call last):
        ValueError: device 'toaster' cannot be used: ...
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = None if accelerator is None else accelerator.type
    if rank is not None and kind is not None and name in (None, kind):
        name = f"{kind}:{rank}"
    try:
        device = torch.device(name) if name is not None else accelerator or torch.get_default_device()
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from None
    if device.type == kind and device.index is not None:
        torch.accelerator.set_device_index(device.index)  # collectives use the current device
    return device


@contextmanager
def process_group(device: str | None = None) -> Iterator[torch.device]:
    """Yield the device of this process. Under torchrun, create the process group and destroy it at the end.

    Args:
        device: name of the device, see `choose_device`.

    Example:
        >>> with process_group("cpu") as device:  # without torchrun: one process and no group
        ...     device, dist.is_initialized()
        (device(type='cpu'), False)
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield choose_device(device)
        return
    from torch.distributed.rendezvous import rendezvous

    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    # torchrun keeps its store when it restarts workers. The prefix hides the addresses of the previous workers.
    store, rank, _ = next(rendezvous("env://"))
    store = dist.PrefixStore(f"start-{restarts()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(dist.get_default_backend_for_device(chosen), store=store, rank=rank, world_size=size)
    try:
        yield chosen
    finally:
        time.sleep(RELEASE_TIME)
        dist.destroy_process_group()
        time.sleep(RELEASE_TIME)


def restarts() -> int:
    """Return how many times torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def other_process_ended(error: RuntimeError) -> bool:
    """Return True if a collective failed because another process ended."""
    message, signs = str(error).lower(), ("gloo", "nccl", "has ended", "by peer")
    return isinstance(error, dist.DistError) or any(sign in message for sign in signs)
