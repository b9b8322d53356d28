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

from lockstep.rollout.weights.gloo import trainer
from tests.fixtures.adapted import perturb_adapters
from tests.fixtures.models import perturb
from tests.fixtures.remote import trained
from tests.fixtures.servers import EngineServer


def main(url: str, lora_rank: str = "0") -> None:
    send = trainer.send

    def dies(group: ProcessGroupGloo, tensors: Iterable[torch.Tensor], worker: int) -> list[Work]:
        works = send(group, list(tensors)[:1], worker)  # the header of the first bucket, but not the embedding
        for work in works:
            work.wait()
        print("killed in mid-bucket", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return works

    trainer.send = dies
    server = EngineServer(process=None, url=url, log_path=None)  # type: ignore[arg-type]
    with trained([server], lora_rank=int(lora_rank)) as sender:
        (perturb_adapters if int(lora_rank) else perturb)(sender.model, seed=9)
        sender.sync.push(777)


if __name__ == "__main__":
    main(*sys.argv[1:])
