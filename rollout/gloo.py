"""Weight transfer over gloo: what vLLM's nccl engine does, for machines without an accelerator.

The trainer's sender is rank 0 of a group of its own, the engine's workers are ranks 1 and up. Weights travel
as flat byte buckets, one broadcast each. The lifecycle is vLLM's (`start`, `update`, `finish`), and differs
from the nccl engine in one point: workers stage what they receive and load it in `finish`. So if the trainer
dies half-way the old weights stay live, at the price of a second copy of the weights in main memory.

Covered: tensor and data parallel workers, tied embeddings, experts, a deadline on every collective.
Not covered: draft models, quantised engines' completeness check (their scales never travel).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any, ClassVar, Self

import torch
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
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
from rollout.buckets import bucket_layout, new_bucket, views
from rollout.daemon import in_daemon_thread
from rollout.errors import SyncError
from rollout.source import ZeroSource

CAUSE_WAIT_S = 5.0
"""How long after a broken broadcast the call to the engine may take to fail as well."""
SENT = 1
"""Last byte of a bucket that holds weights; 0 in one that a failing sender sends so that nobody waits for it."""


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker needs to join: the rendezvous and the deadline of each collective."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):
    """What the sender needs: `rank` 0 sends; any other rank only takes part in the gather.

    `master_address` is this host's, as the workers reach it. The port is chosen when the group is made.
    """

    backend: ClassVar[str] = "gloo"

    master_address: str
    world_size: int
    timeout_s: float = 300.0


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What one round will send, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_sizes: list[int]
    """Number of tensors in each bucket: shipped, so that the two sides cannot cut differently."""

    def buckets(self) -> Iterator[list[ParamMeta]]:
        metas = (
            ParamMeta(name, getattr(torch, dtype_name), tuple(shape))
            for name, dtype_name, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        )
        for size in self.bucket_sizes:
            yield [next(metas) for _ in range(size)]


def _listen(address: str) -> socket.socket:
    """A listening socket on a free port of this address alone; torch would open the port on all interfaces."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    return listener


