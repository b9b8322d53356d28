"""Roster of the servers of a run, which may die, hang, restart, leave and join at any moment.

    joining ──(weight sync, version, canary)──► serving ──(no answer, silence, another process)──► lost
       ▲                                                                                            │
       └──────────── answers again, or a new address: connected in the background ◄────────────────┘

A server is known by its address and its process: one that was restarted, or stopped and continued, joins like a new
one. Servers join only at a weight sync, when no weights move, and sample only after the sync that sent to them has
verified version and canary. Requests of a lost server are sent again to the others (`rollout/engine/pool.py`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import PooledEngine
from lockstep.rollout.errors import EngineError, EngineLostError, LockstepError
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.weights.control_plane import Roster

LOOK_EVERY_S = 2.0
"""Interval at which servers that do not serve are looked for [s]."""
REFUSED_FOR_S = 30.0
"""Time for which a server that was refused is not asked again [s]."""


class ServerRoster(Roster):
    """Servers that leave and join.

    Args:
        pool: those that serve now, to which episodes send their requests.
        addresses: returns the URLs that the run may use now.
        connect: connects to one of them within a second or so. Raises `LockstepError` if it is not ready or not fit.
        warn: prints a sentence.
    """

    may_lose = True

    def __init__(
        self,
        pool: EnginePool,
        *,
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], ServerEngine],
        warn: Callable[[str], None],
    ) -> None:
        serving = [one for one in pool.members if isinstance(one, ServerEngine)]
        self._servers = serving
        """Those that serve, and those that join in the current sync."""
        self._backend = serving[0].weight_transfer_backend
        self._pool = pool
        self._loop = pool.loop
        self._addresses = addresses
        self._connect = connect
        self._warn = warn
        self._lock = threading.Lock()
        """Guards the following, which the thread and the event loop use."""
        self._ready: dict[str, ServerEngine] = {}
        """Connected servers that wait for the next sync, by URL."""
        self._refused: dict[str, tuple[str, float]] = {}
        """Why a server was refused, and until when it is not asked again, by URL."""
        self._known: Sequence[str] = [engine.url for engine in serving]
        self._left: dict[ServerEngine, str] = {}
        """Servers that requests found lost since the last sync, and why."""
        self._problem = ""
        """Why the addresses could not be read the last time."""
        self._num_lost = self._num_joined = 0
        self._has_served = False
        self._is_closed = threading.Event()
        pool.on_lost = self._left_pool
        threading.Thread(target=self._look, name="lockstep-roster", daemon=True).start()

    @property
    def engines(self) -> Sequence[ServerEngine]:
        return self._servers

    @property
    def has_engine(self) -> bool:
        """True if a server serves, or waits to join."""
        with self._lock:
            return bool(self._pool.members or self._ready)

    def renew(self) -> None:
        """Lose members that are other processes now or are not listed any more, and take those that wait."""
        with self._lock:
            left, self._left = self._left, {}
            ready, self._ready = self._ready, {}
            self._servers = [*(engine for engine in self._servers if engine not in left), *ready.values()]
        for engine in left:
            self._loop.run(engine.close())
        listed = self._listed()
        for engine in [one for one in self._servers if one.url not in listed]:
            self._drop(engine, "rollout.urls does not list it any more")
        for engine, error in self._loop.run(self._changed()):
            self.lose(engine, error)

    def is_new(self, engine: PooledEngine) -> bool:
        return self._has_served and engine not in self._pool.members

    def lose(self, engine: PooledEngine, error: Exception) -> None:
        assert isinstance(engine, ServerEngine)
        if not self._has_served and len(self._servers) == 1:
            raise error  # at the start of a run, waiting would not mend it
        if not isinstance(error, EngineLostError):  # it answers, and may fail again at once
            self._refuse(engine.url, str(error))
        self._drop(engine, str(error))

    def serve(self) -> None:
        with self._lock:
            joined = [one for one in self._servers if one not in self._pool.members and one not in self._left]
        for engine in joined:
            self._loop.run(self._add(engine))
            if self._has_served:
                self._num_joined += 1
                self._warn(f"{engine.name} joined with the weights of the run ({len(self._pool.members)} serve)")
        self._has_served = True

    @property
    def num_serving(self) -> int:
        return len(self._pool.members)

    def metrics(self) -> Mapping[str, float]:
        metrics = {
            "sync/engines_lost": self._num_lost,
            "sync/engines_joined": self._num_joined,
            "sync/requests_resent": self._pool.num_resent,
        }
        self._num_lost = self._num_joined = self._pool.num_resent = 0
        return {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Look for servers no more, and close the connections to those that wait."""
        with self._lock:
            self._is_closed.set()
            unused = [*self._ready.values(), *self._left]
            self._ready, self._left = {}, {}
        for engine in unused:
            self._loop.run(engine.close())

    async def _add(self, engine: ServerEngine) -> None:
        """Add to the pool, in the event loop, where requests read it."""
        self._pool.add(engine)

    def _listed(self) -> Sequence[str]:
        """Return the addresses, or the last known ones if they cannot be read now."""
        try:
            self._known, problem = list(self._addresses()), ""
        except LockstepError as error:
            problem = f"{error}; the run goes on with {len(self._known)} known addresses"
        if problem and problem != self._problem:
            self._warn(problem)
        self._problem = problem
        return self._known

    async def _changed(self) -> list[tuple[ServerEngine, EngineError]]:
        """Return the members that do not answer, or are other processes."""

        async def check(engine: ServerEngine) -> EngineError | None:
            try:
                await engine.check_process()
            except EngineError as error:
                return error
            return None

        members = list(self._servers)
        errors = await asyncio.gather(*map(check, members))
        return [(engine, error) for engine, error in zip(members, errors, strict=True) if error is not None]

    def _drop(self, engine: ServerEngine, reason: str) -> None:
        async def leave() -> None:
            self._pool.remove(engine)
            engine.give_up(reason)
            await asyncio.sleep(0)  # its requests end before its connections do
            await engine.close()

        with self._lock:
            self._servers.remove(engine)
            is_told = self._left.pop(engine, None) is not None  # a request found it lost, too
        self._loop.run(leave())
        if not is_told:
            self._tell_lost(engine, reason)

    def _left_pool(self, engine: PooledEngine, error: EngineLostError) -> None:
        """Take note of an engine that a request found lost. Called in the event loop."""
        assert isinstance(engine, ServerEngine)
        engine.give_up(str(error))
        with self._lock:
            if engine not in self._servers:  # a sync has dropped it meanwhile
                return
            self._left[engine] = str(error)
        self._tell_lost(engine, str(error))

    def _tell_lost(self, engine: ServerEngine, reason: str) -> None:
        self._num_lost += 1
        first_line = (reason.splitlines() or [""])[0]
        self._warn(f"{engine.name} is lost: {first_line} ({len(self._pool.members)} left)")

    def _refuse(self, url: str, reason: str) -> None:
        with self._lock:
            told, _ = self._refused.get(url, ("", 0.0))
            self._refused[url] = (reason, time.monotonic() + REFUSED_FOR_S)
        if reason != told:
            self._warn(f"{url} does not join: {reason.splitlines()[0]}")

    def _look(self) -> None:
        """Connect to listed servers that neither serve nor wait, until the roster is closed."""
        while not self._is_closed.wait(LOOK_EVERY_S):
            with self._lock:
                members = {engine.url for engine in self._servers if engine not in self._left} | self._ready.keys()
                refused = {url for url, (_, until) in self._refused.items() if time.monotonic() < until}
            for url in self._listed():
                if url in members or url in refused or self._is_closed.is_set():
                    continue
                try:
                    engine = self._connect(url)
                except EngineError:  # it is not ready
                    continue
                except Exception as error:  # its settings do not fit the run
                    self._refuse(url, str(error) or type(error).__name__)
                    continue
                with self._lock:
                    problem = self._unfit(engine)
                    if problem is None and not self._is_closed.is_set():
                        self._ready[url] = engine
                        continue
                if problem is not None:
                    self._refuse(url, problem)
                with suppress(Exception):  # the loop has ended with the run
                    self._loop.run(engine.close())

    def _unfit(self, engine: ServerEngine) -> str | None:
        """Return why a server cannot join the others; None if it can."""
        for other in (*self._servers, *self._ready.values()):
            if other.instance == engine.instance:
                return f"it is the same process as {other.name}"
        if engine.weight_transfer_backend != self._backend:
            return (
                f"it takes weights over {engine.weight_transfer_backend}, and the run sends them over {self._backend}; "
                f"""restart it with --weight-transfer-config '{{"backend": "{self._backend}"}}'"""
            )
        return None
