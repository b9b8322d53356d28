"""Weight sync: after it the engine samples with the weights that were trained, or the run stops on every rank.

`WeightSync.push(version)` is one collective over the trainer's ranks, in phases:

    pause the engine ─► send the weights ─► version, caches, resume ─► canary

Before a rank enters the next phase all ranks exchange how the last one went, over a process group of their own
with a deadline. So one rank's failure becomes the same `SyncError` on all, and no rank waits in a gather for one
that gave up. The transport is vLLM's own (`nccl`, `ipc`) or `rollout/gloo.py`; the weights come from
`rollout/source.py`.

The canary is a short fixed sequence that engine and trainer both score. It runs on the resumed engine, because a
paused vLLM engine scores nothing. It finds weights that are wrong, not weights that are one small update old: for
that the engine refuses updates in which parameters are missing, and the version is read back.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rollout.errors import ConfigError, EngineError, SyncError

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    from rollout.embedded import EmbeddedEngine

T = TypeVar("T")

ScoreCanary = Callable[[list[int]], list[float]]
"""The trainer's log π(ids[i] | ids[:i]) at temperature 1 for i >= 1. Called on every rank, as under ZeRO-3 it is a
collective, without gradients, on a thread of its own (so an autocast context must be entered inside)."""

CANARY_TOKENS = 24
CANARY_THRESHOLD: Mapping[torch.dtype, float] = {torch.float32: 1e-2, torch.bfloat16: 1.0, torch.float16: 0.5}
"""Largest |Δ log π| that passes, by the engine's dtype. Measured noise on random models: 1e-5 in float32, 0.2 in
bfloat16; with a head that was not reloaded: 2 to 10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """How one sync went. Times in seconds; on ranks without an engine only the gather is known."""

    version: int
    gather_s: float
    """Gathering and copying out of the training weights."""
    transfer_s: float
    """The rest of the sending, that gathering did not hide."""
    pause_s: float
    """How long the engine sampled nothing."""
    bytes: int
    canary_abs_diff: float
    """Largest |Δ log π| over the canary's tokens; NaN if no canary was scored."""

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes per second, over gather and transfer."""
        return self.bytes / max(self.gather_s + self.transfer_s, 1e-9) / 1e9

    def metrics(self) -> dict[str, float]:
        return {
            "sync/version": float(self.version),
            "sync/gather_s": self.gather_s,
            "sync/transfer_s": self.transfer_s,
            "sync/pause_s": self.pause_s,
            "sync/bytes": float(self.bytes),
            "sync/gb_per_s": self.gb_per_s,
            "sync/canary_abs_diff": self.canary_abs_diff,
        }


class WeightSync:
    """Keeps one engine per rank that has one at the weights of the module that the ranks train together.

    Make it on every rank, with the same arguments but `engine`; making it is a collective. One per engine: a later
    one takes the engine over from an earlier one.

    Args:
        module: the trained module as it is wrapped (see `ZeroSource`).
        engine: this rank's engine, or None on ranks that only take part in the gather.
        score_canary: the trainer's scores; None: no canary (the version is still checked).
        canary_ids: what is scored; None: fixed ids spread over the vocabulary, equal on all ranks.
        canary_threshold: largest |Δ log π|; None: by the engine's dtype.
        pause_mode: what happens to requests in flight: wait, keep or abort.
        bucket_bytes: gathered and sent at once.
        deadline_s: of every phase; then every rank raises.
        address: where the gloo and nccl transports meet; loopback unless the engine has workers elsewhere.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        engine: EmbeddedEngine | None,
        score_canary: ScoreCanary | None = None,
        canary_ids: Sequence[int] | None = None,
        canary_threshold: float | None = None,
        pause_mode: str = "wait",
        bucket_bytes: int = 512 * 2**20,
        deadline_s: float = 300.0,
        address: str = "127.0.0.1",
    ) -> None:
        if deadline_s <= 0:
            raise ConfigError(f"the sync deadline must be positive, found {deadline_s} s")
        self._engine = engine
        self._deadline_s = deadline_s
        self._pause_mode = pause_mode
        self._score_canary = score_canary
        self._ranks = _Ranks(deadline_s)
        facts = self._ranks.agree("describing the engine", lambda: _describe(engine))
        described = next((fact for fact in facts if fact is not None), None)
        if described is None:
            raise SyncError("weight sync: no rank has an engine")
        self._backend, dtype, vocab_size = described
        self._canary_ids = list(canary_ids) if canary_ids is not None else _spread_ids(vocab_size)
        self._canary_threshold = CANARY_THRESHOLD[dtype] if canary_threshold is None else canary_threshold

        from rollout.source import ZeroSource

        self._source = ZeroSource(module, dtype=dtype, bucket_bytes=bucket_bytes)
        self._bytes = sum(meta.dtype.itemsize * _numel(meta.shape) for meta in self._source.metadata())
        self._client = _Client(engine, deadline_s)
        self._transport = self._ranks.agree(
            "connecting to the engine", lambda: self._connect(address, bucket_bytes), own=True
        )

    def push(self, version: int) -> SyncReport:
        """Give the engine the module's current weights under this version. A collective over the ranks.

        Raises:
            SyncError: on every rank, if any rank failed or missed the deadline, or the canary is off. The engine
                must not sample again; it is left paused where it still answers.
        """
        phase = self._ranks.agree
        self._client.version = str(version)
        started = time.perf_counter()
        phase("pausing the engine", self._pause)
        paused = time.perf_counter()
        phase("sending the weights", self._send)
        sent = time.perf_counter()
        phase("resuming the engine", lambda: self._resume(version))
        pause_s = time.perf_counter() - started
        gather_s = self._source.gather_s
        canary = phase("scoring the canary", self._score_both, own=True)
        phase("checking the canary", lambda: self._check_canary(version, canary))
        return SyncReport(
            version=version,
            gather_s=gather_s,
            transfer_s=max(0.0, sent - paused - gather_s),
            pause_s=pause_s,
            bytes=self._bytes,
            canary_abs_diff=canary,
        )

    def close(self) -> None:
        """Leave the transport and the ranks' process group; the engine goes on."""
        self._transport.shutdown()
        self._ranks.close()

    def _pause(self) -> None:
        if self._engine is not None:
            # A drain takes as long as the longest request, which has a deadline of its own.
            self._client.call(lambda engine: engine.pause(self._pause_mode))

    def _send(self) -> None:
        try:
            self._transport.send_weights()
        except BaseException:
            self._source.drain()  # the other ranks are in a gather that needs this one
            raise

    def _resume(self, version: int) -> None:
        if self._engine is not None:
            # Pausing cleared the cache; requests that arrived since must not have filled it with old prefixes.
            self._client.call(lambda engine: engine.reset_prefix_cache())
            found = self._client.call(lambda engine: engine.weight_version())
            if found != version:
                raise SyncError(f"the engine says that its weights are version {found}, version {version} was sent")
            self._client.call(lambda engine: engine.resume())

    def _score_both(self) -> float:
        """Largest |Δ log π| on this rank's engine; NaN without a canary or an engine."""
        if self._score_canary is None:
            return float("nan")
        with torch.no_grad():
            trained = torch.tensor(self._score_canary(list(self._canary_ids)), dtype=torch.float64)
        if self._engine is None:
            return float("nan")
        sampled = torch.tensor(self._client.call(lambda engine: engine.score(self._canary_ids)), dtype=torch.float64)
        if trained.shape != sampled.shape:
            raise SyncError(f"canary: the trainer scored {len(trained)} tokens, the engine {len(sampled)}")
        return (trained - sampled).abs().max().item()

    def _check_canary(self, version: int, diff: float) -> None:
        if self._score_canary is None or self._engine is None or diff <= self._canary_threshold:
            return  # written so that a NaN difference fails
        self._client.call(lambda engine: engine.pause("abort"))
        raise SyncError(
            f"after the sync to version {version} engine and trainer differ by {diff:.3g} in log π of the canary, "
            f"expected at most {self._canary_threshold:g}: the engine does not compute with the trained weights"
        )

    def _connect(self, address: str, bucket_bytes: int) -> TrainerWeightTransferEngine[Any]:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rollout.plugin import register

        register()
        return WeightTransferTrainerFactory.trainer_init(
            self._init_info(address, bucket_bytes), client=self._client, source=self._source
        )

    def _init_info(self, address: str, bucket_bytes: int) -> TrainerInitInfo:
        """vLLM's own settings of the transport. Each rank with an engine is the sender (rank 0) to that engine."""
        rank = 0 if self._engine is not None else 1
        world_size = 1 + (self._engine.num_workers if self._engine is not None else 0)
        largest = max(meta.dtype.itemsize * _numel(meta.shape) for meta in self._source.metadata())
        buffer_bytes = max(bucket_bytes, largest)  # vLLM refuses a tensor that is larger than its buffer
        if self._backend == "gloo":
            from rollout.gloo import GlooTrainerInitInfo

            return GlooTrainerInitInfo(
                rank=rank,
                master_address=address,
                world_size=world_size,
                bucket_bytes=bucket_bytes,
                timeout_s=self._deadline_s,
            )
        if self._backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(
                rank=rank,
                master_address=address,
                master_port=_free_port(address),
                world_size=world_size,
                packed_buffer_size_bytes=buffer_bytes,
            )
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
        raise ConfigError(f"weight transfer must be gloo, nccl or ipc, found {self._backend!r}")


