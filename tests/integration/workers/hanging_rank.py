"""Worker of test_hang.py under `accelerate launch`: rank 1 misses a collective in which rank 0 waits.

hanging_rank.py DIRECTORY
"""

import sys
import time
from pathlib import Path

from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.run.heartbeat import Heartbeat


def lost_in_thought() -> None:
    time.sleep(600)


def main(directory: str) -> None:
    distributed = Distributed.start(dtype="float32", max_grad_norm=0.0)
    heart = Heartbeat(Path(directory), rank=distributed.rank, step_timeout_s=3.0, ends_run=True)
    distributed.barrier()
    heart.beat("step", update=1)
    if distributed.rank:
        lost_in_thought()
    distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
