"""Weight sync: afterwards the engines sample with the trained weights, or the run stops on every rank.

    the trainer's canary ─► pause the engines ─► send the weights ─► versions, caches, resume ─► the engines' canary

The engines belong to one rank or (colocated) to several; version and canary are checked for each. Over gloo each rank
sends its part of the weights to all engines. vLLM's transport `nccl` has one sender, the rank with the engines, to
which each bucket is gathered once. Over `cuda_ipc` each rank with an engine gets the buckets and hands them to its own.

After each phase the ranks exchange its outcome, with a deadline: a failure on one rank raises the same `SyncError` on
all. While weights may be partly replaced, the engine labels them as unusable, so that no client samples from an engine
that a failed sync left behind.

The trainer scores the canary (rollout/weights/canary.py) first, while engines that sleep leave it the memory; engines
score it when they are resumed, because a paused vLLM engine does not score.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lockstep.rollout.errors import ConfigError, EngineError, RankLostError, SyncError
from lockstep.rollout.system.abandonable_thread import run_in_abandonable_thread
from lockstep.rollout.system.addresses import LOOPBACK, address_towards, is_loopback, rendezvous_address
from lockstep.rollout.system.device_memory import release_cached_memory
from lockstep.rollout.vllm_names import check_vllm
from lockstep.rollout.weights.canary import SHORT_ROW, Canary, CanaryResult, CanarySettings, Expected, Pace, ScoreCanary
from lockstep.rollout.weights.checksums import describe_differences
from lockstep.rollout.weights.control_plane import ControlPlane

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    from lockstep.rollout.engine.protocol import SleepingEngine, SyncedEngine
    from lockstep.rollout.weights.gloo.wire import Receivers

LONG_SHARE = 0.01
"""Largest share of the time for canaries with the long row, where `CanarySettings.share` is not smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Measurements of one sync. Times in seconds; on ranks without engines only the gather is known."""

    version: int
    gather_s: float
    """Waiting for tensors that one rank needs whole, and copying them; over gloo only merged adapters."""
    transfer_s: float
    """The rest of the sending, including casts over gloo."""
    pause_s: float
    """Time without sampling."""
    bytes: int
    canary_abs_diff: float
    """Largest |Δ log π| over the short row of the canary and engines; NaN if no canary was scored."""
    canary_long_diff: float = math.nan
    """Largest median |Δ log π| over the stretches of the long row and engines; NaN if it was not scored."""
    canary_long_limit: float = math.nan
    """Accepted median of that stretch."""
    canary_image_diff: float = math.nan
    """Largest |Δ log π| over the row with an image and engines; NaN if it was not scored."""

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes per second, over gather and transfer."""
        return self.bytes / max(self.gather_s + self.transfer_s, 1e-9) / 1e9

    def metrics(self) -> dict[str, float]:
        metrics = {
            "sync/version": float(self.version),
            "sync/gather_s": self.gather_s,
            "sync/transfer_s": self.transfer_s,
            "sync/pause_s": self.pause_s,
            "sync/bytes": float(self.bytes),
            "sync/gb_per_s": self.gb_per_s,
        }
        canary = {
            "sync/canary_abs_diff": self.canary_abs_diff,
            "sync/canary_long_diff": self.canary_long_diff,
            "sync/canary_long_limit": self.canary_long_limit,
            "sync/canary_image_diff": self.canary_image_diff,
        }
        return metrics | {name: value for name, value in canary.items() if not math.isnan(value)}


