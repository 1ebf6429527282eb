"""One process of a group: runs checks by name, in step with the others.

Started as ``python -m heads.sharded.worker FOLDER RANK SIZE CHECK...``, or by torchrun without rank and size. Without
names it reads them from its input. It writes the name of each check that has passed to its output.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from . import equality, failures, state

CHECKS = {
    name.removeprefix("check_"): check
    for room in (equality, state, failures)
    for name, check in vars(room).items()
    if name.startswith("check_")
}


def main(folder, *rest):
    torch.set_num_threads(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        checks = rest
    else:
        rank, size, *checks = rest
        where = {"init_method": f"file://{folder}/store", "rank": int(rank), "world_size": int(size)}
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    size, rank = dist.get_world_size(), dist.get_rank()
    members = [list(range(number)) for number in range(size, 1, -1)]
    everyone = [dist.new_group(ranks) for ranks in members]
    groups = [group for ranks, group in zip(members, everyone, strict=True) if rank in ranks]
    for name in checks or map(str.strip, sys.stdin):
        torch.manual_seed(0)
        CHECKS[name](Path(folder), groups)
        dist.barrier()
        print(name, flush=True)
    time.sleep(0.2)  # for the threads of gloo to release tensors, see `hypersphere.training.process_group`
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
