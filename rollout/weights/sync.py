"""Weight sync: after it the engine samples with the weights that were trained, or the run stops on every rank.

`WeightSync.push(version)` is one collective over the trainer's ranks, in phases:

    pause the engines ─► send the weights ─► versions, caches, resume ─► canary

There may be several engines, of one rank or (colocated) of several, and every engine is asked for its version and its
canary. Over gloo each rank sends its part of the weights to all of them; vLLM's transports have one sender, the rank
whose engines they are, to which each bucket is gathered once.

Before a rank enters the next phase all ranks exchange how the last one went, over a process group of their own
with a deadline. So one rank's failure becomes the same `SyncError` on all, and no rank waits in a gather for one
that gave up. The transport is vLLM's own (`nccl`, `ipc`) or `rollout/weights/gloo/`; the weights come from
`rollout/weights/source.py`.

From the moment at which weights may be half replaced until they are whole, the engine labels them with no version. So
whoever samples from an engine that a failed sync left behind, this run or another client, is told not to.

The canary is a short fixed sequence that engine and trainer both score. It runs on the resumed engine, because a
paused vLLM engine scores nothing. It finds weights that are wrong, not weights that are one small update old: for
that the engine refuses updates in which parameters are missing, and the version is read back.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rollout.errors import ConfigError, EngineError, RankLostError, SyncError
from rollout.system.abandonable_thread import in_daemon_thread
from rollout.system.addresses import LOOPBACK, address_towards, is_loopback, rendezvous_address
from rollout.weights.checksums import worst_groups
from rollout.weights.control_plane import ControlPlane

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    from rollout.engine.protocol import SleepingEngine, SyncedEngine
    from rollout.weights.gloo.wire import Receivers

ScoreCanary = Callable[[list[int]], list[float]]
"""The trainer's log π(ids[i] | ids[:i]) at temperature 1 for i >= 1. Called on every rank, as under ZeRO-3 it is a
collective, without gradients, on a thread of its own (so an autocast context must be entered inside)."""

CANARY_TOKENS = 24
CANARY_THRESHOLD: Mapping[torch.dtype, float] = {torch.float32: 1e-2, torch.bfloat16: 1.0, torch.float16: 0.5}
"""Largest |Δ log π| that passes, by the engine's dtype. Measured noise on random models: 1e-5 in float32, 0.2 in
bfloat16; with a head that was not reloaded: 2 to 10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """How one sync went. Times in seconds; on ranks without engines only the gather is known."""

    version: int
    gather_s: float
    """Waiting for what one rank must have whole, and copying it out. Over gloo that is merged adapters alone."""
    transfer_s: float
    """The rest of the sending, casts over gloo among it."""
    pause_s: float
    """How long the engines sampled nothing."""
    bytes: int
    canary_abs_diff: float
    """Largest |Δ log π| over the canary's tokens and the engines; NaN if no canary was scored."""

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
        return metrics if isnan(self.canary_abs_diff) else metrics | {"sync/canary_abs_diff": self.canary_abs_diff}


