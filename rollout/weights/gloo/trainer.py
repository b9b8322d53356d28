"""Trainer side of a gloo transfer: every rank sends its parts to the workers of each engine.

An engine and a sender have a group of their own, so that an engine that dies or hangs delays the others by its silence
at most, and harms none: in a group of several engines, the message that times out closes the connections to all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

from lockstep.rollout.errors import EngineLostError, SyncError
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
"""Interval at which a rank checks whether a transfer makes progress, and whether another rank aborted it."""
GRACE_S = 2.0
"""Least time that an engine is waited for: what it received while another one was waited for shows only then."""
ABORTED_KEY = "aborted"
"""Set in the store of an engine's rendezvous once a rank left its transfer: to who is at fault."""
OF_ENGINE, OF_RANK = "engine", "rank"

Lose = Callable[[str, Exception], None]
"""Takes the name of one of this rank's engines and the error of its transfer. Raises it if the others cannot go on."""


class Client(VLLMWeightSyncClient, Protocol):
    """Control of one engine."""

    def abandon_update(self) -> None:
        """End an unfinished update, if there is one."""


class _AbortedError(SyncError):
    """Another rank failed, so that no transfer can be completed."""


def _raise(name: str, error: Exception) -> None:
    raise error


@dataclass(slots=True, eq=False)
class _Connection:
    """Connection of this rank to the workers of one engine."""

    receivers: Receivers
    store: TCPStore
    """Polled for `ABORTED_KEY`."""
    group: ProcessGroupGloo
    client: Client | None
    """Control of the engine; None for an engine of another rank."""
    buckets: deque[_SentBucket] = field(default_factory=deque)
    """Buckets on their way, oldest first."""
    receiving: Future[None] | None = None
    """The call in which the engine receives; None for an engine of another rank."""
    moved_at: float = 0.0
    """Time of its last known progress, by `time.monotonic`."""

    @property
    def is_own(self) -> bool:
        return self.client is not None

    @property
    def workers(self) -> range:
        return range(1, 1 + self.receivers.num_workers)