class WeightSync:
    """Synchronizes the engines with the trained module. Each engine belongs to the last one created for it.

    Creation is a collective, with the same arguments on every rank except `engines`.

    Args:
        module: the trained module in its wrappers (see `ZeroSource`).
        engines: this rank's engines; none on ranks that only take part in the gather.
        score_canary: the trainer's scores; None: no canary (the version is still checked).
        canary: its rows and limits.
        pause_mode: treatment of requests in flight: wait, keep or abort.
        bucket_bytes: size of a gather or message.
        deadline_s: limit of every phase, after which every rank raises.
        address: rendezvous address of the gloo and nccl transports on this machine; None: loopback if all engines are
            on this machine, else the address that reaches them.
        sleep_level: 1 or 2, if all engines are `SleepingEngine`s that sleep between `sleep` and the next push; 0: none.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        engines: Sequence[SyncedEngine] = (),
        score_canary: ScoreCanary | None = None,
        canary: CanarySettings = SHORT_ROW,
        pause_mode: str = "wait",
        bucket_bytes: int = 512 * 2**20,
        deadline_s: float = 300.0,
        address: str | None = None,
        sleep_level: int = 0,
    ) -> None:
        self._deadline_s = deadline_s
        self._pause_mode = pause_mode
        self._canary_share = canary.share
        self._pace, self._long_pace = Pace(), Pace()
        self._sleep_level = sleep_level
        self._is_asleep = False
        self._ranks = _Ranks(deadline_s)
        settings = [
            (
                one.name,
                (one.weight_transfer_backend, one.dtype, one.vocab_size, one.takes_adapters, one.quantization),
            )
            for one in engines
        ]
        by_rank = self._ranks.run_phase("describing the engines", lambda: settings)
        self._backend, dtype, vocab_size, takes_adapters, self.quantization = _common_settings(
            [one for rank in by_rank for one in rank]
        )
        self._canary = score_canary and Canary(
            score_canary,
            dtype=dtype,
            vocab_size=vocab_size,
            is_quantized=self.quantization is not None,
            settings=canary,
        )
        self._sends_adapters = takes_adapters

        check_vllm("weights")  # a run with servers has no engine that checked it
        from lockstep.rollout.weights.source import ZeroSource

        readers = [rank for rank, traits in enumerate(by_rank) if traits]
        self._source = ZeroSource(
            module, dtype=dtype, bucket_bytes=bucket_bytes, readers=readers, adapters_only=takes_adapters
        )
        self._sizes = [meta.dtype.itemsize * math.prod(meta.shape) for meta in self._source.metadata]
        self._engines = ControlPlane(engines, deadline_s, is_staged=self._backend == "gloo")
        self._address, self._bucket_bytes = address, bucket_bytes
        self._store: TCPStore | None = None
        self._is_joined = False
        self._connect()

    def push(self, version: int) -> SyncReport:
        """Transfer the module's current weights to the engines as this version. A collective.

        Raises `SyncError` on every rank, if any failed or missed the deadline, or a canary failed. The engines must not
        sample again; those that still answer are left paused.
        """
        phase = self._ranks.run_phase
        if not self._is_joined:
            self.reconnect()
        self._engines.version = str(version)
        began = time.perf_counter()
        is_due, is_long = phase("choosing the rows of the canary", self._due)[0]  # by the clock of rank 0
        canary = self._canary if is_due else None
        expected = None
        if canary is not None:  # while engines that sleep leave the memory to the trainer
            expected = phase("scoring the canary by the trainer", lambda: canary.expected(is_long=is_long), own=True)
        canary_s = time.perf_counter() - began
        is_asleep = self._is_asleep
        if is_asleep:
            phase("waking the engines", lambda: self._wake("weights"))
        pause_start = time.perf_counter()
        phase("pausing the engines", lambda: self._engines.all(lambda engine: engine.pause(self._pause_mode)))
        transfer_start = time.perf_counter()
        self._is_joined = False  # until it succeeds: a broken transfer leaves unknown messages
        phase("sending the weights", self._send, is_stuck=lambda: self._source.is_exchanging)
        self._is_joined = True
        transfer_end = time.perf_counter()
        if is_asleep:
            phase("waking the engines' caches", lambda: self._wake("kv_cache"))
            self._is_asleep = False
        phase("resuming the engines", lambda: self._engines.all(lambda engine: self._release(engine, version)))
        pause_s = time.perf_counter() - pause_start
        gather_s = self._source.gather_s
        began = time.perf_counter()
        results = {} if canary is None or expected is None else self._check_canary(version, canary, expected)
        canary_s += time.perf_counter() - began
        for pace in [self._pace] * is_due + [self._long_pace] * is_long:
            pace.ended(canary_s)
        long = [one.long for one in results.values() if one.long is not None]
        worst = max(((one.differences[one.worst], one.limits[one.worst]) for one in long), default=(math.nan, math.nan))
        return SyncReport(
            version=version,
            gather_s=gather_s,
            transfer_s=max(0.0, transfer_end - transfer_start - gather_s),
            pause_s=pause_s,
            bytes=sum(self._sizes),
            canary_abs_diff=max((one.short for one in results.values()), default=math.nan),
            canary_long_diff=worst[0],
            canary_long_limit=worst[1],
            canary_image_diff=max((one.image for one in results.values() if one.image is not None), default=math.nan),
        )

    def _wake(self, part: str) -> None:
        release_cached_memory()  # in this thread, which has the trainer's device; the engines' loop would use GPU 0
        self._engines.all(lambda engine: cast("SleepingEngine", engine).wake(part))

    def sleep(self) -> None:
        """Free the engines' memory until the next push, with a `sleep_level`. A collective. Raises as `push` does."""
        if level := self._sleep_level:
            self._ranks.run_phase(
                "putting the engines to sleep",
                lambda: self._engines.all(lambda engine: cast("SleepingEngine", engine).sleep(level)),
            )
            self._is_asleep = True

    def reconnect(self) -> None:
        """Join the engines again, after a restart; push next. A collective. Raises `SyncError`."""
        self._transport.shutdown()
        self._connect()
        self._pace, self._long_pace = Pace(), Pace()

    def close(self) -> None:
        """Leave the transport and the ranks' process group; the engines keep running."""
        self._transport.shutdown()
        self._ranks.close()

    def _send(self) -> None:
        if torch.accelerator.is_available():
            # Nothing waits for the optimizer's kernels, and transports read the weights on streams of their own.
            torch.accelerator.synchronize()
        self._source.expect(parts=self._backend == "gloo")
        try:
            self._transport.send_weights()
        except BaseException as error:
            self._source.drain()  # the other ranks are in a gather that needs this one
            unresponsive = self._engines.unresponsive()
            self._engines.abandon_update()
            if unresponsive:  # the transport reports a closed connection without its engine
                raise SyncError(f"{' and '.join(unresponsive)} no longer answers: {error}") from error
            raise

    def _due(self) -> tuple[bool, bool]:
        """Return True for a canary that is due, and True if its long row is."""
        if self._canary is None or not self._pace.is_due(self._canary_share):
            return False, False
        return True, self._canary.long is not None and self._long_pace.is_due(min(self._canary_share, LONG_SHARE))

    async def _release(self, engine: SyncedEngine, version: int) -> None:
        # Pausing cleared the cache, but requests may have arrived since.
        await engine.reset_prefix_cache()
        engine_version = await engine.weight_version()
        if engine_version != version:
            raise SyncError(
                f"{engine.name} reports weight version {engine_version}, expected version {version}, which was sent"
            )
        await engine.resume()

    def _check_canary(self, version: int, canary: Canary, expected: Expected) -> dict[str, CanaryResult]:
        """Return the differences of this rank's engines. A collective. Raises `SyncError` on every rank if a canary
        failed."""
        phase = self._ranks.run_phase
        results: dict[str, CanaryResult] = phase(
            "scoring the canary", lambda: canary.compare(self._engines, expected), own=True
        )
        if any(phase("checking the canary", lambda: self._wrong_engines(results))):
            phase("comparing checksums", lambda: self._raise_canary_error(version, results))
        canary.accept(results)
        return results

    def _wrong_engines(self, results: Mapping[str, CanaryResult]) -> list[str]:
        """Return the names of this rank's engines whose canary failed, and pause them."""
        wrong = [name for name, result in results.items() if result.is_wrong]
        if wrong:
            self._engines.all(lambda engine: engine.pause("abort"))
        return wrong

    def _raise_canary_error(self, version: int, results: Mapping[str, CanaryResult]) -> None:
        """Raise the error of a failed canary, with the weights that differ. Every rank takes part in a gather."""
        wrong = self._wrong_engines(results)
        if not wrong:
            if not self._sends_adapters:
                for _ in self._source:
                    pass
            return
        if self._sends_adapters:
            where = (
                "adapters were sent, to the weights that it was started with: use the same model.path for both sides"
            )
        else:
            sums = self._engines.all(lambda engine: engine.weight_checksums())
            where = describe_differences(self._source, dict(zip(self._engines.names, sums, strict=True))[wrong[0]])
        differences = " and ".join(f"{name} {results[name]}" for name in wrong)
        raise SyncError(
            f"after the sync to version {version} the log π of the canary differ from the trainer's: {differences}: "
            f"the engine does not compute what the trainer computes ({wrong[0]}: {where}); run `python "
            "lockstep diagnose model.path=<model> data.path=<data>`"
        )

    def _connect(self) -> None:
        """Connect the engines' workers with all their senders. A collective."""
        receivers = self._ranks.run_phase("listening for the engines", self._listen)
        self._transport: TrainerWeightTransferEngine[Any] = self._ranks.run_phase(
            "connecting to the engines", lambda: self._join([one for one in receivers if one is not None]), own=True
        )
        self._is_joined = True

    def _listen(self) -> Receivers | None:
        """Open the rendezvous of this rank's engines; None without engines or with vLLM's transports."""
        self._store = None
        if self._backend != "gloo" or not self._engines.hosts:
            return None
        from lockstep.rollout.weights.gloo.wire import Receivers, listen

        address = self._address_for([*self._engines.hosts, *self._ranks.others])
        self._store = listen(address, self._deadline_s)
        return Receivers(
            rank=self._ranks.rank,
            address=address,
            port=self._store.port,
            num_workers=self._engines.num_workers,
            senders=self._source.senders,
        )

    def _join(self, receivers: list[Receivers]) -> TrainerWeightTransferEngine[Any]:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from lockstep.rollout.engine.plugin import register

        register()
        info = self._init_info(receivers)
        try:
            return WeightTransferTrainerFactory.trainer_init(info, client=self._engines, source=self._source)
        except RuntimeError as error:
            if self._backend == "nccl" and "invalid usage" in str(error):
                raise SyncError(
                    f"NCCL does not connect the trainer with {' and '.join(self._engines.hosts)} ({error}), for "
                    "example because two of them use one GPU. Start servers on GPUs of their own "
                    "(CUDA_VISIBLE_DEVICES=... before lockstep serve-engine), or sample with rollout=colocated"
                ) from error
            raise

    def _address_for(self, hosts: Sequence[str]) -> str:
        """Return the address where processes on these hosts reach this machine. Raises `ConfigError` without one."""
        if self._address is None:
            return rendezvous_address(hosts)
        if is_loopback(self._address):
            for host in hosts:
                own = rendezvous_address([host])
                if not is_loopback(own):
                    raise ConfigError(
                        f"sync.address={self._address} is loopback, where {host}, the host of an engine or a rank, "
                        f"cannot reach this machine; set sync.address=null, which uses {own} for it"
                    )
        return self._address

    def _init_info(self, receivers: list[Receivers]) -> TrainerInitInfo:
        """Return vLLM's settings of the transport, in which every rank with engines has rank 0."""
        hosts = self._engines.hosts
        rank = 0 if hosts else 1
        buffer_bytes = max(self._bucket_bytes, *self._sizes)  # vLLM refuses a tensor that is larger than its buffer
        if self._backend == "gloo":
            from lockstep.rollout.weights.gloo.trainer import GlooTrainerInitInfo

            sender, store = self._ranks.rank, self._store
            return GlooTrainerInitInfo(
                rank=rank, sender=sender, store=store, receivers=receivers, timeout_s=self._deadline_s
            )
        if self._backend == "nccl":
            check_vllm("nccl")
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            address = self._address_for(hosts)
            return NCCLTrainerInitInfo(
                rank=rank,
                master_address=address,
                master_port=_free_port(address),
                world_size=1 + self._engines.num_workers,
                packed_buffer_size_bytes=buffer_bytes,
            )
        if self._backend == "cuda_ipc":
            if len(hosts) > 1:
                raise ConfigError(
                    "CUDA IPC reaches one engine on the trainer's own GPU; start servers with "
                    '--weight-transfer-config \'{"backend": "nccl"}\''
                )
            check_vllm("cuda_ipc")
            from lockstep.rollout.weights.cuda_ipc import CudaIpcTrainerInitInfo

            return CudaIpcTrainerInitInfo(rank=rank, packed_buffer_size_bytes=buffer_bytes)
        raise ConfigError(f"weight transfer must be gloo, nccl or cuda_ipc, found {self._backend!r}")


