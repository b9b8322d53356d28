"""Weight sync: afterwards the engines sample with the trained weights, or the run stops on every rank.

    the trainer's canary ─► pause the engines ─► send the weights ─► versions, caches, resume ─► the engines' canary

The engines belong to one rank or (colocated) to several; version and canary are checked for each. Over gloo each rank
sends its part of the weights to all engines. Over vLLM's transport `nccl` each rank with engines gets the buckets and
sends them in a group with the workers of its own engines; over `cuda_ipc` it hands them to its own engine.

After each phase the ranks exchange its outcome, with a deadline: a failure on one rank raises the same `SyncError` on
all. A server that dies or hangs fails alone: the sync goes on with the others, and servers that wait join at its
beginning (rollout/server/server_roster.py). While weights may be partly replaced, the engine labels them as unusable,
so that no client samples from an engine that a failed sync left behind.

The trainer scores the canary (rollout/weights/canary.py) first, while engines that sleep leave it the memory; engines
score it when they are resumed, because a paused vLLM engine does not score.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lockstep.rollout.errors import ConfigError, EngineError, EngineLostError, RankLostError, SyncError
from lockstep.rollout.system.abandonable_thread import run_in_abandonable_thread
from lockstep.rollout.system.addresses import LOOPBACK, address_towards, is_loopback, rendezvous_address
from lockstep.rollout.system.device_memory import release_cached_memory
from lockstep.rollout.vllm_names import check_vllm
from lockstep.rollout.weights.canary import SHORT_ROW, Canary, CanaryResult, CanarySettings, Expected, Pace, ScoreCanary
from lockstep.rollout.weights.control_plane import ControlPlane, Roster

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    from lockstep.rollout.engine.protocol import SleepingEngine, SyncedEngine
    from lockstep.rollout.weights.gloo.trainer import GlooSender
    from lockstep.rollout.weights.gloo.wire import Receivers

LONG_SHARE = 0.01
"""Largest share of the time for canaries with the long row, where `CanarySettings.share` is not smaller."""
CANARY_DIFFERENCES = ("canary_abs_diff", "canary_long_diff", "canary_long_limit", "canary_image_diff")


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
    distributions: dict[str, float] = field(default_factory=dict)
    """Metrics of the last comparison of distributions; empty if none was made."""

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes per second, over gather and transfer."""
        return self.bytes / max(self.gather_s + self.transfer_s, 1e-9) / 1e9

    def metrics(self) -> dict[str, float]:
        times = {"gather_s": self.gather_s, "transfer_s": self.transfer_s, "pause_s": self.pause_s}
        metrics = {"version": self.version, **times, "bytes": self.bytes, "gb_per_s": self.gb_per_s}
        canary = {name: getattr(self, name) for name in CANARY_DIFFERENCES}
        metrics |= {name: value for name, value in canary.items() if not math.isnan(value)}
        return {f"sync/{name}": float(value) for name, value in metrics.items()} | self.distributions


