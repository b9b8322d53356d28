"""Sides of benchmarks/sync.py for one model, on two ranks under torchrun. Rank 0 prints one JSON line.

    copy         the same buckets, prepared in the first rank's memory: the transport alone
    parameter    gathered and sent one parameter after another
    group        gathered and sent one layer after another
    lockstep     `ZeroSource` and the gloo transport, as in a run

The middle two gather by `deepspeed.zero.GatheredParameters`, and wait for each transfer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import zero
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, layerwise_groups

from harness.models import small_qwen3
from harness.receiver import Receiver
from lockstep.rollout.system.abandonable_thread import run_in_abandonable_thread
from lockstep.rollout.system.addresses import LOOPBACK
from lockstep.rollout.weights.gloo.trainer import GlooSender
from lockstep.rollout.weights.gloo.wire import Receivers, listen, send
from lockstep.rollout.weights.gloo.worker import bucket_layout, views
from lockstep.rollout.weights.source import ZeroSource

SIDES = ("copy", "parameter", "group", "lockstep")
TIMEOUT_S = 120.0
ENGINE = "the receiver"


class Sync:
    """A model, with one method per way to send its weights to a receiver."""

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, bucket_bytes: int) -> None:
        self._parameters = dict(model.named_parameters())
        self._dtype = dtype
        source = ZeroSource(model, dtype=dtype, bucket_bytes=bucket_bytes, readers=[0])
        self._metas = {meta.name: meta for meta in source.metadata}
        self.buckets = source.buckets()
        self._is_sender = dist.get_rank() == 0
        self.receiver = Receiver() if self._is_sender else None
        rank, store = dist.get_rank(), listen(LOOPBACK, TIMEOUT_S) if self._is_sender else None
        receivers: list[Any] = [
            Receivers(engine=ENGINE, rank=0, address=LOOPBACK, port=store.port, num_workers=1, senders=source.senders)
            if store is not None
            else None
        ]
        dist.broadcast_object_list(receivers)
        self._transport = GlooSender(source, sender=rank, timeout_s=TIMEOUT_S)
        stores = {} if store is None else {ENGINE: store}
        clients: Any = {} if self.receiver is None else {ENGINE: self.receiver}
        self._transport.join(receivers, stores=stores, clients=clients)
        self._ready = [torch.ones(nbytes(metas), dtype=torch.uint8) for metas in self.buckets if self._is_sender]

    def copy(self) -> None:
        if self._is_sender:
            self._send(self._ready)

    def lockstep(self) -> None:
        self._transport.send_weights()
        if self.receiver is not None:
            self.receiver.finish_weight_update()

    def parameter(self) -> None:
        self._gather_and_send([[name] for name in self._metas])

    def group(self) -> None:
        self._gather_and_send(layerwise_groups(list(self._metas)))

    def _gather_and_send(self, groups: Sequence[Sequence[str]]) -> None:
        parts = [[self._metas[name] for name in names] for names in groups]
        if self._is_sender:
            self._send((self._gathered(part) for part in parts), parts)
            return
        for part in parts:
            self._gathered(part)

    @torch.no_grad()
    def _gathered(self, metas: Sequence[ParamMeta]) -> torch.Tensor:
        with zero.GatheredParameters([self._parameters[meta.name] for meta in metas], modifier_rank=None):
            bucket = torch.empty(nbytes(metas) if self._is_sender else 0, dtype=torch.uint8)
            for name, view in views(bucket, metas) if self._is_sender else ():
                view.copy_(self._parameters[name])
            return bucket

    def _send(self, tensors: Iterable[torch.Tensor], parts: Sequence[Sequence[ParamMeta]] | None = None) -> None:
        assert self.receiver is not None
        sizes = [nbytes(metas) for metas in parts or self.buckets]
        receiver, group = self.receiver, self._transport._connections[ENGINE].group
        receiving = run_in_abandonable_thread(lambda: receiver.receive(sizes))
        for tensor in tensors:
            for work in send(group, [tensor], 1):
                work.wait()
        receiving.result(timeout=TIMEOUT_S)


def nbytes(metas: Sequence[ParamMeta]) -> int:
    return bucket_layout(metas)[1]


class Cost(NamedTuple):
    """Cost of one sync on one rank."""

    wall_s: float
    """Time until all ranks have finished."""
    cpu_s: float
    """CPU time of this rank; on the sender including the receiver."""
    extra_bytes: int
    """Peak memory of the rank above its memory before."""


def cost(side: Callable[[], None], receiver: Receiver | None) -> Cost:
    def cpu_s() -> float:
        return time.process_time() + (receiver.cpu_s() if receiver is not None else 0.0)

    ctypes.CDLL(None).malloc_trim(0)  # return memory that earlier sides have freed
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    dist.barrier()
    before, cpu_before, start = resident("VmRSS"), cpu_s(), time.perf_counter()
    side()
    dist.barrier()
    return Cost(time.perf_counter() - start, cpu_s() - cpu_before, resident("VmHWM") - before)


def resident(which: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise KeyError(which)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("hidden", "layers", "vocab", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--bucket-mib", type=float, required=True)
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = small_qwen3(hidden=args.hidden, layers=args.layers, vocab=args.vocab)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}
    )
    sync = Sync(engine.module, dtype=getattr(torch, args.dtype), bucket_bytes=int(args.bucket_mib * 2**20))
    costs_by_side: dict[str, list[Cost]] = {side: [] for side in SIDES}
    for repeat in range(args.repeats + 1):
        for side, costs in costs_by_side.items():
            one = cost(getattr(sync, side), sync.receiver)
            if repeat:  # the first one allocates buffers of the libraries
                costs.append(one)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, costs_by_side)
    if sync.receiver is not None:
        sync.receiver.close()
        result = {
            "parameters": parameters,
            "bytes": sum(nbytes(metas) for metas in sync.buckets),
            "largest_bucket": max(map(nbytes, sync.buckets)),
            "seconds": {side: statistics.median(c.wall_s for c in costs_by_side[side]) for side in SIDES},
            "cpu_seconds": {
                side: sum(statistics.median(c.cpu_s for c in rank[side]) for rank in both) for side in SIDES
            },
            "extra_bytes": {side: max(c.extra_bytes for rank in both for c in rank[side]) for side in SIDES},
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