class _Ranks:
    """The trainer's ranks, which exchange the outcome of every phase within a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._group: dist.ProcessGroup | None = None
        self.rank = 0
        self.others: list[str] = []
        """Addresses of the other ranks on other machines."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            # A rank may have spent minutes starting its engine: wait for it with the default group's timeout.
            dist.barrier()
            # Twice the deadline: a rank that just missed its own must still find the others.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * deadline_s))  # type: ignore[assignment]
            own = address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
            self.others = [one for one in self.run_phase("finding the other ranks", lambda: own) if one != own]

    def run_phase(
        self, what: str, act: Callable[[], Any], *, own: bool = False, is_stuck: Callable[[], bool] = lambda: False
    ) -> Any:
        """Run `act` on all ranks; return the results of all, or with `own` only this rank's.

        Raises the same `SyncError` on every rank if `act` raised or missed the deadline on any; `RankLostError` if a
        rank `is_stuck`: the failed `act` left messages between the ranks, which later ones would receive.
        """
        result, error = None, None
        try:
            result = run_in_abandonable_thread(act).result(timeout=self._deadline_s)
        except Exception as caught:  # any failure must reach the other ranks
            error = caught
        text = None if error is None else _describe_error(error, self._deadline_s)
        mine = (text, None if own else result, error is not None and is_stuck())
        outcomes = self._exchange(what, mine)
        failures = [f"rank {rank}: {text}" for rank, (text, *_) in enumerate(outcomes) if text is not None]
        if failures:
            kind = RankLostError if any(stuck for *_, stuck in outcomes) else SyncError
            raise kind(f"weight sync failed in {what}: {'; '.join(failures)}") from error
        return result if own else [result for _, result, _ in outcomes]

    def _exchange(self, what: str, mine: tuple[str | None, Any, bool]) -> list[tuple[str | None, Any, bool]]:
        if self._group is None:
            return [mine]
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as error:
            raise RankLostError(
                f"weight sync failed in {what}: another rank is gone or did not answer "
                f"(this rank {self.rank}: {mine[0] or 'no error'}): {error}"
            ) from error
        return outcomes

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _describe_error(error: Exception, deadline_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline_s:g} s (sync.timeout_s)"
    if isinstance(error, EngineError | SyncError):
        return str(error)
    return f"{type(error).__name__}: {error}"


EngineTraits = tuple[str, torch.dtype, int, bool, str | None]


def _common_settings(engines: Sequence[tuple[str, EngineTraits]]) -> EngineTraits:
    """Return the settings of all engines. Raises `SyncError` if they differ. engines: names and settings."""
    if not engines:
        raise SyncError("weight sync: no rank has an engine")
    first_name, first = engines[0]
    for name, settings in engines:
        if settings != first:
            raise SyncError(
                f"{name} has (weight transfer, dtype, vocabulary, adapters, quantization) {settings}, {first_name} has "
                f"{first}; start all with the same settings"
            )
    return first


def _free_port(address: str) -> int:
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
