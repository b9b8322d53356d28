"""The trainer's weights as vLLM reads them: by layer group, under the names of the checkpoint.

Plain modules, DDP, DeepSpeed ZeRO-1/2 (whose parameters are whole on every rank) and ZeRO-3 (whose parameters
are shards) go through one class. It reads a model in one of two ways, one bucket at a time:

* **Whole tensors**, for transports with one sender (vLLM's `nccl` and `ipc`): a bucket of shards is fetched
  (`rollout/weights/shards.py`) to the ranks that send it and no others, while the consumer sends the last one.

      wait for bucket k ─► begin to fetch k + 1 ─► send k ─► wait for k + 1 ...

  So a sender holds one bucket on its way in and the one that it sends.
* **The parts that each rank has**, for one on which every rank sends (`rollout/weights/gloo/`): out of a sharded model
  nothing is fetched, and nothing copied unless it is cast.

      tensor ▕██ part of rank 0 ██▏██ of rank 1 ██▏██ of rank 2 ██▏

LoRA adapters are merged into copies (`rollout/weights/checkpoint_tensors.py`), for which their weights are fetched in
either way. A merged weight takes its size in float32 beside the buckets while it is added up, and adapters arrive
beside them, like the weights that they are added to if those are of another dtype than the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rollout.errors import SyncError
from rollout.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from rollout.weights.checkpoint_tensors import Entry, entries_of, unwrap
from rollout.weights.shards import Fetch, Run, elements, is_sharded, own_rank, owners, runs_of, shard_of


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a tensor, and the rank that sends them to an engine."""

    sender: int
    """Global rank."""
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What this rank sends of a tensor."""

    elements: torch.Tensor
    """Flat, in the dtype in which they travel."""
    to_all: bool
    """Whether other ranks' engines need it too. What a rank has whole it sends to its own engines alone."""
    is_copy: bool
    """Whether it takes memory beside the training weights."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """An entry whose pieces are being fetched."""

    entry: Entry
    values: list[torch.Tensor]
    """Of the pieces: where they arrive, or the training weights themselves."""

    def tensor(self) -> torch.Tensor:
        """The entry's value, once its pieces are there: in new memory, or the training weight itself."""
        merge = self.entry.merge
        return (self.values[0] if merge is None else merge(self.values)).to(self.entry.meta.dtype)


class _Bucket:
    """Entries that are fetched together."""

    def __init__(self, entries: Sequence[Entry], readers: Sequence[int] | None) -> None:
        self.entries = entries
        self.metas = [entry.meta for entry in entries]
        self.fetch = Fetch([piece for entry in entries for piece in entry.pieces], readers)

    def begin(self, *, is_reader: bool) -> deque[_Arriving]:
        """Start the exchange."""
        arriving = deque(
            _Arriving(
                entry,
                [
                    torch.empty(piece.shape, dtype=piece.dtype, device=piece.param.device)
                    if is_sharded(piece.param)
                    else elements(piece)
                    for piece in entry.pieces
                ],
            )
            for entry in (self.entries if is_reader else ())
        )
        self.fetch.begin([value for one in arriving for value in one.values])
        return arriving


