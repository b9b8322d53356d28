"""The engines of a rank that get its weights, and concurrent calls to them around a transfer, each with a deadline.

vLLM's transports move the bytes; the sender uses this plane to tell the workers to join, receive and load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.rollout.engine.engine_answers import UNUSABLE_PREFIX
from lockstep.rollout.errors import EngineError, EngineLostError

if TYPE_CHECKING:
    from lockstep.rollout.engine.protocol import SyncedEngine

T = TypeVar("T")

CALL_SHARE = 0.9
"""Share of the deadline for one engine call; below 1, so that the call fails first and names its engine."""
SILENCE_S, SILENCE_SHARE = 5.0, 0.03
"""Limit of a trivial call after a failed sync: the smaller of SILENCE_S and this share of the deadline. Three such
calls fit after `CALL_SHARE`."""


class Roster:
    """Engines that stay: the error of one is raised. Servers leave and join: `rollout/server/server_roster.py`.

    It changes at the beginning of a weight sync only, when no weights move.
    """

    may_lose = False
    """True if a sync goes on without an engine that dies or hangs."""

    def __init__(self, engines: Sequence[SyncedEngine]) -> None:
        self._engines = list(engines)

    @classmethod
    def of(cls, engines: Sequence[SyncedEngine] | Roster) -> Roster:
        return engines if isinstance(engines, Roster) else Roster(engines)

    @property
    def engines(self) -> Sequence[SyncedEngine]:
        """Those that the next sync sends to, or the current one still does."""
        return self._engines

    @property
    def has_engine(self) -> bool:
        """True if an engine serves, or waits to join."""
        return bool(self._engines)

    def renew(self) -> None:
        """Let engines that wait join, before the weights are sent."""

    def is_new(self, engine: SyncedEngine) -> bool:
        """True if the engine waits for its first verified weights beside others that serve."""
        return False

    def lose(self, engine: SyncedEngine, error: Exception) -> None:
        """Leave out an engine. Raises the error if the run cannot go on without it."""
        raise error

    def serve(self) -> None:
        """Let the engines of the roster sample: all have the weights, verified."""

    @property
    def num_serving(self) -> int | None:
        """Number of engines that serve; None where that cannot change."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return what happened since the last call."""
        return {}

    def close(self) -> None:
        """Look for engines no more; they keep running."""


