"""Parameters that ZeRO-3 has cut into shards, on their way to the ranks that send them.

    param  ▕██ shard of rank 0 ██▏██ of rank 1 ██▏██ of rank 2 ██▏      a run of elements each, in order of the ranks
    Fetch  every rank ──the runs that it holds of a bucket of parameters──► to their places at every reader

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

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from rollout.errors import SyncError


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a parameter, sharded or not, in the dtype in which they travel."""

    param: nn.Parameter
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Run:
    """The part of a piece that one rank holds."""

    owner: int
    in_piece: int
    in_shard: int
    count: int


def is_sharded(param: nn.Parameter) -> bool:
    if "deepspeed" not in sys.modules:  # importing it takes seconds, and without it nothing is sharded
        return False
    from deepspeed.runtime.zero.utils import is_zero_param

    return is_zero_param(param)


def full_shape(param: nn.Parameter) -> tuple[int, ...]:
    return tuple(param.ds_shape) if is_sharded(param) else tuple(param.shape)  # type: ignore[attr-defined]


class Fetch:
    """Brings one bucket of pieces to the readers; made once, used for every sync.

    Every rank calls `begin` and `wait`, in the same order for all buckets. Nothing is packed: a run goes from its shard
    (from a copy only if it is cast) straight into the readers' tensors, in a message of its own. Pieces of parameters
    that are not sharded need no exchange.
    """

    def __init__(self, pieces: Sequence[Piece], readers: Sequence[int] | None) -> None:
        """readers: global ranks; None: all."""
        self._pieces = pieces
        self._rank = own_rank()
        members = owners(pieces)
        self._runs = [runs_of(piece, members) for piece in pieces]
        self._send_to = [rank for rank in members if rank != self._rank and (readers is None or rank in readers)]
        self._works: list[dist.Work] = []
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What this rank reads of its own shards: where to, and the run."""
        self.is_under_way = False
        """Whether messages to or from other ranks may be underway."""

    @torch.no_grad()
    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Start the exchange.

        Args:
            values: where a reader wants each piece: contiguous, of its dtype and shape, on its parameter's device; if
                that is not sharded, anything. Of another rank: none.
        """
        exchanges: list[dist.P2POp] = []
        self._own = []
        for index, (piece, runs) in enumerate(zip(self._pieces, self._runs, strict=True)):
            for run in runs:
                into = values[index].view(-1)[run.in_piece : run.in_piece + run.count] if values else None
                if run.owner != self._rank:
                    exchanges += [] if into is None else [_message(dist.irecv, into, run.owner)]
                    continue
                shard = shard_of(piece, run)
                if into is not None:
                    self._own.append((into, shard))
                if self._send_to:
                    sent = shard.to(piece.param.device, piece.dtype)
                    exchanges += [_message(dist.isend, sent, rank) for rank in self._send_to]
        if exchanges:
            _settle()
            self.is_under_way = True
            self._works = dist.batch_isend_irecv(exchanges)

    @torch.no_grad()
    def wait(self) -> None:
        """Until what was begun is over, and the values are whole. This rank's own part is written meanwhile."""
        own, self._own = self._own, []
        for into, shard in own:
            into.copy_(shard)
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if works:
            _settle()
        self.is_under_way = False


def _message(operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int) -> dist.P2POp:
    return dist.P2POp(operation, tensor.view(torch.uint8), peer)  # bytes: not every transport knows every dtype


def elements(piece: Piece) -> torch.Tensor:
    """Those of a parameter that is not sharded, in its own dtype; an alias wherever it is contiguous."""
    return piece.param.detach().reshape(-1)[piece.start : piece.start + piece.count].view(piece.shape)


def shard_of(piece: Piece, run: Run) -> torch.Tensor:
    """A run that this rank holds, in the parameter's dtype: an alias, flat."""
    return piece.param.ds_tensor.detach()[run.in_shard : run.in_shard + run.count]  # type: ignore[attr-defined]


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _settle() -> None:
    """On a GPU, until copies are over: NCCL waits for one stream, and vLLM packs tensors on two in turns."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def owners(pieces: Sequence[Piece]) -> list[int]:
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


def runs_of(piece: Piece, members: Sequence[int]) -> list[Run]:
    """The parts of a piece; none if it is not sharded."""
    if not is_sharded(piece.param):
        return []
    length: int = piece.param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    end, runs = piece.start + piece.count, []
    for place, owner in enumerate(members):
        first, last = max(piece.start, place * length), min(end, (place + 1) * length)
        if first < last:
            runs.append(Run(owner, first - piece.start, first - place * length, last - first))
    return runs
