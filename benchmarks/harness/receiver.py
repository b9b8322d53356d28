"""An engine double for benchmarks/sync.py: a process that joins the transfer group and receives, and nothing else.

What it receives goes into one buffer, again and again, as in an engine that would load it at once.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollout.gloo import GlooInitInfo, GlooUpdateInfo, broadcast, join_group, message_bytes


def serve(connection: Connection) -> None:
    """Until the other end closes: join where a message says, or receive as many buckets of the given bytes."""
    torch.set_num_threads(1)
    group, buffer = None, torch.empty(0, dtype=torch.uint8)
    while True:
        try:
            what, argument = connection.recv()
        except EOFError:
            return
        if what == "join":
            info = GlooInitInfo(**argument)
            group = join_group(info.master_address, info.master_port, info.rank_offset, info.world_size, info.timeout_s)
        elif what == "receive":
            if max(argument) > len(buffer):
                buffer = torch.empty(max(argument), dtype=torch.uint8)
            for size in argument:
                broadcast(group, buffer[:size]).wait()  # type: ignore[arg-type]
        connection.send(time.process_time())


class Receiver:
    """The double's process, seen from the sender. It is vLLM's `VLLMWeightSyncClient`, too."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def _ask(self, what: str, argument: Any = None) -> float:
        self._connection.send((what, argument))
        return self._connection.recv()

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        return self._ask("say the time")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("join", init_info)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive([message_bytes(metas) for metas in GlooUpdateInfo(**update_info).buckets()])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing is loaded."""

    def receive(self, sizes: Sequence[int]) -> None:
        """Wait until buckets of these sizes have arrived."""
        self._ask("receive", list(sizes))

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=10)