class ControlPlane:
    """Synchronous calls to this rank's engines, if any: vLLM's `VLLMWeightSyncClient`.

    An engine that the roster may lose leaves the plane when a call finds it dead or silent; any other error is raised.
    """

    def __init__(self, engines: Sequence[SyncedEngine] | Roster, deadline_s: float, *, is_staged: bool) -> None:
        """is_staged: the transport stages weights and replaces them in `finish_weight_update`."""
        self._roster = Roster.of(engines)
        self._engines = list(self._roster.engines)
        self._limit_s = CALL_SHARE * deadline_s
        self._silence_s = min(SILENCE_S, SILENCE_SHARE * deadline_s)
        self._is_staged = is_staged
        self._lost: dict[str, str] = {}
        self.version = ""
        """Set on the engines when an update finishes; vLLM's transports do not pass one."""

    @property
    def engines(self) -> list[SyncedEngine]:
        return list(self._engines)

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in self._engines]

    @property
    def hosts(self) -> list[str]:
        return [engine.host for engine in self._engines]

    @property
    def num_workers(self) -> int:
        return sum(engine.num_workers for engine in self._engines)

    def renew(self) -> None:
        """Take the engines that the roster has now."""
        before, self._engines = self._engines, list(self._roster.engines)
        for engine in before:  # also if another process has its name now
            if not any(engine is one for one in self._engines):
                self._lost.setdefault(engine.name, "requests found it lost")

    def take_lost(self) -> dict[str, str]:
        """Return the names of the engines that were lost since the last call, and why."""
        lost, self._lost = self._lost, {}
        return lost

    def only(self, name: str) -> ControlPlane:
        """Return a plane of one of these engines, which raises every error."""
        plane = ControlPlane(
            [engine for engine in self._engines if engine.name == name],
            self._limit_s / CALL_SHARE,
            is_staged=self._is_staged,
        )
        plane.version = self.version
        return plane

    def lose(self, name: str, error: Exception) -> None:
        """Go on without an engine. Raises the error if the roster may lose none."""
        for engine in [one for one in self._engines if one.name == name]:
            self._roster.lose(engine, error)
            self._engines.remove(engine)
            self._lost[name] = str(error) or type(error).__name__

    def all(self, act: Callable[[SyncedEngine], Coroutine[Any, Any, T]]) -> list[T]:
        """Run `act` on all engines concurrently and return the results, in the order of those that are left."""
        results: list[T] = []
        for engine, outcome in self._outcomes(act):
            if not isinstance(outcome, Exception):
                results.append(outcome)
            elif isinstance(outcome, EngineLostError) or self._is_expendable(engine):
                self.lose(engine.name, outcome)
            else:
                raise outcome
        return results

    def _outcomes(
        self, act: Callable[[SyncedEngine], Coroutine[Any, Any, T]]
    ) -> list[tuple[SyncedEngine, T | Exception]]:
        if not self._engines:
            return []

        async def one(engine: SyncedEngine) -> T | Exception:
            try:
                return await asyncio.wait_for(act(engine), self._limit_s)
            except TimeoutError:
                return EngineLostError(
                    f"{engine.name} gave no answer within {self._limit_s:g} s: it hangs, or sync.timeout_s is too short"
                )
            except Exception as error:  # read by the caller, after the other engines have answered
                return error

        async def together() -> list[T | Exception]:
            return await asyncio.gather(*map(one, self._engines))

        return list(zip(self._engines, self._engines[0].loop.run(together()), strict=True))

    def _is_expendable(self, engine: SyncedEngine) -> bool:
        """True for an engine without which the sync goes on after an error: a dead server, or one that joins."""
        if not self._roster.may_lose:
            return False
        return self._roster.is_new(engine) or engine.name in self._unanswered(lambda one: one.check_alive())

    def unresponsive(self) -> list[str]:
        """Return the names of dead engines, or else of engines that hang.

        In this order, because an engine whose peer died may be blocked in the transfer and answer little itself.
        """
        return self._unanswered(lambda engine: engine.check_alive()) or self._unanswered(
            lambda engine: engine.pause("keep")  # no change: they are paused already
        )

    def _unanswered(self, ask: Callable[[SyncedEngine], Coroutine[Any, Any, None]]) -> list[str]:
        async def answers(engine: SyncedEngine) -> bool:
            try:
                await asyncio.wait_for(ask(engine), self._silence_s)
            except (EngineError, TimeoutError):
                return False
            return True

        return [engine.name for engine, has_answered in self._outcomes(answers) if has_answered is not True]

    def abandon_update(self) -> None:
        """End an unfinished update on live engines, so that the next one can begin.

        vLLM has no call for this; a worker ends the update when it gets an invalid one.
        """

        async def abandon(engine: SyncedEngine) -> None:
            with suppress(Exception):  # the invalid update fails with some error
                await asyncio.wait_for(engine.update_weights({"none": 0}), self._silence_s)

        self._outcomes(abandon)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join; each engine's workers get the ranks after those of the previous engine."""
        infos, offset = {}, init_info.get("rank_offset", 0)
        for engine in self._engines:
            infos[engine.name] = init_info | ({"rank_offset": offset} if "rank_offset" in init_info else {})
            offset += engine.num_workers
        self.all(lambda engine: engine.init_weight_transfer(infos[engine.name]))

    def start_weight_update(self) -> None:
        if not self._is_staged:
            self._label_unusable()
        self.all(lambda engine: engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.all(lambda engine: engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self._is_staged:
            self._label_unusable()
        self.all(lambda engine: engine.finish_weight_update(weight_version or self.version))

    def _label_unusable(self) -> None:
        """Label the weights as unusable until they are complete, so that every client refuses their samples."""
        self.all(lambda engine: engine.label_weights(UNUSABLE_PREFIX + self.version))
