"""The trainer's side of a transfer over gloo: every rank sends its parts to the workers of all engines."""

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

from rollout.errors import SyncError
from rollout.system.abandonable_thread import in_daemon_thread
from rollout.system.addresses import address_towards
from rollout.weights.buckets import nbytes
from rollout.weights.gloo.wire import (
    GAVE_UP,
    PACKED_BYTES,
    GlooInitInfo,
    GlooUpdateInfo,
    Receivers,
    abandon,
    bytes_of,
    header,
    join_group,
    send,
    visit,
)
from rollout.weights.source import Sent, ZeroSource

CAUSE_WAIT_S = 5.0
"""How long after a transfer that broke the call to the engine may take to fail as well."""
LOOK_S = 0.1
"""How often a rank looks whether the engines of another one gave up, while it waits for them."""
OVER = "over"
"""In the store where a rank's engines met those who send to them, once they gave up."""


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):
    """What a trainer rank needs. `rank` is 0 on every rank with engines: vLLM's word for who calls them."""

    backend: ClassVar[str] = "gloo"

    sender: int
    """Global rank of this process among the trainer's."""
    store: TCPStore | None
    """What listens for this rank's own engines, if it has any (`listen`)."""
    receivers: list[Receivers]
    """Of all ranks with engines, in the order of the ranks."""
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """From this rank to the workers of one rank's engines."""

    receivers: Receivers
    store: TCPStore
    """To look whether they gave up."""
    group: ProcessGroupGloo
    is_own: bool

    @property
    def workers(self) -> range:
        return range(1, 1 + self.receivers.num_workers)


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side, on every rank that has engines or a part of the weights of those that do.

    The source is iterated on the calling thread, so its exchanges keep one order on all ranks; gloo sends on threads of
    its own. Of copies (casts, merged adapters) as much is under way over all ranks as the largest bucket has bytes.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: ZeroSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._source = source
        self._update = asdict(GlooUpdateInfo.of(source))
        self._limit_bytes = max(sum(map(nbytes, metas)) for metas in source.buckets()) // len(source.senders)
        self._lines: list[_Line] = []

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
            self._lines = in_daemon_thread(self._join).result(timeout=info.timeout_s)
            return
        worker_info = GlooInitInfo(
            master_address=own.address,
            master_port=own.port,
            rank_offset=1,
            world_size=1 + own.num_workers,
            senders=own.senders,
            timeout_s=info.timeout_s,
        )
        workers = in_daemon_thread(lambda: self.client.init_weight_transfer_engine(asdict(worker_info)))
        lines = in_daemon_thread(self._join)
        # Not only the lines: if an engine refuses, nobody would tell its group, which waits for the deadline.
        both: list[Future[Any]] = [workers, lines]
        try:
            wait(both, timeout=info.timeout_s, return_when=FIRST_EXCEPTION)
            if workers.done():
                workers.result()
            self._lines = lines.result(timeout=info.timeout_s)
            workers.result(timeout=info.timeout_s)
        except BaseException:
            self._give_up()
            raise

    def _join(self) -> list[_Line]:
        """Every member joins groups in the order of senders and receivers, so that all of them come about."""
        info, lines = self._info, []
        for receivers in info.receivers:
            if info.sender not in receivers.senders:
                continue
            is_own = receivers.rank == info.sender
            # Two, as a store answers one question after another, and to join is to wait in it.
            meeting, store = (visit(receivers.address, receivers.port, info.timeout_s) for _ in range(2))
            own_address = receivers.address if is_own else address_towards(receivers.address)
            size = 1 + receivers.num_workers
            joining = in_daemon_thread(
                partial(join_group, meeting, info.sender, 0, size, info.timeout_s, own_address=own_address)
            )
            _wait_for_those_of(receivers, store, joining)
            lines.append(_Line(receivers, store, joining.result(), is_own))
        return lines

    def send_weights(self) -> None:
        """One round on every trainer rank: start, send while the workers receive, finish.

        After an error on any rank no rank sends again with this object.
        """
        receiving: Future[None] | None = None
        try:
            if self.is_sender:
                self.client.start_weight_update()
                # Abandonable: workers that lost us sit in a collective until its own deadline.
                receiving = in_daemon_thread(lambda: self.client.update_weights(self._update))
            self._send_all(receiving)
            if receiving is not None:
                receiving.result(timeout=self._info.timeout_s)
        except BaseException:
            self._give_up()
            raise
        if self.is_sender:
            self.client.finish_weight_update()

    def _send_all(self, receiving: Future[None] | None) -> None:
        """receiving: the call to this rank's own engines."""
        under_way: dict[_Line, deque[_Sending]] = {line: deque() for line in self._lines}
        try:
            for sent in self._source.own_parts():
                if receiving is not None and receiving.done():
                    receiving.result()  # the workers gave up, and say why
                copied = sum(part.elements.nbytes for part in sent if part.is_copy)
                for line, before in under_way.items():
                    while before and copied + sum(one.copied_bytes for one in before) > self._limit_bytes:
                        _finish(line, [before[0]], receiving)
                        before.popleft()
                    before.append(_Sending(line, sent))
            for line, rest in under_way.items():
                _finish(line, list(rest), receiving)
                rest.clear()
        except BaseException:
            for line, begun in under_way.items():
                abandon([work for one in begun for work in one.works], (line, begun))
                # Workers that still live wait for the next bucket: they get this instead, so that they give up now.
                for worker in line.workers:
                    with suppress(RuntimeError):
                        abandon(send(line.group, [header(GAVE_UP)], worker), line)
            raise

    def _give_up(self) -> None:
        """Tell those who send to this rank's engines."""
        self._lines = []
        if self._info.store is not None:
            with suppress(RuntimeError):  # whoever is cut off from it finds out by that
                self._info.store.set(OVER, "")

    def shutdown(self) -> None:
        self._lines = []


