"""The trainer's weights as vLLM's `WeightSource`: by layer group, under checkpoint names.

One class reads plain modules, DDP, DeepSpeed ZeRO-1/2 (parameters whole on every rank) and ZeRO-3 (parameters sharded)
one bucket at a time, in one of two ways:

* **Whole tensors**, for `nccl` and `cuda_ipc`. A bucket of shards is fetched (`rollout/weights/shards.py`) only to the
  ranks that send it, while the consumer sends the previous one, so a sender holds two buckets.
* **Each rank's own parts**, for a transport on which every rank sends (`rollout/weights/gloo/`). Nothing of a sharded
  model is fetched, and nothing is copied unless it is cast.

LoRA adapters are sent alone to engines that apply them (`rollout/weights/adapter_tensors.py`), or else merged into
copies (`rollout/weights/checkpoint_tensors.py`), for which their weights are fetched in both cases. Beside the buckets,
a merged weight takes its size in float32 while it is computed; so do the fetched adapters, and the fetched base weights
if their dtype is not the engine's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups

from lockstep.rollout.weights.checkpoint_tensors import CheckpointTensor, checkpoint_tensors, unwrap
from lockstep.rollout.weights.shards import (
    Fetch,
    ParamRange,
    ShardRange,
    elements,
    is_sharded,
    own_rank,
    owners,
    shard_elements,
    shard_ranges,
)

DEFAULT_BUCKET_BYTES = 512 * 2**20


def nbytes(meta: ParamMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def plan_buckets(metas: Sequence[ParamMeta], bucket_bytes: int) -> list[list[ParamMeta]]:
    """Split parameters into buckets of at most `bucket_bytes`, never across a layer group.

    Usually one bucket per decoder layer, so that a small model also has several. A larger tensor has its own bucket.
    """
    by_name = {meta.name: meta for meta in metas}
    buckets: list[list[ParamMeta]] = []
    for group in layerwise_groups([meta.name for meta in metas]):
        size = bucket_bytes + 1  # a new group starts a new bucket
        for name in group:
            meta = by_name[name]
            if size + nbytes(meta) > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(meta)
            size += nbytes(meta)
    return buckets


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a tensor, and the rank that sends them to an engine."""

    sender: int
    """Global rank."""
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class SentElements:
    """Elements of a tensor that this rank sends."""

    elements: torch.Tensor
    """Flat, in the dtype in which they are sent."""
    to_all: bool
    """True if other ranks' engines need it too. A tensor that is whole on a rank goes only to its own engines."""
    is_copy: bool
    """True if it takes memory beside the training weights."""


_Arriving = tuple[CheckpointTensor, list[torch.Tensor]]
"""A tensor being fetched, and the destination of each of its ranges, or the training weights themselves."""


class _Bucket:
    """Tensors that are fetched together."""

    def __init__(self, tensors: Sequence[CheckpointTensor], readers: Sequence[int] | None) -> None:
        self.tensors = tensors
        self.metas = [tensor.meta for tensor in tensors]
        self.fetch = Fetch([one for tensor in tensors for one in tensor.ranges], readers)

    def begin(self, *, is_reader: bool) -> deque[_Arriving]:
        arriving = deque(
            (tensor, list(map(_destination, tensor.ranges))) for tensor in (self.tensors if is_reader else ())
        )
        self.fetch.begin([value for _, values in arriving for value in values])
        return arriving