class GlooSender:
    """Sender on every rank that has engines, or a part of the weights of those that have.

    The source is iterated on the calling thread, so its exchanges keep one order on all ranks; gloo sends on its own
    threads. Over all ranks, the copies in flight (casts, merged adapters) take at most the bytes of the largest bucket.
    """

    def __init__(
        self, source: ZeroSource, *, sender: int, timeout_s: float, silence_s: float | None = None, lose: Lose = _raise
    ) -> None:
        """sender: global rank of this process. timeout_s: limit of a collective. silence_s: time without progress after
        which an engine is lost; None: timeout_s."""
        self._source = source
        self._sender = sender
        self._timeout_s = timeout_s
        self._silence_s = silence_s or timeout_s
        self._lose = lose
        self._update = asdict(GlooUpdateInfo.of(source))
        self._limit_bytes = max(sum(map(nbytes, metas)) for metas in source.buckets()) // len(source.senders)
        self._connections: dict[str, _Connection] = {}

    @property
    def names(self) -> list[str]:
        """Names of the connected engines."""
        return list(self._connections)

    def drop(self, names: Sequence[str]) -> None:
        """Leave the groups of these engines."""
        for name in names:
            self._connections.pop(name, None)

    def join(
        self,
        receivers: Sequence[Receivers],
        *,
        stores: Mapping[str, TCPStore],
        clients: Mapping[str, Client],
    ) -> None:
        """Join the groups of engines to which this rank sends, while its own engines' workers join theirs.

        receivers: of engines of all ranks. stores, clients: of this rank's engines by name. An engine of another rank
        that is not reached is left out, and its rank loses it.
        """
        joining = {
            one.engine: run_in_abandonable_thread(
                partial(self._join, one, stores.get(one.engine), clients.get(one.engine))
            )
            for one in receivers
            if self._sender in one.senders
        }
        for name, connection in joining.items():
            try:
                self._connections[name] = connection.result(timeout=self._timeout_s)
            except Exception as error:
                if name in clients:
                    self._lose(name, error)

    def _join(self, receivers: Receivers, own_store: TCPStore | None, client: Client | None) -> _Connection:
        timeout_s, size = self._timeout_s, 1 + receivers.num_workers
        # Two connections, because joining blocks one and a store serves the requests of a connection in order.
        rendezvous, store = (connect_store(receivers.address, receivers.port, timeout_s) for _ in range(2))
        own_address = address_towards(receivers.address) if client is None else receivers.address
        joined = run_in_abandonable_thread(
            partial(join_group, rendezvous, self._sender, 0, size, timeout_s, own_address=own_address)
        )
        call = None
        if client is not None:
            info = GlooInitInfo(
                master_address=receivers.address,
                master_port=receivers.port,
                rank_offset=1,
                world_size=size,
                senders=receivers.senders,
                timeout_s=timeout_s,
            )
            call = run_in_abandonable_thread(lambda: client.init_weight_transfer_engine(asdict(info)))
        try:
            # An engine that refuses does not tell its group, which would wait for the deadline.
            _wait_for(joined, receivers, store, unless_fails=call, silence_s=self._silence_s)
            if call is not None:
                _wait_for(call, receivers, store, silence_s=self._silence_s)
        except BaseException:
            _tell(store, OF_ENGINE)
            raise
        # The store of this rank's engines is kept, because it ends with its last reference.
        return _Connection(receivers, own_store or store, joined.result(), client)

    def send_weights(self) -> None:
        """Send the weights, on every trainer rank, while the workers receive and stage them.

        After an error on any rank this object cannot send again.
        """
        for connection in self._connections.values():
            connection.moved_at = time.monotonic()
            if (client := connection.client) is not None:
                # Abandonable: workers that lost their senders wait in a collective until its deadline.
                connection.receiving = run_in_abandonable_thread(partial(self._receive, client))
        try:
            for parts in self._source.own_parts():
                outgoing = {
                    is_own: _Messages([one for one in parts if one.to_all or is_own])
                    for is_own in {connection.is_own for connection in self._connections.values()}
                }
                self._with_each(partial(self._begin, outgoing))
            self._with_each(self._complete)
        except BaseException:
            for connection in self._connections.values():
                _leave(connection, OF_RANK)
            self._connections.clear()
            raise

    def _receive(self, client: Client) -> None:
        try:
            client.start_weight_update()
        except EngineLostError:
            raise
        except Exception:  # a sync that was stopped, or missed its deadline, has left its update unfinished
            client.abandon_update()
            client.start_weight_update()
        client.update_weights(self._update)

    def _with_each(self, act: Callable[[_Connection], None]) -> None:
        """Call `act` for each connection, and leave those where it fails."""
        for name, connection in list(self._connections.items()):
            try:
                act(connection)
            except _AbortedError:
                raise
            except Exception as error:
                if connection.is_own:
                    self._lose(name, error)
                _leave(connection, OF_ENGINE)
                del self._connections[name]

    def _begin(self, outgoing: Mapping[bool, _Messages], connection: _Connection) -> None:
        """Send a bucket as soon as the copies on their way leave room for it. outgoing: for own and other engines."""
        messages = outgoing[connection.is_own]
        if connection.receiving is not None and connection.receiving.done():
            connection.receiving.result()  # the workers aborted; raise their error
        under_way = connection.buckets
        while under_way and messages.copied_bytes + sum(one.copied_bytes for one in under_way) > self._limit_bytes:
            self._wait_until_sent(connection, [under_way[0]])
            under_way.popleft()
        under_way.append(_SentBucket(connection, messages))

    def _complete(self, connection: _Connection) -> None:
        """Wait until the engine has received all messages."""
        self._wait_until_sent(connection, list(connection.buckets))
        connection.buckets.clear()
        if connection.receiving is not None:
            receivers, store = connection.receivers, connection.store
            since = connection.moved_at
            _wait_for(connection.receiving, receivers, store, silence_s=self._silence_s, since=since)

    def _wait_until_sent(self, connection: _Connection, buckets: Sequence[_SentBucket]) -> None:
        """Wait until buckets are sent. Raises the engine's error if it aborted or died."""
        sending = run_in_abandonable_thread(lambda: ([bucket.wait() for bucket in buckets], connection))
        receiving = connection.receiving
        works = [work for bucket in buckets for work in bucket.works]
        try:
            _wait_for(
                sending,
                connection.receivers,
                connection.store,
                unless_fails=receiving,
                silence_s=self._silence_s,
                since=connection.moved_at,
                progress=lambda: sum(work.is_completed() for work in works),
            )
            connection.moved_at = time.monotonic()
        except RuntimeError:
            if receiving is not None and sending.done():
                with suppress(TimeoutError):  # still receiving: the cause is on this side
                    receiving.result(timeout=CAUSE_WAIT_S)
            raise

    def shutdown(self) -> None:
        self._connections.clear()


