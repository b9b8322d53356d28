"""The engine's side of a transfer over gloo: its workers receive, stage, and load when all has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch.distributed import ProcessGroupGloo
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rollout.weights.buckets import bucket_layout, new_bucket, views
from rollout.weights.gloo.wire import (
    GAVE_UP,
    HEADER_BYTES,
    PACKED_BYTES,
    GlooInitInfo,
    GlooUpdateInfo,
    Planned,
    abandon,
    bytes_of,
    join_all,
    receive_into,
)


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
            abandon(receipt.works, (groups, receipt))
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