class _Pass:
    """Buckets fetched one after another, the next one while the current one is used. A collective, to its end."""

    def __init__(self, buckets: Sequence[_Bucket], *, is_reader: bool) -> None:
        self._is_reader = is_reader
        self._waiting = deque(buckets)
        """Buckets not begun."""
        self._current: _Bucket | None = None
        """Bucket being fetched, or fetched last; None before the first and after the last."""
        self._is_in_step = True
        """False if this rank failed to begin an exchange."""
        self._arriving: deque[_Arriving] = deque()
        """Tensors of the current bucket not yielded yet; empty on ranks that are not readers."""
        self.seconds = 0.0
        """Time spent waiting for buckets and copying them."""

    def buckets(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yield the names and tensors of each bucket, none unless this rank reads. Exhaust each before the next."""
        self._begin_next()
        while (bucket := self._current) is not None:
            with self._timed():
                bucket.fetch.wait()
            yield self._tensors(bucket)

    @property
    def is_under_way(self) -> bool:
        """True if an exchange was begun and not completed."""
        return not self._is_in_step or (self._current is not None and self._current.fetch.is_under_way)

    def drain(self) -> None:
        """See `ZeroSource.drain`."""
        if self._current is None:  # not begun, or at the end, where this does nothing
            self._begin_next()
        while self._current is not None and self._is_in_step:
            self._current.fetch.wait()
            self._begin_next()
        self._arriving.clear()

    def _tensors(self, bucket: _Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        arriving = self._arriving
        if not arriving:
            self._begin_next()
            return
        for meta in bucket.metas:
            with self._timed():
                tensor, values = arriving.popleft()
                bucket.fetch.use(values)
                value = tensor.value(values)
            if not arriving:
                self._begin_next()
            yield meta.name, value

    def _begin_next(self) -> None:
        if not self._waiting:
            self._current = None
            return
        with self._timed():
            self._current, self._is_in_step = self._waiting.popleft(), False
            self._arriving = self._current.begin(is_reader=self._is_reader)
            self._is_in_step = True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


class _Metadata(list[ParamMeta]):
    """Metadata of a source: an attribute in vLLM 0.33 and a method in vLLM 0.32, so the attribute can be called."""

    def __call__(self) -> list[ParamMeta]:
        return self


class ZeroSource(WeightSource):
    """A `WeightSource` over the trained module, in its wrappers, as vLLM 0.32 and 0.33 read it.

    Under ZeRO-3 iteration is a collective: every rank must iterate to the end, or call `drain`.

    Args:
        module: plain, DDP, DeepSpeed engine, PEFT, or these nested.
        dtype: dtype to which floating-point parameters are cast; None: no cast.
        bucket_bytes: maximum size of a fetch, after the cast; a larger tensor is fetched alone.
        adapters_only: of a model with LoRA adapters, only these (`rollout/weights/adapter_tensors.py`).
        readers: global ranks that get the tensors; other ranks iterate over nothing. None: all.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        readers: Sequence[int] | None = None,
        adapters_only: bool = False,
    ) -> None:
        model = unwrap(module)
        send = checkpoint_tensors
        if adapters_only:
            from lockstep.rollout.weights.adapter_tensors import adapter_tensors as send  # other runs do not load it
        sent_tensors = send(model, dtype)
        tensors = {tensor.meta.name: tensor for tensor in sent_tensors}
        plan = plan_buckets([tensor.meta for tensor in tensors.values()], bucket_bytes)
        self._rank = own_rank()
        self._is_reader = readers is None or self._rank in readers
        self._buckets = [_Bucket([tensors[meta.name] for meta in bucket], readers) for bucket in plan]
        self._merged = [
            _Bucket([tensor for tensor in bucket.tensors if tensor.merge is not None], readers)
            for bucket in self._buckets
        ]
        """Merged tensors of each bucket, which no rank holds."""
        self._shard_ranges = {name: _shard_ranges(tensor) for name, tensor in tensors.items()}
        self._pass = _Pass((), is_reader=False)

    @property
    def gather_s(self) -> float:
        """Seconds the last pass spent waiting for buckets and copying them."""
        return self._pass.seconds

    @cached_property
    def metadata(self) -> _Metadata:  # type: ignore[override]  # a method in vLLM 0.32
        """Names, dtypes and full shapes in order of iteration, without owners: every rank takes part in the gather."""
        return _Metadata(meta for bucket in self.buckets() for meta in bucket)

    def buckets(self) -> list[list[ParamMeta]]:
        return [bucket.metas for bucket in self._buckets]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, which stay valid until the next optimizer step."""
        self._pass = _Pass(self._buckets, is_reader=self._is_reader)
        for bucket in self._pass.buckets():
            yield from bucket

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same; vLLM 0.33 iterates by this name."""
        return iter(self)

    def parts(self) -> list[list[Part]]:
        """Return, for each tensor of `metadata`, the parts that this rank's engines need, in order."""
        return [
            [Part(one.owner, one.in_range, one.count) for one in self._shard_ranges[meta.name]]
            or [Part(self._rank, 0, count) for count in [math.prod(meta.shape)] if count]
            for meta in self.metadata
        ]

    @property
    def senders(self) -> list[int]:
        """Global ranks that hold those parts, and this one."""
        return sorted({self._rank, *(one.owner for ranges in self._shard_ranges.values() for one in ranges)})

    def own_parts(self) -> Iterator[list[SentElements]]:
        """Yield what this rank sends of each bucket, in tensor order: aliases of the training weights unless cast.

        A collective if adapters are merged. Each rank must send a bucket before it asks for the next.
        """
        self._pass = _Pass(self._merged, is_reader=self._is_reader)
        for bucket, merged_tensors in zip(self._buckets, self._pass.buckets(), strict=True):
            whole = dict(merged_tensors)
            yield [part for tensor in bucket.tensors if (part := self._own_part(tensor, whole)) is not None]

    def _own_part(self, tensor: CheckpointTensor, merged: Mapping[str, torch.Tensor]) -> SentElements | None:
        source, ranges = tensor.ranges[0], self._shard_ranges[tensor.meta.name]
        is_copy = tensor.merge is not None or source.param.dtype != source.dtype
        if ranges:
            own = next((one for one in ranges if one.owner == self._rank), None)
            return None if own is None else SentElements(shard_elements(source, own).to(source.dtype), True, is_copy)
        if not self._is_reader or not math.prod(tensor.meta.shape):
            return None
        whole = elements(source).to(source.dtype) if tensor.merge is None else merged[tensor.meta.name]
        return SentElements(whole.reshape(-1), False, is_copy)

    def expect(self, *, parts: bool) -> None:
        """Announce the next pass on all ranks (`own_parts`, or else `__iter__`), for a `drain` before it begins."""
        self._pass = _Pass(self._merged if parts else self._buckets, is_reader=self._is_reader)

    @property
    def is_exchanging(self) -> bool:
        """True if messages of this rank's last pass may be in flight, so no other pass can follow."""
        return self._pass.is_under_way

    def drain(self) -> None:
        """Take part in the rest of this rank's last pass, or in the announced one, and discard the tensors.

        A rank that failed while beginning an exchange leaves the others to their deadline: it cannot know whether they
        wait for this exchange or the next, which has another size.
        """
        self._pass.drain()


def _destination(part: ParamRange) -> torch.Tensor:
    """Return new memory for a range of a sharded parameter, or the training weights themselves."""
    return (
        torch.empty(part.shape, dtype=part.dtype, device=part.param.device)
        if is_sharded(part.param)
        else elements(part)
    )


def _shard_ranges(tensor: CheckpointTensor) -> list[ShardRange]:
    """Return the owners of a tensor's elements; empty if it is not sharded, or merged."""
    return shard_ranges(tensor.ranges[0], owners(tensor.ranges)) if tensor.merge is None else []