class WeightSync:
    """Keeps the engines at the weights of the module that the ranks train together.

    Make it on every rank, with the same arguments but `engines`; making it is a collective. One per engine: a later
    one takes the engine over from an earlier one.

    Args:
        module: the trained module as it is wrapped (see `ZeroSource`).
        engines: this rank's engines; none on ranks that only take part in the gather.
        score_canary: the trainer's scores; None: no canary (the version is still checked).
        canary_ids: what is scored; None: fixed ids spread over the vocabulary, equal on all ranks.
        canary_threshold: largest |Δ log π|; None: by the engine's dtype.
        canary_share: most of the time that canaries may take: the next one is scored when its last cost is at most so
            much of the time since. None: one in every push.
        pause_mode: what happens to requests in flight: wait, keep or abort.
        bucket_bytes: gathered or sent at once.
        deadline_s: of every phase; then every rank raises.
        address: this machine's, where the gloo and nccl transports meet; None: loopback if all engines are on this
            machine, else the address that reaches them.
        sleepers: those of the engines that `rest` puts to sleep, until the next push.
        sleep_level: 1 or 2 (`SleepingEngine.sleep`); the same on all ranks. 0: nobody sleeps.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        engines: Sequence[SyncedEngine] = (),
        score_canary: ScoreCanary | None = None,
        canary_ids: Sequence[int] | None = None,
        canary_threshold: float | None = None,
        canary_share: float | None = None,
        pause_mode: str = "wait",
        bucket_bytes: int = 512 * 2**20,
        deadline_s: float = 300.0,
        address: str | None = None,
        sleepers: Sequence[SleepingEngine] = (),
        sleep_level: int = 0,
    ) -> None:
        if deadline_s <= 0:
            raise ConfigError(f"the sync deadline must be positive, found {deadline_s} s")
        self._deadline_s = deadline_s
        self._pause_mode = pause_mode
        self._score_canary = score_canary
        self._canary_share = canary_share
        self._canary_s = 0.0
        """What the last one took."""
        self._canary_over_at = 0.0
        self._sleepers = ControlPlane(sleepers, deadline_s, loads_late=False)
        self._sleep_level = sleep_level
        self._is_asleep = False
        self._ranks = _Ranks(deadline_s)
        facts = self._ranks.agree("describing the engines", lambda: _describe(engines))
        described = next((fact for fact in facts if fact is not None), None)
        if described is None:
            raise SyncError("weight sync: no rank has an engine")
        if other := next((fact for fact in facts if fact not in (None, described)), None):
            raise SyncError(f"weight sync: the engines of the ranks differ, {described} and {other}")
        self._backend, dtype, vocab_size = described
        self._canary_ids = list(canary_ids) if canary_ids is not None else _spread_ids(vocab_size)
        self._canary_threshold = CANARY_THRESHOLD[dtype] if canary_threshold is None else canary_threshold

        from rollout.weights.source import ZeroSource

        # vLLM's ipc transport packs on every rank, whether or not it has an engine.
        readers = None if self._backend == "ipc" else [rank for rank, fact in enumerate(facts) if fact is not None]
        self._source = ZeroSource(module, dtype=dtype, bucket_bytes=bucket_bytes, readers=readers)
        self._bytes = sum(meta.dtype.itemsize * _numel(meta.shape) for meta in self._source.metadata())
        self._engines = ControlPlane(engines, deadline_s, loads_late=self._backend == "gloo")
        self._address, self._bucket_bytes = address, bucket_bytes
        self._store: TCPStore | None = None
        self._is_joined = False
        self._connect()

    def push(self, version: int) -> SyncReport:
        """Give the engine the module's current weights under this version. A collective over the ranks.

        Raises:
            SyncError: on every rank, if any rank failed or missed the deadline, or the canary is off. The engines
                must not sample again; they are left paused where they still answer.
        """
        phase = self._ranks.agree
        if not self._is_joined:
            self.reconnect()
        self._engines.version = str(version)
        if self._is_asleep:
            phase("waking the engines", lambda: self._sleepers.all(lambda engine: engine.wake()))
            self._is_asleep = False
        started = time.perf_counter()
        phase("pausing the engines", lambda: self._engines.all(lambda engine: engine.pause(self._pause_mode)))
        paused = time.perf_counter()
        self._is_joined = False  # until it went well: what is left of a transfer that broke nobody knows
        phase("sending the weights", self._send, is_stuck=lambda: self._source.is_exchanging)
        self._is_joined = True
        sent = time.perf_counter()
        is_due, *_ = phase("resuming the engines", lambda: self._release_all(version))  # by the clock of rank 0
        pause_s = time.perf_counter() - started
        gather_s = self._source.gather_s
        diffs = self._check_canary(version) if is_due else {}
        return SyncReport(
            version=version,
            gather_s=gather_s,
            transfer_s=max(0.0, sent - paused - gather_s),
            pause_s=pause_s,
            bytes=self._bytes,
            canary_abs_diff=max(diffs.values(), default=float("nan")),
        )

    def rest(self) -> None:
        """Nothing is sampled until the next push: free the engines' memory. A collective. Raises as `push` does."""
        if self._sleep_level:
            level = self._sleep_level
            self._ranks.agree(
                "putting the engines to sleep", lambda: self._sleepers.all(lambda engine: engine.sleep(level))
            )
            self._is_asleep = True

    def reconnect(self) -> None:
        """Join the engines anew, after one was started again; push next. A collective. Raises `SyncError`."""
        self._transport.shutdown()
        self._connect()
        self._canary_s = 0.0

    def close(self) -> None:
        """Leave the transport and the ranks' process group; the engines go on."""
        self._transport.shutdown()
        self._ranks.close()

    def _send(self) -> None:
        self._source.expect(parts=self._backend == "gloo")
        try:
            self._transport.send_weights()
        except BaseException as error:
            self._source.drain()  # the other ranks are in a gather that needs this one
            silent = self._engines.silent()
            self._engines.abandon_update()
            if silent:  # the transport knows of a closed connection, not of whose
                raise SyncError(f"{' and '.join(silent)} no longer answers: {error}") from error
            raise

    def _release_all(self, version: int) -> bool:
        """Let this rank's engines sample again. Returns whether a canary is due."""
        self._engines.all(lambda engine: self._release(engine, version))
        since = time.perf_counter() - self._canary_over_at
        return self._canary_share is None or self._canary_s <= self._canary_share * since

    async def _release(self, engine: SyncedEngine, version: int) -> None:
        # Pausing cleared the cache; requests that arrived since must not have filled it with old prefixes.
        await engine.reset_prefix_cache()
        found = await engine.weight_version()
        if found != version:
            raise SyncError(f"{engine.name} says that its weights are version {found}, version {version} was sent")
        await engine.resume()

    def _check_canary(self, version: int) -> dict[str, float]:
        """What `_score_both` finds. A collective. Raises `SyncError` on every rank if it is off."""
        phase, started = self._ranks.agree, time.perf_counter()
        diffs: dict[str, float] = phase("scoring the canary", self._score_both, own=True)
        if any(phase("checking the canary", lambda: self._wrong_engines(diffs))):
            phase("comparing checksums", lambda: self._blame(version, diffs))
        self._canary_over_at = time.perf_counter()
        self._canary_s = self._canary_over_at - started
        return diffs

    def _score_both(self) -> dict[str, float]:
        """Largest |Δ log π| of each of this rank's engines, by name; empty without a canary."""
        if self._score_canary is None:
            return {}
        with torch.no_grad():
            trained = torch.tensor(self._score_canary(list(self._canary_ids)), dtype=torch.float64)

        async def diff(engine: SyncedEngine) -> float:
            sampled = torch.tensor(await engine.score(self._canary_ids), dtype=torch.float64)
            if trained.shape != sampled.shape:
                raise SyncError(f"canary: the trainer scored {len(trained)} tokens, {engine.name} {len(sampled)}")
            return (trained - sampled).abs().max().item()

        return dict(zip(self._engines.names, self._engines.all(diff), strict=True))

    def _wrong_engines(self, diffs: Mapping[str, float]) -> list[str]:
        """Names of this rank's engines whose canary is off; they are paused."""
        # Written so that a NaN difference is wrong.
        wrong = [name for name, diff in diffs.items() if not diff <= self._canary_threshold]
        if wrong:
            self._engines.all(lambda engine: engine.pause("abort"))
        return wrong

    def _blame(self, version: int, diffs: Mapping[str, float]) -> None:
        """Raise the error of a canary that is off, with the weights that differ. Every rank takes part in a gather."""
        wrong = self._wrong_engines(diffs)
        if not wrong:
            for _ in self._source:
                pass
            return
        sums = dict(zip(self._engines.names, self._engines.all(lambda engine: engine.weight_checksums()), strict=True))
        where = worst_groups(self._source, sums[wrong[0]])
        differences = ", ".join(f"{name} by {diffs[name]:.3g}" for name in wrong)
        raise SyncError(
            f"after the sync to version {version} the log π of the canary differ from the trainer's: {differences}, "
            f"expected at most {self._canary_threshold:g}: what differs does not compute with the trained weights "
            f"({wrong[0]}: {where})"
        )

    def _connect(self) -> None:
        """Let the engines' workers join this rank, and those that send to them too. A collective."""
        found = self._ranks.agree("listening for the engines", self._listen)
        receivers = [one for one in found if one is not None]
        self._transport: TrainerWeightTransferEngine[Any] = self._ranks.agree(
            "connecting to the engines", lambda: self._join(receivers), own=True
        )
        self._is_joined = True

    def _listen(self) -> Receivers | None:
        """Where others meet the workers of this rank's engines; None if they do not, as with vLLM's own transports."""
        self._store = None
        if self._backend != "gloo" or not self._engines.hosts:
            return None
        from rollout.weights.gloo.wire import Receivers, listen

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

        from rollout.engine.plugin import register

        register()
        return WeightTransferTrainerFactory.trainer_init(
            self._init_info(receivers), client=self._engines, source=self._source
        )

    def _address_for(self, hosts: Sequence[str]) -> str:
        """This machine's, where processes on these hosts reach it. Raises `ConfigError` if they would not."""
        if self._address is None:
            return rendezvous_address(hosts)
        if is_loopback(self._address):
            for host in hosts:
                own = rendezvous_address([host])
                if not is_loopback(own):
                    raise ConfigError(
                        f"sync.address={self._address} is loopback, where {host}, an engine's host or another rank's, "
                        f"cannot reach this machine; set sync.address=null, which is {own} for it"
                    )
        return self._address

    def _init_info(self, receivers: list[Receivers]) -> TrainerInitInfo:
        """vLLM's own settings of the transport. A rank with engines is the one that calls them (rank 0)."""
        rank = 0 if self._engines.hosts else 1
        hosts = self._engines.hosts
        largest = max(meta.dtype.itemsize * _numel(meta.shape) for meta in self._source.metadata())
        buffer_bytes = max(self._bucket_bytes, largest)  # vLLM refuses a tensor that is larger than its buffer
        if self._backend == "gloo":
            from rollout.weights.gloo.trainer import GlooTrainerInitInfo

            return GlooTrainerInitInfo(
                rank=rank,
                sender=self._ranks.rank,
                store=self._store,
                receivers=receivers,
                timeout_s=self._deadline_s,
            )
        if self._backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            address = self._address_for(hosts)
            return NCCLTrainerInitInfo(
                rank=rank,
                master_address=address,
                master_port=_free_port(address),
                world_size=1 + self._engines.num_workers,
                packed_buffer_size_bytes=buffer_bytes,
            )
        if self._backend == "ipc":
            if len(hosts) > 1:
                raise ConfigError(
                    "CUDA IPC reaches one engine on the trainer's own GPU; start servers with "
                    '--weight-transfer-config \'{"backend": "nccl"}\''
                )
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
        raise ConfigError(f"weight transfer must be gloo, nccl or ipc, found {self._backend!r}")


