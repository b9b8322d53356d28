"""Worker of test_dying_save.py under `accelerate launch`: rank 1 is killed in the middle of the second save.

dying_save.py DIRECTORY
"""

import os
import signal
import sys
from pathlib import Path

import torch

from lockstep.trainer.checkpoint import checkpoint
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.distributed.distributed import Distributed
from tests.integration.workers.reshard import layers


def killed(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str) -> None:
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    module = layers()
    prepared = distributed.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    for update in (1, 2):
        with distributed.accumulate(is_last=True) as backward:
            backward(prepared(torch.ones(2, 5)).square().sum())
        distributed.step(1e-3, distributed.gradient_norm())
        if update == 2 and distributed.rank == 1:
            torch.save = killed  # type: ignore[assignment]  # what DeepSpeed writes its shards with
        state = TrainerState(step=update, update=update, data_cursor=0)
        checkpoint.save(Path(directory), state, distributed, keep=1)
    raise AssertionError("a save without one of its ranks has ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
