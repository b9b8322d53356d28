"""Trainer side of a gloo transfer: every rank sends its parts to the workers of all engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from lockstep.rollout.errors import SyncError
from lockstep.rollout.system.abandonable_thread import run_in_abandonable_thread
from lockstep.rollout.system.addresses import address_towards
from lockstep.rollout.weights.gloo.wire import (
    ABORTED,
    PACKED_BYTES,
    GlooInitInfo,
    GlooUpdateInfo,
    Receivers,
    abandon,
    bytes_of,
    connect_store,
    header,
    join_group,
    send,
)
from lockstep.rollout.weights.source import SentElements, ZeroSource, nbytes

CAUSE_WAIT_S = 5.0
"""Time that the call to the engine may take to fail after a broken transfer, so that its error is reported."""
POLL_S = 0.1
"""Interval at which a rank checks whether the engines of another rank aborted."""
ABORTED_KEY = "aborted"
"""Set in the store of a rank's rendezvous once its engines aborted."""


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):
    """Settings of a trainer rank. vLLM's `rank` is 0 on every rank with engines: the one that calls them."""

    backend: ClassVar[str] = "gloo"

    sender: int
    """Global rank of this trainer process."""
    store: TCPStore | None
    """Rendezvous store of this rank's engines (`listen`), if it has any."""
    receivers: list[Receivers]
    """Receivers of all ranks with engines, in rank order."""
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """Connection of this rank to the workers of one rank's engines."""

    receivers: Receivers
    store: TCPStore
    """Polled for `ABORTED_KEY`."""
    group: ProcessGroupGloo
    is_own: bool

    @property
    def workers(self) -> range:
        return range(1, 1 + self.receivers.num_workers)


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Sender on every rank that has engines, or a part of the weights of those that have.

    The source is iterated on the calling thread, so its exchanges keep one order on all ranks; gloo sends on its own
    threads. Over all ranks, the copies in flight (casts, merged adapters) take at most the bytes of the largest bucket.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: ZeroSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._source = source
        self._update = asdict(GlooUpdateInfo.of(source))
        self._limit_bytes = max(sum(map(nbytes, metas)) for metas in source.buckets()) // len(source.senders)
        self._connections: list[_Connection] = []

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if not isinstance(source, ZeroSource):
            raise TypeError(f"gloo weight transfer needs a ZeroSource, found {type(source).__name__}")
        engine = cls(init_info, client=client, source=source)
        engine._rendezvous()
        return engine

    def _rendezvous(self) -> None:
        """Join every group in which this rank sends, while its own engines' workers join theirs."""
        info = self._info
        own = next((receivers for receivers in info.receivers if receivers.rank == info.sender), None)
        if own is None:
            self._connections = run_in_abandonable_thread(self._join).result(timeout=info.timeout_s)
            return
        worker_info = GlooInitInfo(
            master_address=own.address,
            master_port=own.port,
            rank_offset=1,
            world_size=1 + own.num_workers,
            senders=own.senders,
            timeout_s=info.timeout_s,
        )
        workers = run_in_abandonable_thread(lambda: self.client.init_weight_transfer_engine(asdict(worker_info)))
        connections = run_in_abandonable_thread(self._join)
        # Wait for both: if an engine refuses, its group is not told and would wait for the deadline.
        both: list[Future[Any]] = [workers, connections]
        try:
            wait(both, timeout=info.timeout_s, return_when=FIRST_EXCEPTION)
            if workers.done():
                workers.result()
            self._connections = connections.result(timeout=info.timeout_s)
            workers.result(timeout=info.timeout_s)
        except BaseException:
            self._abort()
            raise

    def _join(self) -> list[_Connection]:
        """Join the groups in the order of senders and receivers, which is the same for all members."""
        info, connections = self._info, []
        for receivers in info.receivers:
            if info.sender not in receivers.senders:
                continue
            is_own = receivers.rank == info.sender
            # Two connections, because joining blocks one and a store serves the requests of a connection in order.
            rendezvous, store = (connect_store(receivers.address, receivers.port, info.timeout_s) for _ in range(2))
            own_address = receivers.address if is_own else address_towards(receivers.address)
            size = 1 + receivers.num_workers
            joining = run_in_abandonable_thread(
                partial(join_group, rendezvous, info.sender, 0, size, info.timeout_s, own_address=own_address)
            )
            _wait_unless_aborted(receivers, store, joining)
            connections.append(_Connection(receivers, store, joining.result(), is_own))
        return connections

    def send_weights(self) -> None:
        """Transfer the weights, on every trainer rank: start, send while the workers receive, finish.

        After an error on any rank this object cannot send again.
        """
        receiving: Future[None] | None = None
        try:
            if self.is_sender:
                self.client.start_weight_update()
                # Abandonable: workers that lost their senders wait in a collective until its deadline.
                receiving = run_in_abandonable_thread(lambda: self.client.update_weights(self._update))
            self._send_all(receiving)
            if receiving is not None:
                receiving.result(timeout=self._info.timeout_s)
        except BaseException:
            self._abort()
            raise
        if self.is_sender:
            self.client.finish_weight_update()

    def _send_all(self, receiving: Future[None] | None) -> None:
        """receiving: the call to this rank's own engines."""
        under_way: dict[_Connection, deque[_SentBucket]] = {connection: deque() for connection in self._connections}
        try:
            for parts in self._source.own_parts():
                if receiving is not None and receiving.done():
                    receiving.result()  # the workers aborted; raise their error
                copied_bytes = sum(part.elements.nbytes for part in parts if part.is_copy)
                for connection, buckets in under_way.items():
                    while buckets and copied_bytes + sum(bucket.copied_bytes for bucket in buckets) > self._limit_bytes:
                        _wait_until_sent(connection, [buckets[0]], receiving)
                        buckets.popleft()
                    buckets.append(_SentBucket(connection, parts))
            for connection, buckets in under_way.items():
                _wait_until_sent(connection, list(buckets), receiving)
                buckets.clear()
        except BaseException:
            for connection, buckets in under_way.items():
                abandon([work for bucket in buckets for work in bucket.works], (connection, buckets))
                # Live workers wait for the next bucket: this header makes them abort now.
                for worker in connection.workers:
                    with suppress(RuntimeError):
                        abandon(send(connection.group, [header(ABORTED)], worker), connection)
            raise

    def _abort(self) -> None:
        """Notify the ranks that send to this rank's engines."""
        self._connections = []
        if self._info.store is not None:
            with suppress(RuntimeError):  # a rank that cannot reach the store notices by that
                self._info.store.set(ABORTED_KEY, "")

    def shutdown(self) -> None:
        self._connections = []