class _Messages:
    """Messages with which a bucket is sent, as `_Receipt` in worker.py expects them."""

    def __init__(self, sent: Sequence[SentElements]) -> None:
        self.copied_bytes = sum(one.elements.nbytes for one in sent if one.is_copy)
        parts = [bytes_of(one.elements.cpu()) for one in sent]
        pieces = [header(sum(part.nbytes for part in parts)), *(part for part in parts if part.nbytes <= PACKED_BYTES)]
        self.tensors = [torch.cat(pieces)] if parts else []
        self.tensors += [part for part in parts if part.nbytes > PACKED_BYTES]


class _SentBucket:
    """A bucket that this rank sends over one connection."""

    def __init__(self, connection: _Connection, messages: _Messages) -> None:
        """Begin to send."""
        self._messages = messages  # kept alive until they are sent
        self.works: list[Work] = []
        self._lost: RuntimeError | None = None
        for worker in connection.workers:
            try:
                self.works += send(connection.group, messages.tensors, worker)
            except RuntimeError as error:  # other workers get the whole bucket, so that they understand the next header
                self._lost = error

    @property
    def copied_bytes(self) -> int:
        return self._messages.copied_bytes

    def wait(self) -> None:
        """Wait until all workers have it. Raises `RuntimeError` if a worker is gone."""
        for work in self.works:
            work.wait()
        if self._lost is not None:
            raise self._lost


def _wait_for(
    awaited: Future[Any],
    receivers: Receivers,
    store: TCPStore,
    *,
    silence_s: float,
    unless_fails: Future[Any] | None = None,
    since: float | None = None,
    progress: Callable[[], int] = lambda: 0,
) -> None:
    """Wait for a future that depends on an engine, and raise its error, or that of `unless_fails`.

    since: time of its last known progress, so that the silences of several engines do not add up; None: now. Raises
    `EngineLostError` without progress for silence_s, or if another rank lost the engine, and `_AbortedError` if
    a rank failed.
    """
    watched = {awaited} if unless_fails is None else {awaited, unless_fails}
    count, began = progress(), time.monotonic()
    since = began if since is None else since
    while awaited not in (done := wait(watched, timeout=POLL_S, return_when=FIRST_COMPLETED).done):
        for future in done:
            future.result()
        watched -= done
        if store.check([ABORTED_KEY]):
            if store.get(ABORTED_KEY) == OF_RANK.encode():
                raise _AbortedError(f"the engines of rank {receivers.rank} aborted")
            raise EngineLostError(f"another rank lost {receivers.engine} in the transfer")
        if (now := progress()) != count:
            count, since = now, time.monotonic()
        elif time.monotonic() - max(since, began - silence_s + GRACE_S) >= silence_s:
            raise EngineLostError(
                f"{receivers.engine} took no part in the transfer for {silence_s:g} s: it hangs or is unreachable"
            )
    awaited.result()


def _leave(connection: _Connection, fault: str) -> None:
    """Leave a transfer, and tell the engine's workers and the other ranks. fault: OF_ENGINE or OF_RANK."""
    buckets = connection.buckets
    abandon([work for bucket in buckets for work in bucket.works], (connection, buckets))
    # Live workers wait for the next bucket: this header makes them abort now.
    for worker in connection.workers:
        with suppress(RuntimeError):
            abandon(send(connection.group, [header(ABORTED)], worker), connection)
    _tell(connection.store, fault)


def _tell(store: TCPStore, fault: str) -> None:
    with suppress(RuntimeError):  # a rank that cannot reach the store notices by that
        if not store.check([ABORTED_KEY]):
            store.set(ABORTED_KEY, fault)
