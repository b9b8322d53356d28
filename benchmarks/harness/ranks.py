"""Start of several ranks for a side of a comparison, as `accelerate launch` would start them on a CPU.

The launcher of accelerate does not pass on file descriptors, and the first rank needs those of `turns.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from torch.distributed.elastic.utils.distributed import get_free_port

from harness.turns import DONE, GO
from lockstep.rollout.system.addresses import LOOPBACK


def start_other_ranks(number: int) -> None:
    """Make this process the first of `ranks` ranks and start the others; return at once in one of those."""
    if number == 1 or "RANK" in os.environ:
        return
    ours = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "ACCELERATE_USE_CPU": "true"}
    ours |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(get_free_port())}
    others = {name: value for name, value in os.environ.items() if name not in (GO, DONE)}
    for rank in range(1, number):
        subprocess.Popen([sys.executable, *sys.argv], env={**others, **ours, **place(rank)})
    os.environ |= ours | place(0)


def place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
