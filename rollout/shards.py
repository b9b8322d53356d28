"""Parameters that ZeRO-3 has cut into shards, on their way to the ranks that send them.

    param  ▕██ shard of rank 0 ██▏██ of rank 1 ██▏██ of rank 2 ██▏      a run of elements each, in order of the ranks
    Fetch  every rank ──one message with its part of the whole bucket──► every reader

One exchange for a bucket of parameters, however many there are; `deepspeed.zero.GatheredParameters` (0.19) takes a
collective for each, and all ranks get everything. What travels is cast before it leaves, and parts of a parameter can
be fetched alone (one expert of a layer).

An exchange runs in the background between `begin` and `wait`, also beside a transfer to an engine: that one is between
a reader and the engine's workers, this one between trainer ranks, and every rank begins its exchanges in the same
order. So none of the two can wait for the other in a circle.

Covered: shards in the device's or the host's memory (`offload_param_device: cpu`), subgroups of ranks that share a
model (MiCS). Refused: shards on NVMe, quantised shards (`zero_quantized_weights`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from rollout.buckets import ALIGNMENT
from rollout.errors import SyncError


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a parameter, sharded or not, in the dtype in which they travel."""

    param: nn.Parameter
    start: int
    count: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of a piece that one rank holds."""

    owner: int
    in_piece: int
    in_shard: int
    count: int
    at: int
    """Offset in the owner's message, in bytes."""


def is_sharded(param: nn.Parameter) -> bool:
    if "deepspeed" not in sys.modules:  # importing it takes seconds, and without it nothing is sharded
        return False
    from deepspeed.runtime.zero.utils import is_zero_param

    return is_zero_param(param)


def full_shape(param: nn.Parameter) -> tuple[int, ...]:
    return tuple(param.ds_shape) if is_sharded(param) else tuple(param.shape)  # type: ignore[attr-defined]


class Fetch:
    """Brings one bucket of pieces to the readers; made once, used for every sync.

    Every rank calls `begin` and `wait`, in the same order for all buckets; readers may then `copy`, until the buffer is
    given to another `begin`. Pieces of parameters that are not sharded need no exchange.
    """

    def __init__(self, pieces: Sequence[Piece], readers: Sequence[int] | None) -> None:
        """readers: global ranks; None: all."""
        self._pieces = pieces
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        members = _owners(pieces)
        sizes = dict.fromkeys(members, 0)
        self._runs = [_runs(piece, members, sizes) for piece in pieces]
        wished = members if readers is None else [rank for rank in readers if rank in members]
        others = [rank for rank in members if rank != self._rank and sizes[rank]]
        self._send_to = [rank for rank in wished if rank != self._rank and sizes.get(self._rank)]
        received_from = others if self._rank in wished else []
        self._at: dict[int, int] = {}
        """Where each rank's message begins in the buffer."""
        self.nbytes = 0
        """Of the buffer."""
        for rank in ([self._rank] if self._send_to else []) + received_from:
            self._at[rank] = self.nbytes
            self.nbytes += sizes[rank]
        self._messages = {rank: slice(start, start + sizes[rank]) for rank, start in self._at.items()}
        self._works: list[dist.Work] = []

    @torch.no_grad()
    def begin(self, buffer: torch.Tensor) -> None:
        """Start the exchange. buffer: at least `nbytes` of uint8 on the shards' device."""
        if self._messages:
            _settle()
        for piece, runs in zip(self._pieces, self._runs, strict=True):
            for run in runs if self._send_to else ():
                if run.owner == self._rank:
                    self._in_message(buffer, piece, run).copy_(_own_elements(piece.param, run))
        exchanges = [dist.P2POp(dist.isend, buffer[self._messages[self._rank]], rank) for rank in self._send_to]
        exchanges += [
            dist.P2POp(dist.irecv, buffer[message], rank)
            for rank, message in self._messages.items()
            if rank != self._rank
        ]
        self._works = dist.batch_isend_irecv(exchanges) if exchanges else []

    def wait(self) -> None:
        """Until what was begun is over, so that the buffer is whole, or free."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if works:
            _settle()

    @torch.no_grad()
    def copy(self, index: int, into: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write piece `index` into a contiguous tensor of as many elements, of any shape, dtype and device."""
        piece, flat = self._pieces[index], into.view(-1)
        if not is_sharded(piece.param):
            flat.copy_(elements(piece))
        for run in self._runs[index]:
            is_own = run.owner == self._rank
            source = _own_elements(piece.param, run) if is_own else self._in_message(buffer, piece, run)
            flat[run.in_piece : run.in_piece + run.count].copy_(source)

    def _in_message(self, buffer: torch.Tensor, piece: Piece, run: _Run) -> torch.Tensor:
        start = self._at[run.owner] + run.at
        return buffer[start : start + run.count * piece.dtype.itemsize].view(piece.dtype)


def elements(piece: Piece) -> torch.Tensor:
    """Those of a parameter that is not sharded: flat, in its own dtype, an alias wherever it is contiguous."""
    return piece.param.detach().reshape(-1)[piece.start : piece.start + piece.count]


def _settle() -> None:
    """On a GPU, until copies are over: NCCL waits for one stream, and vLLM packs tensors on two in turns."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _own_elements(param: nn.Parameter, run: _Run) -> torch.Tensor:
    return param.ds_tensor.detach()[run.in_shard : run.in_shard + run.count]  # type: ignore[attr-defined]


def _owners(pieces: Sequence[Piece]) -> list[int]:
    """The global ranks that share these pieces, in the order of their shards; this rank alone if nothing is sharded.

    Raises:
        SyncError: shards of a kind that cannot be read, or of different groups of ranks.
    """
    groups: set[tuple[int, ...]] = set()
    for param in (piece.param for piece in pieces if is_sharded(piece.param)):
        groups.add(tuple(dist.get_process_group_ranks(param.ds_process_group)))  # type: ignore[attr-defined]
        _check_readable(param)
    if len(groups) > 1:
        raise SyncError(f"weight sync: parameters of one layer are sharded over different ranks, {sorted(groups)}")
    return list(groups.pop()) if groups else []


def _check_readable(param: nn.Parameter) -> None:
    from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

    shard: torch.Tensor = param.ds_tensor  # type: ignore[attr-defined]
    if shard.dtype != param.dtype:
        raise SyncError(
            f"weight sync reads shards in the dtype of their parameter, {param.dtype}, but found {shard.dtype}; set "
            "zero_quantized_weights: false in the DeepSpeed configuration"
        )
    if shard.status != PartitionedParamStatus.AVAILABLE:  # type: ignore[attr-defined]
        raise SyncError(
            "weight sync cannot read shards on NVMe; set offload_param_device: cpu (or none) in the configuration of "
            "accelerate"
        )


def _runs(piece: Piece, members: Sequence[int], sizes: dict[int, int]) -> list[_Run]:
    """The parts of a piece, whose bytes are added to the sizes of the messages; none if it is not sharded."""
    if not is_sharded(piece.param):
        return []
    length: int = piece.param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    end, runs = piece.start + piece.count, []
    for place, owner in enumerate(members):
        first, last = max(piece.start, place * length), min(end, (place + 1) * length)
        if first < last:
            runs.append(_Run(owner, first - piece.start, first - place * length, last - first, sizes[owner]))
            sizes[owner] += -(-(last - first) * piece.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return runs
