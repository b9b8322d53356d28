"""Engine double for benchmarks/sync.py: a process that joins the transfer group and only receives.

It receives into the same memory every time, like an engine that loads each bucket at once.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from lockstep.rollout.weights.gloo.wire import GlooInitInfo, GlooUpdateInfo, join_all, receive_into
from lockstep.rollout.weights.gloo.worker import bucket_bytes, receive


class Memory:
    """Two buffers of the pool, used in turns."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def __call__(self, size: int) -> torch.Tensor:
        self._pieces.reverse()
        if len(self._pieces[0]) < size:
            self._pieces[0] = torch.empty(size, dtype=torch.uint8)
        return self._pieces[0][:size]


def serve(connection: Connection) -> None:
    """Join the group or receive buckets, as each message says, until the other end closes."""
    torch.set_num_threads(1)
    groups, memory = {}, Memory()
    while True:
        try:
            what, argument = connection.recv()
        except EOFError:
            return
        if what == "join":
            info = GlooInitInfo(**argument)
            groups = join_all(info, info.rank_offset)
        elif what == "copies":  # from the first rank; content: bytes of each
            for size in argument:
                receive_into(groups[0], memory(size)).wait()
        elif what == "weights":
            buckets = list(GlooUpdateInfo(**argument).buckets())
            memory(largest := max(map(bucket_bytes, buckets)))
            memory(largest)
            for _ in receive(groups, buckets, memory):
                """Do nothing; an engine would load the tensors here."""
        connection.send(time.process_time())


class Receiver:
    """Sender's handle of the process. Also implements vLLM's `VLLMWeightSyncClient`."""

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
        """Return the CPU time of the process so far [s]."""
        return self._ask("say the time")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("join", init_info)

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._ask("weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing."""

    def receive(self, sizes: Sequence[int]) -> None:
        """Wait until copies of these sizes have arrived from the first rank."""
        self._ask("copies", list(sizes))

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=10)
