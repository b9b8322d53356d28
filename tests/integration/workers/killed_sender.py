"""A trainer that is killed while its weights are on the way to the server.

Run by `test_engine_server.py` and `tests/fixtures/forked_servers.py`."""

from __future__ import annotations

import os
import signal
import sys

from rollout.source import Place, ZeroSource
from tests.fixtures.models import perturb
from tests.fixtures.remote import trained
from tests.fixtures.servers import EngineServer


def main(url: str) -> None:
    original = ZeroSource.tensors

    def dies(self: ZeroSource, place: Place | None):
        for count, pair in enumerate(original(self, place)):
            if count == 20:
                print("killed in mid-bucket", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    ZeroSource.tensors = dies  # type: ignore[method-assign]
    with trained([EngineServer(process=None, url=url, log_path=None)]) as sender:  # type: ignore[arg-type]
        perturb(sender.model, seed=9)
        sender.sync.push(777)


if __name__ == "__main__":
    main(sys.argv[1])
