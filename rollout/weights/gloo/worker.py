"""Engine side of a gloo transfer: workers receive and stage all weights, then load them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch.distributed import ProcessGroupGloo
from vllm.distributed.weight_transfer.base import ParamMeta, WeightTransferEngine

from lockstep.rollout.weights.gloo.wire import (
    ABORTED,
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
from lockstep.rollout.weights.source import nbytes

ALIGNMENT = 16  # of a tensor's offset in its bucket: a view must start at a multiple of its item size


def bucket_layout(metas: Sequence[ParamMeta]) -> tuple[list[int], int]:
    """Return the aligned offset of each tensor in its bucket, and the size of the bucket, in bytes."""
    offsets, end = [], 0
    for meta in metas:
        offsets.append(end)
        end += -(-nbytes(meta) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(bucket: torch.Tensor, metas: Sequence[ParamMeta]) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors of a received bucket, without a copy."""
    offsets, _ = bucket_layout(metas)
    return [
        (meta.name, bucket[offset : offset + nbytes(meta)].view(meta.dtype).view(meta.shape))
        for meta, offset in zip(metas, offsets, strict=True)
    ]


def new_bucket(size: int) -> torch.Tensor:
    """Allocate bytes of main memory; malloc has them from the last update, where `KEEP_FREED` is set."""
    return torch.empty(size, dtype=torch.uint8)


class _Receipt:
    """Part of a bucket from one sender: header and small parts in one message, then the large parts."""

    def __init__(self, group: ProcessGroupGloo, places: Sequence[torch.Tensor]) -> None:
        """Begin to receive. places: bytes."""
        self._nbytes = sum(place.nbytes for place in places)
        self._small = [place for place in places if place.nbytes <= PACKED_BYTES]
        self._packed = torch.zeros(HEADER_BYTES + sum(place.nbytes for place in self._small), dtype=torch.uint8)
        large = [place for place in places if place.nbytes > PACKED_BYTES]
        self.works = [receive_into(group, one) for one in (self._packed, *large)]

    def wait(self) -> None:
        """Wait for all parts. Raises `RuntimeError` if the sender aborted, is gone, or sends fewer bytes."""
        for work in self.works:
            work.wait()
            num_bytes = self._packed[:HEADER_BYTES].view(torch.int64).item()  # in the first message to arrive
            if num_bytes == ABORTED:
                raise RuntimeError("gloo weight transfer: the trainer aborted; the old weights stay")
            if num_bytes != self._nbytes:
                raise RuntimeError(
                    f"gloo weight transfer: a rank sends {num_bytes} bytes of a bucket, not {self._nbytes}"
                )
        sizes = [place.nbytes for place in self._small]
        for place, piece in zip(self._small, self._packed[HEADER_BYTES:].split(sizes), strict=True) if sizes else ():
            place.copy_(piece)


class _Bucket:
    """A bucket being received."""

    def __init__(self, groups: Mapping[int, ProcessGroupGloo], planned: Planned, memory: torch.Tensor) -> None:
        """Begin to receive. groups: by sender. memory: `bucket_bytes` bytes."""
        self._named = views(memory, [meta for meta, _ in planned])
        places: dict[int, list[torch.Tensor]] = {}
        for (_, tensor), (_, parts) in zip(self._named, planned, strict=True):
            for part in parts:
                place = tensor.view(-1)[part.start : part.start + part.count]
                places.setdefault(part.sender, []).append(bytes_of(place))
        self.receipts = [_Receipt(groups[sender], of_one) for sender, of_one in places.items()]

    def wait(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors. Raises `RuntimeError` if a sender aborted or is gone."""
        for receipt in self.receipts:
            receipt.wait()
        return self._named


def receive(
    groups: Mapping[int, ProcessGroupGloo],
    buckets: Iterable[Planned],
    new_memory: Callable[[int], torch.Tensor] = new_bucket,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the tensors of each bucket while the next one arrives. After an error the groups are unusable.

    new_memory: allocates a number of bytes; it may return the memory of the bucket before last again.
    """
    under_way: deque[_Bucket] = deque()
    try:
        for plan in buckets:
            under_way.append(_Bucket(groups, plan, new_memory(bucket_bytes(plan))))
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


class _OnDevice:
    """Named tensors, moved to a device one by one, each time they are iterated over."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], device: torch.device) -> None:
        self._named, self._device = named, device

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(self._device)) for name, tensor in self._named)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Worker side: receive into staging, load in `finish`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _groups: Mapping[int, ProcessGroupGloo] | None = None
    """By sender."""
    _staged: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()  # a restarted trainer creates new groups
        self._staged = []
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._groups = join_all(init_info, init_info.rank_offset + worker)

    def start_weight_update(self) -> None:
        self._staged = []

    def update_weights(self, update_info: dict) -> None:
        # The base class would synchronize an accelerator, which fails on CPU.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._groups is None:
            raise RuntimeError(
                "gloo weight transfer: this engine has no process group; call init_weight_transfer_engine first, and "
                "after every failed update"
            )
        try:
            for tensors in receive(self._groups, update_info.buckets()):
                self._staged.extend(tensors)
        except BaseException:
            self._staged, self._groups = [], None
            raise

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        param_names = {name for name, _ in self.model.named_parameters()}
        staged_weights, self._staged = self._staged, []
        initialize_layerwise_reload(self.model)
        # Without the parameters that vLLM derives from others, such as W_UV of multi-head latent attention.
        expected = param_names & {name for name, _ in self.model.named_parameters()}
        names: dict[int, set[str]] = {}  # several for a parameter of a module that others hold too
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), set()).add(name)
        try:
            loaded_names = self.model.load_weights(_OnDevice(staged_weights, self.device))  # type: ignore[operator]
        finally:
            # Also after an error: otherwise layers stay on the meta device and the next step kills the engine.
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_heads()
            self._repack_experts()
        aliases = {name for same in names.values() if same & loaded_names for name in same}
        missing = sorted(expected - loaded_names - aliases)
        if missing and self.model_config.quantization is None:
            raise RuntimeError(
                f"weight update: {len(missing)} of {len(expected)} parameters were not among the weights that "
                f"arrived, first {missing[:3]}; they keep their old values; use the same model.path for both sides"
            )

    def _repack_heads(self) -> None:
        """Repack heads: on CPU linear weights are used as a packed copy, and a tied head is not loaded itself.

        Otherwise a tied head computes with its old packing: logprobs off by 2 to 10.
        """
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, QuantizeMethodBase):
                module.quant_method.process_weights_after_loading(module)

    def _repack_experts(self) -> None:
        """Repack experts: on CPU they are used as a packed copy, which vLLM 0.32 creates only at the first loading.

        Otherwise experts are read in the wrong order after every sync: logprobs off by 2.
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
