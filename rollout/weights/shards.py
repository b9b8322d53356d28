"""Gathering of ZeRO-3 parameter shards at the ranks that send them.

    param  ▕██ shard of rank 0 ██▏██ of rank 1 ██▏██ of rank 2 ██▏      contiguous elements, in rank order
    Fetch  every rank ──its ranges of a bucket of parameters──► to their places at every reader

One exchange per bucket of parameters, with one message from each owner to each reader;
`deepspeed.zero.GatheredParameters` (0.19) takes a collective per parameter and gives everything to all ranks. Elements
are cast before they are sent, and part of a parameter (one expert of a layer) can be fetched alone.

An exchange runs in the background between `begin` and `wait`. It cannot deadlock with a transfer to an engine: it runs
between trainer ranks, which begin exchanges in the same order, a transfer between a reader and engine workers.

Covered: shards in device or host memory (`offload_param_device: cpu`), subgroups of ranks that share a model (MiCS).
Refused: shards on NVMe, quantized shards (`zero_quantized_weights`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.rollout.errors import SyncError

ALIGNMENT = 16
"""Bytes to whose multiples the parts of a message are aligned, for every dtype."""


@dataclass(frozen=True, slots=True)
class ParamRange:
    """Consecutive elements of a parameter, sharded or not, or of a buffer, and the dtype in which they are sent."""

    param: torch.Tensor
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Part of a `ParamRange` held by one rank; offsets and count in elements."""

    owner: int
    """Global rank."""
    in_range: int
    in_shard: int
    count: int


def is_sharded(param: torch.Tensor) -> bool:
    if "deepspeed" not in sys.modules:  # importing it takes seconds; without it nothing is sharded
        return False
    from deepspeed.runtime.zero.utils import is_zero_param

    return is_zero_param(param)


def full_shape(param: torch.Tensor) -> tuple[int, ...]:
    return tuple(param.ds_shape) if is_sharded(param) else tuple(param.shape)  # type: ignore[attr-defined]