class WeightSync:
    """Synchronizes the engines with the trained module. Each engine belongs to the last one created for it.

    Creation is a collective, with the same arguments on every rank except `engines`.

    Args:
        module: the trained module in its wrappers (see `ZeroSource`).
        engines: this rank's engines, or a roster that loses and adds some; none on ranks that only take part in the
            gather.
        score_canary: the trainer's scores; None: no canary (the version is still checked).
        canary: its rows and limits.
        pause_mode: treatment of requests in flight: wait, keep or abort.
        bucket_bytes: size of a gather or message.
        deadline_s: limit of every phase, after which every rank raises.
        silence_s: time without progress of a transfer after which an engine is lost, at most a third of the deadline.
        address: rendezvous address of the gloo and nccl transports on this machine; None: loopback if all engines are
            on this machine, else the address that reaches them.
        sleep_level: 1 or 2, if all engines are `SleepingEngine`s that sleep between `sleep` and the next push; 0: none.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        engines: Sequence[SyncedEngine] | Roster = (),
        score_canary: ScoreCanary | None = None,
        canary: CanarySettings = SHORT_ROW,
        pause_mode: str = "wait",
        bucket_bytes: int = 512 * 2**20,
        deadline_s: float = 300.0,
        silence_s: float | None = None,
        address: str | None = None,
        sleep_level: int = 0,
    ) -> None:
        self._deadline_s = deadline_s
        self._roster = Roster.of(engines)
        self._silence_s = min(silence_s or deadline_s, deadline_s / 3) if self._roster.may_lose else None
        self._pause_mode = pause_mode
        self._canary_share = canary.share
        self._pace, self._long_pace = Pace(), Pace()
        self._sleep_level = sleep_level
        self._is_asleep = False
        self._ranks = _Ranks(deadline_s)
        settings = [
            (one.name, (one.weight_transfer_backend, one.dtype, one.vocab_size, one.takes_adapters, one.quantization))
            for one in self._roster.engines
        ]
        by_rank = self._ranks.run_phase("describing the engines", lambda: settings)
        described = [one for rank in by_rank for one in rank]
        self._backend, dtype, vocab_size, takes_adapters, self.quantization = _common_settings(described)
        traits: dict[str, Any] = {"vocab_size": vocab_size, "is_quantized": self.quantization is not None}
        self._canary = score_canary and Canary(score_canary, dtype=dtype, settings=canary, **traits)
        self._sends_adapters = takes_adapters

        check_vllm("weights", *(["distributions"] if canary.whole else []))  # servers have checked their own alone
        from lockstep.rollout.weights.source import ZeroSource

        readers = [rank for rank, traits in enumerate(by_rank) if traits]
        self._source = ZeroSource(
            module, dtype=dtype, bucket_bytes=bucket_bytes, readers=readers, adapters_only=takes_adapters
        )
        self._sizes = [meta.dtype.itemsize * math.prod(meta.shape) for meta in self._source.metadata]
        self._engines = ControlPlane(self._roster, deadline_s, is_staged=self._backend == "gloo")
        self._address, self._bucket_bytes = address, bucket_bytes
        self._transport: GlooSender | TrainerWeightTransferEngine[Any] | None = None
        self._sender: GlooSender | None = None
        """The transport if it is gloo's, which knows its engines apart."""
        self._changes: Counter[str] = Counter()
        self._num_serving = 0
        """Number of servers that serve, over all ranks."""
        self._joined: set[str] = set()
        """Names of the engines of all ranks that are connected; empty after a transfer that broke."""
        self._connect(self._names())

    def push(self, version: int) -> SyncReport:
        """Transfer the module's current weights to the engines as this version. A collective.

        Raises `SyncError` on every rank, if any failed or missed the deadline, or a canary failed. The engines must not
        sample again; those that still answer are left paused. Raises `EngineLostError` on every rank if no engine of a
        roster is left.
        """
        phase = self._ranks.run_phase
        self._engines.version = str(version)
        self._connect(self._names(renewed=True))
        began = time.perf_counter()
        is_due, is_long = self._due()
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
        if self._backend != "gloo":  # vLLM's transports need all engines of their group
            self._connect(self._names())
        transfer_start = time.perf_counter()
        joined, self._joined = self._joined, set()  # until it succeeds: a broken transfer leaves unknown messages
        is_broken = any(phase("sending the weights", self._send, is_stuck=lambda: self._source.is_exchanging))
        is_broken = is_broken or any(phase("loading the weights", self._load))
        if is_broken:  # with engines that are lost now
            return self.push(version)
        self._joined = joined
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
        self._names()  # raises without engines
        by_rank = phase("serving", self._serve)
        self._num_serving = sum(number for number, _ in by_rank if number is not None)
        for _, changes in by_rank:
            self._changes.update(changes)
        long = [one.long for one in results.values() if one.long is not None]
        worst = max(((one.differences[one.worst], one.limits[one.worst]) for one in long), default=(math.nan, math.nan))
        compared = [one.whole for one in results.values()]
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
            distributions=whole.metrics(compared) if (whole := self._canary and self._canary.whole) else {},
        )

    def _names(self, *, renewed: bool = False) -> list[str]:
        """Return the names of the engines of all ranks, and forget connections to those that were lost. A collective.

        renewed: True lets engines that wait join. Raises `EngineLostError` on every rank if there is no engine.
        """

        def on_this_rank() -> tuple[list[str], dict[str, str]]:
            if renewed:
                self._roster.renew()
                self._engines.renew()
            return self._engines.names, self._engines.take_lost()

        by_rank = self._ranks.run_phase("listing the engines", on_this_rank)
        names = [name for own, _ in by_rank for name in own]
        lost = {name: reason for _, own in by_rank for name, reason in own.items()}
        self._joined -= lost.keys()
        if self._sender is not None:
            self._sender.drop(list(lost))
        if not names:
            reasons = "; ".join(lost.values()) or "none serves, and none waits to join"
            raise EngineLostError(f"no engine is left: {reasons}")
        return names

    def _serve(self) -> tuple[int | None, Mapping[str, float]]:
        self._roster.serve()
        return self._roster.num_serving, self._roster.metrics()

    def take_changes(self) -> dict[str, float]:
        """Return the metrics of servers that left and joined since the last call, over all ranks; empty without servers
        that can."""
        changes, self._changes = dict(self._changes), Counter()
        return changes | ({"sync/engines": float(self._num_serving)} if self._num_serving else {})

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
        self._joined = set()
        self._connect(self._names())
        self._pace, self._long_pace = Pace(), Pace()

    def close(self) -> None:
        """Leave the transport and the ranks' process group; the engines keep running."""
        if self._transport is not None:
            self._transport.shutdown()
        self._ranks.close()

    def _send(self) -> bool:
        """Send the weights. Returns True if the transfer broke with an engine that the roster may lose."""
        if torch.accelerator.is_available():
            # Nothing waits for the optimizer's kernels, and transports read the weights on streams of their own.
            torch.accelerator.synchronize()
        self._source.expect(parts=self._backend == "gloo")
        assert self._transport is not None
        return self._has_broken(self._transport.send_weights)

    def _load(self) -> bool:
        """Let engines load what they have staged; vLLM's transports have done that. Returns as `_send`."""
        return self._backend == "gloo" and self._has_broken(self._engines.finish_weight_update)

    def _has_broken(self, transfer: Callable[[], None]) -> bool:
        try:
            transfer()
        except BaseException as error:
            self._source.drain()  # the other ranks are in a gather that needs this one
            unresponsive = self._engines.unresponsive()
            self._engines.abandon_update()
            if not unresponsive or (self._roster.may_lose and self._backend == "gloo"):  # which has lost them by itself
                raise
            # The transport reports a closed connection without its engine.
            failure = EngineLostError(f"{' and '.join(unresponsive)} no longer answers: {error}")
            for name in unresponsive:
                self._lose(name, failure)
            return True
        return False

    def _lose(self, name: str, error: Exception) -> None:
        """Go on without an engine. Raises `SyncError` if the roster may lose none."""
        try:
            self._engines.lose(name, error)
        except EngineLostError as failure:
            raise SyncError(str(failure)) from error

    def _due(self) -> tuple[bool, bool]:
        """Return True for a canary that is due, and True if its long row is. A collective."""

        def on_this_rank() -> tuple[bool, bool, bool]:
            is_due = self._pace.is_due(self._canary_share)
            is_long = self._long_pace.is_due(min(self._canary_share, LONG_SHARE))
            return is_due, is_long, any(map(self._roster.is_new, self._engines.engines))

        by_rank = self._ranks.run_phase("choosing the rows of the canary", on_this_rank)
        if self._canary is None:
            return False, False
        is_due, is_long, _ = by_rank[0]  # by the clock of rank 0
        whole = self._canary.whole
        is_due = (whole is not None and whole.begin()) or is_due or any(is_new for *_, is_new in by_rank)
        return is_due, is_due and is_long and self._canary.long is not None

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
        results = phase("scoring the canary", lambda: canary.compare(self._engines, expected), own=True)
        if any(phase("checking the canary", lambda: self._wrong_engines(results))):
            phase("comparing checksums", lambda: self._raise_canary_error(version, results))
        canary.accept(results)
        return results

    def _wrong_engines(self, results: dict[str, CanaryResult]) -> list[str]:
        """Return the names of this rank's engines whose canary failed, and pause them.

        Servers that join with a failed canary are left out, in `results` too.
        """
        for engine in self._engines.engines:
            if self._roster.is_new(engine) and results[engine.name].is_wrong:
                error = SyncError(f"its log π of the canary differ from the trainer's {results.pop(engine.name)}")
                self._engines.lose(engine.name, error)
        wrong = [name for name, result in results.items() if result.is_wrong]
        if wrong:
            self._engines.all(lambda engine: engine.pause("abort"))
        return wrong

    def _raise_canary_error(self, version: int, results: dict[str, CanaryResult]) -> None:
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
            from lockstep.rollout.weights.checksums import describe_differences  # of failures alone

            sums = self._engines.all(lambda engine: engine.weight_checksums())
            where = describe_differences(self._source, dict(zip(self._engines.names, sums, strict=True))[wrong[0]])
        differences = " and ".join(f"{name} {results[name]}" for name in wrong)
        raise SyncError(
            f"after the sync to version {version} the log π of the canary differ from the trainer's: {differences}: "
            f"the engine does not compute what the trainer computes ({wrong[0]}: {where}); run `python "
            "lockstep diagnose model.path=<model> data.path=<data>`"
        )

    def _connect(self, names: Sequence[str]) -> None:
        """Connect the engines' workers with all their senders. A collective. names: of the engines of all ranks."""
        if self._backend == "gloo":
            self._connect_by_gloo(names)
        elif self._joined != set(names):
            if self._transport is not None:
                self._transport.shutdown()
            self._transport = self._ranks.run_phase("connecting to the engines", self._join, own=True)
        self._joined = set(names)

    def _connect_by_gloo(self, names: Sequence[str]) -> None:
        """Connect with the engines that are not connected yet, each by groups of its own."""
        from lockstep.rollout.weights.gloo.trainer import GlooSender
        from lockstep.rollout.weights.gloo.wire import Receivers, listen

        if not self._joined or self._sender is None:
            self._transport = self._sender = GlooSender(
                self._source,
                sender=self._ranks.rank,
                timeout_s=self._deadline_s,
                silence_s=self._silence_s,
                lose=self._engines.lose,
            )
        sender = self._sender
        sender.drop([name for name in sender.names if name not in names])
        joining = set(names) - self._joined
        if not joining:
            return
        stores: dict[str, TCPStore] = {}

        def open_rendezvous() -> list[Receivers]:
            engines = [engine for engine in self._engines.engines if engine.name in joining]
            if not engines:
                return []
            address = self._address_for([*self._engines.hosts, *self._ranks.others])
            for engine in engines:
                stores[engine.name] = listen(address, self._deadline_s)
            return [
                Receivers(
                    engine=engine.name,
                    rank=self._ranks.rank,
                    address=address,
                    port=stores[engine.name].port,
                    num_workers=engine.num_workers,
                    senders=self._source.senders,
                )
                for engine in engines
            ]

        by_rank = self._ranks.run_phase("listening for the engines", open_rendezvous)
        receivers = [one for rank in by_rank for one in rank]
        clients = {name: self._engines.only(name) for name in stores}
        self._ranks.run_phase(
            "connecting to the engines", lambda: sender.join(receivers, stores=stores, clients=clients), own=True
        )

    def _join(self) -> TrainerWeightTransferEngine[Any]:
        """Connect by one of vLLM's transports, which has one group for all engines of this rank."""
        from lockstep.rollout.weights.vllm_transport import connect  # others do not load it

        size = max(self._bucket_bytes, *self._sizes)  # vLLM refuses a tensor that is larger than its buffer
        return connect(self._backend, self._engines, self._source, address_for=self._address_for, buffer_bytes=size)

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
        from lockstep.rollout.system.rank_messages import gathered  # runs on one rank do not load it

        try:
            outcomes = gathered(pickle.dumps(mine), self._group)
            return [pickle.loads(outcome) for outcome in outcomes]  # noqa: S301  # of this run
        except RuntimeError as error:
            raise RankLostError(
                f"weight sync failed in {what}: another rank is gone or did not answer "
                f"(this rank {self.rank}: {mine[0] or 'no error'}): {error}"
            ) from error

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