class _Sending:
    """What this rank sends of a bucket over one line, as `_Receipt` expects it."""

    def __init__(self, line: _Line, sent: Sequence[Sent]) -> None:
        """Begins."""
        taken = [one for one in sent if one.to_all or line.is_own]
        self.copied_bytes = sum(one.elements.nbytes for one in taken if one.is_copy)
        parts = [bytes_of(one.elements.cpu()) for one in taken]
        packed = [header(sum(part.nbytes for part in parts)), *(part for part in parts if part.nbytes <= PACKED_BYTES)]
        self._messages = [torch.cat(packed)] if parts else []
        self._messages += [part for part in parts if part.nbytes > PACKED_BYTES]  # kept until they are sent
        self.works: list[Work] = []
        self._lost: RuntimeError | None = None
        for worker in line.workers:
            try:
                self.works += send(line.group, self._messages, worker)
            except RuntimeError as error:  # the others get their whole bucket, so that they understand what follows
                self._lost = error

    def wait(self) -> None:
        """Until it is sent to all. Raises `RuntimeError` if a worker is gone."""
        for work in self.works:
            work.wait()
        if self._lost is not None:
            raise self._lost


def _finish(line: _Line, sendings: Sequence[_Sending], receiving: Future[None] | None) -> None:
    """Wait until these are sent. Raises what the engines say, if they gave up or it broke because one is gone.

    receiving: the call to this rank's own engines.
    """
    sent = in_daemon_thread(lambda: ([one.wait() for one in sendings], line))
    if not line.is_own:
        _wait_for_those_of(line.receivers, line.store, sent)
        sent.result()
        return
    assert receiving is not None, "a rank with engines has called them"
    either: list[Future[Any]] = [sent, receiving]
    wait(either, return_when=FIRST_COMPLETED)
    if not sent.done():
        receiving.result()  # an engine that hangs holds the bucket up until the deadline
    try:
        sent.result()
    except RuntimeError:
        with suppress(TimeoutError):  # they still receive: the cause is on this side
            receiving.result(timeout=CAUSE_WAIT_S)
        raise


def _wait_for_those_of(receivers: Receivers, store: TCPStore, done: Future[Any]) -> None:
    """Wait for what needs another rank's engines. Raises `SyncError` if they gave up."""
    while not wait([done], timeout=LOOK_S).done:
        if store.check([OVER]):
            raise SyncError(f"the engines of rank {receivers.rank} gave up")
