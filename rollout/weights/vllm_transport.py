"""Transports that vLLM creates on the trainer's side: `nccl`, and over its `ipc` classes `cuda_ipc`.

Each rank with engines has rank 0 of a group of its own, with the workers of all its engines.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from lockstep.rollout.engine.plugin import register
from lockstep.rollout.errors import ConfigError, SyncError
from lockstep.rollout.vllm_names import check_vllm
from lockstep.rollout.weights.control_plane import ControlPlane
from lockstep.rollout.weights.source import ZeroSource

AddressFor = Callable[[Sequence[str]], str]
"""Returns the address of this machine that processes on these hosts reach."""


def connect(
    backend: str, engines: ControlPlane, source: ZeroSource, *, address_for: AddressFor, buffer_bytes: int
) -> TrainerWeightTransferEngine[Any]:
    """Connect the trainer with the workers of these engines.

    buffer_bytes: size of a message. Raises `SyncError` if NCCL does not connect them, `ConfigError` for another backend
    or an address that NCCL cannot use.
    """
    register()
    info = _init_info(backend, engines, address_for=address_for, buffer_bytes=buffer_bytes)
    try:
        return WeightTransferTrainerFactory.trainer_init(info, client=engines, source=source)
    except RuntimeError as error:
        if backend == "nccl" and "invalid usage" in str(error):
            raise SyncError(
                f"NCCL does not connect the trainer with {' and '.join(engines.hosts)} ({error}), for example because "
                "two of them use one GPU. Start servers on GPUs of their own (CUDA_VISIBLE_DEVICES=... before lockstep "
                "serve-engine), or sample with rollout=colocated"
            ) from error
        raise


def _init_info(backend: str, engines: ControlPlane, *, address_for: AddressFor, buffer_bytes: int) -> TrainerInitInfo:
    hosts = engines.hosts
    rank = 0 if hosts else 1
    if backend == "nccl":
        check_vllm("nccl")
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address = address_for(hosts)
        return NCCLTrainerInitInfo(
            rank=rank,
            master_address=address,
            master_port=free_port(address),
            world_size=1 + engines.num_workers,
            packed_buffer_size_bytes=buffer_bytes,
        )
    if backend == "cuda_ipc":
        if len(hosts) > 1:
            raise ConfigError(
                "CUDA IPC reaches one engine on the trainer's own GPU; start servers with "
                '--weight-transfer-config \'{"backend": "nccl"}\''
            )
        check_vllm("cuda_ipc")
        from lockstep.rollout.weights.cuda_ipc import CudaIpcTrainerInitInfo

        return CudaIpcTrainerInitInfo(rank=rank, packed_buffer_size_bytes=buffer_bytes)
    raise ConfigError(f"weight transfer must be gloo, nccl or cuda_ipc, found {backend!r}")


def free_port(address: str) -> int:
    """Return a free port of this address for vLLM's nccl transport. Raises `ConfigError` if it cannot listen there."""
    try:
        with socket.socket(socket.AF_INET) as probe:  # vLLM uses AF_INET for any address
            probe.bind((address, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"vLLM's nccl transport meets at an IPv4 address of this machine, found {address} ({error}); name the "
            "servers in rollout.urls by IPv4, set sync.address=<IPv4 address of this machine>, or start them with "
            '--weight-transfer-config \'{"backend": "gloo"}\', which takes IPv6'
        ) from error
