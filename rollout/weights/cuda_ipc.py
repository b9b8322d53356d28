"""Weight transfer over CUDA IPC: an engine on the trainer's own GPU maps the trainer's buffer and copies from it.

vLLM's `ipc` transport sends classes and a dtype with each handle, which vLLM's serialization refuses unless pickle is
allowed. This one sends plain values. It differs from vLLM's in one more point: a rank serves its own engine alone, so
handles are not exchanged between ranks, and ranks without an engine only take part in the gather.

    trainer: bucket ─copy─► buffer ─handle, as plain values─► engine: map the buffer, clone each tensor, load

The handle is that of `torch.multiprocessing.reductions.reduce_tensor` for the packed buffer, which is always one
contiguous uint8 tensor on CUDA.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

BACKEND = "cuda_ipc"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferHandle:
    """Handle of a contiguous uint8 tensor on CUDA, in values that msgpack encodes."""

    num_bytes: int
    """Size of the tensor."""
    offset: int
    """Offset of the tensor in its storage."""
    device: int
    memory: bytes
    """CUDA's handle of the allocation that holds the storage."""
    storage_bytes: int
    storage_offset: int
    """Offset of the storage in the allocation."""
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    must_wait: bool
    """True if the receiver must wait for the event before it reads."""

    @classmethod
    def of(cls, rebuild_args: tuple[Any, ...]) -> BufferHandle:
        """Read the arguments of `rebuild_cuda_tensor`. Raises `ValueError` for another kind of tensor."""
        (tensor_class, size, stride, offset, _, dtype, device, memory, storage_bytes, storage_offset, _,
         ref_counter, ref_counter_offset, event, must_wait) = rebuild_args  # fmt: skip
        if tensor_class is not torch.Tensor or dtype != torch.uint8 or len(size) != 1 or tuple(stride) != (1,):
            raise ValueError(
                f"found a {tensor_class.__name__} of {dtype} with size {tuple(size)} and stride {tuple(stride)}; "
                "expected a contiguous uint8 tensor of one dimension"
            )
        return cls(
            num_bytes=int(size[0]),
            offset=offset,
            device=device,
            memory=memory,
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            ref_counter=ref_counter,
            ref_counter_offset=ref_counter_offset,
            event=event,
            must_wait=must_wait,
        )

    def rebuild_args(self) -> tuple[Any, ...]:
        """Return the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""
        return (
            torch.Tensor,
            torch.Size([self.num_bytes]),
            (1,),
            self.offset,
            torch.storage.TypedStorage,
            torch.uint8,
            self.device,
            self.memory,
            self.storage_bytes,
            self.storage_offset,
            False,  # requires_grad
            self.ref_counter,
            self.ref_counter_offset,
            self.event,
            self.must_wait,
        )


@dataclass
class CudaIpcTrainerInitInfo(IPCTrainerInitInfo):
    """Settings of the sender. `rank` 0: this rank has an engine; always packed."""

    backend: ClassVar[str] = BACKEND
    packed: bool = True


class CudaIpcTrainerWeightTransferEngine(IPCTrainerWeightTransferEngine):
    """Trainer side, on every rank."""

    init_info_cls = CudaIpcTrainerInitInfo

    def send_weights(self) -> None:
        """Send all weights to this rank's engine. A collective: ranks without an engine take part in the gather."""
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        self._send_packed(self.source)
        self.client.finish_weight_update()
        torch.cuda.ipc_collect()

    def _send_packed(self, source: WeightSource) -> None:
        for chunk in packed_ipc_producer(
            iterator=iter(source),
            gpu_uuid=self.gpu_uuid,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self.packed_buffer_size_bytes,
        ):
            fields = asdict(chunk)
            handles = {uuid: asdict(BufferHandle.of(args)) for uuid, args in fields.pop("ipc_handle").items()}
            self.client.update_weights({**fields, "ipc_handles": handles})  # returns when the engine has copied


class CudaIpcWeightTransferEngine(IPCWeightTransferEngine):
    """Engine side, in the worker on the trainer's GPU."""

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        assert isinstance(update_info.ipc_handles, dict)
        handles = {
            uuid: BufferHandle(**values).rebuild_args()  # type: ignore[arg-type]  # declared as vLLM's tuples
            for uuid, values in update_info.ipc_handles.items()
        }
        super().receive_weights(replace(update_info, ipc_handles=handles))
