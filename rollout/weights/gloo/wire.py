"""Messages between the two sides of a gloo transfer, and their process groups."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import ParamMeta, WeightTransferInitInfo, WeightTransferUpdateInfo

from lockstep.rollout.system.abandonable_thread import run_in_abandonable_thread
from lockstep.rollout.system.addresses import address_towards
from lockstep.rollout.weights.source import Part, ZeroSource

HEADER_BYTES, ABORTED = 8, -1
"""Each bucket starts with the number of bytes its sender has of it, or with ABORTED. gloo itself accepts a message that
is shorter than expected."""
PACKED_BYTES = 2**16
"""Parts up to this size are packed into one message: copying them is faster than a message each."""
Planned = Sequence[tuple[ParamMeta, Sequence[Part]]]
"""Tensors of a bucket with their parts and senders."""


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """A worker's settings for joining: rendezvous, senders, and the deadline of each collective."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    senders: list[int]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The workers of one engine, and the address of their rendezvous."""

    engine: str
    """Its name, which no other engine of the run has."""
    rank: int
    """Global rank of the trainer process with this engine."""
    address: str
    port: int
    num_workers: int
    senders: list[int]
    """Global ranks."""


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Tensors of one transfer, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    parts: list[list[list[int]]]
    """Sender, first element and number of elements of each part of each tensor."""
    bucket_sizes: list[int]
    """Number of tensors in each bucket; sent, so that both sides use the same buckets."""

    @classmethod
    def of(cls, source: ZeroSource) -> Self:
        metas = source.metadata
        return cls(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
            parts=[[[part.sender, part.start, part.count] for part in parts] for parts in source.parts()],
            bucket_sizes=[len(bucket) for bucket in source.buckets()],
        )

    def buckets(self) -> Iterator[Planned]:
        """Yield the buckets. Raises `RuntimeError` if elements of a tensor have no sender."""
        tensors = (
            (ParamMeta(name, getattr(torch, dtype_name), tuple(shape)), [Part(*part) for part in parts])
            for name, dtype_name, shape, parts in zip(
                self.names, self.dtype_names, self.shapes, self.parts, strict=True
            )
        )
        for size in self.bucket_sizes:
            bucket = [next(tensors) for _ in range(size)]
            for meta, parts in bucket:
                _check_complete(meta, parts)
            yield bucket


def _check_complete(meta: ParamMeta, parts: Sequence[Part]) -> None:
    end = 0
    for part in parts:
        if part.start != end:
            break
        end += part.count
    if end != math.prod(meta.shape):
        raise RuntimeError(f"gloo weight transfer: elements of {meta.name} from {end} on have no sender")


def listen(address: str, timeout_s: float) -> TCPStore:
    """Create the store of a rendezvous on a free port of this address only; torch would listen on all interfaces."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, port: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def join_group(
    store: TCPStore, sender: int, rank: int, world_size: int, timeout_s: float, *, own_address: str
) -> ProcessGroupGloo:
    """Join the group of one sender (rank 0 in it), outside torch's global state.

    vLLM's helper for this listens on every interface, and sends over the interface of the host name, which may be
    loopback. sender: global rank. own_address: address of this process for the other members.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    return ProcessGroupGloo(PrefixStore(f"sender-{sender}", store), rank, world_size, options)


def join_all(info: GlooInitInfo, rank: int) -> dict[int, ProcessGroupGloo]:
    """Join the groups of all senders as a worker of this rank; return them by sender."""
    store = connect_store(info.master_address, info.master_port, info.timeout_s)
    own_address = address_towards(info.master_address)
    return {
        sender: join_group(store, sender, rank, info.world_size, info.timeout_s, own_address=own_address)
        for sender in info.senders
    }


def send(group: ProcessGroupGloo, tensors: Iterable[torch.Tensor], worker: int) -> list[Work]:
    """Begin to send contiguous tensors to a worker of a group, in this order.

    Not as broadcasts, which gloo hands from thread to thread: for a model with many small tensors that is most of the
    time. Raises `RuntimeError`: the worker is known to be gone.
    """
    return [group.send([bytes_of(tensor)], worker, 0) for tensor in tensors]  # type: ignore[attr-defined]


def receive_into(group: ProcessGroupGloo, tensor: torch.Tensor) -> Work:
    """Begin to receive the sender's next message into a contiguous tensor."""
    return group.recv([bytes_of(tensor)], 0, 0)  # type: ignore[attr-defined]


def header(value: int) -> torch.Tensor:
    return bytes_of(torch.tensor([value], dtype=torch.int64))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # gloo does not support every dtype


def abandon(works: Sequence[Work], kept: object) -> Future[object]:
    """Wait for collectives in a thread that keeps their group alive: destroying a group waits for its collectives."""
    return run_in_abandonable_thread(lambda: ([work.wait() for work in works], kept))
