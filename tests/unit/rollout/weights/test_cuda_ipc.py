"""CUDA IPC without a GPU: handles cross vLLM's serialization as plain values; both sides meet over a fake device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory, packed_tensor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lockstep.rollout.engine.plugin import register
from lockstep.rollout.weights.cuda_ipc import (
    BufferHandle,
    CudaIpcTrainerInitInfo,
    CudaIpcTrainerWeightTransferEngine,
    CudaIpcWeightTransferEngine,
)
from lockstep.rollout.weights.source import ZeroSource

UUID = "GPU-4c1d"
BUFFER_BYTES = 64
REFERENCE = (
    torch.Tensor, torch.Size([BUFFER_BYTES]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3, b"\x00mem\xff",
    2097152, 512, False, b"counter\x80", 7, b"event\x00", True,
)  # fmt: skip
"""Arguments that `reduce_tensor` returns for a packed buffer on CUDA device 3."""


def sent_through_vllm(message: Any) -> Any:
    """Return a message as the engine's process gets it."""
    return MsgpackDecoder().decode(MsgpackEncoder().encode(message))


def test_the_reference_has_the_arguments_that_torch_rebuilds_a_tensor_from() -> None:
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == [
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip


def test_vllm_refuses_to_encode_torchs_own_handle() -> None:
    with pytest.raises(TypeError, match="not serializable"):
        MsgpackEncoder().encode({"ipc_handles": {UUID: REFERENCE}})


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, torch.nn.Parameter), (1, torch.Size([8, 8])), (2, (2,)), (5, torch.bfloat16)],
    ids=["class", "dimensions", "stride", "dtype"],
)
def test_a_handle_of_another_kind_of_tensor_is_refused(index: int, value: Any) -> None:
    args = list(REFERENCE)
    args[index] = value
    with pytest.raises(ValueError, match="expected a contiguous uint8 tensor"):
        BufferHandle.of(tuple(args))


class Model(torch.nn.Module):
    """Keeps what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update(weights)


class Client:
    """Passes updates to an engine as vLLM's client does, through its serialization."""

    def __init__(self, worker: CudaIpcWeightTransferEngine) -> None:
        self.worker, self.calls = worker, []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.worker.init_transfer_engine(self.worker.parse_init_info(sent_through_vllm(info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update: dict[str, Any]) -> None:
        self.calls.append("update")
        self.worker.receive_weights(self.worker.parse_update_info(sent_through_vllm(update)))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def rebuilt_from(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace CUDA by main memory: one buffer, which `reduce_tensor` and `rebuild_cuda_tensor` pass on."""
    buffers: list[torch.Tensor] = []
    rebuilt: list[tuple[Any, ...]] = []
    empty = torch.empty

    def allocate(size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        return empty(size, dtype=dtype)

    def reduce(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        buffers.append(tensor)
        return None, REFERENCE

    def rebuild(*args: Any) -> torch.Tensor:
        rebuilt.append(args)
        return buffers[-1]

    monkeypatch.setattr(packed_tensor.torch, "empty", allocate)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", reduce)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    for accelerator in (torch.cuda, torch.accelerator):  # vLLM 0.32 asks one, 0.33 the other
        monkeypatch.setattr(accelerator, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    return rebuilt


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 5, generator=generator).bfloat16(),
        "b": torch.randn(7, generator=generator),
        "c": torch.randn(4, 4, generator=generator).T.bfloat16(),
        "d": torch.randn(2, generator=generator).half(),
    }


def source() -> ZeroSource:
    return ZeroSource(torch.nn.ParameterDict(weights()))


def worker_of(model: Model) -> CudaIpcWeightTransferEngine:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    return CudaIpcWeightTransferEngine(None, config, torch.device("cuda", 1), model)  # type: ignore[arg-type]


def test_the_engine_loads_what_the_trainer_sends(rebuilt_from: list[tuple[Any, ...]]) -> None:
    model = Model()
    client = Client(worker_of(model))
    info = CudaIpcTrainerInitInfo(rank=0, packed_buffer_size_bytes=BUFFER_BYTES)
    sender = CudaIpcTrainerWeightTransferEngine.trainer_init(info, client=client, source=source())
    sender.send_weights()

    assert client.calls == ["start", "update", "update", "finish"], "all weights do not fit into one buffer"
    assert model.loaded.keys() == weights().keys()
    for name, sent in weights().items():
        assert torch.equal(model.loaded[name], sent), name
        assert model.loaded[name].dtype == sent.dtype
    (args,) = rebuilt_from  # the buffer is mapped once for all chunks
    assert args[:6] == REFERENCE[:6]
    assert args[6] == 1, "the device of the engine's process"
    assert args[7:] == REFERENCE[7:]


def test_a_rank_without_an_engine_takes_part_in_the_gather_alone(rebuilt_from: list[tuple[Any, ...]]) -> None:
    taken = []

    class Noted(ZeroSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                taken.append(name)
                yield name, tensor

    info = CudaIpcTrainerInitInfo(rank=1)
    noted = Noted(torch.nn.ParameterDict(weights()))
    sender = CudaIpcTrainerWeightTransferEngine.trainer_init(info, client=None, source=noted)  # type: ignore[arg-type]
    sender.send_weights()
    assert taken == ["a", "b", "c", "d"]
    assert rebuilt_from == []


def test_the_plugin_registers_both_sides() -> None:
    register()
    assert WeightTransferEngineFactory._registry["cuda_ipc"]() is CudaIpcWeightTransferEngine
    assert WeightTransferTrainerFactory._registry["cuda_ipc"]() is CudaIpcTrainerWeightTransferEngine
