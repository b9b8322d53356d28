"""Tree of the ranks of a run, in which all agree on a few numbers: one message up and one down for each neighbor.

    0 ─┬─ 1 ─┬─ 3      up: each rank sends the highest numbers of itself and of all ranks below it
       │     └─ 4      down: rank 0 sends the highest of all, which each rank passes on
       └─ 2 ─── 5

A rank has at most 1 + `FAN_OUT` neighbors, so what it spends does not depend on the number of ranks. If one is lost,
only its neighbors notice: they tell the others, which would wait for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lockstep.rollout.errors import RankLostError
from lockstep.trainer.distributed.distributed import ENDED, Distributed, lost_connection

FAN_OUT = 2
"""Largest number of children of a rank."""


class RankTree:
    """The tree, as seen by one rank."""

    def __init__(self, distributed: Distributed) -> None:
        self._distributed = distributed
        first = FAN_OUT * distributed.rank + 1
        self._children = range(first, min(first + FAN_OUT, distributed.world_size))
        self._parents = [(distributed.rank - 1) // FAN_OUT] if distributed.rank else []
        self._lost = 0
        """1 + the number of a rank that this one has lost."""
        self._error: RuntimeError | None = None

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the highest of all ranks in each place of an int64 vector without negative numbers; a collective.

        Raises `RankLostError` on all ranks if one is gone, or has been since the last call.
        """
        message = torch.cat([torch.zeros(1, dtype=torch.int64), values])
        # Before anything is sent: gloo asks first where no one waits yet, which takes a fifth more CPU time.
        arrivals = {rank: self.receive(torch.zeros_like(message), rank) for rank in (*self._children, *self._parents)}
        for rank in self._children:
            message = torch.maximum(message, arrivals[rank]())
        for rank in self._parents:
            message[0] = max(int(message[0]), self._lost)
            self.send(message, rank)
            message = torch.maximum(message, arrivals[rank]())
        message[0] = max(int(message[0]), self._lost)
        for rank in self._children:
            self.send(message, rank)
        if message[0]:
            raise RankLostError(self._sentence(int(message[0]) - 1)) from self._error
        return message[1:]

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to a rank, which receives it. A loss is an error of the next `highest`, on all ranks."""
        with self._noting_loss(rank):
            self._distributed.send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], torch.Tensor]:
        """Begin to fill a tensor with one that a rank sends; return a function that waits for it, and returns it.

        It stays as it is if the rank is lost, as in `send`.
        """
        wait: Callable[[], object] = lambda: None  # noqa: E731
        with self._noting_loss(rank):
            wait = self._distributed.receive(tensor, rank)

        def received() -> torch.Tensor:
            with self._noting_loss(rank):
                wait()
            return tensor

        return received

    @contextmanager
    def _noting_loss(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch: the rank is gone, or late
            self._lost, self._error = rank + 1, error

    def _sentence(self, lost: int) -> str:
        own = f"rank {self._distributed.rank}: rank {lost}"
        if self._error is None:  # another rank says so
            return f"{own} is lost: {ENDED}"
        return lost_connection(self._distributed.rank, self._error) or f"{own} does not answer: {self._error}"