class _SentBucket:
    """A bucket that this rank sends over one connection, as `_Receipt` in worker.py expects it."""

    def __init__(self, connection: _Connection, sent: Sequence[SentElements]) -> None:
        """Begin to send."""
        elements = [one for one in sent if one.to_all or connection.is_own]
        self.copied_bytes = sum(one.elements.nbytes for one in elements if one.is_copy)
        parts = [bytes_of(one.elements.cpu()) for one in elements]
        pieces = [header(sum(part.nbytes for part in parts)), *(part for part in parts if part.nbytes <= PACKED_BYTES)]
        self._messages = [torch.cat(pieces)] if parts else []
        self._messages += [part for part in parts if part.nbytes > PACKED_BYTES]  # kept alive until they are sent
        self.works: list[Work] = []
        self._lost: RuntimeError | None = None
        for worker in connection.workers:
            try:
                self.works += send(connection.group, self._messages, worker)
            except RuntimeError as error:  # other workers get the whole bucket, so that they understand the next header
                self._lost = error

    def wait(self) -> None:
        """Wait until all workers have it. Raises `RuntimeError` if a worker is gone."""
        for work in self.works:
            work.wait()
        if self._lost is not None:
            raise self._lost


def _wait_until_sent(connection: _Connection, buckets: Sequence[_SentBucket], receiving: Future[None] | None) -> None:
    """Wait until buckets are sent. Raises the engines' error if they aborted or died.

    receiving: the call to this rank's own engines.
    """
    sending = run_in_abandonable_thread(lambda: ([bucket.wait() for bucket in buckets], connection))
    if not connection.is_own:
        _wait_unless_aborted(connection.receivers, connection.store, sending)
        sending.result()
        return
    assert receiving is not None, "a rank with engines has called them"
    either: list[Future[Any]] = [sending, receiving]
    wait(either, return_when=FIRST_COMPLETED)
    if not sending.done():
        receiving.result()  # an engine that hangs blocks the bucket until the deadline
    try:
        sending.result()
    except RuntimeError:
        with suppress(TimeoutError):  # still receiving: the cause is on this side
            receiving.result(timeout=CAUSE_WAIT_S)
        raise


def _wait_unless_aborted(receivers: Receivers, store: TCPStore, done: Future[Any]) -> None:
    """Wait for a future that depends on another rank's engines. Raises `SyncError` if they aborted."""
    while not wait([done], timeout=POLL_S).done:
        if store.check([ABORTED_KEY]):
            raise SyncError(f"the engines of rank {receivers.rank} aborted")
