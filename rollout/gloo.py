"""Weight transfer over gloo: what vLLM's nccl engine does, for machines without an accelerator, and without one sender.

Every trainer rank that has a part of the weights sends it to the engines' workers itself, out of where it lies, and
they receive it where it belongs. So each byte travels once, and none is copied on the way unless it is cast.

    rank 0 ──its parts──► ┐
    rank 1 ──its parts──► ├─ workers of the engines of rank 0 (and likewise of any other rank that has engines)
    rank 2 ──its parts──► ┘

A rank and the workers of one rank's engines are a group, in which it sends: for each bucket a header and its small
parts in one message, then the others. The lifecycle is vLLM's (`start`, `update`, `finish`), and differs from the nccl
engine in one point: workers stage what they receive and load it in `finish`. So if the trainer dies half-way the old
weights stay live, at the price of a second copy of the weights in main memory.

Nobody waits for one that gave up. A sender says so instead of its next bucket, and the workers give up too; a rank
whose engines gave up says so in the store where they met, and who sends to them looks there while it waits.

Covered: tensor and data parallel workers, tied embeddings, experts, a deadline on every collective.
Not covered: draft models, quantised engines' completeness check (their scales never travel).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rollout.addresses import address_towards
from rollout.buckets import bucket_layout, nbytes, new_bucket, views
from rollout.daemon import in_daemon_thread
from rollout.errors import SyncError
from rollout.source import Part, Sent, ZeroSource

CAUSE_WAIT_S = 5.0
"""How long after a transfer that broke the call to the engine may take to fail as well."""
LOOK_S = 0.1
"""How often a rank looks whether the engines of another one gave up, while it waits for them."""
HEADER_BYTES, GAVE_UP = 8, -1
"""A bucket begins with the number of bytes that its sender has of it, or with the word that it sends no more. gloo
itself does not mind if fewer bytes come than were expected."""
OVER = "over"
"""In the store where a rank's engines met those who send to them, once they gave up."""
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


class _Receipt:
    """What a worker receives of a bucket from one sender: header and small parts in one message, then the others."""

    def __init__(self, group: ProcessGroupGloo, places: Sequence[torch.Tensor]) -> None:
        """Begins. places: bytes."""
        self._nbytes = sum(place.nbytes for place in places)
        self._small = [place for place in places if place.nbytes <= PACKED_BYTES]
        self._packed = torch.zeros(HEADER_BYTES + sum(place.nbytes for place in self._small), dtype=torch.uint8)
        large = [place for place in places if place.nbytes > PACKED_BYTES]
        self.works = [receive_into(group, one) for one in (self._packed, *large)]

    def wait(self) -> None:
        """Until all of it is in its place. Raises `RuntimeError` if the sender gave up, is gone, or sends less."""
        for work in self.works:
            work.wait()
            sent = self._packed[:HEADER_BYTES].view(torch.int64).item()  # it is in the first message to arrive
            if sent == GAVE_UP:
                raise RuntimeError("gloo weight transfer: the trainer gave up; the old weights stay")
            if sent != (said := self._nbytes):
                raise RuntimeError(f"gloo weight transfer: a rank sends {sent} bytes of a bucket and said {said}")
        sizes = [place.nbytes for place in self._small]
        for place, arrived in zip(self._small, self._packed[HEADER_BYTES:].split(sizes), strict=True) if sizes else ():
            place.copy_(arrived)


