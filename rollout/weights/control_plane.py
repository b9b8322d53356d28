"""What is asked of engines around a transfer of weights: calls to all of them at once, each with a deadline.

vLLM's transports bring the bytes; whoever sends them tells the workers over this plane to join, receive and load
(`VLLMWeightSyncClient` in vLLM). `rollout/weights/sync.py` says in which order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rollout.engine.engine_answers import UNUSABLE_PREFIX
from rollout.errors import EngineError

if TYPE_CHECKING:
    from rollout.engine.protocol import SyncedEngine

T = TypeVar("T")
E = TypeVar("E", bound="SyncedEngine")

CALL_SHARE = 0.9
"""Part of the deadline that one call to an engine may take: less than the whole, so that the engine is named."""
SILENCE_S, SILENCE_SHARE = 5.0, 0.03
"""How long an engine may take over a question that costs nothing, when a sync failed: so many seconds, or that part of
the deadline if it is less. Three such questions fit behind `CALL_SHARE`."""


class ControlPlane(Generic[E]):
    """Of the engines of this rank. Calls are synchronous.

    Implements vLLM's `VLLMWeightSyncClient`. On ranks without engines it exists, and its calls do nothing.
    """

    def __init__(self, engines: Sequence[E], deadline_s: float, *, loads_late: bool) -> None:
        """loads_late: the transport stages what it receives, and replaces weights in `finish_weight_update`."""
        self._engines = tuple(engines)
        self._limit_s = CALL_SHARE * deadline_s
        self._silence_s = min(SILENCE_S, SILENCE_SHARE * deadline_s)
        self._loads_late = loads_late
        self.version = ""
        """Given to the engines when an update finishes: vLLM's transports do not pass one."""

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in self._engines]

    @property
    def hosts(self) -> list[str]:
        return [engine.host for engine in self._engines]

    @property
    def num_workers(self) -> int:
        return sum(engine.num_workers for engine in self._engines)

    def all(self, act: Callable[[E], Coroutine[Any, Any, T]]) -> list[T]:
        """The results of `act` on every engine, at the same time. Raises what the first engine to fail raised."""
        if not self._engines:
            return []

        async def one(engine: E) -> T:
            try:
                return await asyncio.wait_for(act(engine), self._limit_s)
            except TimeoutError:
                raise EngineError(
                    f"{engine.name} gave no answer within {self._limit_s:g} s: it hangs, or sync.timeout_s is too short"
                ) from None

        async def together() -> list[T]:
            return await asyncio.gather(*map(one, self._engines))

        return self._engines[0].loop.run(together())

    def silent(self) -> list[str]:
        """Names of the engines that are dead; if none is, of those that hang.

        In this order, because an engine whose peer died may sit in the transfer, and then answers little itself.
        """
        return self._unanswered(lambda engine: engine.check_alive()) or self._unanswered(
            lambda engine: engine.pause("keep")  # as they were asked to before
        )

    def _unanswered(self, ask: Callable[[SyncedEngine], Coroutine[Any, Any, None]]) -> list[str]:
        async def answers(engine: SyncedEngine) -> bool:
            try:
                await asyncio.wait_for(ask(engine), self._silence_s)
            except (EngineError, TimeoutError):
                return False
            return True

        return [name for name, is_there in zip(self.names, self.all(answers), strict=True) if not is_there]

    def abandon_update(self) -> None:
        """Let engines that live end an update that others did not get through, so that the next one can begin.

        vLLM has no call for that; a worker ends an update that it does not understand.
        """

        async def abandon(engine: SyncedEngine) -> None:
            with suppress(Exception):  # what it does not understand is an error, of whatever kind
                await asyncio.wait_for(engine.update_weights({"none": 0}), self._silence_s)

        self.all(abandon)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine's workers get the ranks after those of the engine before it."""
        offsets, workers_before = {}, 0
        for engine in self._engines:
            offsets[engine.name] = (
                {"rank_offset": init_info["rank_offset"] + workers_before} if ("rank_offset" in init_info) else {}
            )
            workers_before += engine.num_workers
        self.all(lambda engine: engine.init_weight_transfer({**init_info, **offsets[engine.name]}))

    def start_weight_update(self) -> None:
        if not self._loads_late:
            self._disown()
        self.all(lambda engine: engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.all(lambda engine: engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self._loads_late:
            self._disown()
        self.all(lambda engine: engine.finish_weight_update(weight_version or self.version))

    def _disown(self) -> None:
        """Label the weights as no version until they are whole: what they would sample is refused everywhere."""
        self.all(lambda engine: engine.label_weights(UNUSABLE_PREFIX + self.version))
