"""A trainer that is killed while it sends weights to a server.

Worker of `test_engine_server.py` and `tests/fixtures/forked_servers.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroupGloo, Work

from rollout.weights.gloo import trainer
from tests.fixtures.models import perturb
from tests.fixtures.remote import trained
from tests.fixtures.servers import EngineServer


def main(url: str) -> None:
    send = trainer.send

    def dies(group: ProcessGroupGloo, tensors: Iterable[torch.Tensor], worker: int) -> list[Work]:
        works = send(group, list(tensors)[:1], worker)  # the header of the first bucket, but not the embedding
        for work in works:
            work.wait()
        print("killed in mid-bucket", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return works

    trainer.send = dies
    with trained([EngineServer(process=None, url=url, log_path=None)]) as sender:  # type: ignore[arg-type]
        perturb(sender.model, seed=9)
        sender.sync.push(777)


if __name__ == "__main__":
    main(sys.argv[1])