def join_group(
    address: str, port: int, rank: int, world_size: int, timeout_s: float, listener: socket.socket | None = None
) -> ProcessGroupGloo:
    """Join a group outside torch's global state. Rank 0 brings the listener; data takes the way to `address`.

    vLLM's own helper for this listens on every interface, and sends over the one that the host name resolves to, which
    may be loopback.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(
        address,
        port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    own_address = address if listener is not None else address_towards(address)
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    return ProcessGroupGloo(store, rank, world_size, options)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> Work:
    return group.broadcast(tensor, 0)  # type: ignore[attr-defined]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side: receive into staging, load in `finish`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _group: ProcessGroupGloo | None = None
    _staged: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()  # a trainer that was restarted makes a new group
        self._staged = []
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = join_group(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + worker,
            init_info.world_size,
            init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        self._staged = []

    def update_weights(self, update_info: dict) -> None:
        # The base class would synchronise an accelerator, which is an error where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("gloo weight transfer: init_weight_transfer_engine was not called on this engine")
        try:
            for metas in update_info.buckets():
                bucket = new_bucket(message_bytes(metas))
                broadcast(self._group, bucket).wait()
                if bucket[-1] != SENT:
                    raise RuntimeError("gloo weight transfer: the trainer gave up; the old weights stay")
                self._staged.extend(views(bucket, metas))
        except BaseException:
            self._staged = []
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
        self._group = None


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side. Buckets are fetched into two buffers in turns: one arrives while the other is sent.

    The source is iterated on the calling thread, so its exchanges keep one order on all ranks; the overlap comes from
    gloo, which works on threads of its own.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: ZeroSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._source = source
        self._group: ProcessGroupGloo | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if not isinstance(source, ZeroSource):
            raise TypeError(f"gloo weight transfer needs a ZeroSource, found {type(source).__name__}")
        engine = cls(init_info, client=client, source=source)
        if init_info.is_sender:
            engine._group = engine._rendezvous()
        return engine

    def _rendezvous(self) -> ProcessGroupGloo:
        info = self._info
        listener = _listen(info.master_address)
        worker_info = GlooInitInfo(
            master_address=info.master_address,
            master_port=listener.getsockname()[1],
            rank_offset=1,
            world_size=info.world_size,
            timeout_s=info.timeout_s,
        )
        workers = in_daemon_thread(lambda: self.client.init_weight_transfer_engine(asdict(worker_info)))
        address, port = worker_info.master_address, worker_info.master_port
        group = in_daemon_thread(lambda: join_group(address, port, 0, info.world_size, info.timeout_s, listener))
        # Not only the group: if an engine refuses, nobody would tell the group, which waits for the deadline.
        both: list[Future[Any]] = [workers, group]
        wait(both, timeout=info.timeout_s, return_when=FIRST_EXCEPTION)
        if workers.done():
            workers.result()
        joined = group.result(timeout=info.timeout_s)
        workers.result(timeout=info.timeout_s)
        return joined

    def send_weights(self) -> None:
        """One round on every trainer rank: start, broadcast while the workers receive, finish."""
        if not self.is_sender:
            for _ in self._source:
                pass
            return
        if self._group is None:
            self._group = self._rendezvous()
        buckets = self._source.buckets()
        metas = [meta for bucket in buckets for meta in bucket]
        update = GlooUpdateInfo(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
            bucket_sizes=[len(bucket) for bucket in buckets],
        )
        self.client.start_weight_update()
        # Abandonable: workers that lost us sit in a collective until its own deadline.
        receiving = in_daemon_thread(lambda: self.client.update_weights(asdict(update)))
        try:
            self._broadcast_all(self._group, buckets, receiving)
            receiving.result(timeout=self._info.timeout_s)
        except BaseException:
            self._group = None  # in what state it is nobody knows; the next round makes a new one
            raise
        self.client.finish_weight_update()

    def _broadcast_all(
        self, group: ProcessGroupGloo, buckets: Sequence[Sequence[ParamMeta]], receiving: Future[None]
    ) -> None:
        size = max(map(message_bytes, buckets))
        buffers = cycle([new_bucket(size), new_bucket(size)])
        placed: deque[torch.Tensor] = deque()
        sending: deque[Work] = deque()

        def place(metas: Sequence[ParamMeta]) -> list[torch.Tensor]:
            if sending:  # the bucket before the last one, out of the buffer that this one gets
                _finish(sending.popleft(), group, receiving)
            placed.append(next(buffers)[: message_bytes(metas)])
            return [tensor for _, tensor in views(placed[-1], metas)]

        pairs = self._source.tensors(place)
        for metas in buckets:
            try:
                if receiving.done():
                    receiving.result()  # the workers gave up, and say why
                for expected in metas:
                    _check(next(pairs, None), expected)
                bucket = placed.popleft()
                bucket[-1] = SENT
            except BaseException:
                # Workers that still live wait for this bucket: they get it, marked, so that they give up now.
                _abandon(broadcast(group, torch.zeros(message_bytes(metas), dtype=torch.uint8)), group)
                raise
            sending.append(broadcast(group, bucket))
        for work in sending:
            _finish(work, group, receiving)

    def shutdown(self) -> None:
        self._group = None


def _finish(work: Work, group: ProcessGroupGloo, receiving: Future[None]) -> None:
    """Wait until a bucket is sent. Raises what the engines say, if they gave up or it broke because one is gone."""
    sent = _abandon(work, group)
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


def _abandon(work: Work, group: ProcessGroupGloo) -> Future[object]:
    """Wait for a collective on a thread, which keeps the group: to end one waits for what is under way in it."""
    return in_daemon_thread(lambda: (work.wait(), group))


def _check(found: tuple[str, torch.Tensor] | None, expected: ParamMeta) -> None:
    """Raise `SyncError` unless the source gave the tensor that it declares."""
    if found is None:
        raise SyncError(f"weight source ended before {expected.name!r}, which its metadata() declares")
    name, tensor = found
    if (name, tensor.dtype, tuple(tensor.shape)) != (expected.name, expected.dtype, expected.shape):
        raise SyncError(
            f"weight source yields {name!r} {tensor.dtype} {tuple(tensor.shape)} where its metadata() declares "
            f"{expected.name!r} {expected.dtype} {expected.shape}"
        )


def message_bytes(metas: Sequence[ParamMeta]) -> int:
    """Bytes of these tensors and, behind them, of one that says whether they were filled in."""
    return bucket_layout(metas)[1] + 1