class _Ranks:
    """The ranks of the trainer, and how they find out about each other's failures in time."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._group: dist.ProcessGroup | None = None
        self.rank = 0
        self.others: list[str] = []
        """Addresses of the machines of other ranks, unless they are this one."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            # A rank may just have spent minutes starting its engine: wait for it under the default group's timeout.
            dist.barrier()
            # Twice the deadline: a rank that just missed its own must still find the others here.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * deadline_s))  # type: ignore[assignment]
            own = address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
            self.others = [one for one in self.agree("finding the other ranks", lambda: own) if one != own]

    def agree(
        self, what: str, act: Callable[[], Any], *, own: bool = False, is_stuck: Callable[[], bool] = lambda: False
    ) -> Any:
        """Run `act` here while the other ranks run theirs; return all results, or only this rank's `own`.

        is_stuck: whether `act`, that has failed, left messages between the ranks which the next ones would meet.

        Raises:
            SyncError: the same on every rank, if `act` raised or missed the deadline on any.
            RankLostError: the same, if it left any of them stuck.
        """
        result, error = None, None
        try:
            result = in_daemon_thread(act).result(timeout=self._deadline_s)
        except Exception as caught:  # every kind of failure must reach the other ranks
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


def _describe(engines: Sequence[SyncedEngine]) -> tuple[str, torch.dtype, int] | None:
    """What all engines must have in common."""
    facts = [(engine.weight_transfer_backend, engine.dtype, engine.vocab_size) for engine in engines]
    for engine, found in zip(engines, facts, strict=True):
        if found != facts[0]:
            raise ConfigError(
                f"{engine.name} has (weight transfer, dtype, vocabulary) {found}, {engines[0].name} {facts[0]}; start "
                "all servers with the same settings"
            )
    return facts[0] if facts else None


def _spread_ids(vocab_size: int) -> list[int]:
    """Ids all over the vocabulary, in no order that a model could find natural."""
    step = max(1, int(vocab_size * 0.618))
    return [(7 + index * step) % vocab_size for index in range(CANARY_TOKENS)]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _free_port(address: str) -> int:
    """Of this machine at this address, for vLLM's nccl transport. Raises `ConfigError` if it could not listen there."""
    try:
        with socket.socket(socket.AF_INET) as probe:  # as vLLM itself does, whatever the address is
            probe.bind((address, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"vLLM's nccl transport meets at an IPv4 address of this machine, found {address} ({error}); name the "
            "servers in rollout.urls by IPv4, set sync.address=<IPv4 address of this machine>, or start them with "
            '--weight-transfer-config \'{"backend": "gloo"}\', which takes IPv6'
        ) from error
