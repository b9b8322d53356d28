"""What the two sides of a transfer over gloo say to each other, and the groups in which they do."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import ParamMeta, WeightTransferInitInfo, WeightTransferUpdateInfo

from rollout.system.abandonable_thread import in_daemon_thread
from rollout.system.addresses import address_towards
from rollout.weights.source import Part, ZeroSource

HEADER_BYTES, GAVE_UP = 8, -1
"""A bucket begins with the number of bytes that its sender has of it, or with the word that it sends no more. gloo
itself does not mind if fewer bytes come than were expected."""
PACKED_BYTES = 2**16
"""Parts of at most this size travel together: to copy them takes less than a message for each."""
Planned = Sequence[tuple[ParamMeta, Sequence[Part]]]
"""The tensors of a bucket, and who sends what of them."""


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker needs to join: the rendezvous, who will send, and the deadline of each collective."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    senders: list[int]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The workers of one rank's engines, and where those who send to them meet them."""

    rank: int
    """Global rank of the trainer whose engines they are."""
    address: str
    port: int
    num_workers: int
    senders: list[int]
    """Global ranks."""


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What one round will send, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    parts: list[list[list[int]]]
    """Of each tensor, for each of its parts: sender, first element, number of elements."""
    bucket_sizes: list[int]
    """Number of tensors in each bucket: shipped, so that the two sides cannot cut differently."""

    @classmethod
    def of(cls, source: ZeroSource) -> Self:
        metas = source.metadata()
        return cls(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
            parts=[[[part.sender, part.start, part.count] for part in parts] for parts in source.parts()],
            bucket_sizes=[len(bucket) for bucket in source.buckets()],
        )

    def buckets(self) -> Iterator[Planned]:
        """Raises `RuntimeError` if nobody would send some element of a tensor."""
        tensors = (
            (ParamMeta(name, getattr(torch, dtype_name), tuple(shape)), [Part(*part) for part in parts])
            for name, dtype_name, shape, parts in zip(
                self.names, self.dtype_names, self.shapes, self.parts, strict=True
            )
        )
        for size in self.bucket_sizes:
            bucket = [next(tensors) for _ in range(size)]
            for meta, parts in bucket:
                _check_whole(meta, parts)
            yield bucket


def _check_whole(meta: ParamMeta, parts: Sequence[Part]) -> None:
    end = 0
    for part in parts:
        if part.start != end:
            break
        end += part.count
    if end != torch.Size(meta.shape).numel():
        raise RuntimeError(f"gloo weight transfer: elements of {meta.name} from {end} on are announced by no rank")


def listen(address: str, timeout_s: float) -> TCPStore:
    """A store on a free port of this address alone, where a group can meet; torch would listen on all interfaces."""
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


def visit(address: str, port: int, timeout_s: float) -> TCPStore:
    """The store that listens there."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def join_group(
    store: TCPStore, sender: int, rank: int, world_size: int, timeout_s: float, *, own_address: str
) -> ProcessGroupGloo:
    """Join the group in which a trainer rank (rank 0 in it) sends, outside torch's global state.

    vLLM's own helper for this listens on every interface, and sends over the one that the host name resolves to, which
    may be loopback.

    Args:
        store: where the members meet.
        sender: global rank of the one that sends.
        own_address: at which the others reach this process.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    return ProcessGroupGloo(PrefixStore(f"sender-{sender}", store), rank, world_size, options)


def send(group: ProcessGroupGloo, tensors: Iterable[torch.Tensor], worker: int) -> list[Work]:
    """Begin to send these to a worker of a group, in this order. tensors: contiguous.

    Not as broadcasts, which gloo hands from thread to thread: of a model with many small tensors that is most of the
    time.

    Raises:
        RuntimeError: the worker is known to be gone.
    """
    return [group.send([bytes_of(tensor)], worker, 0) for tensor in tensors]  # type: ignore[attr-defined]


def header(what: int) -> torch.Tensor:
    return bytes_of(torch.tensor([what], dtype=torch.int64))


def receive_into(group: ProcessGroupGloo, tensor: torch.Tensor) -> Work:
    """Begin to receive what the sender of a group sends next. tensor: contiguous."""
    return group.recv([bytes_of(tensor)], 0, 0)  # type: ignore[attr-defined]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # gloo does not know every dtype


def join_all(info: GlooInitInfo, rank: int) -> dict[int, ProcessGroupGloo]:
    """The groups of all senders, of which this worker is to be a member of this rank."""
    store = visit(info.master_address, info.master_port, info.timeout_s)
    own_address = address_towards(info.master_address)
    return {
        sender: join_group(store, sender, rank, info.world_size, info.timeout_s, own_address=own_address)
        for sender in info.senders
    }


def abandon(works: Sequence[Work], kept: object) -> Future[object]:
    """Wait for collectives on a thread, which keeps their group: to end one waits for what is under way in it."""
    return in_daemon_thread(lambda: ([work.wait() for work in works], kept))