class _Client:
    """vLLM's control plane for one engine in this process: synchronous calls with a deadline.

    Implements vLLM's `VLLMWeightSyncClient`. On ranks without an engine it exists, and nothing may call it.
    """

    def __init__(self, engine: EmbeddedEngine | None, deadline_s: float) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self.version: str | None = None
        """Given to the engine when an update finishes: vLLM's transports do not pass one."""

    def call(self, method: Callable[[EmbeddedEngine], Any]) -> Any:
        assert self._engine is not None, "a rank without an engine called one"
        return self._engine.loop.run(method(self._engine), timeout=self._deadline_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._rpc("init_weight_transfer_engine", WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self._rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._rpc("update_weights", WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._rpc("finish_weight_update", weight_version or self.version)

    def _rpc(self, name: str, *arguments: object) -> None:
        self.call(lambda engine: engine.control(name, *arguments))


class _Ranks:
    """The ranks of the trainer, and how they find out about each other's failures in time."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._group: dist.ProcessGroup | None = None
        self.rank = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            # A rank may just have spent minutes starting its engine: wait for it under the default group's timeout.
            dist.barrier()
            # Twice the deadline: a rank that just missed its own must still find the others here.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * deadline_s))  # type: ignore[assignment]

    def agree(self, what: str, act: Callable[[], Any], *, own: bool = False) -> Any:
        """Run `act` here while the other ranks run theirs; return all results, or only this rank's `own`.

        Raises:
            SyncError: the same on every rank, if `act` raised or missed the deadline on any.
        """
        result, error = None, None
        try:
            result = _within(self._deadline_s, act)
        except Exception as caught:  # every kind of failure must reach the other ranks
            error = caught
        text = None if error is None else _describe_error(error, self._deadline_s)
        outcomes = self._exchange(what, (text, None if own else result))
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]
        if failures:
            raise SyncError(f"weight sync failed in {what}: {'; '.join(failures)}") from error
        return result if own else [result for _, result in outcomes]

    def _exchange(self, what: str, mine: tuple[str | None, Any]) -> list[tuple[str | None, Any]]:
        if self._group is None:
            return [mine]
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as error:
            raise SyncError(
                f"weight sync failed in {what}: another rank is gone or did not answer "
                f"(this rank {self.rank}: {mine[0] or 'no error'}): {error}"
            ) from error
        return outcomes

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _within(deadline_s: float, act: Callable[[], T]) -> T:
    """Run on a thread that is abandoned at the deadline: a collective whose peer is gone cannot be interrupted."""
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # the current device belongs to a thread
            future.set_result(act())
        except BaseException as error:  # carried to the waiting thread, whatever it is
            future.set_exception(error)

    threading.Thread(target=run, name="lockstep-sync", daemon=True).start()
    return future.result(timeout=deadline_s)


def _describe_error(error: Exception, deadline_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline_s:g} s (rollout.sync_deadline_s)"
    if isinstance(error, EngineError | SyncError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _describe(engine: EmbeddedEngine | None) -> tuple[str, torch.dtype, int] | None:
    return None if engine is None else (engine.weight_transfer_backend, engine.dtype, engine.vocab_size)


def _spread_ids(vocab_size: int) -> list[int]:
    """Ids all over the vocabulary, in no order that a model could find natural."""
    step = max(1, int(vocab_size * 0.618))
    return [(7 + index * step) % vocab_size for index in range(CANARY_TOKENS)]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
