"""A side of a comparison on several ranks, as `accelerate launch` would start them on one machine's CPU.

Its launcher keeps file descriptors from its processes, and the first rank needs those of `turns.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from torch.distributed.elastic.utils.distributed import get_free_port

from harness.turns import DONE, GO
from rollout.system.addresses import LOOPBACK


def start_other_ranks(number: int) -> None:
    """Make this process the first of so many ranks, and start the others, unless it is one of them."""
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