class Fetch:
    """Exchange that brings one bucket of ranges to the readers; reused for every sync.

    Every rank calls `begin` and `wait`, in the same order for all buckets. Each owner sends one message to each reader,
    however many parameters the bucket has: its shard ranges one after another, or the range itself if it is the only
    one. Parameters that are not sharded need no exchange.
    """

    def __init__(self, ranges: Sequence[ParamRange], readers: Sequence[int] | None) -> None:
        """readers: global ranks; None: all."""
        self._ranges = ranges
        self._rank = own_rank()
        members = owners(ranges)
        self._parts: dict[int, list[_Piece]] = {}
        """Pieces of the message of each owner, in the order of the ranges."""
        for index, one in enumerate(ranges):
            for part in shard_ranges(one, members):
                pieces = self._parts.setdefault(part.owner, [])
                pieces.append(_Piece(index, part, one.dtype, start=pieces[-1].end_aligned if pieces else 0))
        self._send_to = [rank for rank in members if rank != self._rank and (readers is None or rank in readers)]
        self._works: list[dist.Work] = []
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destination and source of this rank's own shard ranges."""
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destination and place in a message of those of others."""
        self._in_use: list[torch.Tensor] = []
        """Destinations of the exchange, and messages."""
        self._order = StreamOrder()
        self.is_under_way = False
        """True while messages to or from other ranks may be in flight."""

    @torch.no_grad()
    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Start the exchange.

        values: destination of each range at a reader: contiguous, with its dtype and shape, on its parameter's device;
        ignored for parameters that are not sharded. Empty on other ranks.
        """
        exchanges: list[dist.P2POp] = []
        for owner, pieces in self._parts.items():
            if owner == self._rank:
                shards = [shard_elements(self._ranges[piece.index], piece.part) for piece in pieces]
                if values:
                    self._own += zip(self._destinations(pieces, values), shards, strict=True)
                if self._send_to:
                    message = self._message(pieces, shards)
                    exchanges += [dist.P2POp(dist.isend, message, rank) for rank in self._send_to]
            elif values:
                into = self._destinations(pieces, values)
                message = _bytes(into[0]) if len(pieces) == 1 else self._empty(pieces)
                if len(pieces) > 1:
                    self._received += zip(into, (piece.of(message) for piece in pieces), strict=True)
                exchanges.append(dist.P2POp(dist.irecv, message, owner))
        sharded_indices = {piece.index for pieces in self._parts.values() for piece in pieces}
        self._in_use += [values[index] for index in sorted(sharded_indices) if values]
        if exchanges:
            self.is_under_way = True
            self._works = dist.batch_isend_irecv(exchanges)
        self._order.record(self._in_use)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until the values are complete, on a GPU for the current stream. Own ranges are copied meanwhile."""
        in_use, self._in_use = self._in_use, []
        self._order.follow(in_use)
        own, self._own = self._own, []
        for into, shard in own:
            into.copy_(shard)
        works, self._works = self._works, []
        for work in works:
            work.wait()
        pieces, self._received = self._received, []
        for into, piece in pieces:
            into.copy_(piece)
        self._order.record(in_use)
        self.is_under_way = False

    def use(self, values: Sequence[torch.Tensor]) -> None:
        """Let the current stream read some of the values, after `wait`."""
        self._order.follow(values)

    def _destinations(self, pieces: Sequence[_Piece], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts = [(values[piece.index].view(-1), piece.part) for piece in pieces]
        return [value[part.in_range : part.in_range + part.count] for value, part in starts]

    def _message(self, pieces: Sequence[_Piece], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the message of this rank: a copy, but for a single piece in its own dtype and place."""
        if len(pieces) == 1:
            message = _bytes(shards[0].to(self._ranges[pieces[0].index].param.device, pieces[0].dtype))
            self._in_use.append(message)
            return message
        message = self._empty(pieces)
        for piece, shard in zip(pieces, shards, strict=True):
            piece.of(message).copy_(shard)
        return message

    def _empty(self, pieces: Sequence[_Piece]) -> torch.Tensor:
        device = self._ranges[pieces[0].index].param.device
        self._in_use.append(torch.empty(pieces[-1].end_aligned, dtype=torch.uint8, device=device))
        return self._in_use[-1]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Place of a shard range in the message of its owner."""

    index: int
    """Number of its `ParamRange`."""
    part: ShardRange
    dtype: torch.dtype
    start: int
    """First byte."""

    @property
    def end(self) -> int:
        return self.start + self.part.count * self.dtype.itemsize

    @property
    def end_aligned(self) -> int:
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def of(self, message: torch.Tensor) -> torch.Tensor:
        return message[self.start : self.end].view(self.dtype)


class StreamOrder:
    """Order of the CUDA streams that fill and read the tensors of an exchange; does nothing for tensors on a CPU.

    vLLM's nccl transport iterates on two streams in turns, so that each step of `Fetch` can run on another stream than
    the one before. It waits for that stream on the device; the host waits for none.
    """

    def __init__(self) -> None:
        self._done: torch.Event | None = None

    def record(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark the end of a step in the current stream."""
        self._done = torch.cuda.current_stream().record_event() if any(one.is_cuda for one in tensors) else None

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin the next step: let the current stream wait, and their memory be reused only after its kernels."""
        if self._done is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # not every transport supports every dtype


def elements(part: ParamRange) -> torch.Tensor:
    """Return the elements of a parameter that is not sharded, in its dtype; an alias if it is contiguous."""
    return part.param.detach().reshape(-1)[part.start : part.start + part.count].view(part.shape)


def shard_elements(param_range: ParamRange, part: ShardRange) -> torch.Tensor:
    """Return a range that this rank holds, in the parameter's dtype: a flat alias."""
    return param_range.param.ds_tensor.detach()[part.in_shard : part.in_shard + part.count]  # type: ignore[attr-defined]


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def owners(ranges: Sequence[ParamRange]) -> list[int]:
    """Return the global ranks that hold these ranges, in shard order; empty if nothing is sharded.

    Raises `SyncError`: the shards cannot be read, or belong to different groups of ranks.
    """
    groups: set[tuple[int, ...]] = set()
    for param in (one.param for one in ranges if is_sharded(one.param)):
        groups.add(tuple(dist.get_process_group_ranks(param.ds_process_group)))  # type: ignore[attr-defined]
        _check_readable(param)
    if len(groups) > 1:
        raise SyncError(f"weight sync: parameters of one layer are sharded over different ranks, {sorted(groups)}")
    return list(groups.pop()) if groups else []


def _check_readable(param: torch.Tensor) -> None:
    from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

    shard: torch.Tensor = param.ds_tensor  # type: ignore[attr-defined]
    if shard.dtype != param.dtype:
        raise SyncError(
            f"weight sync expected shards in the dtype of their parameter, {param.dtype}, found {shard.dtype}; set "
            "zero_quantized_weights: false in the DeepSpeed configuration"
        )
    if shard.status != PartitionedParamStatus.AVAILABLE:  # type: ignore[attr-defined]
        raise SyncError(
            "weight sync cannot read shards on NVMe; set offload_param_device: cpu (or none) in the accelerate "
            "configuration"
        )


def shard_ranges(param_range: ParamRange, members: Sequence[int]) -> list[ShardRange]:
    """Split a range by owner; empty if its parameter is not sharded. members: as returned by `owners`."""
    if not is_sharded(param_range.param):
        return []
    length: int = param_range.param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start, end, ranges = param_range.start, param_range.start + param_range.count, []
    for index, owner in enumerate(members):
        first, last = max(start, index * length), min(end, (index + 1) * length)
        if first < last:
            ranges.append(ShardRange(owner, first - start, first - index * length, last - first))
    return ranges