class _Pass:
    """Buckets fetched one after another, the next one on its way while one is used. A collective, to the end."""

    def __init__(self, buckets: Sequence[_Bucket], *, is_reader: bool) -> None:
        self._is_reader = is_reader
        self._waiting = deque(buckets)
        """Those that were not begun."""
        self._fetched: _Bucket | None = None
        """What is being fetched, or was fetched last."""
        self._is_in_step = True
        """Whether this rank has begun every exchange that it came to."""
        self._arriving: deque[_Arriving] = deque()
        """What a reader has not given away of it."""
        self._is_begun = False
        self.seconds = 0.0
        """Spent waiting for buckets and copying them."""

    def buckets(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The names and tensors of each bucket: of a reader. Take all of one before the next."""
        self._begin_next()
        while (bucket := self._fetched) is not None:
            with self._timed():
                bucket.fetch.wait()
            yield self._taken(bucket)

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange was begun and not waited for to its end."""
        return not self._is_in_step or (self._fetched is not None and self._fetched.fetch.is_under_way)

    def drain(self) -> None:
        """See `ZeroSource.drain`."""
        if not self._is_begun:
            self._begin_next()
        while self._fetched is not None and self._is_in_step:
            self._fetched.fetch.wait()
            self._begin_next()
        self._arriving.clear()

    def _taken(self, bucket: _Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        arriving = self._arriving
        if not arriving:
            self._begin_next()
            return
        for meta in bucket.metas:
            with self._timed():
                tensor = arriving.popleft().tensor()
            if not arriving:
                self._begin_next()
            yield meta.name, tensor

    def _begin_next(self) -> None:
        self._is_begun = True
        if not self._waiting:
            self._fetched = None
            return
        with self._timed():
            self._fetched, self._is_in_step = self._waiting.popleft(), False
            self._arriving = self._fetched.begin(is_reader=self._is_reader)
            self._is_in_step = True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


class ZeroSource(WeightSource):
    """A `WeightSource` over the module that is trained, wrapped as it is.

    Under ZeRO-3 iterating is a collective: every rank must iterate, to the end. A rank that stops early calls
    `drain`, so that the others do not wait for it.

    Args:
        module: plain, DDP, DeepSpeed engine, PEFT, or these nested.
        dtype: of the engine's weights; floating-point parameters are cast on the way. None: as they are.
        bucket_bytes: fetched at once, as they are sent; a tensor that is larger is fetched by itself.
        readers: ranks that get the tensors; on others iterating yields nothing. None: all.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        readers: Sequence[int] | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise SyncError(f"bucket_bytes must be positive, found {bucket_bytes}")
        entries = {entry.meta.name: entry for entry in entries_of(unwrap(module), dtype)}
        plan = plan_buckets([entry.meta for entry in entries.values()], bucket_bytes)
        self._rank = own_rank()
        self._is_reader = readers is None or self._rank in readers
        self._buckets = [_Bucket([entries[meta.name] for meta in bucket], readers) for bucket in plan]
        self._merged = [
            _Bucket([entry for entry in bucket.entries if entry.merge is not None], readers) for bucket in self._buckets
        ]
        """Of each bucket what no rank has."""
        self._runs = {name: _runs_of_plain(entry) for name, entry in entries.items()}
        self._pass = _Pass((), is_reader=False)  # nothing to take part in

    @property
    def gather_s(self) -> float:
        """Seconds that the last pass spent waiting for buckets and copying them."""
        return self._pass.seconds

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and full shapes in the order of iteration. No collective, no copy."""
        return [meta for bucket in self.buckets() for meta in bucket]

    def buckets(self) -> list[list[ParamMeta]]:
        """The same as they are read together."""
        return [bucket.metas for bucket in self._buckets]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, which stay as they are until the next optimizer step."""
        self._pass = _Pass(self._buckets, is_reader=self._is_reader)
        for bucket in self._pass.buckets():
            yield from bucket

    def parts(self) -> list[list[Part]]:
        """Of each tensor, in the order of `metadata`, the parts that this rank's engines need, in order."""
        return [
            [Part(run.owner, run.in_piece, run.count) for run in self._runs[meta.name]]
            or [Part(self._rank, 0, count) for count in [torch.Size(meta.shape).numel()] if count]
            for meta in self.metadata()
        ]

    @property
    def senders(self) -> list[int]:
        """Global ranks that have those parts, and this one."""
        return sorted({self._rank, *(run.owner for runs in self._runs.values() for run in runs)})

    def own_parts(self) -> Iterator[list[Sent]]:
        """What this rank sends of each bucket, in the order of the tensors; the training weights unless they are cast.

        A collective if adapters are merged. Everybody sends what was yielded last before waiting for more.
        """
        self._pass = _Pass(self._merged, is_reader=self._is_reader)
        for bucket, merged in zip(self._buckets, self._pass.buckets(), strict=True):
            whole = dict(merged)
            yield [sent for entry in bucket.entries if (sent := self._own(entry, whole)) is not None]

    def _own(self, entry: Entry, merged: Mapping[str, torch.Tensor]) -> Sent | None:
        piece, runs = entry.pieces[0], self._runs[entry.meta.name]
        is_copy = entry.merge is not None or piece.param.dtype != piece.dtype
        if runs:
            own = next((run for run in runs if run.owner == self._rank), None)
            return None if own is None else Sent(shard_of(piece, own).to(piece.dtype), True, is_copy)
        if not self._is_reader or not torch.Size(entry.meta.shape).numel():
            return None
        tensor = elements(piece).to(piece.dtype) if entry.merge is None else merged[entry.meta.name]
        return Sent(tensor.reshape(-1), False, is_copy)

    def expect(self, *, parts: bool) -> None:
        """Say which pass comes next on all ranks (`own_parts`, or else `__iter__`): for `drain`, if it never begins."""
        self._pass = _Pass(self._merged if parts else self._buckets, is_reader=self._is_reader)

    @property
    def is_exchanging(self) -> bool:
        """Whether messages of this rank's last pass may be underway: then no other pass can follow."""
        return self._pass.is_under_way

    def drain(self) -> None:
        """Take part in what this rank's last pass left out, or in the one that was expected. Nothing is kept.

        A rank that failed where it should have begun an exchange leaves the others to their deadline: nobody knows
        whether they wait for this one or the next, which is of another size.
        """
        self._pass.drain()


def _runs_of_plain(entry: Entry) -> list[Run]:
    """Which rank has what of a tensor; none if it is not sharded, or not what was sharded."""
    return runs_of(entry.pieces[0], owners(entry.pieces)) if entry.merge is None else []
