"""The process group under torchrun, and the device of each process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hypersphere.cli.opening import device_of

__all__ = ["is_broken", "own_device", "process_group", "restarts"]

LETTING_GO = (
    0.2  # seconds for the threads of gloo to release tensors; a release during interpreter exit aborts the process
)


def own_device(name: str | None, rank: int | None) -> torch.device:
    """Return the device that `--device` names.

    Args:
        name: name of a device. Under torchrun, an accelerator without an index, or None, selects the accelerator
            with the index of the process.
        rank: local rank of this process, None without torchrun.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = None if accelerator is None else accelerator.type
    if rank is not None and kind is not None and name in (None, kind):
        name = f"{kind}:{rank}"
    chosen = device_of(name)
    if chosen.type == kind and chosen.index is not None:
        torch.accelerator.set_device_index(chosen.index)  # collectives use the current device
    return chosen


@contextmanager
def process_group(device: str | None) -> Iterator[torch.device]:
    """Yield the device to compute on; under torchrun, the process group exists within the context."""
    number = int(os.environ.get("WORLD_SIZE", 1))
    if number == 1:
        yield own_device(device, None)
        return
    from torch.distributed.rendezvous import rendezvous

    chosen = own_device(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    # torchrun keeps its store when it restarts workers. The prefix hides the addresses of the previous workers.
    store, rank, _ = next(rendezvous("env://"))
    own = dist.PrefixStore(f"start-{restarts()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(dist.get_default_backend_for_device(chosen), store=own, rank=rank, world_size=number)
    try:
        yield chosen
    finally:
        dist.destroy_process_group()
        time.sleep(LETTING_GO)


def restarts() -> int:
    """Return how many times torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def is_broken(error: RuntimeError) -> bool:
    """Return True if a collective failed because another process ended."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in message for word in ("gloo", "nccl", "has ended", "peer"))