class _Bucket:
    """A bucket that a worker receives."""

    def __init__(self, groups: Mapping[int, ProcessGroupGloo], planned: Planned, memory: torch.Tensor) -> None:
        """Begins. groups: by sender. memory: of `bucket_bytes` bytes."""
        self._named = views(memory, [meta for meta, _ in planned])
        places: dict[int, list[torch.Tensor]] = {}
        for (_, tensor), (_, parts) in zip(self._named, planned, strict=True):
            for part in parts:
                place = tensor.view(-1)[part.start : part.start + part.count]
                places.setdefault(part.sender, []).append(bytes_of(place))
        self.receipts = [_Receipt(groups[sender], of_one) for sender, of_one in places.items()]

    def wait(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors. Raises `RuntimeError` if a sender gave up or is gone."""
        for receipt in self.receipts:
            receipt.wait()
        return self._named


def receive(
    groups: Mapping[int, ProcessGroupGloo],
    buckets: Iterable[Planned],
    new_memory: Callable[[int], torch.Tensor] = new_bucket,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of each bucket, while the next one arrives already.

    After an error the groups are of no use any more.

    Args:
        new_memory: called with a number of bytes; what it gives is asked for again two buckets later.
    """
    under_way: deque[_Bucket] = deque()
    try:
        for planned in buckets:
            under_way.append(_Bucket(groups, planned, new_memory(bucket_bytes(planned))))
            if len(under_way) > 1:
                yield under_way[0].wait()
                under_way.popleft()
        while under_way:
            yield under_way[0].wait()
            under_way.popleft()
    except BaseException:
        for receipt in chain.from_iterable(bucket.receipts for bucket in under_way):
            _abandon(receipt.works, (groups, receipt))
        raise


def bucket_bytes(planned: Planned) -> int:
    return bucket_layout([meta for meta, _ in planned])[1]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side: receive into staging, load in `finish`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _groups: Mapping[int, ProcessGroupGloo] | None = None
    """By sender."""
    _staged: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()  # a trainer that was restarted makes new groups
        self._staged = []
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._groups = join_all(init_info, init_info.rank_offset + worker)

    def start_weight_update(self) -> None:
        self._staged = []

    def update_weights(self, update_info: dict) -> None:
        # The base class would synchronise an accelerator, which is an error where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._groups is None:
            raise RuntimeError(
                "gloo weight transfer: this engine is in no group; call init_weight_transfer_engine on it (again, if "
                "an update has failed)"
            )
        try:
            for named in receive(self._groups, update_info.buckets()):
                self._staged.extend(named)
        except BaseException:
            self._staged, self._groups = [], None
            raise

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        expected = {name for name, _ in self.model.named_parameters()}
        staged, self._staged = self._staged, []
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(self._on_device(staged))  # type: ignore[operator]
        finally:
            # Also after an error: without it layers stay on the meta device and the next step kills the engine.
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_heads()
            self._repack_experts()
        missing = sorted(expected - loaded)
        if missing and self.model_config.quantization is None:
            raise RuntimeError(
                f"weight update: {len(missing)} of {len(expected)} parameters were not among the weights that "
                f"arrived, first {missing[:3]}; they keep their old values"
            )

    def _on_device(self, staged: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in staged:
            yield name, tensor.to(self.device)

    def _repack_heads(self) -> None:
        """On CPU linear weights are used in a packed copy, and a head tied to the embedding is not loaded itself.

        Without this a tied head computes with its old packing: logprobs off by 2 to 10.
        """
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, QuantizeMethodBase):
                module.quant_method.process_weights_after_loading(module)

    def _repack_experts(self) -> None:
        """On CPU experts are used in a packed form too, which vLLM 0.32 makes at the first loading and never again.

        Without this experts are read in the wrong order after every sync: logprobs off by 2.
        """
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        for module in self.model.modules():
            if not isinstance(module, RoutedExperts) or not isinstance(module.quant_method, UnquantizedFusedMoEMethod):
                continue
            kernel = module.quant_method.moe_kernel
            if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._groups = None


def join_all(info: GlooInitInfo, rank: int) -> dict[int, ProcessGroupGloo]:
    """The groups of all senders, of which this worker is to be a member of this rank."""
    store = visit(info.master_address, info.master_port, info.timeout_s)
    own_address = address_towards(info.master_address)
    return {
        sender: join_group(store, sender, rank, info.world_size, info.timeout_s, own_address=own_address)
        for sender in info.senders
    }


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
                _abandon([work for one in begun for work in one.works], (line, begun))
                # Workers that still live wait for the next bucket: they get this instead, so that they give up now.
                for worker in line.workers:
                    with suppress(RuntimeError):
                        _abandon(send(line.group, [header(GAVE_UP)], worker), line)
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


def _abandon(works: Sequence[Work], kept: object) -> Future[object]:
    """Wait for collectives on a thread, which keeps their group: to end one waits for what is under way in it."""
    return in_daemon_thread(lambda: ([work.wait() for work in works], kept))
